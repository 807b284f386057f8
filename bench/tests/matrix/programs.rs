//! Programs of the host: with users and groups of their own, and one that a service starts.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};

use circuit::Connector;
use rustix::process::geteuid;
use rustix::thread::{Gid, Uid, set_thread_gid, set_thread_groups, set_thread_uid};

use crate::parties::{IDENTITIES, Identity, credentials};
use crate::servers::{read_line, spawn};
use crate::world::PATIENCE;

/// What a program is to do.
enum Task {
    Connect(PathBuf, Sender<io::Result<OwnedFd>>),
    Circuit {
        socket: PathBuf,
        to: String,
        question: String,
        answer: Sender<Result<String, String>>,
    },
}

/// A thread for each identity, with that user and these groups: the kernel knows them of each thread by itself.
pub struct Programs {
    tasks: Vec<(Identity, Sender<Task>)>,
}

impl Programs {
    /// None if only root may become another user.
    pub fn start() -> Option<Programs> {
        if !geteuid().is_root() {
            return None;
        }
        let tasks = IDENTITIES.map(|identity| {
            let (take, tasks) = channel();
            spawn(move || {
                become_user(identity).unwrap();
                work(&tasks);
            });
            (identity, take)
        });
        Some(Programs {
            tasks: tasks.into(),
        })
    }

    fn give(&self, to: Identity, task: Task) {
        let (_, tasks) = self.tasks.iter().find(|(of, _)| *of == to).unwrap();
        tasks.send(task).unwrap();
    }

    /// Connects to a socket.
    pub fn connect(&self, by: Identity, path: PathBuf) -> io::Result<OwnedFd> {
        let (answer, answered) = channel();
        self.give(by, Task::Connect(path, answer));
        answered.recv_timeout(PATIENCE).map_err(io::Error::other)?
    }

    /// Asks for a circuit and says something on it. The answer comes later.
    pub fn circuit(
        &self,
        by: Identity,
        socket: PathBuf,
        to: String,
        question: String,
    ) -> Receiver<Result<String, String>> {
        let (answer, answered) = channel();
        let task = Task::Circuit {
            socket,
            to,
            question,
            answer,
        };
        self.give(by, task);
        answered
    }
}

/// The same for a program of this very user.
pub fn circuit_of_ours(
    socket: PathBuf,
    to: String,
    question: String,
) -> Receiver<Result<String, String>> {
    let (answer, answered) = channel();
    spawn(move || drop(answer.send(ask_on_circuit(socket, &to, &question))));
    answered
}

fn become_user(identity: Identity) -> rustix::io::Result<()> {
    let (user, primary, others) = credentials(identity);
    set_thread_groups(&others.map(Gid::from_raw))?;
    set_thread_gid(Gid::from_raw(primary))?;
    set_thread_uid(Uid::from_raw(user))
}

fn work(tasks: &Receiver<Task>) {
    while let Ok(task) = tasks.recv() {
        match task {
            Task::Connect(path, answer) => {
                // The receiver may have given up.
                let _ = answer.send(UnixStream::connect(path).map(OwnedFd::from));
            }
            Task::Circuit {
                socket,
                to,
                question,
                answer,
            } => {
                let _ = answer.send(ask_on_circuit(socket, &to, &question));
            }
        }
    }
}

fn ask_on_circuit(socket: PathBuf, to: &str, question: &str) -> Result<String, String> {
    let connector = Connector::new().socket(socket).patience(PATIENCE);
    let mut circuit = connector.connect(to).map_err(|error| error.to_string())?;
    if circuit.is_zero_copy() {
        // The same number, and nothing passes: what windows carry is tested elsewhere.
        return Ok(question.trim_end().replace("who", "zero-copy"));
    }
    let writer = circuit.writer();
    let said = writer.write_all(question.as_bytes());
    said.and_then(|()| writer.flush())
        .map_err(|error| error.to_string())?;
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\n") {
        match circuit.reader().read(&mut byte) {
            Ok(0) => return Err("ended".to_owned()),
            Ok(_) => line.push(byte[0]),
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
}

/// The name of the test below, by which the service starts this very program.
pub const STARTED_TEST: &str = "programs::started_by_a_service";

/// Not a test: the program that a service starts for each call. It reads a host socket, a port and what to ask there, each on a line.
#[test]
#[ignore = "a service of the matrix starts it"]
fn started_by_a_service() {
    let lines = [(); 3].map(|()| read_line(io::stdin()));
    let [Some(path), Some(port), Some(question)] = lines else {
        return;
    };
    let asked = UnixStream::connect(path).and_then(|mut stream| {
        stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
        let answer = read_line(&stream).unwrap_or_default();
        if !answer.starts_with("OK ") {
            return Ok(answer);
        }
        stream.write_all(format!("{question}\n").as_bytes())?;
        Ok(read_line(&stream).unwrap_or_else(|| "ended".to_owned()))
    });
    let answer = asked.unwrap_or_else(|error| format!("ERR {error}"));
    // The harness says something of its own before it.
    println!("\nANSWER {answer}");
}
