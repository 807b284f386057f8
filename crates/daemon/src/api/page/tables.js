// Tables: circuits, rules and refusals. Rows are links to the details, and headers of circuits sort.

import { age, bytes, count, h, keep, rate, say, set } from "./dom.js";
import { end, questionOf, ruleName } from "./model.js";
import { drawSparkline, sparkline } from "./plots.js";

// Rows beyond these are counted and not drawn.
const MAX_ROWS = 200;
const MAX_REFUSAL_ROWS = 30;

const BY_RATE = 9;

// What a column shows, and by what it sorts where that is something else.
const COLUMNS = [
  { name: "From", of: (one) => end(one.told.from) },
  { name: "To", of: (one) => target(one.told) },
  { name: "Rule", of: (one) => one.told.rule ?? "–" },
  { name: "State", of: (one) => one.told.state, class: "wide" },
  { name: "Kind", of: (one) => kind(one.told), class: "wide" },
  { name: "Age", of: (one) => ageOf(one.told), by: (one) => one.told.age_ms ?? 0, class: "number wide" },
  { name: "Sent", of: (one) => bytes(one.told.bytes_from_caller), by: (one) => one.told.bytes_from_caller, class: "number wide" },
  { name: "Received", of: (one) => bytes(one.told.bytes_to_caller), by: (one) => one.told.bytes_to_caller, class: "number wide" },
  { name: "Queued", of: (one) => queuedWords(one.told), by: (one) => queued(one.told) ?? -1, class: "number wide" },
  { name: "Rate", of: (one) => rate(one.rates.up + one.rates.down), by: (one) => one.rates.up + one.rates.down, class: "number" },
];

export class Circuits {
  #body = h("tbody");
  #heads;
  #sort = { column: BY_RATE, down: true };
  #redraw;

