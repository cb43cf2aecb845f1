// Who has signed in to a team's page, and the way out. A page of one user shows neither.

import { signOut, takeAccount } from "./api.js";
import { h } from "./dom.js";
import { showConnection } from "./shell.js";

/** Show the reader's name in the page's head, and a button if this page can end the session. */
export async function showAccount() {
  const account = await takeAccount().catch(() => ({ user: "" })); // the view says why the server does not answer
  if (!account.user) return;
  const leave = h("button", { type: "button", class: "quiet", on: { click: end } }, "Sign out");
  document.querySelector("header.top").append(h("p", { class: "account" }, account.user, account.signs_out ? leave : ""));

  async function end() {
    leave.disabled = true;
    try {
      location.assign((await signOut()).next);
    } catch {
      showConnection("signed out");
      leave.disabled = false;
    }
  }
}
