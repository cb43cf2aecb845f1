// The author's steps as a tree: which composites are open, and in which stages their parts run.

import { load, graphAddress } from "./api.js";

export class StepTree {
  #listeners = [];
  #asked = new Set();
  #stages = new Map();
  #own = new Map();

  constructor(run) {
    this.id = run.id;
    this.transforms = run.graph.transforms ?? [];
    this.drawing = run.graph.steps ?? { nodes: [], open: [], layouts: null };
    this.isKnown = this.transforms.length > 0;
    this.parts = new Map(); // by composite
    this.transforms.forEach(({ inside }, id) => this.parts.set(inside, [...(this.parts.get(inside) ?? []), id]));
    this.steps = this.transforms.map(() => []); // by transform: [stage, index] of the steps that are its own
    for (const [stage, homes] of Object.entries(run.graph.homes ?? {})) {
      homes.forEach((home, index) => home >= 0 && this.steps[home].push([stage, index]));
    }
  }

  canOpen(id) {
    return this.parts.has(id) && this.stagesOf(id).size > 0;
  }

  isOpen(id) {
    return this.drawing.open.includes(id);
  }

  /** Return the steps of a transform and of all that is in it: [[stage, index]]. */
  stepsOf(id) {
    if (!this.#own.has(id)) this.#own.set(id, [...this.steps[id], ...(this.parts.get(id) ?? []).flatMap((part) => this.stepsOf(part))]);
    return this.#own.get(id);
  }

  stagesOf(id) {
    if (!this.#stages.has(id)) this.#stages.set(id, new Set(this.stepsOf(id).map(([stage]) => stage)));
    return this.#stages.get(id);
  }

  /** Return the transforms to show, in the author's order, with their depth: open composites and the parts in them. */
  shown() {
    const rows = (inside, depth) => (this.parts.get(inside) ?? []).flatMap((id) => [{ id, depth }, ...(this.isOpen(id) ? rows(id, depth + 1) : [])]);
    return rows(-1, 0);
  }

  /** Return the transform that a step of the run is, or is a part of; -1 if none is. */
  find(step) {
    let found = -1;
    this.transforms.forEach(({ name }, id) => {
      if ((step === name || step.startsWith(`${name}/`)) && (found < 0 || name.length > this.transforms[found].name.length)) found = id;
    });
    return found;
  }

  /** Open or fold a composite. The server says where the boxes stand then. */
  async toggle(id) {
    if (this.isOpen(id)) {
      const inner = (part) => [part, ...(this.parts.get(part) ?? []).flatMap(inner)];
      for (const part of inner(id)) this.#asked.delete(part);
      // A composite with a single part was opened with it, and is folded with it.
      for (let outer = id; outer >= 0 && this.parts.get(outer).length === 1; outer = this.transforms[outer].inside) this.#asked.delete(outer);
      for (let outer = this.transforms[id].inside; outer >= 0 && this.parts.get(outer).length === 1; outer = this.transforms[outer].inside) this.#asked.delete(outer);
    } else this.#asked.add(id);
    this.drawing = await load(graphAddress(this.id, [...this.#asked]));
    for (const listener of this.#listeners) listener();
  }

  /** Open everything around a transform, so that it is seen. */
  async reveal(id) {
    const missing = [];
    for (let outer = this.transforms[id].inside; outer >= 0; outer = this.transforms[outer].inside) if (!this.isOpen(outer)) missing.push(outer);
    if (!missing.length) return;
    for (const outer of missing) this.#asked.add(outer);
    this.drawing = await load(graphAddress(this.id, [...this.#asked]));
    for (const listener of this.#listeners) listener();
  }

  onChange(listener) {
    this.#listeners.push(listener);
  }
}
