// What is known: the daemon's last words, and rates and histories made of them. Nothing here touches the page.

// One sample a second for five minutes.
export const SAMPLES = 300;

// Refusals that are kept. The same call again counts up the one that is there.
const MAX_REFUSALS = 100;

export const HOST = "host";

export class Model {
  vms = new Map();
  circuits = new Map();
  more = 0;
  rules = [];
  moreRules = 0;
  refusals = [];
  refusedOf = new Map();
  hasEvents = null;
  lastEvent = null;
  total = new Rates();
  setup = [];
  #setupBefore = null;

  // Takes a list of VMs and one of circuits that were asked for at the same time, `now` in milliseconds.
  take(now, vms, circuits) {
    this.vms = renewed(this.vms, vms, fullName, () => ({ rates: new Rates() }));
    let [sent, received] = [0, 0];
    for (const vm of this.vms.values()) {
      const counters = vm.told.counters ?? {};
      vm.rates.take(now, counters.bytes_from_guest ?? 0, counters.bytes_to_guest ?? 0);
      sent += vm.rates.up;
      received += vm.rates.down;
    }
    this.total.note(now, sent, received);
    this.circuits = renewed(this.circuits, circuits.circuits, (one) => one.id, () => ({ rates: new Rates() }));
    for (const circuit of this.circuits.values()) {
      const { told, rates } = circuit;
      rates.take(now, told.bytes_from_caller, told.bytes_to_caller, told.age_ms);
      circuit.caller = party(told.from);
      circuit.callee = party(told.reached ?? told.to);
    }
    this.more = circuits.more ?? 0;
  }

  takeEvent(event, id) {
    this.lastEvent = id;
    if (event.kind !== "refused") return;
    // The port that a call came from says nothing, and is another each time.
    const from = withoutPort(event.from);
    const key = JSON.stringify([from, event.to, event.rule, event.reason]);
    const known = this.refusals.findIndex((one) => one.key === key);
    const times = known < 0 ? 1 : this.refusals.splice(known, 1)[0].times + 1;
    this.refusals.unshift({ key, times, event, call: `${from} → ${event.to ?? "?"}` });
    this.refusals.length = Math.min(this.refusals.length, MAX_REFUSALS);
    const rule = ruleName(event.rule);
    if (rule) this.refusedOf.set(rule, (this.refusedOf.get(rule) ?? 0) + 1);
  }

  takeRules(answer) {
    this.rules = answer.rules ?? [];
    this.moreRules = answer.more ?? 0;
  }

  // Takes a page of metrics: of the set-up times since the last one, the median and the time that 95 of 100 stay below.
  takeMetrics(now, page) {
    const histogram = setupTimes(page);
    const before = this.#setupBefore;
    this.#setupBefore = histogram;
    if (!histogram || !before) return;
    const since = new Map();
    for (const [bound, total] of histogram) since.set(bound, Math.max(0, total - (before.get(bound) ?? 0)));
    const count = Math.max(0, ...since.values());
    this.setup.push({ now, count, p50: quantile(since, count, 0.5), p95: quantile(since, count, 0.95) });
    if (this.setup.length > SAMPLES) this.setup.shift();
  }

  get measuresSetup() {
    return this.#setupBefore !== null;
  }

  circuitsOf(vm) {
    return [...this.circuits.values()].filter((one) => one.caller === vm || one.callee === vm);
  }

  circuitsBetween(a, b) {
    const is = (one) => (one.caller === a && one.callee === b) || (one.caller === b && one.callee === a);
    return [...this.circuits.values()].filter(is);
  }

  circuitsBy(rule) {
    return [...this.circuits.values()].filter((one) => one.told.rule === rule);
  }

  // Bytes a second that programs of the host send and receive.
  ratesOfHost() {
    let [sent, received] = [0, 0];
    for (const { caller, callee, rates } of this.circuits.values()) {
      if (caller === HOST) [sent, received] = [sent + rates.up, received + rates.down];
      if (callee === HOST) [sent, received] = [sent + rates.down, received + rates.up];
    }
    return [sent, received];
  }

