//! Pools in directories of their own, with VMMs that obey.

mod added;

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

use config::{Cids, Plan, VmRequest, parse_windows};

use super::*;
use crate::switchboard::pool::{Kind, Lent, NoWindow, Pair, WindowPool, WindowState, WindowStatus};

const MIB: u64 = 1 << 20;
const MOST: u64 = u64::MAX;

fn line(directory: &Path, name: &str, windows: &str) -> LineSpec {
    let mut request = VmRequest::named(name);
    request.windows = Some(parse_windows(windows).unwrap());
    resolve(directory, &request)
}

fn resolve(directory: &Path, request: &VmRequest) -> LineSpec {
    let mut plan = Plan::new(directory.to_owned(), Cids::default());
    plan.add(request).unwrap()
}

fn open(directory: &Path, name: &str, windows: &str) -> Windows {
    let pool = Windows::new(directory).unwrap();
    pool.open(&line(directory, name, windows)).unwrap();
    pool.sweep();
    pool
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn host(vm: &str) -> Pair {
    Pair::Host {
        vm: vm.to_owned(),
        uid: own_uid(),
    }
}

fn party(vm: &str) -> Party {
    Party::Vm(vm.to_owned())
}

/// What an agent says at first: each device there is.
fn show(pool: &Windows, vm: &str) {
    for window in pool.list() {
        pool.seen(vm, window.uuid, window.len - 2 * MIB);
    }
}

fn only(pool: &Windows) -> WindowStatus {
    let list = pool.list();
    assert_eq!(list.len(), 1, "{list:?}");
    list[0].clone()
}

fn uuids(pool: &Windows) -> BTreeSet<WindowId> {
    pool.list().iter().map(|window| window.uuid).collect()
}

fn bytes(pool: &Windows, uuid: WindowId, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let file = File::from(pool.file(uuid).unwrap());
    file.read_exact_at(&mut bytes, at).unwrap();
    bytes
}

fn release(pool: &Windows, lent: &Lent, vm: &str) {
    for by in [Party::Host, party(vm)] {
        assert!(pool.released(lent.uuid, lent.generation, &by));
    }
}

#[test]
fn a_vm_without_windows_has_none() {
    let directory = tempfile::tempdir().unwrap();
    let pool = Windows::new(directory.path()).unwrap();
    let spec = resolve(directory.path(), &VmRequest::named("web"));
    pool.open(&spec).unwrap();
    assert!(pool.list().is_empty() && !directory.path().join("windows").exists());
    assert!(files(directory.path(), &spec).is_empty());
    assert_eq!(
        pool.take(&host("web"), Kind::Bytes, MOST),
        Err(NoWindow::None)
    );
    pool.arrived("web");
    assert!(!pool.seen("web", WindowId([1; 16]), 14 * MIB));
    pool.gone("web");
    pool.file(WindowId([1; 16])).unwrap_err();
}

#[test]
fn a_window_is_lent_when_the_guest_has_shown_it() {
    let directory = tempfile::tempdir().unwrap();
    let pool = open(directory.path(), "web", "1x16M");
    let window = only(&pool);
    assert_eq!((window.state, window.len), (WindowState::Absent, 16 * MIB));
    assert_eq!(
        pool.take(&host("web"), Kind::Bytes, MOST),
        Err(NoWindow::Busy)
    );
    pool.arrived("web");
    // Of another size, of another VM, or of none.
    assert!(!pool.seen("web", window.uuid, 16 * MIB));
    assert!(!pool.seen("db", window.uuid, 14 * MIB));
    assert!(!pool.seen("web", WindowId([1; 16]), 14 * MIB));
    assert_eq!(only(&pool).state, WindowState::Absent);
    assert!(pool.seen("web", window.uuid, 14 * MIB));
    assert_eq!(only(&pool).state, WindowState::Free);

    assert_eq!(
        pool.take(&host("db"), Kind::Bytes, MOST),
        Err(NoWindow::None)
    );
    assert_eq!(
        pool.take(&host("web"), Kind::Bytes, 4095),
        Err(NoWindow::TooSmall)
    );
    let lent = pool.take(&host("web"), Kind::Records, MOST).unwrap();
    assert_eq!(
        (lent.uuid, lent.ring_len, lent.offset),
        (window.uuid, 4 * MIB, 2 * MIB)
    );
    let header = bytes(&pool, lent.uuid, 2 * MIB, 64);
    assert_eq!(&header[..8], b"RINGDCIR");
    assert_eq!(header[16..24], lent.ring_len.to_le_bytes());
    assert_eq!(header[32..40], lent.generation.to_le_bytes());
    assert_eq!(header[40..56], lent.nonce);
    let window = only(&pool);
    assert_eq!(
        (window.state, window.generation),
        (WindowState::InUse, lent.generation)
    );
    let uid = Some(own_uid());
    let vm = "web".to_owned();
    assert_eq!(window.owners, Owners::Host { vm, uid });
    assert_eq!(
        pool.take(&host("web"), Kind::Bytes, MOST),
        Err(NoWindow::Busy)
    );

    // The next life has another number, another nonce, and nothing of this one.
    let file = File::from(pool.file(lent.uuid).unwrap());
    file.write_all_at(b"secret", 5 * MIB).unwrap();
    release(&pool, &lent, "web");
    assert_eq!(only(&pool).state, WindowState::Free);
    assert_eq!(
        bytes(&pool, lent.uuid, 2 * MIB, 4 * MIB as usize),
        vec![0; 4 * MIB as usize]
    );
    let next = pool.take(&host("web"), Kind::Bytes, MIB).unwrap();
    assert!(next.generation > lent.generation && next.nonce != lent.nonce);
    assert_eq!(next.ring_len, MIB);
    assert!(
        !pool.released(lent.uuid, lent.generation, &Party::Host),
        "an earlier life"
    );
}

#[test]
fn a_window_that_nobody_lets_go_of_is_not_lent_again() {
    let directory = tempfile::tempdir().unwrap();
    let pool = open(directory.path(), "web", "1x8M");
    pool.arrived("web");
    show(&pool, "web");
    let lent = pool.take(&host("web"), Kind::Bytes, MOST).unwrap();
    pool.quarantine(lent.uuid, lent.generation, &party("web"));
    assert!(pool.released(lent.uuid, lent.generation, &Party::Host));
    assert_eq!(only(&pool).state, WindowState::Quarantined);
    pool.gone("web");
    pool.arrived("web");
    assert_eq!(only(&pool).state, WindowState::Quarantined);
    assert_eq!(
        pool.take(&host("web"), Kind::Bytes, MOST),
        Err(NoWindow::Busy)
    );
    show(&pool, "web");
    assert_eq!(only(&pool).state, WindowState::Free);
    // A session that ends in the middle, and one that comes without the end of the one before.
    for ends in [true, false] {
        let lent = pool.take(&host("web"), Kind::Bytes, MOST).unwrap();
        if ends {
            pool.gone("web");
        }
        pool.arrived("web");
        assert!(pool.released(lent.uuid, lent.generation, &Party::Host));
        assert_eq!(only(&pool).state, WindowState::Quarantined);
        show(&pool, "web");
        assert_eq!(only(&pool).state, WindowState::Free);
    }
}

#[test]
fn files_are_for_whoever_could_end_the_vmm_anyhow() {
    let directory = tempfile::tempdir().unwrap();
    let pool = open(directory.path(), "web", "2x8M");
    pool.arrived("web");
    show(&pool, "web");
    let uid = own_uid() + 1000;
    let vm = "web".to_owned();
    let others = Pair::Host {
        vm: vm.clone(),
        uid,
    };
    assert_eq!(pool.take(&others, Kind::Bytes, MOST), Err(NoWindow::None));
    let root = Pair::Host { vm, uid: 0 };
    pool.take(&root, Kind::Bytes, MOST).unwrap();
    pool.take(&host("web"), Kind::Bytes, MOST).unwrap();
}

#[test]
fn windows_with_a_path_outlive_the_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join("windows").join(name);
    let pool = open(directory.path(), "web", "2x8M");
    let spec = line(directory.path(), "web", "2x8M");
    assert_eq!(
        files(directory.path(), &spec),
        [at("web.d/0"), at("web.d/1")]
    );
    pool.arrived("web");
    show(&pool, "web");
    let lent = pool.take(&host("web"), Kind::Bytes, MOST).unwrap();
    let (before, inode) = (pool.list(), std::fs::metadata(at("web.d/0")).unwrap().ino());
    drop(pool);

    let pool = open(directory.path(), "web", "2x8M");
    assert_eq!(std::fs::metadata(at("web.d/0")).unwrap().ino(), inode);
    for (was, is) in before.iter().zip(pool.list()) {
        assert_eq!((was.uuid, &was.owners), (is.uuid, &is.owners));
        assert_eq!(is.state, WindowState::Absent);
    }
    pool.arrived("web");
    show(&pool, "web");
    // Its own window comes first, in a life that no earlier daemon has given.
    let again = pool.take(&host("web"), Kind::Bytes, MOST).unwrap();
    assert_eq!(again.uuid, lent.uuid);
    assert!(again.generation > lent.generation);
    drop(pool);

    // Fewer, and then larger ones.
    let kept = uuids(&open(directory.path(), "web", "1x8M"));
    assert!(kept.len() == 1 && at("web.d/0").exists() && !at("web.d/1").exists());
    let pool = open(directory.path(), "web", "1x16M");
    assert!(uuids(&pool).is_disjoint(&kept));
    assert_eq!(std::fs::metadata(at("web.d/0")).unwrap().len(), 16 * MIB);
    drop(pool);
    // Of a VM that is no more.
    let pool = open(directory.path(), "db", "1x8M");
    assert!(!at("web.d/0").exists() && at("db.d/0").exists());
    pool.close("db");
    assert!(pool.list().is_empty() && !at("db.d/0").exists());
    assert_eq!(
        pool.take(&host("db"), Kind::Bytes, MOST),
        Err(NoWindow::None)
    );
}

