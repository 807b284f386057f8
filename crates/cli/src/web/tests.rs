use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixListener;
use std::sync::mpsc;
use std::thread;

use fake_daemon::FakeDaemon;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// A proxy on a thread of the test.
struct Opened {
    address: SocketAddr,
    token: Token,
    end: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Opened {
    fn to(socket: PathBuf) -> Opened {
        let token = Token::new().unwrap();
        let proxy = Proxy {
            socket,
            token: token.clone(),
            name: NAME.to_owned(),
        };
        let (end, ended) = tokio::sync::oneshot::channel();
        let (tell, told) = mpsc::channel();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                let ended = async {
                    // A sender that was dropped ends the proxy as well.
                    let _ = ended.await;
                };
                proxy.serve(vec![listener], ended).await;
            });
        });
        Opened {
            address: told.recv_timeout(PATIENCE).unwrap(),
            token,
            end: Some(end),
            thread: Some(thread),
        }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Asks with these lines in the head, and returns the status and all that comes back.
    fn ask(&self, first: &str, lines: &[&str]) -> (u16, String) {
        let mut stream = self.connect();
        let head = [&[first, "Connection: close"], lines].concat().join("\r\n");
        stream
            .write_all(format!("{head}\r\n\r\n").as_bytes())
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).and_then(|word| word.parse().ok());
        (status.unwrap_or_default(), answer)
    }

    fn bearer(&self) -> String {
        format!("Authorization: Bearer {}", self.token.reveal())
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // A test that fails shows why itself.
            let _ = thread.join();
        }
    }
}

const NAME: &str = "0123456789abcdef.localhost";

const HOST: &str = "Host: 0123456789abcdef.localhost";

#[test]
fn the_page_is_for_all_and_the_rest_for_who_has_the_token() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let proxy = Opened::to(daemon.runtime_dir().join("control.sock"));
    for page in ["/", "/page/main.js", "/page/page.css"] {
        let (status, answer) = proxy.ask(&format!("GET {page} HTTP/1.1"), &[HOST]);
        assert_eq!(status, 200, "{answer}");
        assert!(
            answer
                .to_lowercase()
                .contains("\r\ncontent-security-policy: default-src 'none'")
        );
    }
    let bearer = proxy.bearer();
    let (status, answer) = proxy.ask("GET /v1/vms HTTP/1.1", &[HOST, &bearer]);
    assert_eq!(status, 200, "{answer}");
    assert!(answer.contains("\"name\":\"web\""), "{answer}");
    // What is not there is said by the daemon, in its words.
    let (status, answer) = proxy.ask("GET /v1/nothing?a=b HTTP/1.1", &[HOST, &bearer]);
    assert_eq!(status, 404);
    assert!(answer.contains("nothing is at /v1/nothing"), "{answer}");
    let (status, answer) = proxy.ask("HEAD /v1/vms HTTP/1.1", &[HOST, &bearer]);
    assert_eq!(status, 200);
    assert!(answer.ends_with("\r\n\r\n"), "{answer}");
    let mut wrong = proxy.token.reveal().to_owned();
    let last = if wrong.pop() == Some('0') { '1' } else { '0' };
    wrong.push(last);
    let wrong = [
        String::new(),
        format!("Authorization: Bearer {wrong}"),
        format!("Authorization: Basic {}", proxy.token.reveal()),
        format!("Authorization: {}", proxy.token.reveal()),
        format!("Cookie: token={}", proxy.token.reveal()),
        "Authorization: Bearer ".to_owned(),
    ];
    for line in &wrong {
        let lines: Vec<&str> = [HOST, line]
            .into_iter()
            .filter(|line| !line.is_empty())
            .collect();
        // Whether it exists or not.
        for path in ["/v1/vms", "/v1/nothing", "/v1/capture", "/x", "//page/"] {
            let (status, answer) = proxy.ask(&format!("GET {path} HTTP/1.1"), &lines);
            assert_eq!(status, 401, "{line}: {answer}");
            assert!(answer.contains("the token is missing or wrong"), "{answer}");
            assert!(answer.contains("www-authenticate: Bearer"), "{answer}");
        }
    }
}

