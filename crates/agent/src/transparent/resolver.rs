//! Answers the questions that programs send over their datagram sockets. In a namespace ([`super::datagrams`]) the questions of each user wait in a socket of their own, and so many of each are answered in turn,
//! by one thread. Where the sockets are pairs, each user has a thread: a program can send descriptors along (`SCM_RIGHTS`), and to receive them closes them, which may take as long as it wants (`SO_LINGER`).

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::libc::{in_pktinfo, in6_pktinfo};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg,
};
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use sys::supervise::{MAX_USERS, UserNumber};

use super::dns::{self, MAX_QUESTION_LEN};
use super::names::Names;
use super::servers::Servers;
use super::sockets::{Kind, Sockets};
use crate::share::Places;

/// Whatever server a program asks, it is asked at this port.
pub(crate) const DNS_PORT: u16 = 53;

/// So many questions of one socket are answered before others have their turn.
const MAX_QUESTIONS: usize = 16;

/// So many sockets are served between two waits.
const MAX_EVENTS: usize = 64;

/// So many streams of questions there may be at once, each with a thread, and so long one may be silent. A user alone has 34 of them at most.
const MAX_STREAMS: usize = 128;
const STREAM_PATIENCE: Duration = Duration::from_secs(30);

/// The stack of a thread, in bytes.
const STACK_LEN: usize = 128 << 10;

/// The resolver.
#[derive(Debug)]
pub(crate) struct Resolver {
    /// Of each user, what the thread waits for that serves its pairs, once it has one.
    pairs: Mutex<[Option<Arc<OwnedFd>>; MAX_USERS]>,
    sockets: Arc<Mutex<Sockets>>,
    names: Arc<Mutex<Names>>,
    streams: Arc<Places>,
}

impl Resolver {
    /// At the sockets `questions` arrive those of any number of the programs' sockets: one for each user, and family by family. They are for the servers, if there are such.
    ///
    /// # Errors
    /// The system has no descriptor or no thread left.
    pub(crate) fn start(
        sockets: Arc<Mutex<Sockets>>,
        names: Arc<Mutex<Names>>,
        questions: Vec<OwnedFd>,
        servers: Option<Arc<Servers>>,
    ) -> io::Result<Resolver> {
        if !questions.is_empty() {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            for (index, socket) in questions.iter().enumerate() {
                let data = epoll::EventData::new_u64(index as u64);
                epoll::add(&epoll, socket, data, epoll::EventFlags::IN)?;
            }
            let known = Arc::clone(&names);
            start_thread(move || answer_all(&epoll, &questions, &known, servers.as_ref()))?;
        }
        Ok(Resolver {
            pairs: Mutex::default(),
            sockets,
            names,
            streams: Places::new(MAX_STREAMS),
        })
    }

    /// Answers questions that come over a stream, each behind its length (RFC 1035, section 4.2.2), in a thread of their own.
    ///
    /// # Errors
    /// The user has too many, or the system has no thread left.
    pub(crate) fn serve_stream(&self, end: OwnedFd, user: UserNumber) -> io::Result<()> {
        let place = self.streams.take(user).ok_or(Errno::AGAIN)?;
        let names = Arc::clone(&self.names);
        let mut stream = UnixStream::from(end);
        stream.set_read_timeout(Some(STREAM_PATIENCE))?;
        stream.set_write_timeout(Some(STREAM_PATIENCE))?;
        let serve = move || {
            let _place = place;
            // Whatever ends it, the program sees the end of the stream.
            while answer_one(&mut stream, &names, user).is_ok() {}
        };
        let thread = std::thread::Builder::new()
            .name("questions".into())
            .stack_size(STACK_LEN);
        thread.spawn(serve).map(drop)
    }

    /// Serves the program at the other end of `end`, whose socket is this user's and has this number, until it is closed.
    pub(crate) fn serve(&self, end: &OwnedFd, number: u64, user: UserNumber) -> io::Result<()> {
        let data = epoll::EventData::new_u64(number);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        Ok(epoll::add(&*self.pairs_of(user)?, end, data, flags)?)
    }

