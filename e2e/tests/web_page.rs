//! The web page in a real browser: what it shows of real guests, where its links lead, and that what guests call themselves does nothing.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use e2e::pattern::Pattern;
use e2e::{
    Browser, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Running, Scene, WebDoor, host, spawn,
};

const DEADLINE: Duration = Duration::from_secs(120);

/// A host name that would be markup, as long as a host name may be.
const HOSTILE: &str = "<img src=x onerror=document.title='taken'><b>";

/// `@` stands for the directory of sockets, `REGISTRY` for the address of a service of the host.
const FILE: &str = r#"
[[vm]]
name = "web"
cid = 3
groups = ["frontends"]
vhost-user = "@/web.vhost"
host = "@/web.sock"

[[vm]]
name = "db"
cid = 4
vhost-user = "@/db.vhost"
host = "@/db.sock"

[[vm]]
name = "ci"
cid = 5
vhost-user = "@/ci.vhost"
host = "@/ci.sock"

[[vm]]
name = "spare"
cid = 6
vhost-user = "@/spare.vhost"
host = "@/spare.sock"

[[service]]
name = "registry"
port = 5000
to = "tcp:REGISTRY"

[[rule]]
name = "frontends-to-db"
from = "@frontends"
to = "db"
port = [5432, "5440-5449"]
action = "allow"
limits = { bytes-per-second = 24_000_000 }

[[rule]]
name = "ci-to-registry"
from = "ci"
to = "service:registry"
action = "allow"
limits = { bytes-per-second = 3_000_000 }

[[rule]]
name = "deploy"
from = "ci"
to = "web"
port = 8022
action = "allow"
limits = { bytes-per-second = 1_500_000 }

[[rule]]
name = "everything-else"
from = "*"
to = ["*", "service:*"]
action = "deny"
"#;

/// What the page makes of counters that grow, that start anew, and that come and go; and of a histogram.
const FIGURES: &str = r#"
import('/page/model.js').then(({ Model }) => {
  const vm = (sent) => ({ name: 'a', domain: 'red', counters: { bytes_from_guest: sent, bytes_to_guest: 0 } });
  const circuit = (id, sent, age_ms) =>
    ({ id, from: { kind: 'vm', vm: 'red/a', port: 1 }, to: { kind: 'host', port: 2 }, bytes_from_caller: sent, bytes_to_caller: 0, age_ms });
  const model = new Model();
  const rates = [
    [0, 100, [circuit('old', 100, 9000)]],
    [2000, 500, [circuit('old', 500, 11000), circuit('new', 50, 500)]],
    [3000, 40, [circuit('new', 20, 1500)]],
  ].map(([now, sent, circuits]) => {
    model.take(now, [vm(sent)], { circuits });
    return [model.vms.get('red/a').rates.up, ...[...model.circuits.values()].map((one) => one.rates.up)];
  });
  const page = (fast, all) => ['0.001', '0.01', '+Inf']
    .map((bound, index) => `ringdown_vm_setup_seconds_bucket{vm="a",le="${bound}"} ${index === 0 ? fast : all}\n`).join('');
  model.takeMetrics(0, page(10, 10));
  model.takeMetrics(1, page(60, 110));
  const [{ count, p50, p95 }] = model.setup;
  return { rates, count, p50, p95: p95.toFixed(4) };
})
"#;

fn daemon() -> Daemon {
    let registry = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = registry.local_addr().unwrap();
    thread::spawn(move || {
        for mut stream in registry.incoming().flatten() {
            // Each caller is sent more than it will take; it ends with its circuit.
            thread::spawn(move || host::send(&mut stream, &mut Pattern::new(0), 1 << 40));
        }
    });
    let directory = spawn::scratch_directory().unwrap();
    let text = FILE
        .replace('@', "\0")
        .replace("\"\0frontends", "\"@frontends");
    let text = text.replace('\0', &directory.display().to_string());
    let file = directory.join("ringdown.toml");
    std::fs::write(&file, text.replace("REGISTRY", &address.to_string())).unwrap();
    let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
    spec.runtime_directory = Some(directory);
    Daemon::start(spec).unwrap()
}

