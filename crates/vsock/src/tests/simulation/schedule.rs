//! What happens next, by dice.

use std::time::Duration;

use policy::LineId;
use wire::vsock::{HOST_CID, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, SocketType};

use super::{hostile, rules};
use crate::tests::model::guest::Packet;
use crate::tests::model::socket::Kernel;
use crate::tests::model::{After, Answer, Plan, Socket, World};
use crate::tests::random::Random;
use crate::{CircuitId, Event, Limits, Reason, Side};

/// More than this many programs do not run at once, or none would get anywhere.
const PROGRAMS: usize = 40;
const PORTS: [u32; 4] = [80, 81, 82, 83];

pub(super) struct Schedule {
    pub(super) world: World,
    random: Random,
    lines: Vec<LineId>,
    hostile: Option<LineId>,
    next_number: u32,
    faults: bool,
    /// Each sends what it means to, says so, and waits for the other: nothing may stand still.
    gentle: bool,
    /// There are two domains with equal names and numbers, and rules that change.
    ruled: bool,
    /// Numbers that guests have resolved.
    known: Vec<u32>,
}

/// Small limits, so that they are met.
fn limits(random: &mut Random) -> Limits {
    if random.one_in(3) {
        return Limits::default();
    }
    Limits {
        circuits: random.pick(&[8, 30, 1000]),
        half_open: random.pick(&[2, 10, 1000]),
        connects_per_second: random.pick(&[0, 1, 20, 500, 20_000]),
        host_connects_per_second: random.pick(&[0, 1, 20, 500, 20_000]),
        controls_per_second: random.pick(&[0, 1000, 10_000, 500_000]),
        orphan_resets: random.pick(&[0, 1, 8, 100]),
        grant_bytes: random.pick(&[4096, 65536, 262_144]),
        max_grant_bytes: random.pick(&[65_536, 1_048_576]).max(262_144),
        min_grant_bytes: random.pick(&[100, 1024, 4096]),
        line_grant_bytes: random.pick(&[100_000, 1_000_000, 100_000_000]),
        quantum_bytes: random.pick(&[8192, 20_000, 131_072]),
        ..Limits::default()
    }
}

impl Schedule {
    pub(super) fn new(seed: u64, log: bool, ruled: bool) -> Schedule {
        let mut random = Random::new(seed);
        let guests = random.pick(&[1, 2, 3]);
        let limits = limits(&mut random);
        let (mut world, lines) = World::kept(if ruled { 0 } else { guests }, limits, log);
        world.log.traced = super::number("RINGDOWN_SIM_TRACE").map(|number| number as u32);
        // Few circuits, and yet not all cut at once in most worlds.
        world.switch.cuts_at_once = [64, 1, 2, 3][(seed % 4) as usize];
        world.socket_buffer = random.pick(&[200, 2000, 20_000]);
        let mut schedule = Schedule {
            world,
            random,
            lines: Vec::new(),
            hostile: None,
            next_number: if ruled { 0 } else { guests },
            faults: seed % 3 != 0,
            gentle: seed % 6 == 0,
            ruled,
            known: Vec::new(),
        };
        for line in lines {
            schedule.furnish(line);
        }
        if ruled {
            for _ in 0..guests + 2 {
                schedule.add_guest();
            }
            schedule.change_rules();
        }
        if seed % 2 == 1 {
            let line = schedule.add_guest();
            schedule.world.guest(line).hostile = true;
            schedule.hostile = Some(line);
        }
        schedule
    }

    fn add_guest(&mut self) -> LineId {
        self.world.limits = limits(&mut self.random);
        let line = match self.ruled {
            true => rules::add_twin(&mut self.world, self.next_number),
            false => self.world.add_guest(self.next_number),
        };
        self.next_number += 1;
        self.furnish(line);
        line
    }

