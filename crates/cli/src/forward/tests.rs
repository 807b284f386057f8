//! Programs on both sides of a real agent's session; only the daemon's host socket is the test's.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Mutex;
use std::thread;

use tempfile::TempDir;

use super::*;

/// A host socket behind which an agent serves, until it is gone.
struct Scene {
    directory: TempDir,
    connections: Arc<Mutex<Vec<UnixStream>>>,
}

impl Scene {
    fn new() -> Scene {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("host")).unwrap();
        let connections = Arc::new(Mutex::new(Vec::new()));
        let all = Arc::clone(&connections);
        let options = agent::session::Options::new();
        thread::spawn(move || {
            for connection in listener.incoming() {
                let mut connection = connection.unwrap();
                all.lock().unwrap().push(connection.try_clone().unwrap());
                let options = options.clone();
                thread::spawn(move || {
                    let mut byte = [0];
                    while byte != *b"\n" {
                        connection.read_exact(&mut byte).unwrap();
                    }
                    connection.write_all(b"OK 1073741824\n").unwrap();
                    let _ = agent::session::serve(&connection.into(), &options);
                });
            }
        });
        Scene {
            directory,
            connections,
        }
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    /// Break every connection to the agent, as a daemon does that ends.
    fn cut(&self) {
        for connection in self.connections.lock().unwrap().drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

struct Way(PathBuf);

impl Guest for Way {
    fn host_socket(&self, _: Duration) -> Result<PathBuf, String> {
        Ok(self.0.clone())
    }
}

/// Forwards on a thread of its own: what it says.
fn forward(scene: &Scene, forwards: Vec<Forward>) -> mpsc::Receiver<String> {
    let (sender, messages) = mpsc::channel(64);
    let way = Way(scene.directory.path().join("host"));
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        if let Err(error) = runtime
            .block_on(async { run(way, Places::listen(forwards).await?, sender.clone()).await })
        {
            let _ = sender.blocking_send(error.to_string());
        }
    });
    messages
}

fn words(messages: &mut mpsc::Receiver<String>) -> String {
    messages.blocking_recv().unwrap()
}

/// A program that answers what it was sent, backwards, once that has ended.
fn program(path: &str) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = connection.unwrap();
            thread::spawn(move || {
                let mut bytes = Vec::new();
                connection.read_to_end(&mut bytes).unwrap();
                bytes.reverse();
                connection.write_all(&bytes).unwrap();
            });
        }
    });
}

fn ask(mut connection: impl Read + Write, end: impl Fn()) {
    let question: Vec<u8> = (0..300_000_u32).map(|number| number as u8).collect();
    connection.write_all(&question).unwrap();
    end();
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer).unwrap();
    answer.reverse();
    assert!(answer == question);
}

fn ask_at(path: &str) {
    let connection = UnixStream::connect(path).unwrap();
    let end = connection.try_clone().unwrap();
    ask(connection, || end.shutdown(Shutdown::Write).unwrap());
}

/// How a connection ends that nothing came over: a reset can come before connect(2) has returned.
fn end_of(connection: io::Result<TcpStream>) -> io::Error {
    let read = connection.and_then(|mut connection| connection.read(&mut [0]));
    read.expect_err("a reset")
}

#[test]
fn either_side_reaches_the_other_and_a_reply_follows_a_half_close() {
    let scene = Scene::new();
    program(&scene.path("program"));
    for direction in [Direction::ToGuest, Direction::ToHost] {
        let place = scene.path(&format!("{direction:?}"));
        let text = format!("{place}:{}", scene.path("program"));
        let mut messages = forward(&scene, vec![Forward::parse(direction, &text).unwrap()]);
        let said = words(&mut messages);
        assert!(said.contains(&place), "{said}");
        for _ in 0..3 {
            ask_at(&place);
        }
    }
}

#[test]
fn over_tcp_a_port_can_be_chosen_and_a_program_that_is_not_there_is_a_reset() {
    let scene = Scene::new();
    for direction in [Direction::ToGuest, Direction::ToHost] {
        let text = format!("0:{}", scene.path("late"));
        let mut messages = forward(&scene, vec![Forward::parse(direction, &text).unwrap()]);
        let said = words(&mut messages);
        let address = said.split(' ').nth(1).unwrap().to_owned();
        end_of(TcpStream::connect(&address));
        let said = words(&mut messages);
        assert!(said.contains("cannot connect"), "{said}");
        program(&scene.path("late"));
        let connection = std::net::TcpStream::connect(&address).unwrap();
        let end = connection.try_clone().unwrap();
        ask(connection, || end.shutdown(Shutdown::Write).unwrap());
        std::fs::remove_file(scene.path("late")).unwrap();
    }
}

/// The source is a program behind the agent; the agent, its VM or the daemon is gone in the middle.
#[test]
fn another_user_of_the_host_leaves_half_of_the_places() {
    if !rustix::process::geteuid().is_root() {
        println!("not tried: this user cannot become others");
        return;
    }
    let scene = Scene::new();
    program(&scene.path("guest"));
    let there = scene.path("guest");
    let forwards = Forward::parse(Direction::ToGuest, &format!("127.0.0.1:0:{there}"));
    let mut messages = forward(&scene, vec![forwards.unwrap()]);
    let address = words(&mut messages).split(' ').nth(1).unwrap().to_owned();
    let own = address.clone();
    let other = thread::spawn(move || {
        let user = rustix::process::Uid::from_raw(4242);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        let connect = |_| TcpStream::connect(&address);
        (0..MAX_CONNECTIONS).map(connect).collect::<Vec<_>>()
    });
    let mut held = other.join().unwrap();
    assert!(words(&mut messages).contains("other users"));
    thread::spawn(move || while messages.blocking_recv().is_some() {});
    // Those beyond its places are reset.
    let last = held.pop().unwrap();
    assert_eq!(end_of(last).kind(), io::ErrorKind::ConnectionReset);
    let connection = TcpStream::connect(own).unwrap();
    let end = connection.try_clone().unwrap();
    ask(connection, || end.shutdown(Shutdown::Write).unwrap());
}

