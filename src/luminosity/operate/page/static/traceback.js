// A traceback: its exception and the user's own frames; the frames of Beam, Luminosity and packages are folded away.

import { h, setText } from "./dom.js";
import { counted } from "./words.js";

const FRAME = /^\s*(?:\| )?File "([^"\n]+)", line \d+/;
const FOREIGN = /(^|[/\\])(apache_beam|site-packages|dist-packages|luminosity)[/\\]|[/\\]lib[/\\]python\d[\d.]*[/\\]|^<frozen/;

/** Cut a traceback into parts: {isForeign, frames, lines}. Lines that belong to no frame are the user's. */
export function partsOf(text) {
  const parts = [];
  let isForeign = false;
  let isInFrame = false;
  for (const line of text.split("\n")) {
    const frame = line.match(FRAME);
    if (frame) [isForeign, isInFrame] = [FOREIGN.test(frame[1]), true];
    else if (isInFrame && !line.startsWith("    ") && !/^\s*[|~^]/.test(line)) [isForeign, isInFrame] = [false, false]; // an exception, or a heading
    if (parts.at(-1)?.isForeign !== isForeign) parts.push({ isForeign, frames: 0, lines: [] });
    parts.at(-1).lines.push(line);
    if (frame) parts.at(-1).frames += 1;
  }
  return parts;
}

/** Return a traceback that opens, with a button that copies all of it. */
export function traceback(text, isOpen = false, title = "Traceback") {
  const said = h("span", { class: "muted", role: "status" });
  const copy = h("button", { type: "button", class: "quiet", on: { click: async () => {
    try {
      await navigator.clipboard.writeText(text);
      setText(said, "Copied.");
    } catch {
      for (const folded of frame.querySelectorAll("details")) folded.open = true;
      getSelection().selectAllChildren(frame);
      setText(said, "The browser does not allow it: the text is selected, press Ctrl+C.");
    }
  } } }, "Copy");
  const parts = partsOf(text);
  const hasOwn = parts.some((part) => !part.isForeign && part.frames);
  const shown = parts.map((part) => {
    const code = h("code", {}, `${part.lines.join("\n")}\n`);
    if (!part.isForeign || !hasOwn) return code;
    return h("details", { class: "foreign" }, h("summary", {}, `${counted(part.frames, "frame")} of Beam, Luminosity or packages`), code);
  });
  const frame = h("pre", { tabindex: 0 }, shown);
  const toEnd = () => frame.scrollTo(0, frame.scrollHeight); // the end says what happened
  return h("details", { class: "traceback", open: isOpen, on: { toggle: (event) => event.target === event.currentTarget && toEnd() } }, h("summary", {}, title), h("div", { class: "copy" }, copy, said), frame);
}