/// Waits until the column at the right has this title, and shows all these words: they may come with a later answer of the daemon.
#[track_caller]
fn wait_for_inspector(browser: &mut Browser, title: &str, words: &[&str]) {
    let expression = format!(
        "(() => {{ const box = document.querySelector('#inspector'); return box?.querySelector('.title')?.innerText === {} \
         && {}.every((words) => box.innerText.includes(words)); }})()",
        serde_json::json!(title),
        serde_json::json!(words)
    );
    browser.wait_for(&expression).unwrap();
}

/// Nothing went wrong in the page, and it asked only its own origin.
#[track_caller]
fn assert_clean(browser: &mut Browser, origin: &str) {
    let complaints = browser.complaints().unwrap();
    assert!(complaints.is_empty(), "{complaints:#?}");
    let requests = browser.requests().unwrap();
    let own = |url: &&String| url.starts_with(&format!("{origin}/")) || *url == "about:blank";
    assert!(requests.len() > 10, "{requests:?}");
    let others: Vec<&String> = requests.iter().filter(|url| !own(url)).collect();
    assert!(others.is_empty(), "{others:?}");
}

#[test]
fn without_guests_the_page_is_complete_and_found_by_keyboard() {
    let daemon = daemon();
    let door = WebDoor::open(&daemon).unwrap();
    let origin = door.origin().to_owned();
    let mut browser = Browser::start(1280, 800).unwrap();
    browser.open(&door.address).unwrap();
    browser
        .wait_for("document.querySelector('#link').innerText === 'live'")
        .unwrap();
    // The token is not left where it could be read over a shoulder, or bookmarked.
    assert_eq!(
        browser.evaluate("location.href").unwrap(),
        format!("{origin}/#/")
    );
    browser
        .wait_for("document.querySelectorAll('.card').length === 5")
        .unwrap();
    browser
        .wait_for("document.querySelectorAll('.rules li').length === 4")
        .unwrap();
    browser
        .wait_for("document.querySelector('#totals').innerText === '4 VMs · 0 circuits · 4 rules'")
        .unwrap();

    // From link to link with the keyboard, to a VM; and back.
    let focused = "document.activeElement.getAttribute('href')";
    let mut presses = 0;
    while browser.evaluate(focused).unwrap() != "#/vm/db" {
        presses += 1;
        assert!(presses < 20, "Tab does not lead to a VM");
        browser.press("Tab").unwrap();
    }
    browser.press("Enter").unwrap();
    wait_for_inspector(
        &mut browser,
        "db",
        &["waiting: no VMM is attached to its socket"],
    );
    browser.press("Escape").unwrap();
    browser.wait_for("location.hash === '#/'").unwrap();

    let figures = browser.evaluate(FIGURES).unwrap();
    let expected = serde_json::json!({
        "rates": [[0, 0], [200, 200, 100], [40, 20]], "count": 100, "p50": 0.001, "p95": "0.0091",
    });
    assert_eq!(figures, expected);

    // A question to the policy.
    for (name, text) in [("from", "ci"), ("to", "db"), ("port", "5432")] {
        browser.click(&format!("#ask [name={name}]")).unwrap();
        browser.enter(text).unwrap();
    }
    browser.press("Enter").unwrap();
    browser
        .wait_for("document.querySelector('#inspector').innerText.includes('denied')")
        .unwrap();
    assert_eq!(
        browser.evaluate("location.hash").unwrap(),
        "#/call/ci/db/5432"
    );
    browser
        .click("#inspector a[href='#/rule/everything-else']")
        .unwrap();
    wait_for_inspector(&mut browser, "everything-else", &[]);
    assert_clean(&mut browser, &origin);

    // On a phone everything is there, and nothing has to be scrolled sideways. What an address says is text.
    browser.resize(390, 844, true).unwrap();
    browser
        .evaluate("location.hash = '#/rule/' + encodeURIComponent('<img src=x>')")
        .unwrap();
    browser
        .wait_for("document.querySelector('#inspector .title')?.innerText === '<img src=x>'")
        .unwrap();
    browser
        .wait_for("document.documentElement.scrollWidth <= 390")
        .unwrap();
    assert_eq!(browser.evaluate("document.images.length").unwrap(), 0);
    assert_clean(&mut browser, &origin);

    // Without the token the answers are empty; with it, the page from its own storage is let in again.
    browser.open(&format!("{origin}/?again#/vm/web")).unwrap();
    browser
        .wait_for("document.querySelector('#link').innerText === 'live'")
        .unwrap();
    browser.evaluate("localStorage.clear()").unwrap();
    browser.open(&format!("{origin}/#/")).unwrap();
    browser.evaluate("location.reload()").unwrap();
    browser
        .wait_for("document.querySelector('#link')?.innerText.startsWith('not admitted')")
        .unwrap();
    browser
        .wait_for("document.querySelectorAll('.card').length === 1")
        .unwrap();

    // The address, pasted into the page that is open: the page stays, and is let in.
    browser.evaluate("window.stayed = true").unwrap();
    let asked = browser.requests().unwrap();
    browser.open(&door.address).unwrap();
    browser
        .wait_for("document.querySelector('#link').innerText === 'live' && document.querySelectorAll('.card').length === 5")
        .unwrap();
    browser
        .wait_for("document.querySelectorAll('.rules li').length === 4")
        .unwrap();
    assert_eq!(browser.evaluate("window.stayed").unwrap(), true);
    assert_eq!(
        browser.evaluate("location.href").unwrap(),
        format!("{origin}/#/")
    );
    let events = |requests: &[String]| {
        let is_stream = |url: &&String| url.contains("/v1/events");
        requests.iter().filter(is_stream).count()
    };
    assert!(events(&browser.requests().unwrap()) > events(&asked));
    drop(browser);
    door.end().unwrap();
}