    /// Gives a guest its kernel, its rings, its listeners and those of the host.
    fn furnish(&mut self, line: LineId) {
        let random = &mut self.random;
        let guest = self.world.guests.get_mut(&line).expect("just added");
        guest.kernel = random.pick(&[Kernel::Old, Kernel::CountsPackets]);
        guest.ring = random.pick(&[1, 4, 64, 256]);
        guest.buffer_payload = random.pick(&[4096 - 44, 65_536]);
        for port in PORTS {
            let socket_type = kind(port);
            let plan = plan(random, self.gentle);
            let guest = self.world.guests.get_mut(&line).expect("just added");
            guest.listen(port, socket_type, plan);
            let listener = guest.listeners.get_mut(&port).expect("just made");
            listener.buf_alloc = buffer(random, guest.kernel);
        }
        self.lines.push(line);
        self.restore_host(line);
    }

    fn restore_host(&mut self, line: LineId) {
        for port in PORTS {
            let random = &mut self.random;
            let answer = match random.below(8) {
                0 => Answer::Refuse(random.pick(&[Reason::NoListener, Reason::WrongType])),
                1 => Answer::Never,
                _ => Answer::Accept(plan(random, self.gentle)),
            };
            self.world.listeners.insert((line, port), answer);
        }
    }

    pub(super) fn run(&mut self, events: u64) {
        let mut steps = 0_u64;
        while self.world.totals.events < events && steps < events * 4 {
            steps += 1;
            self.step();
            if steps % 16 == 0 {
                self.world.check_tables();
            }
        }
        let bytes = self.random.pick(&[0, 3000]);
        self.world.finish_soon(bytes);
    }

    fn line(&mut self) -> LineId {
        self.random.pick(&self.lines)
    }

    fn step(&mut self) {
        let line = self.line();
        let amount = 1 + self.random.below(12) as usize;
        match self.random.below(100) {
            0..=19 => {
                self.world.take_from_guest(line, amount);
            }
            20..=39 => self.work(line),
            40..=59 => {
                let guest = self.world.guests.get_mut(&line).expect("listed");
                if !guest.paused && guest.up {
                    for _ in 0..amount {
                        guest.take_packet(&mut self.world.audit);
                    }
                }
            }
            60..=69 => self.run_programs(line),
            70..=84 => self.serve_program(),
            85..=87 => self.dial(),
            88..=89 => self.meddle(line),
            90..=96 => self.pass_time(),
            97 => self.attack(),
            98 if self.random.one_in(4) => self.pause(line),
            99 if self.faults && self.random.one_in(10) => self.fault(line),
            98..=99 if self.ruled && self.random.one_in(40) => self.change_rules(),
            98..=99 if self.ruled => self.look_up(line),
            _ => {}
        }
    }

    /// The device looks after a line that has been woken, as long as there is room.
    fn work(&mut self, line: LineId) {
        let room = self.world.guests[&line].room() > 0;
        if room && self.world.switch.has_work(line) {
            self.world.pump(line);
        }
    }

    fn run_programs(&mut self, line: LineId) {
        let now = self.world.now;
        let guest = self.world.guests.get_mut(&line).expect("listed");
        if guest.paused || !guest.up {
            return;
        }
        let sockets: Vec<u32> = guest.sockets.keys().copied().collect();
        if !sockets.is_empty() {
            let id = self.random.pick(&sockets);
            guest.run_program(now, id, &mut self.world.audit);
        }
    }

    fn some_program(&mut self) -> Option<u64> {
        let tokens: Vec<u64> = self.world.programs.keys().copied().collect();
        (!tokens.is_empty()).then(|| self.random.pick(&tokens))
    }

    fn serve_program(&mut self) {
        let Some(token) = self.some_program() else {
            return;
        };
        let program = self.world.programs.get_mut(&token).expect("listed");
        program.run(&mut self.world.audit);
        self.world.serve_program(token);
        let program = &self.world.programs[&token];
        let served = program
            .circuit
            .is_none_or(|id| !self.world.host_of.contains_key(&id));
        if program.released && served {
            self.world.programs.remove(&token);
        }
    }

