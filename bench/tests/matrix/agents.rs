//! The agents of guests whose lines do not show callers: they give the host a secret, and take what begins with it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, recv};
use wire::agent::{CAPABILITY_PROOF, CONNECTION_CHANNEL, Decoder, Frame, Hello, PORT, Secret};

use crate::servers::answer_lines;

fn hello() -> Vec<u8> {
    let hello = Hello {
        capabilities: vec![CAPABILITY_PROOF.to_owned()],
        ..Hello::new("matrix")
    };
    Frame::Hello(hello).to_bytes(CONNECTION_CHANNEL).unwrap()
}

/// The secret of a VM, as it travels.
fn secret(vm: &str) -> Vec<u8> {
    let mut bytes = [0; 32];
    bytes[..vm.len()].copy_from_slice(vm.as_bytes());
    let frame = Frame::Secret(Secret::new(bytes));
    frame.to_bytes(CONNECTION_CHANNEL).unwrap()
}

/// Says over a connection to the host's port [`PORT`] that the agent is there. It is for as long as the connection is open.
pub fn announce(vm: &str, mut host: UnixStream) -> UnixStream {
    host.write_all(&hello()).unwrap();
    let mut decoder = Decoder::new();
    while decoder.next_frame().unwrap().is_none() {
        let len = host.read(decoder.space()).unwrap();
        assert_ne!(len, 0, "the host has hung up on the agent of {vm}");
        decoder.advance(len);
    }
    host.write_all(&secret(vm)).unwrap();
    host
}

/// Answers what calls a port of a guest. At the agent's own it has to begin with the secret.
pub fn answer(vm: &str, port: &str, mut stream: UnixStream) {
    let who = format!("{vm}:{port}");
    if port != PORT.to_string() {
        return answer_lines(stream, &who);
    }
    let expected = secret(vm);
    let mut begin = vec![0; expected.len()];
    if stream.read_exact(&mut begin).is_err() || begin != expected {
        // The cell fails by this answer.
        let _ = stream.write_all(b"without the secret\n");
        return;
    }
    let mut first = [0];
    match recv(&stream, &mut first, RecvFlags::PEEK) {
        Ok(_) if first == *b"w" => answer_lines(stream, &who),
        // The daemon makes sure of the secret.
        _ => drop(stream.write_all(&hello())),
    }
}
