// Which view an address shows. Links inside the page change the view without loading the page again.

import { compareView } from "./compare_view.js";
import { driftView } from "./drift_view.js";
import { replaceAll, setAttributes } from "./dom.js";
import { runView } from "./run_view.js";
import { runsView } from "./runs_view.js";
import { go, setTitle, showConnection } from "./shell.js";

let stop = () => {};

function show() {
  stop();
  showConnection("");
  const path = location.pathname.replace(/\/$/, "");
  const asked = new URLSearchParams(location.search);
  const view = document.getElementById("view");
  const run = path.match(/^\/runs\/([^/]+)$/);
  let page = "runs";
  replaceAll(view);
  setTitle("");
  if (run) stop = runView(view, decodeURIComponent(run[1]));
  else if (path === "/compare") [page, stop] = ["compare", compareView(view, asked.get("a"), asked.get("b"))];
  else if (path === "/drift") [page, stop] = ["drift", driftView(view)];
  else stop = runsView(view);
  for (const link of document.querySelectorAll("nav a")) setAttributes(link, { "aria-current": link.dataset.page === page ? "page" : null });
  scrollTo(0, 0);
}

/** Show the view of the address, now and whenever it changes. */
export function start() {
  window.addEventListener("popstate", () => {
    if (location.pathname + location.search !== shown) show();
    shown = location.pathname + location.search;
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href]");
    const isPlain = event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey;
    if (!link || !isPlain || link.target || link.origin !== location.origin || link.hash) return;
    if (!/^\/(runs|compare|drift)(\/|$)/.test(link.pathname)) return;
    event.preventDefault();
    go(link.href);
    document.getElementById("view").focus({ preventScroll: true });
  });
  show();
}

let shown = location.pathname + location.search;