    fn dial(&mut self) {
        let sockets: usize = self
            .world
            .guests
            .values()
            .map(|guest| guest.sockets.len())
            .sum();
        if sockets + self.world.programs.len() > PROGRAMS {
            return;
        }
        let (line, to) = (self.line(), self.line());
        let port = match self.random.below(12) {
            0 => 9999,
            _ => self.random.pick(&PORTS),
        };
        let plan = plan(&mut self.random, self.gentle);
        if self.random.one_in(3) {
            self.world.dial(line, port, kind(port), plan);
            return;
        }
        let cid = match self.random.below(4) {
            0 | 1 => HOST_CID,
            2 => self.world.guests[&to].cid,
            3 if !self.known.is_empty() => self.random.pick(&self.known),
            _ => 3 + self.random.below(8) as u32,
        };
        let guest = self.world.guests.get_mut(&line).expect("listed");
        if guest.hostile || !guest.up {
            return;
        }
        // Now and then the port of an earlier call.
        let own = self
            .random
            .one_in(3)
            .then(|| 700 + self.random.below(6) as u32);
        // A dial that is given up and repeated is one call to the switch: it comes from one socket, with one buffer.
        let size = match own {
            Some(_) => 65_536,
            None => buffer(&mut self.random, guest.kernel),
        };
        let mut socket = Socket::new(Side::Caller, kind(port), size);
        socket.plan = plan;
        if !own.is_some_and(|own| self.is_in_use(line, own)) {
            let now = self.world.now;
            self.world
                .guest(line)
                .connect(now, socket, (cid, port), own);
        }
    }

    /// Whether a socket has this port, or packets of an earlier one are on their way: in vsock nothing distinguishes them from
    /// those of the next. (Linux forgets the address of a socket before the program closes it, and lets it speak all
    /// the same.)
    fn is_in_use(&self, line: LineId, port: u32) -> bool {
        let (guests, switch) = (&self.world.guests, &self.world.switch);
        let on_its_way =
            |packet: &Packet| [packet.header.src_port, packet.header.dst_port].contains(&port);
        guests[&line]
            .sockets
            .values()
            .any(|socket| socket.port == port)
            || switch
                .by_end
                .keys()
                .any(|end| end.line == line && end.port == port)
            || guests
                .values()
                .any(|guest| guest.rx.iter().chain(&guest.tx).any(on_its_way))
    }

    /// A program does something of its own accord.
    fn meddle(&mut self, line: LineId) {
        let now = self.world.now;
        let audit = &mut self.world.audit;
        let guest = self.world.guests.get_mut(&line).expect("listed");
        let sockets: Vec<u32> = guest.sockets.keys().copied().collect();
        if !sockets.is_empty() && !guest.paused {
            let id = self.random.pick(&sockets);
            let least = 3 * u64::from(self.gentle);
            match least + self.random.below(12 - least) {
                0 => guest.close(now, id, audit),
                1 => guest.shutdown(id, SHUTDOWN_SEND, audit),
                2 => guest.shutdown(id, SHUTDOWN_RECEIVE, audit),
                3..=6 => {
                    let socket = guest.sockets.get_mut(&id).expect("listed");
                    socket.plan.reads = !socket.plan.reads;
                }
                _ => {
                    let max = 1 + self.random.below(5000) as u32;
                    if guest.socket(id).own_shutdown & SHUTDOWN_RECEIVE == 0 {
                        guest.read(id, max);
                    }
                }
            }
        }
        let Some(token) = self.some_program() else {
            return;
        };
        let audit = &mut self.world.audit;
        let program = self.world.programs.get_mut(&token).expect("listed");
        let least = 3 * u64::from(self.gentle);
        match least + self.random.below(12 - least) {
            0 => program.close(audit),
            1 => program.finished = true,
            2 => program.refuse(audit),
            3..=6 => program.plan.reads = !program.plan.reads,
            _ => {
                program.read(1 + self.random.below(5000) as u32);
            }
        }
    }