    fn pairs_of(&self, user: UserNumber) -> io::Result<Arc<OwnedFd>> {
        // Nothing panics while it holds the lock.
        let mut pairs = sys::lock(&self.pairs);
        let place = &mut pairs[user.index()];
        if let Some(epoll) = place {
            return Ok(Arc::clone(epoll));
        }
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let own = Arc::clone(&epoll);
        let (sockets, names) = (Arc::clone(&self.sockets), Arc::clone(&self.names));
        start_thread(move || serve_pairs(&own, &sockets, &names))?;
        Ok(Arc::clone(place.insert(epoll)))
    }
}

fn start_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("resolver".into());
    thread.stack_size(STACK_LEN).spawn(work).map(drop)
}

/// Has this done with each event, for ever.
fn attend(epoll: &OwnedFd, mut work: impl FnMut(&epoll::Event)) {
    let mut events = Vec::with_capacity(MAX_EVENTS);
    loop {
        events.clear();
        match epoll::wait(epoll, spare_capacity(&mut events), None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                eprintln!("ringdown-agent run: names are not resolved any more: {error}");
                return;
            }
        }
        events.iter().for_each(&mut work);
    }
}

fn answer_all(
    epoll: &OwnedFd,
    questions: &[OwnedFd],
    names: &Mutex<Names>,
    servers: Option<&Arc<Servers>>,
) {
    attend(epoll, |event| {
        let index = event.data.u64() as usize;
        if let Some(socket) = questions.get(index) {
            serve_all(socket, names, servers, UserNumber::of(index % MAX_USERS));
        }
    });
}

fn serve_pairs(epoll: &OwnedFd, sockets: &Mutex<Sockets>, names: &Mutex<Names>) {
    // Nothing panics while it holds the lock.
    let lock = || sys::lock(sockets);
    attend(epoll, |event| {
        let number = event.data.u64();
        let end = lock().get_mut(number).and_then(|socket| {
            let is_asked = socket.peer.is_none_or(|peer| peer.port() == DNS_PORT);
            match &socket.kind {
                Kind::Datagram(end) => Some((Arc::clone(end), is_asked, socket.user)),
                Kind::Stream(_) => None,
            }
        });
        // Its last end here is gone with its entry, and it with that.
        let Some((end, is_asked, user)) = end else {
            return;
        };
        let is_open = serve(&end, is_asked, names, user);
        // A program that sends no more gets no more: such an end would be readable for ever.
        let ended = epoll::EventFlags::HUP | epoll::EventFlags::RDHUP | epoll::EventFlags::ERR;
        let flags = event.flags;
        if flags.intersects(ended) || !is_open {
            let _ = epoll::delete(epoll, &*end);
            // `end` outlives it: what is closed with the end is closed without the lock.
            lock().remove(number);
        }
    });
}

/// Answers what is there, and returns whether there may be more.
fn serve(end: &OwnedFd, is_asked: bool, names: &Mutex<Names>, user: UserNumber) -> bool {
    let mut bytes = [0; MAX_QUESTION_LEN];
    for _ in 0..MAX_QUESTIONS {
        match rustix::net::recv(end, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((len, _)) if is_asked => answer(end, &bytes[..len], names, user),
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return true,
            Err(_) => return false,
        }
    }
    true
}

/// Answers what is there at a socket of the resolver's own, from the address that was asked. What cannot be answered is lost, as over UDP.
fn serve_all(
    socket: &OwnedFd,
    names: &Mutex<Names>,
    servers: Option<&Arc<Servers>>,
    user: UserNumber,
) {
    for _ in 0..MAX_QUESTIONS {
        let answered = receive_question(socket).and_then(|question| match (question, servers) {
            (Some(question), None) => {
                let answer = {
                    let mut names = sys::lock(names);
                    dns::answer(&question.bytes, &mut names, user)
                };
                answer.map_or(Ok(()), |answer| reply(socket, &question, &answer))
            }
            (Some(question), Some(servers)) => {
                pass_on(socket, question, servers, user);
                Ok(())
            }
            (None, _) => Ok(()),
        });
        if answered == Err(nix::errno::Errno::EAGAIN) {
            return;
        }
    }
}

