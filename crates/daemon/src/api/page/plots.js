// Plots of the last five minutes: now is at the right edge.

import { bytes, duration, h, rate, s, say, set } from "./dom.js";

const SPAN_MS = 300_000;
const SIZE = { width: 400, height: 104, top: 6, bottom: 16 };

// What went up and what came down, mirrored at the middle line.
export class Mirror {
  #title = h("h2");
  #up = h("span", { class: "up" });
  #down = h("span", { class: "down" });
  #areas = [s("path", { class: "area up" }), s("path", { class: "area down" })];
  #axis = s("path", { class: "axis" });
  #scale = h("span", { class: "scale" });

  constructor(box) {
    const drawing = picture(...this.#areas, this.#axis);
    box.append(
      h("figcaption", null, this.#title, h("p", { class: "now" }, this.#up, this.#down)),
      h("div", { class: "plot" }, drawing, this.#scale, times()),
    );
  }

  draw(title, words, rates, now) {
    const { up, down, history } = rates;
    say(this.#title, title);
    say(this.#up, `${words[0]} ${rate(up)}`);
    say(this.#down, `${words[1]} ${rate(down)}`);
    const points = history.filter((point) => now - point.now <= SPAN_MS);
    const most = nice(Math.max(1000, ...points.map((point) => Math.max(point.up, point.down))));
    const middle = (SIZE.height - SIZE.bottom + SIZE.top) / 2;
    const half = middle - SIZE.top;
    const [above, below] = this.#areas;
    set(above, "d", area(points, now, middle, (point) => middle - (point.up / most) * half));
    set(below, "d", area(points, now, middle, (point) => middle + (point.down / most) * half));
    set(this.#axis, "d", `M0 ${middle}H${SIZE.width}`);
    say(this.#scale, `± ${bytes(most)}/s`);
  }
}

// The median of the set-up times and what 95 of 100 stay below, on a logarithmic scale.
export class Setup {
  #p50words = h("span", { class: "up" });
  #p95words = h("span", { class: "down" });
  #none = h("p", { class: "none" });
  #marks = [h("span"), h("span")];
  #p50 = s("path", { class: "line up" });
  #p95 = s("path", { class: "line down" });
  #grid = s("path", { class: "grid" });

  constructor(box) {
    const drawing = picture(this.#grid, this.#p95, this.#p50);
    box.append(
      h("figcaption", null, h("h2", null, "Set-up times"), h("p", { class: "now" }, this.#p50words, this.#p95words)),
      h("div", { class: "plot" }, drawing, h("div", { class: "marks" }, this.#marks), this.#none, times()),
    );
  }

  draw(model, now) {
    const points = model.setup.filter((point) => now - point.now <= SPAN_MS && point.p50 !== null);
    const last = points.at(-1);
    say(this.#p50words, last ? `median ${duration(last.p50)}` : "");
    say(this.#p95words, last ? `95 % below ${duration(last.p95)}` : "");
    say(this.#none, last ? "" : model.measuresSetup ? "No circuit was set up in the last minutes." : "This daemon has told no set-up times yet.");
    const values = points.flatMap((point) => [point.p50, point.p95]).filter((value) => value > 0);
    const low = Math.floor(Math.log10(Math.min(1e-4, ...values)));
    const high = Math.max(low + 2, Math.ceil(Math.log10(Math.max(1e-3, ...values))));
    const floor = SIZE.height - SIZE.bottom;
    const y = (seconds) => floor - ((Math.log10(Math.max(seconds, 10 ** low)) - low) / (high - low)) * (floor - SIZE.top);
    const powers = Array.from({ length: high - low + 1 }, (_, index) => 10 ** (low + index));
    set(this.#grid, "d", powers.map((power) => `M0 ${y(power).toFixed(1)}H${SIZE.width}`).join(""));
    say(this.#marks[0], last ? duration(powers.at(-1)) : "");
    say(this.#marks[1], last ? duration(powers[0]) : "");
    set(this.#p50, "d", line(points, now, (point) => y(point.p50)));
    set(this.#p95, "d", line(points, now, (point) => y(point.p95)));
  }
}

// A small line of the last minute, for lists.
export function sparkline() {
  return s("svg", { class: "spark", viewBox: "0 0 60 16", "aria-hidden": "true" }, s("path"));
}

export function drawSparkline(element, history, now) {
  const points = history.slice(-60);
  const most = Math.max(1, ...points.map((point) => point.up + point.down));
  const at = (point) => `${(60 - (now - point.now) / 1000).toFixed(1)} ${(15 - ((point.up + point.down) / most) * 14).toFixed(1)}`;
  set(element.firstChild, "d", points.map((point, index) => `${index === 0 ? "M" : "L"}${at(point)}`).join(""));
}

function picture(...parts) {
  const size = { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, preserveAspectRatio: "none" };
  return s("svg", { ...size, "aria-hidden": "true" }, ...parts);
}

function times() {
  return h("div", { class: "times" }, h("span", null, "5 min ago"), h("span", null, "now"));
}

function x(now, point) {
  return (SIZE.width * (1 - (now - point.now) / SPAN_MS)).toFixed(1);
}

function line(points, now, y) {
  return points.map((point, index) => `${index === 0 ? "M" : "L"}${x(now, point)} ${y(point).toFixed(1)}`).join("");
}

function area(points, now, base, y) {
  if (points.length === 0) return "";
  return `M${x(now, points[0])} ${base}${line(points, now, y).replace("M", "L")}L${x(now, points.at(-1))} ${base}Z`;
}

// The next of 1, 2 and 5 times a power of ten.
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5].map((step) => step * power).find((bound) => bound >= value) ?? 10 * power;
}
