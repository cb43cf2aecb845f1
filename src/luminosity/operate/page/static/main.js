// The beginning of the page: shows the view that the address names.

import { takeToken } from "./api.js";
import { start } from "./router.js";

takeToken();
start();
