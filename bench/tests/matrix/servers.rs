//! Everything on the host that is called, and what is noted of it: each question. Each answers a line `who NUMBER` with its name and the number.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, accept, bind, listen, recv,
    send, socket,
};

use crate::parties::{PLACE_PORT, PLACES, Place};

/// How often each callee was called.
#[derive(Debug, Default)]
pub struct Arrivals(Mutex<BTreeMap<String, u64>>);

impl Arrivals {
    pub fn note(&self, who: &str) {
        *self.0.lock().unwrap().entry(who.to_owned()).or_default() += 1;
    }

    /// How often each was called.
    pub fn all(&self) -> BTreeMap<String, u64> {
        self.0.lock().unwrap().clone()
    }
}

/// The answer to a line.
pub fn reply_to(line: &[u8], who: &str) -> String {
    let line = String::from_utf8_lossy(line);
    let number = line.trim().strip_prefix("who ").unwrap_or("-");
    format!("{who} {number}\n")
}

/// Answers each line of a stream, until its end.
pub fn answer_lines(mut stream: impl Read + Write, who: &str) {
    let mut line = Vec::new();
    let mut byte = [0];
    while matches!(stream.read(&mut byte), Ok(1)) {
        line.push(byte[0]);
        if byte == *b"\n" {
            // The caller may be gone.
            let _ = stream.write_all(reply_to(&line, who).as_bytes());
            line.clear();
        }
    }
}

/// Runs this on a thread of its own, which ends with the process.
pub fn spawn(run: impl FnOnce() + Send + 'static) {
    drop(
        std::thread::Builder::new()
            .stack_size(128 << 10)
            .spawn(run)
            .unwrap(),
    );
}

pub struct Servers {
    pub tcp: u16,
    pub udp: u16,
}

impl Servers {
    pub fn start(directory: &Path, arrivals: &Arc<Arrivals>) -> Servers {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let servers = Servers {
            tcp: tcp.local_addr().unwrap().port(),
            udp: udp.local_addr().unwrap().port(),
        };
        serve_tcp(tcp, "service:tcp".to_owned(), arrivals.clone());
        serve_udp(udp, arrivals.clone());
        let unix = UnixListener::bind(directory.join("service")).unwrap();
        serve_unix(unix, "service:unix".to_owned(), arrivals.clone());
        serve_messages(&directory.join("messages"), arrivals.clone());
        servers
    }

    /// What a program of the host made for a guest.
    pub fn listen_for(&mut self, vm: &str, path: &Path, arrivals: &Arc<Arrivals>) {
        let listener = UnixListener::bind(path).unwrap();
        serve_unix(listener, format!("listener:{vm}"), arrivals.clone());
    }
}

/// Listens at the places behind egress, for the worlds of this thread. Returns whether `::1` is one of this machine's addresses.
pub fn listen_at_places(arrivals: &Arc<Arrivals>) -> bool {
    let own = PLACES.into_iter().filter(|place| *place != Place::Special);
    let mut has_ipv6 = true;
    loop {
        let first = TcpListener::bind("127.0.0.2:0").unwrap();
        let port = first.local_addr().unwrap().port();
        let mut listeners = vec![(Place::Name, first)];
        for place in own.clone().skip(1) {
            match TcpListener::bind((place.address(), port)) {
                Ok(listener) => listeners.push((place, listener)),
                Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => break,
                Err(_) if place == Place::OwnIpv6 => has_ipv6 = false,
                Err(error) => panic!("{}: {error}", place.address()),
            }
        }
        if listeners.len() + usize::from(!has_ipv6) < own.clone().count() {
            continue;
        }
        PLACE_PORT.set(port);
        for (place, listener) in listeners {
            serve_tcp(
                listener,
                format!("server:{}", place.address()),
                arrivals.clone(),
            );
        }
        return has_ipv6;
    }
}

fn serve_tcp(listener: TcpListener, who: String, arrivals: Arc<Arrivals>) {
    spawn(move || {
        for stream in listener.incoming().flatten() {
            arrivals.note(&who);
            let who = who.clone();
            spawn(move || answer_lines(stream, &who));
        }
    });
}

fn serve_unix(listener: UnixListener, who: String, arrivals: Arc<Arrivals>) {
    spawn(move || {
        for stream in listener.incoming().flatten() {
            arrivals.note(&who);
            let who = who.clone();
            spawn(move || answer_lines(stream, &who));
        }
    });
}

fn serve_udp(socket: UdpSocket, arrivals: Arc<Arrivals>) {
    spawn(move || {
        let mut bytes = [0; 512];
        while let Ok((len, from)) = socket.recv_from(&mut bytes) {
            arrivals.note("service:udp");
            let answer = reply_to(&bytes[..len], "service:udp");
            // A datagram may be lost.
            let _ = socket.send_to(answer.as_bytes(), from);
        }
    });
}

fn serve_messages(path: &Path, arrivals: Arc<Arrivals>) {
    let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&listener, 64).unwrap();
    spawn(move || {
        while let Ok(stream) = accept(&listener) {
            arrivals.note("service:unix-seqpacket");
            spawn(move || answer_messages(&stream));
        }
    });
}

fn answer_messages(stream: &OwnedFd) {
    let mut bytes = [0; 512];
    while let Ok((_, len @ 1..)) = recv(stream, &mut bytes[..], RecvFlags::empty()) {
        let answer = reply_to(&bytes[..len], "service:unix-seqpacket");
        // The caller may be gone.
        let _ = send(stream, answer.as_bytes(), SendFlags::NOSIGNAL);
    }
}

/// A line of a stream, without its end. Nothing is read behind it.
pub fn read_line(stream: impl Read) -> Option<String> {
    let mut line = String::new();
    let mut reader = BufReader::with_capacity(1, stream);
    let len = reader.read_line(&mut line).ok()?;
    (len > 0).then(|| line.trim_end().to_owned())
}
