// Follows a live run: server-sent events with numbers, so that nothing is lost when the connection is.

import { eventsAddress, load, runAddress } from "./api.js";

const RETRY_MS = 2000; // after an answer that makes the browser give up

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
      if (isStopped) return;
      onConnection("reconnecting");
      if (source.readyState === EventSource.CLOSED) retryLater();
    });
  }

  function retryLater() {
    source.close();
    timer = setTimeout(async () => {
      try {
        await load(runAddress(id));
      } catch (error) {
        if (isStopped) return;
        onConnection(error.status === 401 ? "signed out" : "reconnecting");
        retryLater();
        return;
      }
      if (!isStopped) connect();
    }, RETRY_MS);
  }

  connect();
  return () => {
    isStopped = true;
    clearTimeout(timer);
    source.close();
  };
}
