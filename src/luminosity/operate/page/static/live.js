// Follows a live run: server-sent events with numbers, so that nothing is lost when the connection is.

import { eventsAddress, load, runAddress } from "./api.js";

const RETRY_MS = 2000; // after an answer that makes the browser give up
const HIDDEN_MS = 5000; // a hidden tab lets its connection go: a browser has only six for one server

/**
 * Follow the run `id` after the event `number`. Calls `onEvent(event, number)`, `onState(state)`, `onCost(bill)`,
 * `onReload()` if numbers are gone, and `onConnection("live" | "reconnecting" | "signed out")`.
 * Returns a function that stops it.
 */
export function follow(id, number, { onEvent, onState, onCost, onReload, onConnection }) {
  let source = null;
  let timer = 0;
  let last = number;
  let isStopped = false;

  function connect() {
    source = new EventSource(eventsAddress(id, last));
    source.addEventListener("open", () => onConnection("live"));
    source.addEventListener("message", (message) => {
      const arrived = Number(message.lastEventId);
      if (arrived && arrived < last) return; // sent twice around a reconnect
      last = arrived || last;
      onEvent(JSON.parse(message.data), last);
    });
    source.addEventListener("state", (message) => onState(JSON.parse(message.data).state));
    source.addEventListener("cost", (message) => onCost(JSON.parse(message.data)));
    source.addEventListener("reload", () => onReload());
    source.addEventListener("error", () => {
      if (isStopped || !source) return;
      onConnection("reconnecting");
      if (source.readyState === EventSource.CLOSED) later(retry, RETRY_MS);
    });
  }

  /** Ask why the browser gave up: the run may have ended, or this browser may be signed out. */
  async function retry() {
    try {
      const { state } = await load(runAddress(id));
      if (isStopped) return;
      if (state === "running") connect();
      else onState(state);
    } catch (error) {
      if (isStopped) return;
      onConnection(error.status === 401 ? "signed out" : "reconnecting");
      later(retry, RETRY_MS);
    }
  }

  function later(task, ms) {
    disconnect();
    timer = setTimeout(task, ms);
  }

  function disconnect() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }

  function onVisibility() {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(disconnect, HIDDEN_MS);
    else if (!source) connect();
  }

  document.addEventListener("visibilitychange", onVisibility);
  connect();
  return () => {
    isStopped = true;
    document.removeEventListener("visibilitychange", onVisibility);
    disconnect();
  };
}
