// The column at the right: all VMs, or what the address's fragment chooses, from a VM to its circuits to the rule that allowed one.
//
//   #/                        all VMs
//   #/vm/NAME                 a VM and its circuits
//   #/between/A/B             the circuits between two
//   #/circuit/ID              a circuit, and the rule that allows it
//   #/rule/LABEL              a rule, and the circuits that it allows
//   #/call/FROM/TO/PORT       what the policy says of a call

import { bytes, count, h, keep, rate, say, set } from "./dom.js";
import { HOST, end, ruleName } from "./model.js";
import { drawSparkline, sparkline } from "./plots.js";
import { VERDICTS, ageOf, clock, kind, queued, ruleHref, target } from "./tables.js";

const STATES = {
  waiting: "no VMM is attached to its socket",
  attached: "a VMM is attached, but nothing in its guest answers yet",
  booted: "the guest's kernel runs, but its agent has not called",
  joined: "its VMM has a vsock device of its own, and its agent has not called",
  ready: "its agent is there",
};

// Circuits in a list of links.
const MAX_LINKS = 50;

// From this width on the column is beside the graph (page.css).
const BESIDE = 1000;

// What the fragment says is chosen. `parties` are those whom it is about, and null if nobody in particular.
export function choice(fragment, model) {
  const [kind, ...words] = fragment.replace(/^#\/?/, "").split("/");
  let names;
  try {
    names = words.map(decodeURIComponent);
  } catch {
    names = [];
  }
  const [name, other = HOST, port = ""] = names;
  switch (name === undefined ? "" : kind) {
    case "vm":
      return { kind, name, parties: [name] };
    case "between":
      return { kind, name, other, parties: [name, other] };
    case "circuit": {
      const circuit = model.circuits.get(name);
      return { kind, name, parties: circuit ? [circuit.caller, circuit.callee] : null, rule: circuit?.told.rule };
    }
    case "rule":
      return { kind, name, parties: null, rule: name };
    case "call":
      return { kind, name, other, port, parties: null };
    default:
      return { kind: null, parties: null };
  }
}

export class Inspector {
  #box;
  #get;
  #shown = null;
  #view = null;

  // `get` asks the daemon for a path.
  constructor(box, get) {
    this.#box = box;
    this.#get = get;
  }

  draw(model, chosen, now) {
    const key = JSON.stringify([chosen.kind, chosen.name, chosen.other, chosen.port]);
    if (key !== this.#shown) {
      const follows = this.#shown !== null && chosen.kind !== null;
      this.#shown = key;
      this.#view = this.#make(chosen);
      this.#box.replaceChildren(...this.#view.elements);
      this.#box.scrollTop = 0;
      // Whoever follows a link by keyboard, or has the page read out, is taken to where it leads.
      if (follows) this.#box.focus({ preventScroll: innerWidth > BESIDE });
    }
    this.#view.draw(model, now);
  }

  #make(chosen) {
    switch (chosen.kind) {
      case "vm":
        return vmView(chosen.name);
      case "between":
        return betweenView(chosen.name, chosen.other);
      case "circuit":
        return circuitView(chosen.name);
      case "rule":
        return ruleView(chosen.name);
      case "call":
        return callView(chosen, this.#get);
      default:
        return allView();
    }
  }
}

function allView() {
  const list = h("ul", { class: "vms" });
  const none = h("p", { class: "none" });
  const parts = () => [h("span"), h("bdi", { class: "label" }), sparkline(), h("span", { class: "state" }), h("span", { class: "words" })];
  const make = ([name]) => h("li", null, h("a", { href: vmHref(name) }, parts()));
  const draw = (model, now) => {
    const vms = [...model.vms].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
    keep(list, vms, ([name]) => name, make, (item, [name, { told, rates }]) => {
      const [dot, label, line, state, words] = item.firstChild.children;
      set(dot, "class", `dot ${told.state}`);
      say(label, name);
      say(state, told.state);
      drawSparkline(line, rates.history, now);
      const counters = told.counters ?? {};
      const passed = `↑ ${bytes(counters.bytes_from_guest ?? 0)} ↓ ${bytes(counters.bytes_to_guest ?? 0)}`;
      say(words, `${told.kind}, CID ${told.cid} · ${count(model.circuitsOf(name).length, "circuit")} · ${passed}`);
    });
    say(none, vms.length === 0 ? "There are none: add one with ringdown vm add NAME." : "");
  };
  return { elements: [h("h2", null, "Virtual machines"), list, none], draw };
}

function vmView(name) {
  const facts = new Facts();
  const circuits = new CircuitLinks("Circuits", name);
  const draw = (model) => {
    circuits.draw(model.circuitsOf(name));
    const vm = model.vms.get(name);
    if (!vm) {
      facts.draw([["State", "there is no such VM"]]);
      return;
    }
    const { told, rates } = vm;
    const { counters = {}, limits = {}, usage = {}, agent, groups = [], aliases = [] } = told;
    facts.draw([
      ["State", `${told.state}: ${STATES[told.state] ?? ""}`],
      told.last_fault ? ["Last fault", told.last_fault] : null,
      ["Line", `${told.kind}, CID ${told.cid}`],
      ["Sends", `${rate(rates.up)}, ${bytes(counters.bytes_from_guest ?? 0)} in all`],
      ["Receives", `${rate(rates.down)}, ${bytes(counters.bytes_to_guest ?? 0)} in all`],
      ["Circuits", `${number(told.circuits)} of ${number(limits.circuits)}, ${number(counters.circuits_opened)} ever`],
      ["Buffered", `${bytes(usage.buffered_bytes ?? 0)} of ${bytes(limits.buffered_bytes ?? 0)}`],
      groups.length > 0 ? ["Groups", groups.join(", ")] : null,
      aliases.length > 0 ? ["Aliases", aliases.join(", ")] : null,
      agent ? ["Host name", agent.hostname] : null,
      agent ? ["Agent", agent.software] : null,
    ]);
  };
  return { elements: [crumbs("VM"), heading(name), facts.element, ...circuits.elements], draw };
}

function betweenView(a, b) {
  const facts = new Facts();
  const circuits = new CircuitLinks("Circuits", null);
  const draw = (model) => {
    const pair = model.pairs().find((one) => (one.a === a && one.b === b) || (one.a === b && one.b === a));
    const [there, back] = !pair ? [0, 0] : pair.a === a ? [pair.there, pair.back] : [pair.back, pair.there];
    facts.draw([
      [`To ${b}`, rate(there)],
      [`To ${a}`, rate(back)],
    ]);
    circuits.draw(model.circuitsBetween(a, b));
  };
  return { elements: [crumbs("Between two"), heading(`${a} and ${b}`), facts.element, ...circuits.elements], draw };
}

function circuitView(id) {
  const facts = new Facts();
  const rule = h("p", { class: "by" });
  // What was last known of it stays when it ends.
  let last = null;
  const draw = (model) => {
    const circuit = model.circuits.get(id);
    last = circuit ?? last;
    if (!last) {
      facts.draw([["State", "there is no such circuit"]]);
      return;
    }
    const { told, rates } = last;
    const passed = (total, perSecond) => bytes(total) + (circuit ? `, ${rate(perSecond)}` : "");
    facts.draw([
      ["From", end(told.from), partyHref(told.from)],
      ["To", end(told.to), partyHref(told.to)],
      told.reached ? ["Reached", end(told.reached), partyHref(told.reached)] : null,
      ["State", circuit ? told.state : "ended"],
      ["Kind", kind(told)],
      ["Age", ageOf(told)],
      ["Sent", passed(told.bytes_from_caller, rates.up)],
      ["Received", passed(told.bytes_to_caller, rates.down)],
      queued(told) === null ? null : ["Queued", bytes(queued(told))],
    ]);
    const label = told.rule ?? null;
    if (rule.hasChildNodes() && rule.says === label) return;
    rule.says = label;
    const without = "No rule is about it. Without one, programs of the host may call VMs, and VMs the sockets that the host made for them.";
    rule.replaceChildren(...(label === null ? [without] : ["Allowed by the rule ", h("a", { href: ruleHref(label) }, h("bdi", null, label))]));
  };
  return { elements: [crumbs("Circuit"), heading(id), facts.element, h("h3", null, "Why it is let through"), rule], draw };
}

function ruleView(label) {
  const facts = new Facts();
  const circuits = new CircuitLinks("Circuits by this rule", null);
  const refused = new RefusedBy(label);
  const draw = (model) => {
    const rule = model.rules.find((one) => one.label === label);
    facts.draw(rule ? factsOfRule(rule, model.rules.length + model.moreRules) : [["State", "there is no such rule"]]);
    circuits.draw(model.circuitsBy(label));
    refused.draw(model);
  };
  return { elements: [crumbs("Rule"), heading(label), facts.element, ...circuits.elements, ...refused.elements], draw };
}

function factsOfRule(rule, rules) {
  const limits = Object.entries(rule.limits ?? {}).map(([name, limit]) => `${number(limit)} ${name.replaceAll("_", " ")}`);
  return [
    ["Verdict", VERDICTS[rule.verdict] ?? rule.verdict],
    ["From", rule.from.join(", ")],
    ["To", rule.to.join(", ")],
    ["Port", rule.ports.includes("*") ? "any" : rule.ports.join(", ")],
    rule.redirect ? ["Instead", rule.redirect] : null,
    limits.length > 0 ? ["Limits", limits.join(", ")] : null,
    ["Position", `${rule.index + 1} of ${rules}`],
    ["Written", rule.place],
  ];
}

function callView({ name: from, other: to, port }, get) {
  const facts = new Facts();
  facts.draw([["Answer", "asking …"]]);
  const words = [from, to, port].map(encodeURIComponent);
  get(`/v1/why?from=${words[0]}&to=${words[1]}&port=${words[2]}`).then(
    (answer) => facts.draw(factsOfAnswer(answer)),
    (error) => facts.draw([["Answer", error.message]]),
  );
  return { elements: [crumbs("Call"), heading(`${from} to ${to}, port ${port}`), facts.element], draw: () => {} };
}

function factsOfAnswer({ policy, fails, hindrances = [], refusals = [] }) {
  const link = (rule) => [rule.label, ruleHref(rule.label)];
  const often = (one) => (one.count > 1 ? `${number(one.count)} times, last at ` : "");
  return [
    ["Answer", fails ? `${policy.verdict}, but ${fails}` : policy.verdict],
    ["Because", policy.why],
    policy.redirect ? ["Goes to", policy.redirect] : null,
    policy.rule ? ["Rule", ...link(policy.rule)] : null,
    ...hindrances.slice(fails ? 1 : 0).map((hindrance) => ["But", hindrance]),
    ...(policy.notes ?? []).map((note) => ["Note", note]),
    ...(policy.passed_over ?? []).map((passed) => [`Not by ${passed.differs_in}`, ...link(passed.rule)]),
    ...refusals.map((one) => ["Refused", `${often(one)}${clock(one.time)}: ${one.reason}`]),
  ];
}

function crumbs(what) {
  return h("p", { class: "crumbs" }, h("a", { href: "#/" }, "All VMs"), h("span", { "aria-hidden": "true" }, " / "), what);
}

function heading(text) {
  return h("h2", { class: "title" }, h("bdi", null, text));
}

function vmHref(name) {
  return `#/vm/${encodeURIComponent(name)}`;
}

function partyHref(of) {
  return of.kind === "vm" ? vmHref(of.vm) : null;
}

function number(value) {
  return (value ?? 0).toLocaleString("en");
}

// Names and values. A third member makes the value a link; null leaves a fact out.
class Facts {
  element = h("dl", { class: "facts" });
  #shape = null;

  draw(facts) {
    const given = facts.filter((fact) => fact !== null);
    const shape = JSON.stringify(given.map(([name, , href]) => [name, href ?? null]));
    if (shape !== this.#shape) {
      this.#shape = shape;
      const value = (href) => (href ? h("a", { href }, h("bdi")) : h("bdi"));
      this.element.replaceChildren(...given.flatMap(([name, , href]) => [h("dt", null, h("bdi", null, name)), h("dd", null, value(href))]));
    }
    given.forEach(([, words], index) => say(this.element.children[2 * index + 1].querySelector("bdi"), String(words)));
  }
}

// Links to circuits, the busiest first, seen from one of the two ends or from neither.
class CircuitLinks {
  #title = h("h3");
  #list = h("ul", { class: "links" });
  #words;
  #seenFrom;
  elements = [this.#title, this.#list];

  constructor(words, seenFrom) {
    this.#words = words;
    this.#seenFrom = seenFrom;
  }

  draw(circuits) {
    say(this.#title, `${this.#words}: ${circuits.length === 0 ? "none" : number(circuits.length)}`);
    const busiest = [...circuits].sort((a, b) => b.rates.up + b.rates.down - a.rates.up - a.rates.down);
    const parts = () => [h("bdi", { class: "call" }), h("span", { class: "rate" }), h("bdi", { class: "words" })];
    const make = (one) => h("li", null, h("a", { href: `#/circuit/${encodeURIComponent(one.told.id)}` }, parts()));
    keep(this.#list, busiest.slice(0, MAX_LINKS), (one) => one.told.id, make, (item, one) => {
      const [call, speed, words] = item.firstChild.children;
      say(call, this.#call(one));
      say(speed, rate(one.rates.up + one.rates.down));
      say(words, [one.told.state, ageOf(one.told), one.told.rule ?? "no rule"].join(" · "));
    });
  }

  #call({ told, caller }) {
    if (this.#seenFrom === null) return `${end(told.from)} → ${target(told)}`;
    return caller === this.#seenFrom ? `→ ${target(told)}` : `← ${end(told.from)} at ${(told.reached ?? told.to).port ?? "?"}`;
  }
}

// The latest calls that a rule refused.
class RefusedBy {
  #label;
  #title = h("h3", null, "Refused by this rule");
  #list = h("ul", { class: "links" });
  elements = [this.#title, this.#list];

  constructor(label) {
    this.#label = label;
  }

  draw(model) {
    const refused = model.refusals.filter((one) => ruleName(one.event.rule) === this.#label).slice(0, MAX_LINKS);
    this.#title.hidden = refused.length === 0;
    const make = () => h("li", { class: "plain" }, h("bdi"), h("span", { class: "words" }));
    keep(this.#list, refused, (one) => one.key, make, (item, { event, times, call }) => {
      say(item.firstChild, call);
      say(item.lastChild, times > 1 ? `${number(times)} times, last at ${clock(event.time)}` : clock(event.time));
    });
  }
}
