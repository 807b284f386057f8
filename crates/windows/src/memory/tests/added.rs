//! Windows that are added to running VMMs.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::MutexGuard;
use std::thread::{self, JoinHandle};

use serde_json::{Value, json};

use super::*;

/// A VMM that takes what it is given, and shows it to its guest's agent.
struct Vmm {
    path: PathBuf,
    inner: Arc<Mutex<Inner>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Inner {
    objects: Vec<String>,
    refuses: bool,
    devices: usize,
    refuses_devices: bool,
    /// Ends with the next connection.
    ends: bool,
    /// Gets each new device.
    pool: Option<(Arc<Windows>, String)>,
}

impl Vmm {
    fn start(path: PathBuf) -> Vmm {
        let listener = UnixListener::bind(&path).unwrap();
        let inner = Arc::new(Mutex::new(Inner::default()));
        let shared = inner.clone();
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.lock().unwrap().ends {
                    return;
                }
                serve(stream.unwrap(), &shared);
            }
        });
        let thread = Some(thread);
        Vmm {
            path,
            inner,
            thread,
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    /// The agent of its guest, which shows each device as it comes.
    fn show(&self, pool: &Arc<Windows>, vm: &str) {
        self.inner().pool = Some((pool.clone(), vm.to_owned()));
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.inner().ends = true;
        UnixStream::connect(&self.path).unwrap();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn serve(mut stream: UnixStream, inner: &Mutex<Inner>) {
    let _ = stream.write_all(b"{\"QMP\": {}}\n");
    let lines = BufReader::new(stream.try_clone().unwrap()).lines();
    for line in lines.map_while(Result::ok) {
        let command: Value = serde_json::from_str(&line).unwrap();
        let arguments = &command["arguments"];
        let answer = {
            let mut inner = inner.lock().unwrap();
            match command["execute"].as_str().unwrap() {
                "qom-list" => {
                    let objects = inner.objects.iter();
                    Some(objects.map(|name| json!({ "name": name })).collect())
                }
                "add-fd" => Some(json!({ "fdset-id": 1, "fd": 5 })),
                "object-add" if inner.refuses => None,
                "object-add" => {
                    inner
                        .objects
                        .push(arguments["id"].as_str().unwrap().to_owned());
                    Some(json!({}))
                }
                "object-del" => {
                    let id = arguments["id"].as_str().unwrap();
                    inner.objects.retain(|object| object != id);
                    Some(json!({}))
                }
                "device_add" if inner.refuses_devices => None,
                "device_add" => {
                    inner.devices += 1;
                    let memory = arguments["memdev"].as_str().unwrap();
                    let uuid = memory.strip_prefix("ringdown-window-").unwrap();
                    let uuid = WindowId::parse(uuid).unwrap();
                    if let Some((pool, vm)) = inner.pool.clone() {
                        drop(inner);
                        let window = pool.list().into_iter().find(|window| window.uuid == uuid);
                        assert!(pool.seen(&vm, uuid, window.unwrap().len - 2 * MIB));
                    }
                    Some(json!({}))
                }
                _ => Some(json!({})),
            }
        };
        let answer = match answer {
            Some(value) => json!({ "return": value, "id": command["id"] }),
            None => json!({ "error": { "desc": "no" }, "id": command["id"] }),
        };
        if writeln!(stream, "{answer}").is_err() {
            return;
        }
    }
}

struct Two {
    pool: Arc<Windows>,
    a: Vmm,
    b: Vmm,
    // Behind the VMMs, which end by a connection to their sockets in it.
    _directory: tempfile::TempDir,
}

/// Two VMs, `a` and `b`, each with a VMM.
fn two(windows: [&str; 2]) -> Two {
    let directory = tempfile::tempdir().unwrap();
    let pool = Arc::new(Windows::new(directory.path()).unwrap());
    let vmms = ["a", "b"].map(|name| Vmm::start(directory.path().join(name)));
    for (vmm, windows) in vmms.iter().zip(windows) {
        let name = vmm.path.file_name().unwrap().to_str().unwrap();
        let mut request = VmRequest::named(name);
        request.windows = Some(parse_windows(windows).unwrap());
        request.qmp = Some(vmm.path.clone());
        let spec = resolve(directory.path(), &request);
        assert!(files(directory.path(), &spec).is_empty());
        pool.open(&spec).unwrap();
        vmm.show(&pool, name);
    }
    let [a, b] = vmms;
    Two {
        pool,
        a,
        b,
        _directory: directory,
    }
}

fn between() -> Pair {
    let [a, b] = ["a", "b"].map(str::to_owned);
    Pair::Vms { a, b }
}

fn release_between(pool: &Windows, lent: &Lent) {
    for vm in ["a", "b"] {
        assert!(pool.released(lent.uuid, lent.generation, &party(vm)));
    }
}

#[test]
fn windows_with_the_host_are_added_when_the_agent_comes() {
    let two = two(["2x8M", "1x8M"]);
    let (pool, vmm) = (&two.pool, &two.a);
    assert!(vmm.inner().objects.is_empty());
    pool.arrived("a");
    assert_eq!(vmm.inner().objects.len(), 2);
    let lent = pool.take(&host("a"), Kind::Bytes, MOST).unwrap();
    // An agent that comes again, in the same guest: nothing has to be added.
    pool.gone("a");
    pool.arrived("a");
    assert_eq!(vmm.inner().objects.len(), 2);
    pool.released(lent.uuid, lent.generation, &Party::Host);
    show(pool, "a");
    // A guest that was started anew, with its VMM: the same windows are added again.
    let before: BTreeSet<String> = std::mem::take(&mut vmm.inner().objects)
        .into_iter()
        .collect();
    pool.gone("a");
    pool.arrived("a");
    assert_eq!(BTreeSet::from_iter(vmm.inner().objects.clone()), before);
    assert!(two.b.inner().objects.is_empty());
    pool.take(&host("a"), Kind::Bytes, MOST).unwrap();
}

#[test]
fn a_sealed_window_is_its_first_users_for_ever() {
    let two = two(["2x8M", "1x8M"]);
    two.pool.arrived("a");
    let of = |uid| {
        let vm = "a".to_owned();
        two.pool.take(&Pair::Host { vm, uid }, Kind::Bytes, MOST)
    };
    let (first, second) = (of(1000).unwrap(), of(1001).unwrap());
    release(&two.pool, &first, "a");
    release(&two.pool, &second, "a");
    assert_eq!(of(1002), Err(NoWindow::None));
    assert_eq!(of(0), Err(NoWindow::None));
    assert_eq!(of(1000).unwrap().uuid, first.uuid);
    assert_eq!(of(1000), Err(NoWindow::Busy));
    assert_eq!(of(1001).unwrap().uuid, second.uuid);
}

#[test]
fn strangers_get_no_window_in_which_they_could_forge_the_guests_descriptions_of_pages() {
    for (windows, is_for_strangers) in [("1x64M", true), ("1x66M", false), ("1x128M", false)] {
        let two = two([windows, windows]);
        two.pool.arrived("a");
        two.pool.arrived("b");
        let of = |uid| {
            let vm = "a".to_owned();
            two.pool.take(&Pair::Host { vm, uid }, Kind::Bytes, MOST)
        };
        let of_stranger = of(own_uid() + 1000).map(|_| ());
        match is_for_strangers {
            true => assert_eq!(of_stranger, Ok(())),
            false => {
                assert_eq!(of_stranger, Err(NoWindow::None));
                of(own_uid()).unwrap();
            }
        }
        let between = two.pool.take(&between(), Kind::Bytes, MOST).unwrap();
        let list = two.pool.list();
        let window = list.iter().find(|window| window.uuid == between.uuid);
        assert_eq!(window.unwrap().len, 64 * MIB);
    }
}

#[test]
fn two_vms_get_a_window_when_they_first_need_one() {
    let two = two(["2x16M", "1x8M"]);
    let pool = &two.pool;
    let take = || pool.take(&between(), Kind::Bytes, MOST);
    assert_eq!(take(), Err(NoWindow::None), "no agent is there");
    pool.arrived("a");
    assert_eq!(take(), Err(NoWindow::None), "one agent is there");
    pool.arrived("b");
    let lent = take().unwrap();
    let window = pool
        .list()
        .into_iter()
        .find(|window| window.uuid == lent.uuid)
        .unwrap();
    assert_eq!(window.len, 8 * MIB, "the smaller one's size");
    let name = format!("ringdown-window-{}", lent.uuid);
    assert!(
        [&two.a, &two.b]
            .iter()
            .all(|vmm| vmm.inner().objects.contains(&name))
    );
    assert_eq!(take(), Err(NoWindow::Busy), "one of them may have no more");
    assert!(
        !pool.released(lent.uuid, lent.generation, &Party::Host),
        "no party to it"
    );
    release_between(pool, &lent);
    // In either order.
    let [a, b] = ["b", "a"].map(str::to_owned);
    let again = pool.take(&Pair::Vms { a, b }, Kind::Bytes, MOST).unwrap();
    assert_eq!(again.uuid, lent.uuid);
    // It goes with either of them.
    pool.close("b");
    assert!(pool.list().iter().all(|window| window.uuid != lent.uuid));
    assert!(!pool.released(again.uuid, again.generation, &party("a")));
    let alone = Pair::Vms {
        a: "a".to_owned(),
        b: "a".to_owned(),
    };
    assert_eq!(pool.take(&alone, Kind::Bytes, MOST), Err(NoWindow::None));
}

#[test]
fn a_guest_that_never_shows_its_device_costs_the_first_circuit_a_while() {
    let two = two(["1x8M", "1x8M"]);
    two.pool.arrived("a");
    two.pool.arrived("b");
    two.b.inner().pool = None;
    assert_eq!(
        two.pool.take(&between(), Kind::Bytes, MOST),
        Err(NoWindow::Busy)
    );
    show(&two.pool, "b");
    two.pool.take(&between(), Kind::Bytes, MOST).unwrap();
}

#[test]
fn a_vmm_that_refuses_is_asked_again_when_its_agent_comes_again() {
    let two = two(["1x8M", "1x8M"]);
    let pool = &two.pool;
    two.b.inner().refuses = true;
    pool.arrived("a");
    pool.arrived("b");
    assert!(two.b.inner().objects.is_empty());
    pool.arrived("a");
    assert_eq!(
        pool.take(&between(), Kind::Bytes, MOST),
        Err(NoWindow::None)
    );
    // It takes those with the host, and then nothing more.
    two.b.inner().refuses = false;
    pool.arrived("b");
    two.b.inner().refuses = true;
    assert_eq!(
        pool.take(&between(), Kind::Bytes, MOST),
        Err(NoWindow::Failed)
    );
    // Nothing of it stays at the first, which may have no more than one.
    assert_eq!(two.a.inner().objects.len(), 1);
    assert_eq!(two.a.inner().devices, 1);
    assert_eq!(pool.list().len(), 2);
    assert_eq!(
        pool.take(&between(), Kind::Bytes, MOST),
        Err(NoWindow::None)
    );
    two.b.inner().refuses = false;
    pool.arrived("b");
    let lent = pool.take(&between(), Kind::Bytes, MOST).unwrap();
    assert_eq!(two.a.inner().devices, 2);
    release_between(pool, &lent);
    pool.close("b");
    assert_eq!(pool.list().len(), 1);
}

#[test]
fn a_vmm_that_has_failed_holds_up_nothing_more_that_waited_for_it() {
    let two = two(["8x8M", "8x8M"]);
    let pool = &two.pool;
    pool.arrived("a");
    pool.arrived("b");
    // What VM b's VMM does from here on.
    let kept = two.b.path.with_extension("kept");
    std::fs::rename(&two.b.path, &kept).unwrap();
    let silent = UnixListener::bind(&two.b.path).unwrap();
    thread::scope(|scope| {
        let take = || pool.take(&between(), Kind::Bytes, MOST);
        let takers = [(); 4].map(|()| scope.spawn(take));
        let (first, _) = silent.accept().unwrap();
        // Each has given memory to VM a's VMM, and waits for that of VM b.
        while two.a.inner().objects.len() < 8 + 4 {
            thread::yield_now();
        }
        drop(first);
        for taker in takers {
            taker.join().unwrap().unwrap_err();
        }
    });
    silent.set_nonblocking(true).unwrap();
    let again = silent.accept().map(|_| ()).map_err(|error| error.kind());
    assert_eq!(again, Err(std::io::ErrorKind::WouldBlock));
    std::fs::rename(&kept, &two.b.path).unwrap();
}

#[test]
fn a_vmm_that_takes_memory_and_refuses_the_device_is_asked_again_when_its_agent_comes_again() {
    let two = two(["1x8M", "1x8M"]);
    let pool = &two.pool;
    pool.arrived("a");
    pool.arrived("b");
    two.a.inner().refuses_devices = true;
    assert_eq!(
        pool.take(&between(), Kind::Bytes, MOST),
        Err(NoWindow::Failed)
    );
    assert_eq!(two.a.inner().objects.len(), 1, "no memory without a device");
    assert_eq!(two.b.inner().devices, 2);
    two.a.inner().refuses_devices = false;
    pool.arrived("a");
    // Its agent has shown both anew; the other's has shown its own when it came.
    pool.take(&between(), Kind::Bytes, MOST).unwrap();
    assert_eq!(two.b.inner().devices, 2, "it is not added twice");
}

#[test]
fn many_circuits_of_two_vms_share_their_windows() {
    let two = two(["2x8M", "2x8M"]);
    let pool = &two.pool;
    pool.arrived("a");
    pool.arrived("b");
    let used = Mutex::new(BTreeSet::new());
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..50 {
                    // As many circuits at once as windows.
                    let lent = loop {
                        match pool.take(&between(), Kind::Bytes, MOST) {
                            Ok(lent) => break lent,
                            Err(NoWindow::Busy) => {}
                            Err(error) => panic!("{error}"),
                        }
                    };
                    used.lock().unwrap().insert(lent.uuid);
                    release_between(pool, &lent);
                }
            });
        }
    });
    assert!((1..=2).contains(&used.lock().unwrap().len()));
    let list = pool.list();
    assert!(
        list.iter().all(|window| window.state == WindowState::Free),
        "{list:?}"
    );
}