#[test]
fn a_guest_that_renames_its_window_renames_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let pool = open(directory.path(), "web", "1x8M");
    pool.open(&line(directory.path(), "db", "1x8M")).unwrap();
    let before = uuids(&pool);
    let [web, db] = ["web.d/0", "db.d/0"].map(|name| directory.path().join("windows").join(name));
    let block = std::fs::read(&db).unwrap();
    let file = File::options().write(true).open(&web).unwrap();
    file.write_all_at(&block[4096..8192], 4096).unwrap();
    drop(pool);
    let pool = open(directory.path(), "web", "1x8M");
    pool.open(&line(directory.path(), "db", "1x8M")).unwrap();
    assert!(before.contains(&only_of(&pool, "web")));
    let uuid = only_of(&pool, "web");
    assert_eq!(std::fs::read(&web).unwrap()[4096 + 16..4096 + 32], uuid.0);
}

fn only_of(pool: &Windows, name: &str) -> WindowId {
    let is_of =
        |window: &WindowStatus| matches!(&window.owners, Owners::Host { vm, .. } if vm == name);
    let list = pool.list();
    let mut of_vm = list.iter().filter(|window| is_of(window));
    let uuid = of_vm.next().unwrap().uuid;
    assert!(of_vm.next().is_none());
    uuid
}