  constructor(box, redraw) {
    this.#redraw = redraw;
    this.#heads = COLUMNS.map((column, index) =>
      h("th", { scope: "col", class: column.class }, h("button", { type: "button", click: () => this.#by(index) }, column.name)),
    );
    const heads = h("tr", null, this.#heads, h("th", { scope: "col", class: "wide" }, "Last minute"));
    box.append(h("table", { class: "rows" }, h("thead", null, heads), this.#body));
  }

  // Draws those that have every word of the filter in them; returns what there is to say of their number.
  draw(model, filter, chosen, now) {
    const words = filter
      .toLowerCase()
      .split(/\s+/)
      .filter((word) => word);
    const fits = (one) => {
      const text = [...COLUMNS.slice(0, 5).map((column) => column.of(one)), one.told.id].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    };
    const found = [...model.circuits.values()].filter(fits);
    const { column, down } = this.#sort;
    const by = COLUMNS[column].by ?? COLUMNS[column].of;
    found.sort((a, b) => (compare(by(a), by(b)) || compare(a.told.id, b.told.id)) * (down ? -1 : 1));
    this.#heads.forEach((head, index) => set(head, "aria-sort", index === column ? (down ? "descending" : "ascending") : null));
    const rows = found.slice(0, MAX_ROWS);
    keep(this.#body, rows, (one) => one.told.id, makeRow, (row, one) => {
      COLUMNS.forEach((column, index) => say(index === 0 ? row.cells[0].firstChild : row.cells[index], String(column.of(one))));
      set(row.cells[3], "class", `state wide ${one.told.state}`);
      drawSparkline(row.lastChild.firstChild, one.rates.history, now);
      set(row, "class", chosen.kind === "circuit" && chosen.name === one.told.id ? "chosen" : null);
    });
    const all = model.circuits.size;
    const unlisted = model.more > 0 ? `, and ${count(model.more, "more circuit")} not listed` : "";
    return (all === 0 ? "none" : rows.length < all ? `${rows.length} of ${count(all, "circuit")}` : count(all, "circuit")) + unlisted;
  }

  #by(column) {
    const numbers = COLUMNS[column].class?.includes("number") ?? false;
    this.#sort = { column, down: column === this.#sort.column ? !this.#sort.down : numbers };
    this.#redraw();
  }
}

function makeRow(one) {
  const cells = COLUMNS.map((column) => h("td", { class: column.class }));
  cells[0].append(h("a", { href: `#/circuit/${encodeURIComponent(one.told.id)}` }));
  return h("tr", { click: follow }, cells, h("td", { class: "wide" }, sparkline()));
}

// A click anywhere in a row is one on its link.
function follow(event) {
  if (event.target.closest("a, button") || String(getSelection())) return;
  event.currentTarget.querySelector("a")?.click();
}

// Rules in their order, each with what it lets through now.
export class Rules {
  #list = h("ol", { class: "rules" });
  #none = h("p", { class: "none" });

  constructor(box) {
    box.append(this.#list, this.#none);
  }

  draw(model, chosen) {
    const parts = () => [h("span"), h("bdi", { class: "label" }), h("span", { class: "uses" }), h("bdi", { class: "words" })];
    const make = (rule) => h("li", null, h("a", { href: ruleHref(rule.label) }, parts()));
    keep(this.#list, model.rules.slice(0, MAX_ROWS), (rule) => `${rule.index} ${rule.label}`, make, (item, rule) => {
      const [verdict, label, uses, words] = item.firstChild.children;
      const circuits = model.circuitsBy(rule.label).length;
      const refused = model.refusedOf.get(rule.label) ?? 0;
      say(verdict, VERDICTS[rule.verdict] ?? rule.verdict);
      set(verdict, "class", `verdict ${rule.verdict}`);
      say(label, rule.label);
      say(uses, circuits > 0 ? count(circuits, "circuit") : refused > 0 ? `${refused.toLocaleString("en")} refused` : "");
      say(words, ruleWords(rule));
      set(item, "class", chosen.rule === rule.label ? "chosen" : null);
    });
    const hidden = model.moreRules + Math.max(0, model.rules.length - MAX_ROWS);
    const none = "There are no rules: VMs reach the host, and not each other.";
    say(this.#none, model.rules.length === 0 ? none : hidden > 0 ? `${count(hidden, "more rule")} not shown` : "");
  }
}

// The latest refusals, equal ones together.
export class Refusals {
  #list = h("ol", { class: "refusals" });
  #none = h("p", { class: "none" });

  constructor(box) {
    box.append(this.#list, this.#none);
  }

  draw(model) {
    const call = ({ event }) => h("a", { href: questionOf(event) }, h("bdi"));
    const make = (one) => h("li", null, h("time"), call(one), h("span", { class: "often" }), h("span", { class: "why" }));
    keep(this.#list, model.refusals.slice(0, MAX_REFUSAL_ROWS), (one) => one.key, make, (item, { event, times, call: words }) => {
      const [time, call, often, why] = item.children;
      say(time, clock(event.time));
      say(call.firstChild, words);
      say(often, times > 1 ? `× ${times.toLocaleString("en")}` : "");
      if (why.hasChildNodes()) return;
      const rule = ruleName(event.rule);
      const reason = String(event.reason ?? "");
      if (rule) why.append(h("a", { href: ruleHref(rule) }, h("bdi", null, rule)), reason ? ": " : "");
      why.append(h("bdi", null, reason));
    });
    const deaf = "This daemon does not tell of refusals.";
    say(this.#none, model.hasEvents === false ? deaf : model.refusals.length === 0 ? "No call was refused." : "");
  }
}

export const VERDICTS = { allowed: "allow", denied: "deny", redirected: "redirect" };

export function ruleHref(label) {
  return `#/rule/${encodeURIComponent(label)}`;
}

function ruleWords(rule) {
  const ports = rule.ports.includes("*") ? "any port" : `port ${rule.ports.join(", ")}`;
  const redirect = rule.redirect ? `, to ${rule.redirect} instead` : "";
  return `${rule.from.join(", ")} → ${rule.to.join(", ")}, ${ports}${redirect}`;
}

// Whom the caller meant, and who has it if that is somebody else.
export function target(told) {
  return told.reached ? `${end(told.to)} → ${end(told.reached)}` : end(told.to);
}

export function kind(told) {
  return told.seqpacket ? `${told.kind}, messages` : told.kind;
}

// Bytes that have left one side and not reached the other, of both directions; null where the daemon does not say.
export function queued(told) {
  const ways = [told.queued_from_caller, told.queued_to_caller].filter((way) => typeof way === "number");
  return ways.length > 0 ? ways.reduce((sum, way) => sum + way, 0) : null;
}

function queuedWords(told) {
  const found = queued(told);
  return found === null ? "–" : bytes(found);
}

// Not known of a circuit of which only the window is left.
export function ageOf(told) {
  return typeof told.age_ms === "number" ? age(told.age_ms) : "–";
}

export function clock(time) {
  const date = new Date(time ?? NaN);
  return Number.isNaN(date.getTime()) ? "" : date.toLocaleTimeString("en-GB");
}

function compare(a, b) {
  return typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}
