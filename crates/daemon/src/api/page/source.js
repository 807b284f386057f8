// Asking the daemon. Behind `ringdown web` each request carries the token from the address that it printed; a page that comes from the
// control socket itself needs none.

const TOKEN = /^#token=([0-9a-f]{64})$/;
const KEPT_AS = "ringdown-token";
const ANSWER_MS = 15000;

// The longest event, in characters. The daemon's are far shorter.
const MAX_EVENT = 64 * 1024;

// What of all that happens the page shows.
const EVENTS = "/v1/events?kind=refused,policy-changed,reload";

let token = "";

// Takes the token out of the address, so that it is neither bookmarked nor shown, and tells whether there was one. Storage belongs to this port of
// this host alone, unlike a cookie, which other servers of the host would get too.
export function takeToken() {
  const found = TOKEN.exec(location.hash);
  if (found) {
    localStorage.setItem(KEPT_AS, found[1]);
    history.replaceState(null, "", "#/");
  }
  token = localStorage.getItem(KEPT_AS) ?? "";
  return found !== null;
}

export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function answer(path, signal, headers = {}) {
  if (token) headers.Authorization = `Bearer ${token}`;
  const response = await fetch(path, { headers, signal, cache: "no-store" });
  if (response.ok) return response;
  let detail = `the daemon answers ${response.status}`;
  try {
    detail = (await response.json()).detail ?? detail;
  } catch {
    // Not in the words of the API: the status has to do.
  }
  throw new Refused(response.status, String(detail));
}

export async function get(path) {
  return (await answer(path, AbortSignal.timeout(ANSWER_MS))).json();
}

export async function text(path) {
  return (await answer(path, AbortSignal.timeout(ANSWER_MS))).text();
}

// Reads server-sent events until the stream ends (HTML Living Standard, section 9.2), and hands over each with its number, as text: it may have more
// digits than a number here. `EventSource` would do, but cannot carry the token.
export async function events(after, signal, take) {
  const headers = { Accept: "text/event-stream" };
  if (after !== null) headers["Last-Event-ID"] = after;
  const response = await answer(EVENTS, signal, headers);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  let id = after;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r\n|\n|\r/);
    rest = lines.pop();
    if (rest.length > MAX_EVENT) throw new Error("an event has no end");
    for (const line of lines) {
      if (line === "") {
        if (data.length > 0) take(JSON.parse(data.join("\n")), id);
        data = [];
      } else if (line.startsWith("data:")) {
        data.push(line.slice(line.startsWith("data: ") ? 6 : 5));
      } else if (line.startsWith("id:")) {
        id = line.slice(3).trim();
      }
    }
  }
}
