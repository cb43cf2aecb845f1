// Tables that keep their rows while their values change, and that readers can sort.

import { h, keyed, setAttributes, setText } from "./dom.js";
import { bytes, count, duration, percent } from "./words.js";

const UNITS = { count, bytes, seconds: duration, milliseconds: (value) => duration(value / 1000), share: percent };

/** Return the columns of the numbers that the server describes (events/numbers.py); `viewOf(row)` has their fields. */
export function numberColumns(numbers, viewOf) {
  return numbers.map(({ field, title, meaning, unit, dash }) => {
    const valueOf = (row) => viewOf(row)[field] ?? (dash ? null : 0);
    const isKnown = (value) => value !== null && !(dash && value === 0);
    return {
      key: field, title, hint: meaning, why_: dash,
      value: (row) => (isKnown(valueOf(row)) ? valueOf(row) : null),
      text: (row) => (isKnown(valueOf(row)) ? UNITS[unit](valueOf(row)) : "–"),
    };
  });
}

const ALL_UP_TO = 60; // rows that are all shown: more would be slow, and nobody reads them
const FIRST = 25; // of more rows
const MORE = 100;

/**
 * A table. A column is {key, title, hint, isText, value(row), text(row), cell(row, td), why(row)}:
 * `value` is what it sorts by, `text` what it shows (or `cell` fills the cell), `why` tells why a value is not known.
 * `onRow(tr, row)` may set more of a row; `detail(row)` returns what opens below it, as {element, update(row)}.
 * Of many rows, only some are drawn, and always those of which `isPinned(row)` is true.
 */
export class Table {
  #rows = [];
  #known = new Map();
  #sort = null; // {key, isDescending}
  #open = new Set();
  #revealed = new Set();
  #most = FIRST;

  constructor({ columns, keyOf, label, kind = null, onRow = () => {}, detail = null, sort = null, isPinned = () => false }) {
    Object.assign(this, { columns, keyOf, onRow, detail, isPinned });
    this.#sort = sort;
    this.heads = columns.map((column) => this.#head(column));
    this.body = h("tbody");
    this.table = h("table", { class: kind }, h("caption", { class: "unseen" }, label), h("thead", {}, h("tr", {}, this.heads)), this.body);
    this.more = h("button", { type: "button", class: "quiet more", on: { click: () => this.#showMore() } });
    this.element = h("div", { class: "table" }, h("div", { class: "wide", role: "region", "aria-label": label, tabindex: 0 }, this.table), this.more);
    this.#showSort();
  }

  #head(column) {
    const mark = h("span", { class: "sort-mark", "aria-hidden": "true" });
    const button = h("button", { type: "button", title: column.hint ?? null, on: { click: () => this.#toggle(column) } }, column.title, mark);
    return h("th", { scope: "col", class: column.isText ? null : "number" }, column.value ? button : column.title);
  }

  /** First the most interesting end (large numbers, A), then the other one, then the pipeline's own order. */
  #toggle(column) {
    const first = !column.isText;
    if (this.#sort?.key !== column.key) this.#sort = { key: column.key, isDescending: first };
    else if (this.#sort.isDescending === first) this.#sort = { key: column.key, isDescending: !first };
    else this.#sort = null;
    this.#showSort();
    this.update(this.#rows);
  }

  #showSort() {
    this.columns.forEach((column, index) => {
      const isSorted = this.#sort?.key === column.key;
      const direction = this.#sort?.isDescending ? "descending" : "ascending";
      setAttributes(this.heads[index], { "aria-sort": isSorted ? direction : null });
      const mark = this.heads[index].querySelector(".sort-mark");
      if (mark) setText(mark, isSorted ? (this.#sort.isDescending ? "▾" : "▴") : "");
    });
  }

  /** Show these rows. */
  update(rows) {
    this.#rows = rows;
    const shown = rows.length <= Math.max(this.#most, ALL_UP_TO) ? this.#sorted(rows) : this.#sorted(rows).filter((row, place) => place < this.#most || this.#mustShow(row));
    const hidden = rows.length - shown.length;
    this.more.hidden = !hidden;
    setText(this.more, `Show ${Math.min(hidden, MORE)} more of ${count(rows.length)}`);
    const parts = shown.flatMap((row) => {
      const key = this.keyOf(row);
      return this.detail && this.#open.has(key) ? [{ key, row }, { key: `${key} detail`, row, isDetail: true }] : [{ key, row }];
    });
    keyed(this.body, this.#known, parts, (part) => part.key, (part) => (part.isDetail ? this.#detailRow(part.row) : this.#row()));
  }

  #mustShow(row) {
    return this.#open.has(this.keyOf(row)) || this.#revealed.has(this.keyOf(row)) || this.isPinned(row);
  }

  #showMore() {
    this.#most += MORE;
    this.update(this.#rows);
  }

  /** Show the row with this key, also if it is one of many. */
  reveal(key) {
    this.#revealed.add(key);
    this.update(this.#rows);
  }

  #sorted(rows) {
    const column = this.columns.find((each) => each.key === this.#sort?.key);
    if (!column) return rows;
    const way = this.#sort.isDescending ? -1 : 1;
    const isNone = (value) => value === null || value === undefined || Number.isNaN(value);
    return [...rows].sort((a, b) => {
      const [one, two] = [column.value(a), column.value(b)];
      if (isNone(one) || isNone(two)) return isNone(one) - isNone(two); // unknown values last, either way
      return way * (column.isText ? String(one).localeCompare(String(two)) : one - two);
    });
  }

  #row() {
    const cells = this.columns.map((column, index) => h(index ? "td" : "th", { scope: index ? null : "row", class: column.isText ? column.class : "number", "data-title": index ? column.title : null }));
    const element = h("tr", {}, cells);
    const update = ({ row }) => {
      this.columns.forEach((column, index) => {
        if (column.cell) column.cell(row, cells[index], this);
        else {
          const text = column.text(row);
          setText(cells[index], text);
          setAttributes(cells[index], { title: text === "–" ? column.why?.(row) ?? column.why_ ?? "not known" : null });
        }
      });
      this.onRow(element, row);
    };
    return { element, update };
  }

  #detailRow(row) {
    const inner = this.detail(row);
    const element = h("tr", { class: "detail" }, h("td", { colspan: this.columns.length }, inner.element));
    return { element, update: (part) => inner.update(part.row) };
  }

  isOpen(key) {
    return this.#open.has(key);
  }

  /** Open or close the detail of a row. */
  toggleDetail(key) {
    if (!this.#open.delete(key)) this.#open.add(key);
    this.update(this.#rows);
  }
}
