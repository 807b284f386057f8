//! Making the call of a cell, as its caller would.

use std::io::Write;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::TryRecvError;

use wire::switchboard::link::FromAgent;
use wire::vsock::{HOST_CID, SocketType};

use crate::config::{VMS, hybrid_socket, published};
use crate::parties::*;
use crate::programs::circuit_of_ours;
use crate::world::{End, World};

/// What came of a call: the answer, or why there is none.
pub type Outcome = Result<String, String>;

/// A port of guests below 1024, of which only privileged programs have one.
const PRIVILEGED: u32 = 1000;

/// What a caller dials: by CID and port, or for programs of the host by a VM's name and port.
pub fn dialled(cell: &Cell) -> (String, u32) {
    let (callee, port) = cell.callee.question(cell.caller);
    match (cell.way, cell.caller) {
        (Way::Redirect, Caller::Guest(..)) => ("host".to_owned(), cell.callee.redirected_port()),
        (Way::Redirect, _) => (DECOY.to_owned(), cell.callee.redirected_port()),
        (Way::Alias, _) => (cell.callee.alias(cell.caller).unwrap_or(callee), port),
        _ => (callee, port),
    }
}

/// Makes the call of a cell and asks for the peer.
pub fn call(world: &mut World, cell: &Cell, number: u64) -> Outcome {
    let question = format!("who {number}\n");
    let (to, port) = dialled(cell);
    match (cell.caller, cell.way) {
        (Caller::Program(_) | Caller::Started, Way::Window) => {
            let (socket, to) = (world.run("circuit.sock"), format!("{to}:{port}"));
            let answer = match (cell.caller, &world.programs) {
                (Caller::Program(identity), Some(programs)) => {
                    programs.circuit(identity, socket, to, question)
                }
                _ => circuit_of_ours(socket, to, question),
            };
            world.wants_windows = true;
            let answer = world.until(None, |_| match answer.try_recv() {
                Ok(answer) => Some(answer),
                Err(TryRecvError::Empty) => None,
                Err(error) => Some(Err(error.to_string())),
            });
            world.wants_windows = false;
            answer.unwrap_or_else(|| Err("HUNG: the circuit".to_owned()))
        }
        (Caller::Program(identity), _) => {
            let path = host_socket(world, &to);
            let programs = world.programs.as_ref().unwrap();
            let socket = programs.connect(identity, path);
            let end = End::Socket(socket.map_err(|error| error.to_string())?);
            world.send(&end, format!("CONNECT {port}\n{question}").as_bytes())?;
            let answer = line_behind(world, &end);
            world.close(end);
            answer
        }
        (Caller::Started, _) => call_by_a_started_program(world, &to, port, &question),
        (Caller::PublishedTcp | Caller::PublishedUnix, way) => {
            let target = match way {
                Way::Redirect => format!("{to}:{port}"),
                _ => cell.callee.answers_as(cell.caller),
            };
            let end = published_end(world, cell.caller, &target)?;
            ask(world, end, &question)
        }
        (Caller::Guest(line, _), _) => {
            let vm = cell.caller.vm().unwrap();
            let end = dial_from_guest(world, cell, line, vm, port)?;
            match cell.callee {
                Callee::Egress(place) => ask_proxy(world, end, place, &question),
                Callee::Own(own) => ask_daemon(world, end, vm, own, number),
                Callee::Service(Service::UdpStream) => {
                    let framed = [
                        &(question.len() as u16).to_be_bytes()[..],
                        question.as_bytes(),
                    ];
                    let answer = ask_bytes(world, end, &framed.concat());
                    answer.map(|line| line.trim_start_matches(|c: char| c.is_control()).to_owned())
                }
                _ => ask(world, end, &question),
            }
        }
    }
}

fn host_socket(world: &World, vm: &str) -> PathBuf {
    world.run(&format!("{}.sock", vm.replace('/', ".")))
}

