// Who talks with whom: the host in the middle, VMs around it, and between each two that have circuits a lane each way, on which dots move as
// the bytes do. Width and speed grow with the logarithm of the rate: ten times as much is one step, whatever it is ten times of.

import { keep, rate, s, say, set } from "./dom.js";
import { HOST } from "./model.js";

// Below this width, in pixels, there is less room, and more height is needed for lanes to pass each other.
const NARROW = 560;
const HEIGHT = 330;
const NARROW_HEIGHT = 420;

// More VMs than this are too many for one picture: the busiest are shown.
const MAX_SHOWN = 24;
const MAX_SHOWN_NARROW = 8;

// A card has two lines, in one of two widths; where there are many VMs it is their name alone.
const WIDE = { width: 160, height: 50 };
const SMALL = { width: 104, height: 46 };
const CHIP = { width: 92, height: 25 };
const MAX_CARDS = 10;

// Between the dots of a lane, in pixels.
const GAP = 11;

const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Graph {
  #box;
  #svg;
  #lanes = s("g", { class: "lanes" });
  #labels = s("g", { class: "labels" });
  #cards = s("g", { class: "cards" });
  #moving = new Map();
  #last = 0;

  constructor(box) {
    this.#box = box;
    const label = "VMs and the circuits between them";
    this.#svg = s("svg", { role: "group", "aria-label": label }, this.#lanes, this.#labels, this.#cards);
    box.append(this.#svg);
    const move = (now) => {
      this.#move(now);
      requestAnimationFrame(move);
    };
    requestAnimationFrame(move);
  }

  // Draws the model; returns how many VMs were left out.
  draw(model, chosen) {
    const width = Math.max(320, this.#box.clientWidth);
    const height = width < NARROW ? NARROW_HEIGHT : HEIGHT;
    set(this.#svg, "viewBox", `0 0 ${width} ${height}`);
    set(this.#svg, "height", height);
    const names = shown(model, chosen, width < NARROW ? MAX_SHOWN_NARROW : MAX_SHOWN);
    const places = arrange(names, width, height);
    const pairs = model.pairs().filter((pair) => places.has(pair.a) && places.has(pair.b));
    this.#drawLanes(pairs, places, chosen);
    this.#drawLabels(pairs, places, chosen);
    this.#drawCards(model, places, chosen);
    return model.vms.size - names.length;
  }

  #drawLanes(pairs, places, chosen) {
    const lanes = pairs.flatMap((pair) => [
      { pair, key: `${pair.key}>`, from: pair.a, to: pair.b, perSecond: pair.there },
      { pair, key: `${pair.key}<`, from: pair.b, to: pair.a, perSecond: pair.back },
    ]);
    const moving = new Map();
    const make = () => s("a", null, ...["reach", "bed", "flow", "tip"].map((part) => s("path", { class: part })), s("title"));
    keep(this.#lanes, lanes, (lane) => lane.key, make, (element, lane) => {
      const [reach, bed, flow, tip, title] = element.children;
      const { pair } = lane;
      const curve = curveOf(places.get(lane.from), places.get(lane.to), places.get(HOST));
      const step = steps(lane.perSecond);
      set(element, "href", `#/between/${encodeURIComponent(pair.a)}/${encodeURIComponent(pair.b)}`);
      set(element, "class", `lane${step > 0 ? " busy" : ""}${concerns(chosen, pair) ? "" : " off"}`);
      for (const part of [reach, bed, flow]) set(part, "d", curve.path);
      const thick = 1.6 + step * 0.85;
      set(flow, "stroke-width", thick.toFixed(2));
      set(flow, "stroke-dasharray", `0 ${(GAP + thick).toFixed(2)}`);
      set(tip, "d", tipOf(curve, 3 + step * 0.8));
      say(title, `${lane.from} to ${lane.to}: ${rate(lane.perSecond)}`);
      const at = this.#moving.get(lane.key)?.at ?? 0;
      if (step > 0) moving.set(lane.key, { flow, speed: 14 + step * 17, period: GAP + thick, at });
    });
    this.#moving = moving;
  }

  // The rate of each pair at the middle of its lanes, where there is room for it: the highest first.
  #drawLabels(pairs, places, chosen) {
    const taken = [...places.values()];
    const labels = [];
    for (const pair of [...pairs].sort((a, b) => b.there + b.back - a.there - a.back)) {
      if (pair.there + pair.back < 1) break;
      const { middle } = curveOf(places.get(pair.a), places.get(pair.b), places.get(HOST), 0);
      const text = rate(pair.there + pair.back);
      const label = { pair, text, ...middle, width: 7.1 * text.length + 10, height: 18 };
      if (taken.some((other) => overlap(label, other))) continue;
      taken.push(label);
      labels.push(label);
    }
    const make = () => s("g", null, s("rect", { rx: 3, height: 18 }), s("text"));
    keep(this.#labels, labels, (label) => label.pair.key, make, (element, label) => {
      const [rect, words] = element.children;
      say(words, label.text);
      set(element, "class", `label${concerns(chosen, label.pair) ? "" : " off"}`);
      set(rect, "width", label.width.toFixed(1));
      set(rect, "x", (label.x - label.width / 2).toFixed(1));
      set(rect, "y", (label.y - 9).toFixed(1));
      set(words, "x", label.x.toFixed(1));
      set(words, "y", (label.y + 4).toFixed(1));
    });
  }

  #drawCards(model, places, chosen) {
    const make = ([name]) =>
      s(
        "a",
        { href: name === HOST ? "#/" : `#/vm/${encodeURIComponent(name)}` },
        s("rect", { rx: 7 }),
        s("circle", { r: 3.6, cx: 14 }),
        s("text", { class: "name", x: 25 }),
        s("text", { class: "rates", x: 12, y: 39 }),
        s("title"),
      );
    const key = ([name]) => (name === HOST ? HOST : `vm ${name}`);
    keep(this.#cards, [...places], key, make, (element, [name, place]) => {
      const [rect, dot, title, rates, hint] = element.children;
      const vm = model.vms.get(name);
      const { width, height } = place;
      const isChosen = chosen.kind === "vm" && chosen.name === name;
      set(element, "transform", `translate(${(place.x - width / 2).toFixed(1)} ${(place.y - height / 2).toFixed(1)})`);
      set(element, "class", `card ${vm ? vm.told.state : "host"}${isChosen ? " chosen" : ""}`);
      set(rect, "width", width);
      set(rect, "height", height);
      set(dot, "cy", height === CHIP.height ? 12.5 : 18);
      set(title, "y", height === CHIP.height ? 17 : 22);
      say(title, cut(name, width === WIDE.width ? 16 : width === SMALL.width ? 10 : 8));
      const [sent, received] = vm ? [vm.rates.up, vm.rates.down] : model.ratesOfHost();
      const isQuiet = sent + received < 1;
      if (height === CHIP.height) say(rates, "");
      else if (isQuiet) say(rates, vm ? vm.told.state : "quiet");
      else say(rates, width === WIDE.width ? `↑ ${rate(sent)}  ↓ ${rate(received)}` : rate(sent + received));
      say(hint, vm ? `${name}: ${vm.told.state}, sends ${rate(sent)}, receives ${rate(received)}` : "this host");
    });
  }

  #move(now) {
    const seconds = Math.min(0.1, (now - this.#last) / 1000);
    this.#last = now;
    if (calm.matches) return;
    for (const lane of this.#moving.values()) {
      lane.at = (lane.at - lane.speed * seconds) % lane.period;
      lane.flow.setAttribute("stroke-dashoffset", lane.at.toFixed(1));
    }
  }
}

