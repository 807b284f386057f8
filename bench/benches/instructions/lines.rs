//! Lines: guests that send to programs, guests that are sent to by them, and guests that send to each other.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use device::{Fabric, LineConfig};
use keeper::{Holder, Keeper};
use policy::{
    Address, CalleePattern, CallerPattern, DEFAULT_DOMAIN, Policy, Rule, RuleLimits, Verdict,
    VmPattern,
};
use vsock::Limits;
use wire::vsock::{HEADER_LEN, Header, Operation, SocketType};

use crate::guest::Guest;
use crate::scene::{PACKETS, SPIN, Scene, turn_until};

/// Of a packet, in bytes.
const PAYLOAD: u32 = 64;

/// What a program sends in a turn, in bytes: as much as fills 16 of Linux's receive buffers.
const PROGRAM_BYTES: usize = 16 * 4096;

const HOST: u64 = 2;
const FIRST_CID: u32 = 3;
const PORT: u32 = 80;

/// The two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    ToHost,
    FromHost,
    /// Each guest with an even number to the next.
    BetweenGuests,
}

pub struct Lines {
    fabric: Fabric,
    way: Way,
    busy: Vec<Guest>,
    idle: Vec<Guest>,
    programs: Vec<UnixStream>,
    /// By guest, how much it may still send, in bytes.
    credit: Vec<Credit>,
    room: Vec<u8>,
    directory: tempfile::TempDir,
    _keeper: Option<Arc<Keeper>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Credit {
    allocated: u32,
    forwarded: u32,
    sent: u32,
}

fn header(operation: Operation, from: u64, to: u64) -> Header {
    Header {
        src_cid: from,
        dst_cid: to,
        src_port: PORT,
        dst_port: PORT,
        len: 0,
        socket_type: SocketType::Stream as u16,
        operation: operation as u16,
        flags: 0,
        // More than is sent.
        buf_alloc: 1 << 30,
        fwd_cnt: 0,
    }
}

fn cid(number: usize) -> u64 {
    u64::from(FIRST_CID) + number as u64
}

fn step(fabric: &mut Fabric) -> io::Result<()> {
    fabric.turn(Some(Duration::from_millis(1)))
}

impl Lines {
    /// With so many lines at work, with a circuit each or for two of them, and so many that are idle.
    pub fn new(way: Way, busy: usize, idle: usize, is_kept: bool) -> io::Result<Lines> {
        let directory = tempfile::tempdir()?;
        let limits = Limits::default();
        let mut fabric = Fabric::new(limits, 1007, Box::new(|_| false))?;
        fabric.set_spin(SPIN);
        let keeper = is_kept.then(|| keeper(&directory)).transpose()?;
        if let Some(keeper) = &keeper {
            fabric.set_keeper(Arc::clone(keeper))?;
        }
        fabric.set_policy(Arc::new(Policy::new(vec![anyone()])), Vec::new(), false);
        for number in 0..busy + idle {
            let config = LineConfig {
                address: Address::new(&format!("v{number}"), cid(number) as u32),
                limits,
                vhost_user: directory.path().join(format!("v{number}.vhost")),
                host: directory.path().join(format!("v{number}.sock")),
            };
            fabric.open_line(&config).map_err(io::Error::other)?;
        }
        if let Some(keeper) = &keeper {
            keeper.run();
        }
        let mut lines = Lines {
            fabric,
            way,
            busy: Vec::new(),
            idle: Vec::new(),
            programs: Vec::new(),
            credit: vec![Credit::default(); busy],
            room: vec![0; 1 << 20],
            directory,
            _keeper: keeper,
        };
        for number in 0..busy + idle {
            lines.attach(number, number < busy)?;
        }
        let all_up = |fabric: &mut Fabric| Ok(fabric.lines().iter().all(|line| line.report.up));
        turn_until(&mut lines.fabric, 32, step, all_up)?;
        lines.try_idle()?;
        for number in 0..busy {
            lines.connect(number)?;
        }
        Ok(lines)
    }

    fn attach(&mut self, number: usize, is_busy: bool) -> io::Result<()> {
        let socket = self.directory.path().join(format!("v{number}.vhost"));
        let payload = if is_busy { 4096 } else { 0 };
        let guest = Guest::connect(&socket, HEADER_LEN as u32 + 4 + payload, is_busy)?;
        match is_busy {
            true => self.busy.push(guest),
            false => self.idle.push(guest),
        }
        Ok(())
    }

    /// What idle guests send is of a circuit that does not exist. Each has sent one when this returns.
    fn try_idle(&mut self) -> io::Result<()> {
        let first = self.busy.len();
        for (number, guest) in self.idle.iter_mut().enumerate() {
            let stray = header(Operation::CreditUpdate, cid(first + number), HOST);
            guest.set_packet(&stray.to_bytes());
            guest.send(1);
        }
        let idle = &mut self.idle;
        let mut taken = 0;
        turn_until(&mut self.fabric, 32, step, |_| {
            taken += idle.iter_mut().map(Guest::take_sent).sum::<u64>();
            Ok(taken == idle.len() as u64)
        })
    }

