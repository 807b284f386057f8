//! Chromium without a window, driven by its DevTools protocol over two pipes: messages of JSON, each with a zero byte behind it.
//!
//! A library would bring an HTTP client, a WebSocket and an async runtime for the few messages that are needed here; the pipes need none of it, and
//! no other program can connect to them.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use crate::spawn;

/// How long the browser may take for anything. It shares the machine with emulated guests.
const PATIENCE: Duration = Duration::from_secs(120);

/// How often a wait checks again.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// What `Runtime.evaluate` answers when a navigation ends the page before the expression. The protocol gives these no code of their own.
const PAGE_REPLACED: [&str; 3] = [
    "Inspected target navigated or closed",
    "Execution context was destroyed",
    "Cannot find default execution context",
];

/// The browser reads at descriptor 3 and writes at 4.
const WITH_PIPES: &str = r#"exec "$@" 3<&0 4>&1 </dev/null >/dev/null"#;

/// Nothing but what it is asked for: no updates, no services of its maker, nothing kept.
const OPTIONS: [&str; 12] = [
    "--headless=new",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
];

/// A browser with one page. Dropping it ends it.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    session: String,
    last_id: u64,
    events: VecDeque<Value>,
    log: std::path::PathBuf,
}

impl Browser {
    /// Starts a browser with a window of this size, in CSS pixels.
    ///
    /// # Errors
    /// When it is not installed, or does not come up.
    pub fn start(width: u32, height: u32) -> Result<Browser> {
        Browser::start_program("chromium", width, height)
    }

    fn start_program(program: &str, width: u32, height: u32) -> Result<Browser> {
        let directory = spawn::scratch_directory()?;
        let log = directory.join("browser.log");
        let log_file = std::fs::File::create(&log)?;
        let first = ["-c", WITH_PIPES, "sh", program];
        let words = first.iter().chain(&OPTIONS);
        let mut arguments: Vec<String> = words.map(|word| (*word).to_owned()).collect();
        arguments.push(format!(
            "--user-data-dir={}",
            directory.join("profile").display()
        ));
        if rustix::process::geteuid().is_root() {
            // Its sandbox does not work for root. What is shown is our own page.
            arguments.push("--no-sandbox".to_owned());
        }
        arguments.push("about:blank".to_owned());
        let mut child = spawn::spawn("sh", arguments, |command| {
            command
                .env("HOME", &directory)
                .env("TZ", "UTC")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(log_file);
        })?;
        let input = child.stdin.take().context("no pipe")?;
        let output = child.stdout.take().context("no pipe")?;
        let (sender, messages) = channel();
        thread::spawn(move || {
            for message in BufReader::new(output).split(0).map_while(Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else {
                    break;
                };
                if sender.send(message).is_err() {
                    break;
                }
            }
        });
        let mut browser = Browser {
            child,
            input,
            messages,
            session: String::new(),
            last_id: 0,
            events: VecDeque::new(),
            log,
        };
        browser
            .attach()
            .context("is chromium installed? `scripts/setup tests` installs it")?;
        browser.resize(width, height, false)?;
        Ok(browser)
    }