    fn pass_time(&mut self) {
        let random = &mut self.random;
        self.world.now += match random.below(40) {
            0 => Duration::from_millis(random.below(12_000)),
            1..=9 => Duration::from_millis(random.below(100)),
            _ => Duration::from_micros(random.below(500)),
        };
        self.world.fire_timers();
    }

    fn pause(&mut self, line: LineId) {
        let guest = self.world.guests.get_mut(&line).expect("listed");
        guest.paused = !guest.paused;
    }

    fn fault(&mut self, line: LineId) {
        if self.hostile == Some(line) {
            return;
        }
        match self.random.below(5) {
            0 | 1 => {
                self.world.line_up(line);
            }
            2 => {
                self.world.line_down(line);
            }
            3 => {
                let ids: Vec<CircuitId> = self
                    .world
                    .switch
                    .circuits
                    .iter()
                    .map(|(_, circuit)| circuit.id)
                    .collect();
                if !ids.is_empty() {
                    let circuit = self.random.pick(&ids);
                    self.world.audit.taint(circuit);
                    let reason = self.random.pick(&[Reason::MemoryFault, Reason::Operator]);
                    self.world.handle(Event::Kill { circuit, reason });
                }
            }
            _ => {
                self.world.remove_line(line);
                self.lines.retain(|other| *other != line);
                self.add_guest();
            }
        }
        let down = self.lines.iter().filter(|line| !self.world.guests[line].up);
        if let Some(line) = down.copied().next() {
            if self.random.one_in(2) {
                self.world.line_up(line);
            }
        }
        self.restore_host(line);
    }

    /// The operator's file is read again.
    fn change_rules(&mut self) {
        let random = &mut self.random;
        if random.one_in(2) {
            let answers = [0; 4].map(|_| match random.below(4) {
                0 => Answer::Refuse(random.pick(&[Reason::NoListener, Reason::Unreachable])),
                1 if random.one_in(4) => Answer::Never,
                _ => Answer::Accept(plan(random, self.gentle)),
            });
            self.world.set_services(&rules::services(random, answers));
        }
        let random = &mut self.random;
        if random.one_in(3) {
            let uid = random.below(3) as u32;
            self.world.call_as(uid, &[uid, 50]);
        }
        let rules = rules::random(&mut self.random);
        self.world.set_rules(rules);
        if self.random.one_in(2) {
            self.world.enforce();
        }
    }

    /// A guest asks for the number of another.
    fn look_up(&mut self, line: LineId) {
        let name = self.random.pick(&rules::NAMES);
        let known = self.world.resolve(line, name);
        self.known.extend(known);
        self.known.truncate(8);
    }

    fn attack(&mut self) {
        let Some(line) = self.hostile else { return };
        for _ in 0..4 {
            hostile::send(&mut self.world, line, &mut self.random);
        }
    }
}

/// The type of socket that listens on a port.
fn kind(port: u32) -> SocketType {
    match port % 4 {
        3 => SocketType::SeqPacket,
        _ => SocketType::Stream,
    }
}

/// A size of a receive buffer that this kernel can work with: one that counts packets needs room for one.
fn buffer(random: &mut Random, kernel: Kernel) -> u32 {
    let size = random.pick(&[50, 200, 1000, 4096, 65_536, 262_144, 262_144, 2_000_000]);
    match kernel {
        Kernel::Old => size,
        Kernel::CountsPackets => size.max(1024),
    }
}

fn plan(random: &mut Random, gentle: bool) -> Plan {
    let left = match random.below(4) {
        0 => 0,
        1 => random.below(2000),
        2 => random.below(100_000),
        _ => random.below(400_000),
    };
    let write_len = random.pick(&[1, 10, 777, 5000, 65_536, 300_000]);
    Plan {
        // A ring of one buffer takes its time for very many messages.
        left: left.min(5000 * u64::from(write_len)),
        write_len,
        after: match gentle {
            true => After::HalfClose,
            false => random.pick(&[After::Wait, After::HalfClose, After::Close]),
        },
        reads: !random.one_in(4),
        closes: gentle || random.one_in(2),
    }
}
