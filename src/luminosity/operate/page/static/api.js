// Requests to the server that gave this page.

/** An answer other than the wanted one, with a sentence for the reader. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const SENTENCES = {
  401: "This browser is not signed in. Open the address that `lum ui` prints: it contains the token.",
  404: "There is no such run. Records of old runs are removed.",
};

/** Return the JSON at an address of this server. */
export async function load(address, signal) {
  let answer;
  try {
    answer = await fetch(address, { headers: { accept: "application/json" }, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. `lum ui` starts it again; this page then goes on.");
  }
  if (!answer.ok) {
    const said = SENTENCES[answer.status] ?? (await answer.json().catch(() => ({}))).error;
    throw new ApiError(answer.status, said ?? `The server answered with ${answer.status}.`);
  }
  return answer.json();
}

export const runAddress = (id) => `/api/runs/${encodeURIComponent(id)}`;
export const eventsAddress = (id, after) => `${runAddress(id)}/events?after=${after}`;