/// A question and its two parties.
struct Question {
    bytes: Vec<u8>,
    asker: SockaddrStorage,
    asked: ControlMessageOwned,
}

impl Question {
    fn server(&self) -> Option<IpAddr> {
        match &self.asked {
            ControlMessageOwned::Ipv4PacketInfo(info) => {
                Some(Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes()).into())
            }
            ControlMessageOwned::Ipv6PacketInfo(info) => {
                Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

fn receive_question(socket: &OwnedFd) -> nix::Result<Option<Question>> {
    let mut bytes = [0; MAX_QUESTION_LEN];
    let mut space = nix::cmsg_space!(in_pktinfo, in6_pktinfo);
    let (len, asker, asked) = {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let (socket, flags) = (socket.as_raw_fd(), MsgFlags::MSG_DONTWAIT);
        let got = recvmsg::<SockaddrStorage>(socket, &mut parts, Some(&mut space), flags)?;
        (got.bytes, got.address, got.cmsgs()?.next())
    };
    let bytes = bytes[..len].to_vec();
    let ends = asker.zip(asked);
    Ok(ends.map(|(asker, asked)| Question {
        bytes,
        asker,
        asked,
    }))
}

/// From the address that was asked.
fn reply(socket: &OwnedFd, question: &Question, answer: &[u8]) -> nix::Result<()> {
    let from = match &question.asked {
        ControlMessageOwned::Ipv4PacketInfo(info) => ControlMessage::Ipv4PacketInfo(info),
        ControlMessageOwned::Ipv6PacketInfo(info) => ControlMessage::Ipv6PacketInfo(info),
        _ => return Ok(()),
    };
    let (parts, flags) = ([IoSlice::new(answer)], MsgFlags::MSG_DONTWAIT);
    let asker = Some(&question.asker);
    sendmsg(socket.as_raw_fd(), &parts, &[from], flags, asker).map(drop)
}

fn pass_on(socket: &OwnedFd, question: Question, servers: &Arc<Servers>, user: UserNumber) {
    let (Some(server), Ok(socket)) = (question.server(), socket.try_clone()) else {
        return;
    };
    let bytes = question.bytes.clone();
    servers.ask(server, bytes, user, move |answer| {
        // What cannot be sent is lost.
        let _ = reply(&socket, &question, answer);
    });
}

fn answer_one(stream: &mut UnixStream, names: &Mutex<Names>, user: UserNumber) -> io::Result<()> {
    let mut len = [0; 2];
    stream.read_exact(&mut len)?;
    let mut bytes = [0; MAX_QUESTION_LEN];
    let bytes = bytes
        .get_mut(..u16::from_be_bytes(len).into())
        .ok_or(io::ErrorKind::InvalidData)?;
    stream.read_exact(bytes)?;
    let answer = {
        let mut names = sys::lock(names);
        dns::answer(bytes, &mut names, user)
    };
    let answer = answer.ok_or(io::ErrorKind::InvalidData)?;
    // Answers are shorter than 512 bytes and a name.
    let len = (answer.len() as u16).to_be_bytes();
    stream.write_all(&[&len[..], &answer].concat())
}

/// Answers a question, if it is one. As over UDP, an answer for which there is no room is lost.
pub(crate) fn answer(end: &OwnedFd, question: &[u8], names: &Mutex<Names>, user: UserNumber) {
    let answer = {
        let mut names = sys::lock(names);
        dns::answer(question, &mut names, user)
    };
    if let Some(answer) = answer {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::send(end, &answer, flags);
    }
}