// A kilobyte a second is one step and a gigabyte seven.
function steps(perSecond) {
  return perSecond < 1 ? 0 : Math.min(8, Math.max(0.4, Math.log10(perSecond) - 2));
}

function shown(model, chosen, most) {
  const names = [...model.vms.keys()].sort();
  if (names.length <= most) return names;
  const weight = (name) => {
    if (chosen.parties?.includes(name)) return Infinity;
    const vm = model.vms.get(name);
    return vm.rates.up + vm.rates.down + (vm.told.circuits ?? 0);
  };
  const weighed = names.map((name) => [weight(name), name]).sort(([a], [b]) => b - a);
  return weighed
    .slice(0, most)
    .map(([, name]) => name)
    .sort();
}

function arrange(names, width, height) {
  const card = names.length > MAX_CARDS ? CHIP : width < NARROW ? SMALL : WIDE;
  const middle = { x: width / 2, y: height / 2 };
  const places = new Map([[HOST, { ...middle, ...card }]]);
  const across = Math.min(width / 2 - card.width / 2 - 8, 400);
  const down = height / 2 - card.height / 2 - 6;
  names.forEach((name, index) => {
    // From the left over the top for one and two, so that they stand beside the host; from the top right for more.
    const part = names.length <= 2 ? 0.5 - index / 2 : (index + 0.5) / names.length - 0.25;
    const turn = 2 * Math.PI * part;
    places.set(name, { x: middle.x + across * Math.cos(turn), y: middle.y + down * Math.sin(turn), ...card });
  });
  return places;
}

