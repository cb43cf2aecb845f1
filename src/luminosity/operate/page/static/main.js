// The beginning of the page: shows the view that the address names.

import { takeToken } from "./api.js";
import { showAccount } from "./account.js";
import { start } from "./router.js";

takeToken();
showAccount();
start();
