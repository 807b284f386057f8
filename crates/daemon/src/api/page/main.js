// The page: asks once a second, draws what it hears, and goes where the address's fragment says.

import { count, rate, say, set } from "./dom.js";
import { Graph } from "./graph.js";
import { Inspector, choice } from "./inspector.js";
import { Model } from "./model.js";
import { Mirror, Setup } from "./plots.js";
import { Refused, events, get, takeToken, text } from "./source.js";
import { Circuits, Refusals, Rules } from "./tables.js";

const EVERY_MS = 1000;
const RULES_EVERY_MS = 15_000;

// Metrics are asked of guests too, so not as often.
const METRICS_EVERY_MS = 5000;

// How long to wait before a broken stream of events is asked for again.
const EVENTS_AGAIN_MS = 3000;

const THEMES = ["system", "light", "dark"];

const at = (id) => document.getElementById(id);
const model = new Model();
const graph = new Graph(at("graph"));
const inspector = new Inspector(at("inspector"), get);
const throughput = new Mirror(at("throughput"));
const setup = new Setup(at("setup"));
const circuits = new Circuits(at("circuits"), () => draw());
const rules = new Rules(at("policy"));
const refusals = new Refusals(at("decisions"));

function draw() {
  const now = performance.now();
  const chosen = choice(location.hash, model);
  const hidden = graph.draw(model, chosen);
  say(at("graph-note"), hidden > 0 ? `${count(hidden, "quieter VM")} not drawn` : "");
  inspector.draw(model, chosen, now);
  drawThroughput(chosen, now);
  setup.draw(model, now);
  say(at("circuits-note"), circuits.draw(model, at("filter").value, chosen, now));
  rules.draw(model, chosen);
  say(at("policy-note"), model.rules.length > 1 ? "the first rule that matches decides" : "");
  refusals.draw(model);
  const all = model.circuits.size + model.more;
  say(at("totals"), `${count(model.vms.size, "VM")} · ${count(all, "circuit")} · ${count(model.rules.length + model.moreRules, "rule")}`);
}

function drawThroughput(chosen, now) {
  const vm = chosen.kind === "vm" ? model.vms.get(chosen.name) : null;
  const circuit = chosen.kind === "circuit" ? model.circuits.get(chosen.name) : null;
  if (vm) throughput.draw(`Throughput of ${chosen.name}`, ["sent", "received"], vm.rates, now);
  else if (circuit) throughput.draw(`Throughput of ${chosen.name}`, ["sent", "received"], circuit.rates, now);
  else throughput.draw("Throughput", ["sent", "received"], model.total, now);
}

// Says how it stands with the daemon. Old figures stay, and are seen to be old.
function tell(state, words) {
  const link = at("link");
  say(link, words);
  set(link, "class", `link ${state}`);
  document.body.classList.toggle("stale", state === "broken");
}

function explain(error) {
  if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
    tell("broken", "not admitted: run ringdown web, and open the address that it prints");
  } else if (error instanceof Refused) tell("broken", error.message);
  else tell("broken", "no answer; trying again");
}

// Ends every pause, and the stream of events.
const admission = new EventTarget();

function pause(ms) {
  return new Promise((done) => {
    const end = () => {
      clearTimeout(timer);
      admission.removeEventListener("token", end);
      done();
    };
    const timer = setTimeout(end, ms);
    admission.addEventListener("token", end);
  });
}

// While nobody looks, nothing is asked.
function seen() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((done) => document.addEventListener("visibilitychange", () => done(), { once: true }));
}

async function watch() {
  for (;;) {
    await seen();
    const begun = performance.now();
    try {
      const [vms, list] = await Promise.all([get("/v1/vms"), get("/v1/circuits")]);
      model.take(performance.now(), vms.vms, list);
      tell("live", "live");
    } catch (error) {
      explain(error);
    }
    draw();
    await pause(Math.max(EVERY_MS / 4, EVERY_MS - (performance.now() - begun)));
  }
}

// Asks for something at an interval. That the daemon does not answer is told by the one that asks most often.
async function every(ms, ask) {
  for (;;) {
    await seen();
    await ask().catch(() => {});
    await pause(ms);
  }
}

async function takeRules() {
  model.takeRules(await get("/v1/policy/rules"));
}

async function takeMetrics() {
  const page = await text("/v1/metrics");
  model.takeMetrics(performance.now(), page);
}

// A stream holds one of the few connections that a browser makes, so it ends while nobody looks, and goes on where it ended.
async function listen() {
  for (;;) {
    await seen();
    const over = new AbortController();
    const end = () => over.abort();
    const hide = () => document.hidden && end();
    document.addEventListener("visibilitychange", hide);
    admission.addEventListener("token", end);
    try {
      await events(model.lastEvent, over.signal, (event, id) => {
        model.takeEvent(event, id);
        if (event.kind === "policy-changed" || event.kind === "reload") takeRules().catch(() => {});
      });
    } catch (error) {
      if (error instanceof Refused && error.status === 404) {
        model.hasEvents = false;
        return;
      }
    } finally {
      document.removeEventListener("visibilitychange", hide);
      admission.removeEventListener("token", end);
    }
    if (!over.signal.aborted) await pause(EVENTS_AGAIN_MS);
  }
}

function dress(theme) {
  set(document.documentElement, "data-theme", theme === "system" ? null : theme);
  say(at("theme"), `Theme: ${theme}`);
}

function offerThemes() {
  let theme = localStorage.getItem("ringdown-theme") ?? THEMES[0];
  dress(theme);
  at("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem("ringdown-theme", theme);
    dress(theme);
  });
}

function ask(event) {
  event.preventDefault();
  const asked = new FormData(event.target);
  const words = ["from", "to", "port"].map((name) => encodeURIComponent(asked.get(name).trim()));
  location.hash = `#/call/${words.join("/")}`;
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && location.hash.length > 2) location.hash = "#/";
  if (event.key === "/" && !(event.target instanceof HTMLInputElement)) {
    event.preventDefault();
    at("filter").focus();
  }
}

// An address of `ringdown web` that is pasted into a page that is open changes no more than the fragment.
function go() {
  if (takeToken()) admission.dispatchEvent(new Event("token"));
  draw();
}

takeToken();
offerThemes();
addEventListener("hashchange", go);
addEventListener("resize", draw);
addEventListener("keydown", press);
at("filter").addEventListener("input", draw);
at("ask").addEventListener("submit", ask);
watch();
every(RULES_EVERY_MS, takeRules);
every(METRICS_EVERY_MS, takeMetrics);
listen();