/// What another user of the host serves at the port before: it stays in the browser, and takes what the address of a page of this origin says.
const OTHERS_PAGE: &str = "<!doctype html><title>other</title><script>
navigator.serviceWorker.register('/worker.js').then(() => navigator.serviceWorker.ready).then(() => { document.title = 'stays' });
</script>";
const OTHERS_WORKER: &str = "
self.addEventListener('install', () => self.skipWaiting());
self.addEventListener('activate', (event) => event.waitUntil(clients.claim()));
self.addEventListener('fetch', (event) => {
  const page = '<!doctype html><title>taken</title>';
  if (event.request.mode === 'navigate') event.respondWith(new Response(page, { headers: { 'content-type': 'text/html' } }));
});";

/// Serves these at an address until it is dropped.
struct Others {
    address: String,
    ends: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Others {
    fn serve(address: String) -> Others {
        let listener = TcpListener::bind(&address).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let ended = ends.clone();
        let thread = thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                // A browser connects also without a request.
                thread::spawn(move || answer(stream));
            }
        });
        Others {
            address,
            ends,
            thread: Some(thread),
        }
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(&self.address);
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

fn answer(stream: TcpStream) -> Option<()> {
    let mut lines = BufReader::new(&stream).lines();
    let first = lines.next()?.ok()?;
    while !lines.next()?.ok()?.is_empty() {}
    let (media_type, body) = match first.contains("/worker.js") {
        true => ("text/javascript", OTHERS_WORKER),
        false => ("text/html", OTHERS_PAGE),
    };
    let answer = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: {media_type}\r\nCache-Control: max-age=31536000, immutable\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    (&stream).write_all(answer.as_bytes()).ok()
}

#[test]
fn what_another_user_has_left_in_the_browser_at_this_port_does_not_get_the_token() {
    let daemon = daemon();
    let door = WebDoor::open(&daemon).unwrap();
    let (listen, before) = (door.listen(), door.origin().to_owned());
    door.end().unwrap();
    let others = Others::serve(listen.clone());
    let mut browser = Browser::start(1280, 800).unwrap();
    // A bookmark of before, and names that the page had or that are well known.
    let port = listen.rsplit(':').next().unwrap();
    for origin in [
        before.clone(),
        format!("http://{listen}"),
        format!("http://localhost:{port}"),
    ] {
        browser.open(&format!("{origin}/#/vm/web")).unwrap();
        browser.wait_for("document.title === 'stays'").unwrap();
    }
    drop(others);
    let door = WebDoor::open_at(&daemon, &listen).unwrap();
    assert_ne!(door.origin(), before);
    browser.open(&door.address).unwrap();
    browser
        .wait_for(
            "document.title === 'taken' || document.querySelector('#link')?.innerText === 'live'",
        )
        .unwrap();
    assert_eq!(
        browser.evaluate("location.href").unwrap(),
        format!("{}/#/", door.origin())
    );
    drop(browser);
    door.end().unwrap();
}