// The curve of a lane. The two lanes of a pair keep to their side, and those between VMs go around the host.
function curveOf(from, to, host, apart = 4.5) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const shift = { x: (-dy / length) * apart, y: (dx / length) * apart };
  const straight = { x: (from.x + to.x) / 2, y: (from.y + to.y) / 2 };
  let bow = { x: 0, y: 0 };
  if (from !== host && to !== host) {
    const [ox, oy] = [straight.x - host.x, straight.y - host.y];
    const away = Math.hypot(ox, oy);
    // Those that are opposite each other pass it on its upper side, or on its right, whichever of the two is asked about first.
    const side = (Math.abs(dx) < 1 ? -dy : dx) > 0 ? -1 : 1;
    const aside = { x: (-dy / length) * side, y: (dx / length) * side };
    const outwards = away < 20 ? aside : { x: ox / away, y: oy / away };
    const far = Math.max(0, 160 - away) * 0.95;
    bow = { x: outwards.x * far, y: outwards.y * far };
  }
  const a = { x: from.x + shift.x, y: from.y + shift.y };
  const b = { x: to.x + shift.x, y: to.y + shift.y };
  const control = { x: straight.x + bow.x + shift.x, y: straight.y + bow.y + shift.y };
  const at = (part) => {
    const rest = 1 - part;
    const along = (axis) => rest * rest * a[axis] + 2 * rest * part * control[axis] + part * part * b[axis];
    return { x: along("x"), y: along("y") };
  };
  const point = ({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  return { path: `M${point(a)}Q${point(control)} ${point(b)}`, at, middle: at(0.5) };
}

// A small arrow on a lane, behind its label.
function tipOf(curve, size) {
  const [tip, before] = [curve.at(0.66), curve.at(0.63)];
  const [dx, dy] = [tip.x - before.x, tip.y - before.y];
  const length = Math.hypot(dx, dy) || 1;
  const [ux, uy] = [dx / length, dy / length];
  const corner = (along, aside) => `${(tip.x + ux * along - uy * aside).toFixed(1)} ${(tip.y + uy * along + ux * aside).toFixed(1)}`;
  return `M${corner(size, 0)}L${corner(-size * 0.7, size * 0.8)}L${corner(-size * 0.7, -size * 0.8)}Z`;
}

// Whether two boxes, each told by its middle and size, have something in common.
function overlap(one, other) {
  const [across, down] = [Math.abs(one.x - other.x), Math.abs(one.y - other.y)];
  return across < (one.width + other.width) / 2 && down < (one.height + other.height) / 2;
}

// Whether what is chosen is about these two.
function concerns({ parties }, { a, b }) {
  if (!parties) return true;
  return parties.length === 1 ? parties[0] === a || parties[0] === b : parties.includes(a) && parties.includes(b);
}

function cut(text, most) {
  const letters = [...text];
  return letters.length <= most ? text : `${letters.slice(0, most - 1).join("")}…`;
}