    fn connect(&mut self, number: usize) -> io::Result<()> {
        match self.way {
            Way::ToHost | Way::FromHost => self.call_host(number)?,
            Way::BetweenGuests if number % 2 == 0 => self.call_next(number)?,
            Way::BetweenGuests => return Ok(()),
        }
        let to = match self.way {
            Way::BetweenGuests => cid(number + 1),
            _ => HOST,
        };
        let data = Header {
            len: PAYLOAD,
            ..header(Operation::Data, cid(number), to)
        };
        let packet = [&data.to_bytes()[..], &[7; PAYLOAD as usize]].concat();
        self.busy[number].set_packet(&packet);
        Ok(())
    }

    fn call_host(&mut self, number: usize) -> io::Result<()> {
        let path = self.directory.path().join(format!("v{number}.sock_{PORT}"));
        let listener = UnixListener::bind(path)?;
        let dial = header(Operation::Request, cid(number), HOST);
        self.say(number, &dial)?;
        self.wait_for(number, Operation::Response)?;
        let (program, _) = listener.accept()?;
        program.set_nonblocking(true)?;
        self.programs.push(program);
        Ok(())
    }

    fn call_next(&mut self, number: usize) -> io::Result<()> {
        let next = number + 1;
        self.say(number, &header(Operation::Request, cid(number), cid(next)))?;
        self.wait_for(next, Operation::Request)?;
        self.say(next, &header(Operation::Response, cid(next), cid(number)))?;
        self.wait_for(number, Operation::Response)
    }

    fn say(&mut self, number: usize, header: &Header) -> io::Result<()> {
        let guest = &mut self.busy[number];
        guest.set_packet(&header.to_bytes());
        guest.send(1);
        turn_until(&mut self.fabric, 1, step, |_| Ok(guest.take_sent() == 1))
    }

    fn wait_for(&mut self, number: usize, operation: Operation) -> io::Result<()> {
        let guest = &mut self.busy[number];
        let credit = &mut self.credit[number];
        turn_until(&mut self.fabric, 1, step, |_| {
            let mut found = false;
            guest.take_received(|bytes| {
                let header = Header::from_bytes(bytes);
                credit.learn(&header);
                found |= header.operation == operation as u16;
            });
            Ok(found)
        })
    }

    /// The guests that send: send as much as they may.
    fn send(&mut self) {
        let step = match self.way {
            Way::ToHost => 1,
            Way::BetweenGuests => 2,
            Way::FromHost => return,
        };
        let senders = self.busy.iter_mut().zip(&mut self.credit).step_by(step);
        for (guest, credit) in senders {
            guest.take_sent();
            let packets = PACKETS
                .min(guest.room())
                .min(u64::from(credit.left() / PAYLOAD));
            credit.sent = credit.sent.wrapping_add(PAYLOAD * packets as u32);
            guest.send(packets);
        }
    }
}

impl Credit {
    fn learn(&mut self, header: &Header) {
        (self.allocated, self.forwarded) = (header.buf_alloc, header.fwd_cnt);
    }

    fn left(&self) -> u32 {
        let under_way = self.sent.wrapping_sub(self.forwarded);
        self.allocated.saturating_sub(under_way)
    }
}

impl Scene for Lines {
    fn stir(&mut self) {
        for guest in &mut self.idle {
            guest.send(1);
        }
    }

    fn prepare(&mut self) -> io::Result<u64> {
        let mut bytes = 0;
        let mut filled = 0;
        for (guest, credit) in self.busy.iter_mut().zip(&mut self.credit) {
            guest.take_received(|beginning| {
                let header = Header::from_bytes(beginning);
                credit.learn(&header);
                filled += u64::from(header.operation == Operation::Data as u16);
                bytes += header.len as usize;
            });
        }
        for program in &mut self.programs {
            match self.way {
                Way::FromHost => program.write_all(&self.room[..PROGRAM_BYTES])?,
                _ => bytes += read(program, &mut self.room)?,
            }
        }
        self.send();
        Ok(match self.way {
            Way::FromHost => filled,
            Way::ToHost | Way::BetweenGuests => bytes as u64 / u64::from(PAYLOAD),
        })
    }

    fn turn(&mut self) -> io::Result<()> {
        self.fabric.turn(Some(SPIN))
    }
}

fn read(program: &mut UnixStream, room: &mut [u8]) -> io::Result<usize> {
    match program.read(room) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        other => other,
    }
}

fn keeper(directory: &tempfile::TempDir) -> io::Result<Arc<Keeper>> {
    let path = directory.path().join("keeper");
    let holder = Holder::listen(&path).map_err(io::Error::other)?;
    // It ends with this process.
    std::thread::spawn(move || holder.run());
    Ok(Arc::new(Keeper::attach(&path).map_err(io::Error::other)?))
}

fn anyone() -> Rule {
    let domain = || DEFAULT_DOMAIN.to_owned();
    Rule {
        from: vec![CallerPattern::Vms(VmPattern::Any { domain: domain() })],
        to: vec![CalleePattern::Vms(VmPattern::Any { domain: domain() })],
        ports: Vec::new(),
        verdict: Verdict::Allow,
        limits: RuleLimits::default(),
        label: "anyone".to_owned(),
        is_named: true,
    }
}