#[test]
fn domains_have_files_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let mut request = VmRequest::named("web");
    request.domain = "red".to_owned();
    request.windows = Some(parse_windows("1x8M").unwrap());
    let pool = Windows::new(directory.path()).unwrap();
    pool.open(&resolve(directory.path(), &request)).unwrap();
    pool.open(&line(directory.path(), "red.web", "1x8M"))
        .unwrap();
    for name in ["red@web.d/0", "red.web.d/0"] {
        assert!(
            directory.path().join("windows").join(name).exists(),
            "{name}"
        );
    }
    assert_eq!(pool.list().len(), 2);
}

#[test]
fn what_stands_in_the_way_is_told_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let windows = directory.path().join("windows");
    std::fs::create_dir_all(windows.join("web.d/1")).unwrap();
    let pool = Windows::new(directory.path()).unwrap();
    let error = pool
        .open(&line(directory.path(), "web", "2x8M"))
        .unwrap_err();
    assert!(error.to_string().contains("web.d/1"), "{error}");
    assert!(pool.list().is_empty() && !windows.join("web.d/0").exists());
    std::fs::write(windows.join("windows.json"), "{").unwrap();
    let error = Windows::new(directory.path()).err().unwrap();
    assert!(error.to_string().contains("windows.json"), "{error}");
}

#[test]
fn no_window_is_lost_or_lent_twice_in_a_thousand_circuits() {
    let directory = tempfile::tempdir().unwrap();
    let pool = open(directory.path(), "web", "4x8M");
    pool.arrived("web");
    show(&pool, "web");
    let lives = Mutex::new(BTreeSet::new());
    let in_use = Mutex::new(BTreeSet::new());
    std::thread::scope(|scope| {
        for number in 0..4_u8 {
            let (pool, lives, in_use) = (&pool, &lives, &in_use);
            scope.spawn(move || {
                for _ in 0..250 {
                    // As many threads as windows: one is free, or is being cleaned.
                    let lent = loop {
                        match pool.take(&host("web"), Kind::Bytes, 4096) {
                            Ok(lent) => break lent,
                            Err(NoWindow::Busy) => std::thread::yield_now(),
                            Err(error) => panic!("{error}"),
                        }
                    };
                    assert!(in_use.lock().unwrap().insert(lent.uuid), "lent twice");
                    assert!(
                        lives.lock().unwrap().insert(lent.generation),
                        "a life twice"
                    );
                    let file = File::from(pool.file(lent.uuid).unwrap());
                    let mut ring = [1; 4096];
                    file.read_exact_at(&mut ring, 4 * MIB).unwrap();
                    assert_eq!(ring, [0; 4096], "of another life");
                    file.write_all_at(&[number + 1; 4096], 4 * MIB).unwrap();
                    file.read_exact_at(&mut ring, 4 * MIB).unwrap();
                    assert_eq!(ring, [number + 1; 4096], "cleaned while in use");
                    assert!(in_use.lock().unwrap().remove(&lent.uuid));
                    release(pool, &lent, "web");
                }
            });
        }
    });
    assert_eq!(lives.lock().unwrap().len(), 1000);
    let list = pool.list();
    assert!(list.len() == 4 && list.iter().all(|window| window.state == WindowState::Free));
}
