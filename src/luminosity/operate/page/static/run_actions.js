// What the reader may do to a run: stop or drain it, save a savepoint. Each is confirmed in a dialog first.

import { ApiError, act, actionsAddress, howToAct, load, mayAct } from "./api.js";
import { h, replaceAll, setText } from "./dom.js";
import { moment } from "./words.js";

const WORDS = {
  stop: { button: "Stop …", title: "Stop this run?", confirm: "Stop the run", text: "It starts no more bundles, waits for those that run, and saves a last checkpoint. Start it again with the same --checkpoint_dir, and it continues there." },
  cancel: { button: "Cancel …", title: "Cancel this run?", confirm: "Cancel the run", text: "It has no checkpoint: it can't be continued, and starts from the beginning next time." },
  drain: { button: "Drain …", title: "Drain this run?", confirm: "Drain the run", text: "Its sources read nothing new. What they have read goes through the pipeline to its end, and the run has finished then. To continue later, stop it instead." },
  save: { button: "Save a savepoint …", title: "Save a savepoint", confirm: "Save it", text: "A complete copy of the run's newest checkpoint, from which other runs can start. The run goes on meanwhile." },
};

/** Return the buttons and the dialog of a run. `element` has the buttons, `news` what was done. */
export function runActions(id) {
  let known = null; // what the server allows; null: not asked yet
  let run = null;
  let isAsking = false;
  const buttons = h("div", { class: "run-actions", role: "group", "aria-label": "Actions" });
  const said = h("p", { class: "said", role: "status" });
  const newest = h("summary");
  const older = h("ul");
  const past = h("details", { class: "muted past" }, newest, older);
  said.hidden = true;

  const title = h("h2", { id: "action-title" });
  const about = h("p");
  const name = h("input", { type: "text", maxlength: 100, autocomplete: "off", spellcheck: "false" });
  const named = h("label", { class: "field" }, "Name of the savepoint", name);
  const problem = h("p", { class: "failure", role: "alert" });
  const confirm = h("button", { type: "submit", class: "action" });
  const close = h("button", { type: "button", class: "quiet", on: { click: () => dialog.close() } }, "Not now");
  const form = h("form", { method: "dialog", on: { submit: submit } }, title, h("p", { class: "muted" }, `Run ${id}`), about, named, problem, h("div", { class: "choices" }, close, confirm));
  const dialog = h("dialog", { "aria-labelledby": "action-title" }, form);
  const news = h("div", { class: "action-news" }, said, past, dialog);
  let asked = "";

  function open(action) {
    asked = action;
    const words = wordsOf(action);
    setText(title, words.title);
    setText(about, words.text);
    setText(confirm, words.confirm);
    setText(problem, mayAct() ? "" : howToAct());
    confirm.disabled = !mayAct();
    named.hidden = action !== "save";
    name.value = `page-${new Date().toISOString().slice(0, 16).replace(/[-:]/g, "").replace("T", "-")}`;
    dialog.showModal();
    (action === "save" ? name : close).focus();
  }

  const wordsOf = (action) => (action === "stop" && !run.started.checkpoint_dir ? WORDS.cancel : WORDS[action]);

  async function submit(event) {
    event.preventDefault();
    const action = asked;
    confirm.disabled = true;
    setText(problem, "");
    setText(confirm, action === "save" ? "Saving …" : "Asking …");
    try {
      const answer = await act(id, { action, confirmed: id, ...(action === "save" ? { name: name.value.trim() } : {}) });
      setText(said, answer.message);
      said.hidden = false;
      dialog.close();
    } catch (error) {
      setText(problem, error instanceof ApiError && error.status === 401 ? howToAct() : error.message);
    }
    confirm.disabled = false;
    setText(confirm, wordsOf(action).confirm);
    ask();
  }

  async function ask() {
    if (isAsking) return;
    isAsking = true;
    known = await load(actionsAddress(id)).catch(() => ({ actions: [], done: [] }));
    isAsking = false;
    replaceAll(buttons, known.actions.map((action) => h("button", { type: "button", class: "quiet", "data-action": action, on: { click: () => open(action) } }, wordsOf(action).button)));
    const lines = known.done.map((line) => [moment(Date.parse(line.at) / 1000), line.user, [line.action, line.name].filter(Boolean).join(" "), line.result].join(" · "));
    setText(newest, lines[0] ?? "");
    replaceAll(older, lines.slice(1).map((line) => h("li", {}, line)));
    update(run);
  }

  function update(now) {
    run = now;
    if (known === null) ask();
    buttons.hidden = !run.isLive || !known?.actions.length;
    past.hidden = !known?.done.length;
    if (!run.isLive && dialog.open) dialog.close();
  }
  return { element: buttons, news, update };
}
