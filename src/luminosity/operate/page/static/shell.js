// What all views share: the connection in the page's head, problems, and the way to another view.

import { h, replaceAll, setAttributes, setText } from "./dom.js";

const CONNECTIONS = {
  "": "",
  live: "Live",
  reconnecting: "Reconnecting …",
  "signed out": "Signed out: sign in again, or open the address that lum ui prints",
};

/** Say in the page's head whether the view follows a run. */
export function showConnection(state) {
  const place = document.getElementById("connection");
  setText(place, CONNECTIONS[state]);
  setAttributes(place, { "data-state": state || null });
}

/** Show a sentence in place of a view. */
export function showProblem(view, title, message) {
  replaceAll(view, h("div", { class: "problem", role: "alert" }, h("h1", {}, title), h("p", {}, message)));
}

/** Go to another view of this page. */
export function go(address) {
  history.pushState(null, "", address);
  dispatchEvent(new PopStateEvent("popstate"));
}

/** Set the title of the browser's tab. */
export function setTitle(title) {
  document.title = title ? `${title} · Luminosity` : "Luminosity";
}

/** Call `task` now and again `everyMs` after it has finished, but not in a hidden tab. Returns a function that ends it. */
export function repeat(task, everyMs) {
  let isStopped = false;
  let timer = 0;
  const next = async () => {
    if (isStopped) return;
    if (!document.hidden) await task();
    if (!isStopped) timer = setTimeout(next, everyMs());
  };
  next();
  return () => {
    isStopped = true;
    clearTimeout(timer);
  };
}
