//! What passes through circuits.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use bench::guest::{Connection, Received, VirtualGuest};
use circuit::Circuit;

use super::world::{HOST_PORT, House, PATIENCE, wait_for};
/// Carries the wake-ups of a guest's program, whose socket is one of the test's, to its vsock connection and back.
pub struct Pump {
    pub socket: UnixStream,
}

impl Pump {
    pub fn pump(&mut self, guest: &mut VirtualGuest, connection: Connection) {
        let mut bytes = [0; 4096];
        match self.socket.read(&mut bytes) {
            Ok(0) => guest.close(connection),
            Ok(read) => drop(guest.send(connection, &bytes[..read])),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // The program has left wake-ups unread.
            Err(_) => guest.close(connection),
        }
        let mut arrived = Vec::new();
        match guest.try_receive(connection, bytes.len(), &mut arrived) {
            // What finds no room is one wake-up of many.
            Received::Bytes(_) => drop(self.socket.write(&arrived)),
            Received::Nothing => {}
            _ => drop(self.socket.shutdown(std::net::Shutdown::Write)),
        }
    }
}

/// Bytes that are different everywhere.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// A program that sends, and wants the same back.
pub fn send_and_compare(mut circuit: Circuit, len: usize, seed: u64) {
    let sent = pattern(len, seed);
    let mut back = Vec::new();
    for piece in sent.chunks(256 * 1024) {
        circuit.writer().write_all(piece).unwrap();
        let mut bytes = vec![0; piece.len()];
        circuit.reader().read_exact(&mut bytes).unwrap();
        back.extend(bytes);
    }
    assert!(back == sent, "what came back is not what was sent");
}

/// A program that sends back what comes, to the end.
pub fn echo(mut circuit: Circuit) {
    let mut bytes = vec![0; 64 * 1024];
    loop {
        match circuit.reader().read(&mut bytes) {
            Ok(0) | Err(_) => return,
            Ok(read) => {
                if circuit.writer().write_all(&bytes[..read]).is_err() {
                    return;
                }
            }
        }
    }
}

/// A program of the host that listens, takes one circuit, says whether it has a window, and sends back what comes.
pub fn host_echo(house: &House) -> JoinHandle<bool> {
    let mut listener = house.circuits().listen(HOST_PORT).unwrap();
    listener.set_timeout(Some(PATIENCE));
    std::thread::spawn(move || {
        let circuit = listener.accept().unwrap();
        assert_eq!(circuit.peer().unwrap().to_string(), "web:40001");
        let is_zero_copy = circuit.is_zero_copy();
        echo(circuit);
        is_zero_copy
    })
}

/// Waits for a thread, and carries wake-ups meanwhile.
pub fn finish<T>(
    thread: JoinHandle<T>,
    guest: &mut VirtualGuest,
    mut pumping: impl FnMut(&mut VirtualGuest),
) -> T {
    wait_for("the end of a program", guest, |guest| {
        pumping(guest);
        thread.is_finished()
    });
    thread.join().unwrap()
}