#[test]
fn only_who_addresses_the_own_name_or_loopback_is_answered() {
    let daemon = FakeDaemon::start(&[], &[]);
    let proxy = Opened::to(daemon.runtime_dir().join("control.sock"));
    let bearer = proxy.bearer();
    let upper_case = NAME.to_uppercase();
    for name in [NAME, &upper_case, &format!("{NAME}:8080")] {
        let host = format!("Host: {name}");
        for path in ["/", "/page/main.js", "/v1/vms"] {
            let (status, answer) = proxy.ask(&format!("GET {path} HTTP/1.1"), &[&host, &bearer]);
            assert_eq!(status, 200, "{name}: {answer}");
        }
    }
    // Programs may ask there, and browsers find no page.
    let loopback = [
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost",
        "LocalHost:8080",
        "[::1]:9",
        "127.0.0.9:1",
    ];
    for host in loopback {
        for (path, expected) in [("/v1/vms", 200), ("/", 421), ("/page/main.js", 421)] {
            let (status, answer) = proxy.ask(
                &format!("GET {path} HTTP/1.1"),
                &[&format!("Host: {host}"), &bearer],
            );
            assert_eq!(status, expected, "{host}: {answer}");
        }
    }
    let bad = [
        "evil.example",
        "127.0.0.1.evil.example:80",
        "localhost.evil.example",
        "fedcba9876543210.localhost",
        "0123456789abcdef.localhost.evil.example",
        "x.0123456789abcdef.localhost",
        "0123456789abcdef",
        "evil.example:127",
        "10.0.0.1",
        "",
        "localhost:80:80",
        "::1:x",
    ];
    for host in bad {
        for path in ["/", "/v1/vms"] {
            let (status, answer) = proxy.ask(
                &format!("GET {path} HTTP/1.1"),
                &[&format!("Host: {host}"), &bearer],
            );
            assert_eq!(status, 421, "{host}: {answer}");
        }
    }
    let two = ["Host: localhost", "Host: evil.example", bearer.as_str()];
    assert_eq!(proxy.ask("GET / HTTP/1.1", &two).0, 421);
    assert_eq!(proxy.ask("GET / HTTP/1.1", &[]).0, 421);
    let absolute = "GET http://evil.example/v1/vms HTTP/1.1";
    assert_eq!(proxy.ask(absolute, &["Host: localhost", &bearer]).0, 421);
    let absolute = "GET http://localhost/ HTTP/1.1";
    assert_eq!(proxy.ask(absolute, &[HOST]).0, 421);
}

#[test]
fn nothing_can_be_changed_and_nothing_captured() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let proxy = Opened::to(daemon.runtime_dir().join("control.sock"));
    let bearer = proxy.bearer();
    for method in [
        "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE", "get", "X",
    ] {
        let target = if method == "CONNECT" {
            "localhost:80"
        } else {
            "/v1/vms/web"
        };
        let (status, answer) = proxy.ask(&format!("{method} {target} HTTP/1.1"), &[HOST, &bearer]);
        assert_eq!(status, 405, "{method}: {answer}");
        assert!(answer.contains("allow: GET, HEAD"), "{answer}");
    }
    assert_eq!(daemon.request("GET", "/v1/vms/web", "").0, 200);
    for path in [
        "/v1/capture",
        "/v1/capture?vm=web",
        "/v1/networks/lan/capture?count=1",
    ] {
        let (status, answer) = proxy.ask(&format!("GET {path} HTTP/1.1"), &[HOST, &bearer]);
        assert_eq!(status, 403, "{answer}");
    }
}

