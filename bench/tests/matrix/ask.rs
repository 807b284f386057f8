//! What the daemon says about a call when it is asked.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::Value;

use crate::world::PATIENCE;

/// A connection to the control API.
pub struct Api {
    stream: BufReader<UnixStream>,
}

/// What `policy test` and `why` say about a call.
#[derive(Debug)]
pub struct Said {
    /// The status, if it is not 200, with the answer.
    pub problem: Option<String>,
    pub verdict: String,
    pub redirect: Option<String>,
    pub rule: Option<String>,
    pub why: String,
    pub notes: Vec<String>,
    /// What `why` adds.
    pub allowed: bool,
    pub hindrances: Vec<String>,
    pub refusals: Vec<Value>,
}

impl Api {
    pub fn new(socket: &Path) -> Api {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Api {
            stream: BufReader::new(stream),
        }
    }

    pub fn get(&mut self, target: &str) -> (u16, Value) {
        let request = format!("GET {target} HTTP/1.1\r\nHost: ringdown\r\n\r\n");
        self.stream.get_mut().write_all(request.as_bytes()).unwrap();
        let mut status = 0;
        let mut len = 0;
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line).unwrap();
            let line = line.trim_end();
            if line.is_empty() {
                break;
            }
            if let Some(rest) = line.strip_prefix("HTTP/1.1 ") {
                status = rest[..3].parse().unwrap();
            }
            let field = line.split_once(": ");
            if let Some((_, value)) =
                field.filter(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            {
                len = value.parse().unwrap();
            }
        }
        let mut body = vec![0; len];
        self.stream.read_exact(&mut body).unwrap();
        (status, serde_json::from_slice(&body).unwrap_or_default())
    }

    /// `policy test` and `why`, which must not contradict each other.
    pub fn ask(&mut self, from: &str, to: &str, port: u32) -> Said {
        let query = format!("from={from}&to={to}&port={port}");
        let (status, why) = self.get(&format!("/v1/why?{query}"));
        let (test_status, test) = self.get(&format!("/v1/policy/test?{query}"));
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let texts = |value: &Value| {
            let list = value.as_array().map(Vec::as_slice).unwrap_or_default();
            list.iter().map(text).collect()
        };
        let mut problem = None;
        if (status, test_status) != (200, 200) {
            problem = Some(format!(
                "why: {status} {why}; policy test: {test_status} {test}"
            ));
        } else if why["policy"] != test {
            problem = Some(format!("why says {}, policy test {test}", why["policy"]));
        }
        Said {
            problem,
            verdict: text(&test["verdict"]),
            redirect: test["redirect"].as_str().map(str::to_owned),
            rule: test["rule"]["label"].as_str().map(str::to_owned),
            why: text(&test["why"]),
            notes: texts(&test["notes"]),
            allowed: why["allowed"] == true,
            hindrances: texts(&why["hindrances"]),
            refusals: why["refusals"].as_array().cloned().unwrap_or_default(),
        }
    }
}
