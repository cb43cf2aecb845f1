// Requests to the server that gave this page.

/** An answer other than the wanted one, with a sentence for the reader. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let account = { user: "" }; // who has signed in to a team's page

const SENTENCES = {
  404: "There is no such run. Records of old runs are removed.",
};

const notSignedIn = () => (account.user ? "Your session is over. Load this page again to sign in." : "This browser is not signed in. Open the address that `lum ui` prints: it contains the token.");

const TOKEN = "action-token"; // where this browser keeps it; no other server, not even on another port, can read it

/** Take the token for actions out of the address, where the server has put it, and keep it. */
export function takeToken() {
  const found = location.hash.match(/^#act=([\w-]+)$/);
  if (!found) return;
  localStorage.setItem(TOKEN, found[1]);
  history.replaceState(null, "", location.pathname + location.search);
}

/** Ask who has signed in; a page of one user has no names. */
export async function takeAccount() {
  return (account = await load("/api/account"));
}

/** Return whether this browser has a token for actions. The server may have another one by now. */
export const mayAct = () => Boolean(account.token) || localStorage.getItem(TOKEN) !== null;

/** Return what a reader has to do who may only read. */
export const howToAct = () => (account.user ? "Your session is over: load this page again." : "This browser may only read: to act, open the address that `lum ui` has printed.");

/** Send JSON to the server, with the token for actions; return what it says. */
async function send(address, content) {
  const token = account.user ? (await takeAccount()).token : localStorage.getItem(TOKEN);
  const headers = { "content-type": "application/json", authorization: `Bearer ${token}` };
  return load(address, undefined, { method: "POST", headers, body: JSON.stringify(content) });
}

/** Do something to a run. */
export const act = (id, asked) => send(`${runAddress(id)}/act`, asked);

/** End the session of this browser. */
export const signOut = () => send("/logout", {});

/** Return the JSON at an address of this server; null if there is nothing new. */
export async function load(address, signal, more = {}) {
  let answer;
  try {
    answer = await fetch(address, { headers: { accept: "application/json" }, signal, ...more });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. `lum ui` starts it again; this page then goes on.");
  }
  if (!answer.ok) {
    const said = answer.status === 401 ? notSignedIn() : SENTENCES[answer.status] ?? (await answer.json().catch(() => ({}))).error;
    throw new ApiError(answer.status, said ?? `The server answered with ${answer.status}.`);
  }
  return answer.status === 204 ? null : answer.json();
}

/** Return the address of the graph of a run's steps with these composites open. */
export const graphAddress = (id, open) => `${runAddress(id)}/graph?open=${open.join(",")}`;

/** Return what is asked for as the query of an address; what is empty is left out. */
const queryOf = (asked) => new URLSearchParams(Object.entries(asked).filter(([, value]) => value !== undefined && value !== null && value !== ""));

/** Return the address of the list of runs; empty words ask for everything. */
export const runsAddress = (asked) => `/api/runs?${queryOf(asked)}`;

/** Return the address of a page of log lines, and of these lines as a file with text. */
export const logsAddress = (id, asked) => `${runAddress(id)}/logs?${queryOf(asked)}`;
export const logTextAddress = (id, asked) => `${runAddress(id)}/log.txt?${queryOf(asked)}`;

/** Return the address of all drift, if it is not what the page knows already. */
export const driftAddress = (known) => `/api/drift?${queryOf({ known })}`;
export const changesAddress = (a, b) => `/api/compare?${new URLSearchParams({ a, b })}`;
export const runAddress = (id) => `/api/runs/${encodeURIComponent(id)}`;
export const actionsAddress = (id) => `${runAddress(id)}/actions`;
export const eventsAddress = (id, after) => `${runAddress(id)}/events?after=${after}`;