fn dial_from_guest(
    world: &mut World,
    cell: &Cell,
    line: Line,
    vm: &'static str,
    port: u32,
) -> Result<End, String> {
    let port = match cell.callee {
        Callee::Egress(_) if cell.way != Way::Redirect => EGRESS_PORT,
        _ => port,
    };
    match line {
        Line::Rings => {
            let cid = match (cell.way, cell.callee) {
                (Way::Alias, _) => alias_cid(world, vm, cell)?,
                (Way::Cid, Callee::Guest(..) | Callee::Itself(_)) => {
                    cid_of(cell.callee.vm(cell.caller).unwrap())
                }
                _ => HOST_CID,
            };
            let socket_type = match cell.callee {
                Callee::Service(service) if service.is_seqpacket() => SocketType::SeqPacket,
                _ => SocketType::Stream,
            };
            let local = matches!(cell.callee, Callee::Own(1005 | 1007)).then_some(PRIVILEGED);
            world.dial(vm, (cid, port), socket_type, local)
        }
        Line::Hybrid => {
            let path = hybrid_socket(world.directory.path(), vm);
            let path = format!("{}_{port}", path.display());
            let stream = UnixStream::connect(path).map_err(|error| error.to_string())?;
            Ok(End::Socket(stream.into()))
        }
        Line::Serial => {
            let (socket, answered) = world.serial[vm].dial(port);
            let answer = world.until(None, |_| answered.try_recv().ok());
            match answer {
                Some(Ok(())) => Ok(End::Socket(socket)),
                Some(Err(refusal)) => Err(format!("{refusal:?}")),
                None => Err("HUNG: the channel".to_owned()),
            }
        }
    }
}

pub fn cid_of(vm: &str) -> u32 {
    let (_, cid, _) = VMS.iter().find(|(name, ..)| *name == vm).unwrap();
    *cid
}

/// Asks the directory for the CID of another name. Where that has nothing to say, the CID is the one that another daemon said: a guest could guess it.
fn alias_cid(world: &mut World, vm: &'static str, cell: &Cell) -> Result<u32, String> {
    let name = cell.callee.alias(cell.caller).unwrap();
    let end = world.dial(vm, (HOST_CID, 1006), SocketType::Stream, None)?;
    let answer = ask(world, end, &format!("RESOLVE {name}\n"))?;
    let told = answer.strip_prefix("OK ").and_then(|cid| cid.parse().ok());
    match told {
        Some(cid) => {
            world.aliases.lock().unwrap().insert((vm, name), cid);
            Ok(cid)
        }
        None => {
            let known = world.aliases.lock().unwrap().get(&(vm, name)).copied();
            known.ok_or(answer)
        }
    }
}

fn published_end(world: &World, caller: Caller, target: &str) -> Result<End, String> {
    let found = published().into_iter().find(|(to, ..)| to == target);
    let (_, path, port) = found.unwrap();
    let socket: Result<OwnedFd, std::io::Error> = match caller {
        Caller::PublishedTcp => TcpStream::connect((world.published, port)).map(OwnedFd::from),
        _ => UnixStream::connect(world.directory.path().join(path)).map(OwnedFd::from),
    };
    Ok(End::Socket(socket.map_err(|error| error.to_string())?))
}

fn ask(world: &mut World, end: End, question: &str) -> Outcome {
    ask_bytes(world, end, question.as_bytes())
}

fn ask_bytes(world: &mut World, end: End, question: &[u8]) -> Outcome {
    let answer = world.send(&end, question).and_then(|()| world.line(&end));
    world.close(end);
    answer
}

/// The answer of the host socket, and the line behind it.
fn line_behind(world: &mut World, end: &End) -> Outcome {
    let first = world.line(end)?;
    let mut lines = first.lines();
    let verdict = lines.next().unwrap_or_default().to_owned();
    if !verdict.starts_with("OK ") {
        return Err(verdict);
    }
    match lines.next() {
        Some(line) => Ok(line.to_owned()),
        None => world.line(end),
    }
}

