// Elements of the page. Text from runs only ever becomes a text node, never markup.

import { shortened } from "./words.js";

const NARROW_CHARACTERS = 36; // three lines of a narrow table
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  add(node, children);
  return node;
}

function add(node, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Return an HTML element: h("p", {class: "muted"}, "text", child). */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Return an SVG element. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Return a name from a run, for a table. On narrow pages a long one is cut, but for its end, which tells it from others. */
export function named(name) {
  const cut = shortened(name, NARROW_CHARACTERS);
  return cut === name ? h("span", {}, name) : h("span", { title: name }, h("span", { class: "on-wide" }, name), h("span", { class: "on-narrow" }, cut));
}

/** Replace the text of a node, if it is another one: untouched nodes keep the user's selection. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Set attributes that changed; null removes one. */
export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value === true ? "" : value);
  }
}

/** Replace all children of a node. */
export function replaceAll(node, ...children) {
  node.replaceChildren();
  add(node, children);
}

/**
 * Keep one child for each item: create new ones, remove old ones, put them in order, and leave the others untouched.
 * `known` is a Map that belongs to the parent; `create(item)` returns an object with `element` and `update(item)`.
 */
export function keyed(parent, known, items, keyOf, create) {
  const wanted = new Set();
  let before = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    wanted.add(key);
    if (!known.has(key)) known.set(key, create(item));
    const part = known.get(key);
    part.update(item);
    if (part.element === before) before = before.nextSibling;
    else parent.insertBefore(part.element, before);
  }
  for (const [key, part] of known) {
    if (wanted.has(key)) continue;
    part.element.remove();
    known.delete(key);
  }
}

/** Return a section with a heading. `id` is an anchor and the name of what labels it. */
export function section(id, title, ...children) {
  const heading = h("h2", { id: `${id}-title` }, title);
  return h("section", { id, "aria-labelledby": `${id}-title` }, heading, ...children);
}

/** Return a value that is not known, with the reason. */
export function unknown(reason) {
  return h("span", { class: "unknown", title: reason }, "–");
}
