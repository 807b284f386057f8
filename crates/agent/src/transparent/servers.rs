//! Name servers outside of the guest, where the agent answers no questions itself (`--resolver off`): a question that a program sends to one over UDP is asked there over TCP (RFC 7766), by a circuit
//! to port 53 of its address, so that the policy decides by the address.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use domain::base::iana::Rcode;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use sys::supervise::{UserNumber, errno};
use wire::destination::{Destination, Host};

use super::resolver::DNS_PORT;
use super::way::{self, Way};
use super::{dns, supervisor};
use crate::share::Places;

/// So many questions may wait for their answers, each with a thread and a circuit; of a user alone, 68. Others are lost, as over UDP.
const MAX_QUESTIONS: usize = 256;

/// How long a server may take to be reached, and to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The stack of a thread, in bytes. An answer, of 64 KiB at most, is not on it.
const STACK_LEN: usize = 128 << 10;

/// The way to all of them.
pub(crate) struct Servers {
    way: Arc<dyn Way>,
    places: Arc<Places>,
    is_verbose: bool,
}

impl Servers {
    pub(crate) fn new(way: Arc<dyn Way>, is_verbose: bool) -> Servers {
        Servers {
            way,
            places: Places::new(MAX_QUESTIONS),
            is_verbose,
        }
    }

    /// Has a question asked, in a thread of its own. What is said to the program fits into a datagram that it takes; a refusal is an answer, too.
    pub(crate) fn ask(
        self: &Arc<Servers>,
        server: IpAddr,
        question: Vec<u8>,
        user: UserNumber,
        reply: impl FnOnce(&[u8]) + Send + 'static,
    ) {
        let Some(place) = self.places.take(user) else {
            return;
        };
        let own = Arc::clone(self);
        let ask = move || {
            let _place = place;
            let answer = match own.answer(server, &question) {
                Ok(answer) => dns::fitting(&question, answer),
                Err(Errno::ACCESS) => dns::failure(&question, Rcode::REFUSED),
                Err(_) => dns::failure(&question, Rcode::SERVFAIL),
            };
            if let Some(answer) = answer {
                reply(&answer);
            }
        };
        let thread = std::thread::Builder::new().name("question".into());
        // Without a thread the question is lost.
        let _ = thread.stack_size(STACK_LEN).spawn(ask);
    }

    fn answer(&self, server: IpAddr, question: &[u8]) -> Result<Vec<u8>, Errno> {
        if supervisor::is_of_guest(server) || server.is_multicast() {
            // No server has it, or the question would be its.
            return Err(Errno::ACCESS);
        }
        let destination =
            Destination::new(Host::from(server), DNS_PORT).map_err(|_| Errno::INVAL)?;
        let socket = self.way.socket().map_err(errno)?;
        let deadline = Instant::now() + PATIENCE;
        let opened = way::open(&*self.way, socket.as_fd(), &destination, deadline);
        if self.is_verbose {
            supervisor::say(&destination, opened);
        }
        opened?;
        for timeout in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, timeout, Some(PATIENCE))?;
        }
        exchange(&mut File::from(socket), question).map_err(errno)
    }
}

/// Each behind its length (RFC 1035, section 4.2.2).
fn exchange(stream: &mut (impl Read + Write), question: &[u8]) -> io::Result<Vec<u8>> {
    // A datagram has less than 64 KiB.
    let len = (question.len() as u16).to_be_bytes();
    stream.write_all(&[&len[..], question].concat())?;
    let mut len = [0; 2];
    stream.read_exact(&mut len)?;
    let mut answer = vec![0; u16::from_be_bytes(len).into()];
    stream.read_exact(&mut answer)?;
    match answer.get(..2) == question.get(..2) {
        true => Ok(answer),
        // Of another question.
        false => Err(io::ErrorKind::InvalidData.into()),
    }
}