fn call_by_a_started_program(world: &mut World, vm: &str, port: u32, question: &str) -> Outcome {
    let path = host_socket(world, vm);
    let end = world.dial("bridge", (HOST_CID, BRIDGE_PORT), SocketType::Stream, None)?;
    let mut words = Vec::new();
    write!(words, "{}\n{port}\n{question}", path.display()).unwrap();
    let mut told = world.send(&end, &words).map(|()| String::new());
    while let Ok(text) = &told {
        let answer = text
            .split_once("ANSWER ")
            .and_then(|(_, answer)| answer.split_once('\n'));
        if let Some((answer, _)) = answer {
            told = match answer.starts_with("ERR ") {
                true => Err(answer.to_owned()),
                false => Ok(answer.to_owned()),
            };
            break;
        }
        let before = text.clone();
        told = match world.receive(&end) {
            Ok(more) if more.is_empty() => Err(format!("the program ended: {before:?}")),
            Ok(more) => Ok(before + &String::from_utf8_lossy(&more)),
            Err(error) => Err(error),
        };
    }
    world.close(end);
    told
}

/// SOCKS5 (RFC 1928): CONNECT to a place, and the question there.
fn ask_proxy(world: &mut World, end: End, place: Place, question: &str) -> Outcome {
    let mut request = vec![5, 1, 0];
    match place.asked().parse::<std::net::IpAddr>() {
        Ok(std::net::IpAddr::V4(address)) => {
            request.push(1);
            request.extend(address.octets());
        }
        Ok(std::net::IpAddr::V6(address)) => {
            request.push(4);
            request.extend(address.octets());
        }
        Err(_) => {
            request.extend([3, place.asked().len() as u8]);
            request.extend(place.asked().as_bytes());
        }
    }
    request.extend((place_port() as u16).to_be_bytes());
    let answer = socks(world, &end, &request).and_then(|()| {
        world.send(&end, question.as_bytes())?;
        world.line(&end)
    });
    world.close(end);
    answer
}

fn socks(world: &mut World, end: &End, request: &[u8]) -> Result<(), String> {
    world.send(end, &[5, 1, 0])?;
    let method = receive_len(world, end, 2)?;
    if method != [5, 0] {
        return Err(format!("SOCKS: {method:?}"));
    }
    world.send(end, request)?;
    // The address behind it is of IPv4: nothing is said of where the connection comes from.
    let reply = receive_len(world, end, 10)?;
    match reply[1] {
        0 => Ok(()),
        code => Err(format!("SOCKS {code}")),
    }
}

fn receive_len(world: &mut World, end: &End, len: usize) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let more = world.receive(end)?;
        if more.is_empty() {
            return Err("ended".to_owned());
        }
        bytes.extend(more);
    }
    Ok(bytes)
}

/// What the daemon answers at its own ports, as a callee would.
fn ask_daemon(world: &mut World, end: End, vm: &str, port: u32, number: u64) -> Outcome {
    let said = match port {
        1006 => ask(world, end, "WHOAMI\n").and_then(|answer| {
            let (domain, name) = vm.split_once('/').unwrap_or(("default", vm));
            match answer == format!("OK {name} {domain} {}", cid_of(vm)) {
                true => Ok(()),
                false => Err(answer),
            }
        }),
        1005 => ask(world, end, &FromAgent::Hello { version: 1 }.to_string()).map(drop),
        _ => greet(world, end),
    };
    said.map(|()| format!("daemon:{port} {number}"))
}

/// Waits for the daemon's hello, as an agent does.
fn greet(world: &mut World, end: End) -> Result<(), String> {
    let heard = world.receive(&end);
    world.close(end);
    match heard?.is_empty() {
        true => Err("ended".to_owned()),
        false => Ok(()),
    }
}