#[test]
fn a_stream_comes_piece_by_piece_and_its_end_is_told_to_the_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("control.sock");
    let daemon = UnixListener::bind(&socket).unwrap();
    let proxy = Opened::to(socket);
    let mut client = proxy.connect();
    let request = format!(
        "GET /v1/events?after=7 HTTP/1.1\r\n{HOST}\r\n{}\r\nLast-Event-ID: 8\r\nCookie: a=b\r\nX-Other: c\r\n\r\n",
        proxy.bearer()
    );
    client.write_all(request.as_bytes()).unwrap();
    let (mut asked, _) = daemon.accept().unwrap();
    asked.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = read_until(&mut asked, "\r\n\r\n").to_lowercase();
    assert!(
        head.starts_with("get /v1/events?after=7 http/1.1\r\n"),
        "{head}"
    );
    assert!(head.contains("last-event-id: 8\r\n"), "{head}");
    for secret in ["bearer", "cookie", "x-other"] {
        assert!(!head.contains(secret), "{head}");
    }
    asked
        .write_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        .unwrap();
    read_until(&mut client, "\r\n\r\n");
    for piece in ["data: 1\n\n", "data: 2\n\n"] {
        // The next is sent only when this one has arrived.
        write!(asked, "{:x}\r\n{piece}\r\n", piece.len()).unwrap();
        read_until(&mut client, piece);
    }
    drop(client);
    // The daemon's reader is gone: the connection ends, or is reset.
    let mut rest = Vec::new();
    match asked.read_to_end(&mut rest) {
        Ok(_) => assert!(rest.is_empty(), "{rest:?}"),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

#[test]
fn a_daemon_that_is_not_there_is_told_of() {
    let directory = tempfile::tempdir().unwrap();
    let proxy = Opened::to(directory.path().join("control.sock"));
    let (status, answer) = proxy.ask("GET /v1/vms HTTP/1.1", &[HOST, &proxy.bearer()]);
    assert_eq!(status, 502, "{answer}");
    assert!(answer.contains("no daemon answers at"), "{answer}");
}

#[test]
fn a_head_has_its_limit() {
    let daemon = FakeDaemon::start(&[], &[]);
    let proxy = Opened::to(daemon.runtime_dir().join("control.sock"));
    let bearer = proxy.bearer();
    let ask = |len: usize| {
        let first = "GET /v1/health HTTP/1.1";
        let rest = [first, "Connection: close", HOST, &bearer, "X: "];
        let others: usize = rest.iter().map(|line| line.len() + 2).sum::<usize>() + 2;
        proxy
            .ask(
                first,
                &[HOST, &bearer, &format!("X: {}", "x".repeat(len - others))],
            )
            .0
    };
    assert_eq!(ask(MAX_HEADER_BYTES - 1), 200);
    // hyper looks when it has read so many, and its answer may be lost with the connection.
    assert_ne!(ask(2 * MAX_HEADER_BYTES), 200);
}

#[test]
fn connections_beyond_the_limit_are_told_so() {
    let daemon = FakeDaemon::start(&[], &[]);
    let proxy = Opened::to(daemon.runtime_dir().join("control.sock"));
    let bearer = proxy.bearer();
    let request = format!("GET /v1/health HTTP/1.1\r\n{HOST}\r\n{bearer}\r\n\r\n");
    // Each is served, and kept.
    let mut kept: Vec<TcpStream> = (0..MAX_CONNECTIONS)
        .map(|_| {
            let mut stream = proxy.connect();
            stream.write_all(request.as_bytes()).unwrap();
            read_until(&mut stream, "\"keeper\":false}");
            stream
        })
        .collect();
    let ask = || proxy.ask("GET /v1/health HTTP/1.1", &[HOST, &bearer]);
    let (status, answer) = ask();
    assert_eq!(status, 503, "{answer}");
    assert!(
        answer.contains("64 connections to this page are open"),
        "{answer}"
    );
    assert!(answer.contains("connection: close"), "{answer}");
    // Clients inside are served on.
    kept[0].write_all(request.as_bytes()).unwrap();
    read_until(&mut kept[0], "\"keeper\":false}");
    drop(kept.pop());
    let until = std::time::Instant::now() + PATIENCE;
    while ask().0 != 200 {
        assert!(std::time::Instant::now() < until, "no slot is free");
    }
}

#[test]
fn who_has_no_token_keeps_nobody_out() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let proxy = Opened::to(daemon.runtime_dir().join("control.sock"));
    let bearer = proxy.bearer();
    // More than all places: silent, and half said.
    let idle: Vec<TcpStream> = (0..2 * MAX_NEWCOMERS)
        .map(|index| {
            let mut stream = proxy.connect();
            let said = ["", "GET / HTTP/1.1\r\nHost:"][index % 2];
            // The proxy may have closed it already.
            let _ = stream.write_all(said.as_bytes());
            stream
        })
        .collect();
    let (status, answer) = proxy.ask("GET /v1/vms HTTP/1.1", &[HOST, &bearer]);
    assert_eq!(status, 200, "{answer}");
    let (status, answer) = proxy.ask("GET / HTTP/1.1", &[HOST]);
    assert_eq!(status, 200, "{answer}");
    drop(idle);
    // Without the token one answer is all that a connection gets.
    for path in ["/", "/v1/vms"] {
        let mut stream = proxy.connect();
        let request = format!("GET {path} HTTP/1.1\r\n{HOST}\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("connection: close\r\n"), "{answer}");
    }
}

fn read_until(stream: &mut impl Read, end: &str) -> String {
    let mut read = Vec::new();
    while !read.ends_with(end.as_bytes()) {
        let mut byte = [0];
        assert_eq!(
            stream.read(&mut byte).unwrap(),
            1,
            "{}",
            String::from_utf8_lossy(&read)
        );
        read.push(byte[0]);
    }
    String::from_utf8(read).unwrap()
}

mod deadlines;