/// A probe that goes on until the scene ends.
fn keep(guest: &Guest, steps: &str) -> Running {
    guest.probe(steps).unwrap()
}

/// Traffic between all of them, each circuit with a pace of its own.
fn traffic(scene: &Scene) -> Vec<Running> {
    let [web, db, ci] = ["web", "db", "ci"].map(|name| scene.guest(name));
    let much = 1_u64 << 40;
    let mut running = Vec::new();
    running.push(db.serve("5443", "echo").unwrap());
    for port in [5432, 5440] {
        running.push(
            db.probe_listening(&format!("listen:{port} accept recv:{much}"))
                .unwrap(),
        );
        running.push(keep(web, &format!("connect:4:{port} send:{much}")));
    }
    running.push(
        db.probe_listening(&format!("listen:5441 accept send:{much}"))
            .unwrap(),
    );
    running.push(keep(web, &format!("connect:4:5441 recv:{much}")));
    running.push(
        web.probe_listening(&format!("listen:8022 accept recv:{much}"))
            .unwrap(),
    );
    running.push(keep(ci, &format!("connect:3:8022 send:{much}")));
    running.push(keep(ci, &format!("connect:2:5000 recv:{much}")));
    running
}

#[test]
fn from_a_vm_to_a_circuit_to_the_rule_that_allowed_it() {
    // First: without a browser there is no use in booting guests.
    let mut browser = Browser::start(1280, 800).unwrap();
    let daemon = daemon();
    let guests = [
        ("web", Kernel::V6_12),
        ("db", Kernel::V6_1),
        ("ci", Kernel::V6_12),
    ];
    let specs = guests.map(|(name, kernel)| GuestSpec::new(name, kernel).attached(&daemon));
    let guests = Guest::boot_all(specs.into()).unwrap();
    let scene = Scene { guests, daemon };
    // A guest that calls itself something that would be markup: its agent says so when it calls in again.
    let db = scene.guest("db");
    scene
        .daemon
        .wait_for_log("the guest is ready vm=\"db\"", DEADLINE)
        .unwrap();
    db.shell(&format!("hostname \"{HOSTILE}\"; killall ringdown-agent"))
        .unwrap();
    let _traffic = traffic(&scene);
    // No rule allows a call to this.
    let _refused: Vec<Running> = (0..3)
        .map(|_| {
            scene
                .guest("web")
                .probe("fails:ECONNRESET:connect:4:22")
                .unwrap()
        })
        .collect();

    let door = WebDoor::open(&scene.daemon).unwrap();
    let origin = door.origin().to_owned();
    browser.open(&door.address).unwrap();
    browser
        .wait_for("document.querySelectorAll('.lane.busy').length >= 4")
        .unwrap();
    if let Some(directory) = std::env::var_os("RINGDOWN_SCREENSHOT") {
        picture(&mut browser, &PathBuf::from(directory), &scene);
    }

    // A circuit that is set up while the page looks on is in its set-up times.
    browser
        .wait_for("/median|No circuit was set up/.test(document.querySelector('#setup').innerText)")
        .unwrap();
    scene
        .guest("web")
        .probe_to_end("connect:4:5443 close")
        .unwrap();
    browser
        .wait_for("document.querySelector('#setup').innerText.includes('median')")
        .unwrap();

    // The VM in the graph, its circuit, the rule.
    browser.click(".card[href='#/vm/web']").unwrap();
    wait_for_inspector(&mut browser, "web", &["ready: its agent is there"]);
    // One that lasts. The list is sorted anew each second, and circuits of agents are in it too: so by what the link says, and by its address from then on.
    let link = "[...document.querySelectorAll('#inspector .links a')].find((link) => /→ db:54(32|40|41)[\\s\\S]*frontends-to-db/.test(link.innerText))";
    browser.wait_for(link).unwrap();
    let circuit = browser
        .evaluate(&format!("{link}?.getAttribute('href')"))
        .unwrap();
    let circuit = circuit.as_str().unwrap();
    follow(&mut browser, circuit);
    let id = circuit.strip_prefix("#/circuit/").unwrap();
    let words = ["Allowed by the rule frontends-to-db", "stream"];
    wait_for_inspector(&mut browser, id, &words);
    browser.click("#inspector .by a").unwrap();
    let words = [
        "allow",
        "@frontends",
        "5432, 5440-5449",
        "24,000,000 bytes per second",
        "ringdown.toml: line ",
        "Circuits by this rule: 3",
    ];
    wait_for_inspector(&mut browser, "frontends-to-db", &words);
    // The same by its address alone.
    let place = browser.evaluate("location.href").unwrap();
    browser.open("about:blank").unwrap();
    browser.open(place.as_str().unwrap()).unwrap();
    wait_for_inspector(
        &mut browser,
        "frontends-to-db",
        &["Circuits by this rule: 3"],
    );

    // The circuits by the table's filter, and by a lane of the graph.
    browser.click("#filter").unwrap();
    browser.enter("registry open").unwrap();
    browser
        .wait_for("document.querySelectorAll('.rows tbody tr').length === 1")
        .unwrap();
    let note = browser.text("#circuits-note").unwrap();
    // Beside the five there are those of the agents.
    assert!(note.starts_with("1 of "), "{note}");
    browser.evaluate("document.querySelector('.lane[href=\"#/between/ci/web\"]').dispatchEvent(new MouseEvent('click'))").unwrap();
    wait_for_inspector(&mut browser, "ci and web", &["→ web:8022"]);

    // What was refused, equal calls together; from there to the rule, and to what is known of such calls.
    browser
        .wait_for(r"/web → db:22\s+× \d/.test(document.querySelector('.refusals').innerText)")
        .unwrap();
    let refused = browser.text(".refusals").unwrap();
    assert!(
        refused.contains("web → db:22") && refused.contains("everything-else"),
        "{refused}"
    );
    browser
        .click(".refusals a[href='#/call/web/db/22']")
        .unwrap();
    browser
        .wait_for("document.querySelector('#inspector').innerText.includes('times, last at')")
        .unwrap();
    browser
        .click(".refusals a[href='#/rule/everything-else']")
        .unwrap();
    browser
        .wait_for("document.querySelector('#inspector').innerText.includes('Refused by this rule')")
        .unwrap();

    // What the guest calls itself is there, letter by letter, and is no markup.
    browser.evaluate("location.hash = '#/vm/db'").unwrap();
    browser
        .wait_for("document.querySelector('#inspector').innerText.includes('Host name')")
        .unwrap();
    let name = format!(
        "document.querySelector('#inspector').innerText.includes({:?})",
        HOSTILE
    );
    browser.wait_for(&name).unwrap();
    assert_eq!(browser.evaluate("document.images.length").unwrap(), 0);
    assert_eq!(browser.evaluate("document.title").unwrap(), "Ringdown");
    assert_clean(&mut browser, &origin);
    drop(browser);
    door.end().unwrap();
}

