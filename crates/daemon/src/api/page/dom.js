// The only place that makes elements. Text goes in as text and attributes by name, never as markup: what a guest calls itself is shown, and
// nothing more. The page's security policy refuses anything else as well (page.rs).

const SVG = "http://www.w3.org/2000/svg";

// An element. Properties that are functions listen (`click`, `submit`); the rest are attributes, and null leaves one out.
export function h(tag, properties, ...children) {
  return dress(document.createElement(tag), properties, children);
}

// The same for SVG.
export function s(tag, properties, ...children) {
  return dress(document.createElementNS(SVG, tag), properties, children);
}

function dress(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Sets text only where it differs: selections and screen readers are left alone.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function set(element, name, value) {
  if (value === null || value === undefined) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

// Makes the children of `parent` be those of `items`: elements stay with their keys, so that focus and hover stay where they are.
export function keep(parent, items, key, make, update) {
  const old = (parent.kept ??= new Map());
  const kept = new Map();
  let at = null;
  for (const item of items) {
    const name = key(item);
    if (kept.has(name)) continue;
    const element = old.get(name) ?? make(item);
    update(element, item);
    kept.set(name, element);
    const next = at === null ? parent.firstChild : at.nextSibling;
    if (next !== element) parent.insertBefore(element, next);
    at = element;
  }
  for (const [name, element] of old) {
    if (!kept.has(name)) element.remove();
  }
  parent.kept = kept;
}

const BYTES = ["B", "kB", "MB", "GB", "TB", "PB"];

// A number of bytes in three digits and a unit.
export function bytes(count) {
  let unit = 0;
  let value = count;
  while (value >= 999.5 && unit < BYTES.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)} ${BYTES[unit]}`;
}

export function rate(perSecond) {
  return perSecond < 0.5 ? "0" : `${bytes(perSecond)}/s`;
}

// A time in the largest unit of which there are two at least.
export function age(ms) {
  const seconds = Math.floor(ms / 1000);
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

export function duration(seconds) {
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  return `${seconds.toFixed(1)} s`;
}

// "1 circuit", "2 circuits".
export function count(number, what) {
  return `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
}