    fn attach(&mut self) -> Result<()> {
        let targets = self.call("Target.getTargets", json!({}))?;
        let targets = targets["targetInfos"].as_array().context("no targets")?;
        let page = targets.iter().find(|target| target["type"] == "page");
        let page = page.context("the browser has no page")?["targetId"].clone();
        let attached = self.call(
            "Target.attachToTarget",
            json!({"targetId": page, "flatten": true}),
        )?;
        self.session = attached["sessionId"]
            .as_str()
            .context("no session")?
            .to_owned();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            self.call(&format!("{domain}.enable"), json!({}))?;
        }
        Ok(())
    }

    /// Gives the page another size, in CSS pixels; a phone's viewport, if asked.
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn resize(&mut self, width: u32, height: u32, is_phone: bool) -> Result<()> {
        let size =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone});
        self.call("Emulation.setDeviceMetricsOverride", size)
            .map(drop)
    }

    /// Has the page believe that the person prefers `dark` or `light`.
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn prefer(&mut self, scheme: &str) -> Result<()> {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}))
            .map(drop)
    }

    /// Opens an address and waits until it is loaded.
    ///
    /// # Errors
    /// As [`Browser::call`]; and when it cannot be opened.
    pub fn open(&mut self, url: &str) -> Result<()> {
        let opened = self.call("Page.navigate", json!({"url": url}))?;
        ensure!(
            opened["errorText"].is_null(),
            "{url}: {}",
            opened["errorText"]
        );
        self.wait_for("document.readyState === 'complete'")
    }

    /// What an expression of JavaScript gives.
    ///
    /// # Errors
    /// As [`Browser::call`]; and when it throws.
    pub fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", asked)?;
        ensure!(
            answer["exceptionDetails"].is_null(),
            "{expression}: {}",
            answer["exceptionDetails"]
        );
        Ok(answer["result"]["value"].clone())
    }

    /// Waits until an expression is true.
    ///
    /// # Errors
    /// With what the page shows, when it does not become so.
    pub fn wait_for(&mut self, expression: &str) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while !self.is_true(expression)? {
            if Instant::now() > until {
                let shown = self.evaluate("document.body.innerText")?;
                bail!(
                    "{expression} does not become true; the page shows:\n{}",
                    shown.as_str().unwrap_or_default()
                );
            }
            thread::sleep(LOOK_INTERVAL);
        }
        Ok(())
    }

    /// Whether an expression is true. A page that is replaced before it answers has not said so: the next one is asked again.
    fn is_true(&mut self, expression: &str) -> Result<bool> {
        match self.evaluate(&format!("Boolean({expression})")) {
            Ok(value) => Ok(value == json!(true)),
            Err(error)
                if PAGE_REPLACED
                    .iter()
                    .any(|said| error.to_string().contains(said)) =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Presses the mouse's button in the middle of the first element that matches, once there is one.
    ///
    /// # Errors
    /// As [`Browser::wait_for`]; and when something else is above it.
    pub fn click(&mut self, selector: &str) -> Result<()> {
        let quoted = json!(selector);
        self.wait_for(&format!("document.querySelector({quoted})"))?;
        let place = self.evaluate(&format!(
            "(() => {{ const found = document.querySelector({quoted}); found.scrollIntoView({{block: 'nearest'}});
               const {{x, y, width, height}} = found.getBoundingClientRect(); const at = [x + width / 2, y + height / 2];
               const top = document.elementFromPoint(...at); return [...at, found.contains(top)]; }})()"
        ))?;
        ensure!(
            place[2] == json!(true),
            "{selector} cannot be clicked: something is above it"
        );
        for kind in ["mouseMoved", "mousePressed", "mouseReleased"] {
            let event = json!({"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1});
            self.call("Input.dispatchMouseEvent", event)?;
        }
        Ok(())
    }

    /// Presses and releases a key, by its name (`Tab`, `Enter`) or as the character that it types.
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn press(&mut self, key: &str) -> Result<()> {
        let (code, text) = match key {
            "Tab" => (9, ""),
            "Enter" => (13, "\r"),
            "Escape" => (27, ""),
            typed => (0, typed),
        };
        let down = json!({"type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text});
        self.call("Input.dispatchKeyEvent", down)?;
        let up = json!({"type": "keyUp", "key": key, "code": key, "windowsVirtualKeyCode": code});
        self.call("Input.dispatchKeyEvent", up).map(drop)
    }

    /// Types text into what has the focus.
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn enter(&mut self, text: &str) -> Result<()> {
        self.call("Input.insertText", json!({"text": text}))
            .map(drop)
    }

    /// The text that the first element that matches shows.
    ///
    /// # Errors
    /// As [`Browser::wait_for`].
    pub fn text(&mut self, selector: &str) -> Result<String> {
        let quoted = json!(selector);
        self.wait_for(&format!("document.querySelector({quoted})"))?;
        let text = self.evaluate(&format!("document.querySelector({quoted}).innerText"))?;
        Ok(text.as_str().unwrap_or_default().to_owned())
    }

    /// Writes what is seen into a PNG file.
    ///
    /// # Errors
    /// As [`Browser::call`]; and when the file cannot be written.
    pub fn screenshot(&mut self, file: &Path) -> Result<()> {
        let shot = self.call("Page.captureScreenshot", json!({"format": "png"}))?;
        let picture = STANDARD.decode(shot["data"].as_str().unwrap_or_default())?;
        std::fs::write(file, picture).with_context(|| format!("cannot write {}", file.display()))
    }

    /// What went wrong in the page so far: exceptions, errors and warnings of the console, refusals of the security policy.
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn complaints(&mut self) -> Result<Vec<Value>> {
        self.evaluate("1")?;
        let is_complaint = |event: &&Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Log.entryAdded") => event["params"]["entry"]["level"] != "verbose",
            Some("Runtime.consoleAPICalled") => true,
            _ => false,
        };
        Ok(self.events.iter().filter(is_complaint).cloned().collect())
    }

    /// The addresses that the page has asked for so far.
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn requests(&mut self) -> Result<Vec<String>> {
        self.evaluate("1")?;
        let sent = self
            .events
            .iter()
            .filter(|event| event["method"] == "Network.requestWillBeSent");
        Ok(sent
            .filter_map(|event| {
                event["params"]["request"]["url"]
                    .as_str()
                    .map(str::to_owned)
            })
            .collect())
    }

    /// Calls a method of the protocol and waits for its result. Events that come meanwhile are kept.
    ///
    /// # Errors
    /// When the browser refuses, is gone, or does not answer in time.
    pub fn call(&mut self, method: &str, parameters: Value) -> Result<Value> {
        self.last_id += 1;
        let id = self.last_id;
        let mut message = json!({"id": id, "method": method, "params": parameters});
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        let until = Instant::now() + PATIENCE;
        self.input.write_all(&bytes).map_err(|_| self.gone())?;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let mut message = match self.messages.recv_timeout(left) {
                Ok(message) => message,
                Err(_) => return Err(self.gone().context(format!("{method} has no answer"))),
            };
            if message["id"] != json!(id) {
                self.events.push_back(message);
                continue;
            }
            ensure!(message["error"].is_null(), "{method}: {}", message["error"]);
            return Ok(message["result"].take());
        }
    }

    fn gone(&self) -> anyhow::Error {
        anyhow!(
            "the browser does not answer; it said:\n{}",
            crate::log_tail(&self.log, 10)
        )
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It may have ended already. Its own children end with it.
        let _ = self.call("Browser.close", json!({}));
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_browser_that_is_not_installed_is_missed_at_once() {
        let error = Browser::start_program("ringdown-no-such-browser", 1280, 800).unwrap_err();
        let told = format!("{error:#}");
        assert!(told.contains("is chromium installed?"), "{told}");
        assert!(
            told.contains("ringdown-no-such-browser: not found"),
            "{told}"
        );
    }
}