  // Bytes a second between each two that have circuits, each way.
  pairs() {
    const pairs = new Map();
    for (const { caller, callee, rates } of this.circuits.values()) {
      const [a, b] = caller < callee ? [caller, callee] : [callee, caller];
      const key = JSON.stringify([a, b]);
      const pair = pairs.get(key) ?? { key, a, b, there: 0, back: 0, circuits: 0 };
      pair.there += caller === a ? rates.up : rates.down;
      pair.back += caller === a ? rates.down : rates.up;
      pair.circuits += 1;
      pairs.set(key, pair);
    }
    return [...pairs.values()];
  }
}

// Bytes a second of two counters, up and down, and their history.
class Rates {
  up = 0;
  down = 0;
  history = [];
  #before = null;

  // A counter that has become less has started anew.
  take(now, up, down, ageMs = null) {
    const before = this.#before;
    this.#before = { now, up, down };
    if (before) {
      const seconds = Math.max(0.05, (now - before.now) / 1000);
      this.up = (up >= before.up ? up - before.up : up) / seconds;
      this.down = (down >= before.down ? down - before.down : down) / seconds;
    } else if (ageMs !== null && ageMs > 0 && ageMs < 2000) {
      this.up = (up / ageMs) * 1000;
      this.down = (down / ageMs) * 1000;
    } else return;
    this.note(now, this.up, this.down);
  }

  note(now, up, down) {
    this.up = up;
    this.down = down;
    this.history.push({ now, up, down });
    if (this.history.length > SAMPLES) this.history.shift();
  }
}

function renewed(old, told, key, make) {
  const map = new Map();
  for (const one of told) {
    const entry = old.get(key(one)) ?? make();
    entry.told = one;
    map.set(key(one), entry);
  }
  return map;
}

export function fullName(vm) {
  return vm.domain && vm.domain !== "default" ? `${vm.domain}/${vm.name}` : vm.name;
}

// Whose an end of a circuit is: a VM's full name, or the host.
export function party(end) {
  return end.kind === "vm" ? end.vm : HOST;
}

// The fragment that asks about a call of which an event tells.
export function questionOf(event) {
  const from = withoutPort(event.from);
  const caller = /^(host|published)\(/.test(from) ? HOST : from;
  const callee = withoutPort(event.to).replace(/^service\((.*)\)$/, "service:$1");
  return `#/call/${[caller, callee, event.port ?? ""].map(encodeURIComponent).join("/")}`;
}

function withoutPort(words) {
  return String(words ?? "?").replace(/:\d+$/, "");
}

// An end of a circuit in words, as the command line has it.
export function end(of) {
  switch (of.kind) {
    case "vm": return `${of.vm}:${of.port}`;
    case "program": return `host (uid ${of.uid}, pid ${of.pid})`;
    case "published": return `published ${of.name}`;
    case "service": return `${of.service}:${of.port}`;
    case "host": return `host:${of.port}`;
    default: return "gone";
  }
}

export function ruleName(rule) {
  if (rule === null || rule === undefined) return null;
  return typeof rule === "string" ? rule : (rule.label ?? null);
}

// The buckets of the histogram of set-up times, of all VMs together: how many took at most so many seconds.
function setupTimes(page) {
  const buckets = new Map();
  for (const line of page.split("\n")) {
    if (!line.startsWith("ringdown_vm_setup_seconds_bucket{")) continue;
    const bound = /le="([^"]+)"/.exec(line);
    const total = Number(line.slice(line.lastIndexOf(" ") + 1));
    if (!bound || !Number.isFinite(total)) continue;
    const seconds = bound[1] === "+Inf" ? Infinity : Number(bound[1]);
    buckets.set(seconds, (buckets.get(seconds) ?? 0) + total);
  }
  return buckets.size > 0 ? buckets : null;
}

// As Prometheus has it: evenly spread within a bucket.
function quantile(buckets, count, share) {
  if (count === 0) return null;
  let [below, floor] = [0, 0];
  for (const [bound, total] of [...buckets].sort(([a], [b]) => a - b)) {
    if (total >= share * count) {
      if (bound === Infinity || total === below) return floor;
      return floor + (bound - floor) * ((share * count - below) / (total - below));
    }
    [below, floor] = [total, bound];
  }
  return floor;
}