#[test]
fn a_connection_that_is_cut_has_no_end() {
    let scene = Scene::new();
    let source = UnixListener::bind(scene.path("source")).unwrap();
    for direction in [Direction::ToGuest, Direction::ToHost] {
        let text = format!("0:{}", scene.path("source"));
        let mut messages = forward(&scene, vec![Forward::parse(direction, &text).unwrap()]);
        let said = words(&mut messages);
        let address = said.split(' ').nth(1).unwrap().to_owned();
        let mut receiver = std::net::TcpStream::connect(&address).unwrap();
        let (mut sender, _) = source.accept().unwrap();
        sender.write_all(b"half of it").unwrap();
        receiver.read_exact(&mut [0; 10]).unwrap();
        scene.cut();
        let error = receiver.read(&mut [0]).unwrap_err();
        assert_eq!(
            error.kind(),
            io::ErrorKind::ConnectionReset,
            "{direction:?}"
        );
    }
}

#[test]
fn a_place_in_the_guest_is_listened_at_again_after_a_cut() {
    let scene = Scene::new();
    program(&scene.path("program"));
    let text = format!("{}:{}", scene.path("place"), scene.path("program"));
    let mut messages = forward(
        &scene,
        vec![Forward::parse(Direction::ToHost, &text).unwrap()],
    );
    assert!(words(&mut messages).starts_with("forwarding"));
    ask_at(&scene.path("place"));
    scene.cut();
    let said = words(&mut messages);
    assert!(said.contains("in the guest has ended: "), "{said}");
    let said = words(&mut messages);
    assert!(said.starts_with("forwarding"), "{said}");
    ask_at(&scene.path("place"));
}

#[test]
fn a_place_that_is_taken_is_told_before_anything_is_forwarded() {
    let scene = Scene::new();
    program(&scene.path("program"));
    for direction in [Direction::ToGuest, Direction::ToHost] {
        let text = format!("{0}:{0}", scene.path("program"));
        let mut messages = forward(&scene, vec![Forward::parse(direction, &text).unwrap()]);
        let said = words(&mut messages);
        assert!(said.contains("cannot listen"), "{said}");
    }
}

/// A server in the guest that refuses an upload: it answers, and closes without having read the rest.
#[test]
fn what_a_program_said_before_it_broke_off_still_arrives_and_is_no_end() {
    let scene = Scene::new();
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let text = format!("0:{}", server.local_addr().unwrap());
    let mut messages = forward(
        &scene,
        vec![Forward::parse(Direction::ToGuest, &text).unwrap()],
    );
    let said = words(&mut messages);
    let address = said.split(' ').nth(1).unwrap().to_owned();
    let mut client = std::net::TcpStream::connect(&address).unwrap();
    client.write_all(b"unread").unwrap();
    let (mut program, _) = server.accept().unwrap();
    assert_eq!(program.peek(&mut [0; 6]).unwrap(), 6);
    let answer: Vec<u8> = (0..50_000_u32).map(|index| index as u8).collect();
    program.write_all(&answer).unwrap();
    // The test has a descriptor of each connection to the agent.
    scene.connections.lock().unwrap().clear();
    drop(program);
    let mut received = Vec::new();
    let error = client.read_to_end(&mut received).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    assert!(received == answer, "{} bytes", received.len());
}

/// A guest that has no host socket any more.
struct Gone;

impl Guest for Gone {
    fn host_socket(&self, _: Duration) -> Result<PathBuf, String> {
        Err("it is gone".to_owned())
    }
}

#[tokio::test]
async fn callers_without_end_have_a_place_before_they_cost_anything() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("program");
    let program = tokio::net::UnixListener::bind(&path).unwrap();
    let path = path.into_os_string().into_encoded_bytes();
    let (sender, mut messages) = mpsc::channel(1);
    let shared = Arc::new(Shared {
        guest: Gone,
        places: Arc::new(Semaphore::new(1)),
        of_others: Arc::new(Semaphore::new(0)),
        sender,
    });
    let (near, mut agent) = tokio::net::UnixStream::pair().unwrap();
    let callers = 1000;
    let mut frames = Vec::new();
    for number in 0..callers {
        let caller = Frame::Forward(Message::Caller { number });
        caller.encode(OPERATION_CHANNEL, &mut frames).unwrap();
    }
    agent.write_all(&frames).await.unwrap();
    let taking = tokio::spawn(async move {
        let (decoder, key) = (Decoder::new(), [0; 16]);
        let mut listening = Listening {
            stream: near,
            decoder,
            key,
        };
        take_callers(&shared, &mut listening, &Place::Unix { path }).await
    });
    for _ in 0..callers {
        program.accept().await.unwrap();
        // The one that takes them, and the one that was taken, which is about to give its place back.
        let tasks = tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks();
        assert!(tasks <= 2, "{tasks}");
        assert_eq!(messages.recv().await.unwrap(), "it is gone");
    }
    drop(agent);
    assert_eq!(taking.await.unwrap(), "the connection was closed");
}