/// Follows a link of the column at the right as Enter does, wherever the next second sorts it to.
fn follow(browser: &mut Browser, href: &str) {
    let selector = format!("#inspector a[href='{href}']");
    browser
        .evaluate(&format!(
            "document.querySelector({}).click()",
            serde_json::json!(selector)
        ))
        .unwrap();
}

/// How long the page is left open before its picture is taken: until its plots are full enough to be looked at.
const EXPOSURE_SAMPLES: u32 = 200;

fn picture(browser: &mut Browser, directory: &std::path::Path, scene: &Scene) {
    let web = scene.guest("web");
    let counted = "performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/v1/circuits')).length";
    browser
        .evaluate("performance.setResourceTimingBufferSize(5000)")
        .unwrap();
    let mut round = 0;
    while browser.evaluate(counted).unwrap().as_u64().unwrap() < u64::from(EXPOSURE_SAMPLES) {
        // Calls come and go, so that there are set-up times, and now and then one is refused.
        round += 1;
        let steps = match round % 40 {
            7 => "fails:ECONNRESET:connect:5:80",
            19 => "fails:ECONNRESET:connect:4:22",
            _ => "connect:4:5443 close",
        };
        web.probe_to_end(steps).unwrap();
    }
    browser.prefer("light").unwrap();
    browser.screenshot(&directory.join("web.png")).unwrap();
    browser.prefer("dark").unwrap();
    browser.click(".card[href='#/vm/web']").unwrap();
    browser
        .wait_for("document.querySelector('#inspector .title')?.innerText === 'web'")
        .unwrap();
    browser.screenshot(&directory.join("web-dark.png")).unwrap();
    browser.prefer("light").unwrap();
    browser.evaluate("location.hash = '#/'").unwrap();
}
