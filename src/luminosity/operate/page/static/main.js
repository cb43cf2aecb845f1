// The beginning of the page: shows the view that the address names.

import { start } from "./router.js";

start();
