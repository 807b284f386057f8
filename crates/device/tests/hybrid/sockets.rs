//! The sockets at which a hybrid line's VMM calls: there when something is on offer, gone when it is not, and no other's.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use device::{HybridConfig, OpenLineError};
use policy::Address;
use vsock::Limits;

use crate::PATIENCE;
use crate::house::{House, redirect};
use crate::vmm::{Manner, Vmm, dial};

/// The ports that are listened at for a VM.
fn offered(house: &House) -> BTreeSet<u32> {
    let directory = house.path("fc").parent().unwrap().to_owned();
    fs::read_dir(directory)
        .unwrap()
        .filter_map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            name.strip_prefix("fc.v.sock_")?.parse().ok()
        })
        .collect()
}

#[test]
fn they_follow_the_services_and_the_rules() {
    let house = House::new(HashMap::new());
    house.add("fc", 3);
    assert_eq!(offered(&house), [1006, 1007].into());
    house.offer(&[(1, "registry", 5000), (2, "proxy", 3128)]);
    assert_eq!(offered(&house), [1006, 1007, 3128, 5000].into());
    house.offer(&[(2, "proxy", 3128)]);
    house.set_rules(vec![redirect("fc", 5432, "db", 5432)], false);
    assert_eq!(offered(&house), [1006, 1007, 3128, 5432].into());
    house.set_rules(vec![redirect("other", 5432, "db", 5432)], false);
    assert_eq!(offered(&house), [1006, 1007, 3128].into());
    let mode = fs::metadata(house.port_path("fc", 3128))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(house.ask(|fabric| fabric.close_line("fc")));
    assert_eq!(offered(&house), BTreeSet::new());
}

#[test]
fn a_program_that_listens_already_keeps_its_place() {
    let house = House::new(HashMap::new());
    let path = house.port_path("fc", 5000);
    let program = UnixListener::bind(&path).unwrap();
    house.offer(&[(1, "registry", 5000)]);
    house.add("fc", 3);
    let mut near = dial(&house.path("fc"), 5000).unwrap();
    let (mut far, _) = program.accept().unwrap();
    near.write_all(b"x").unwrap();
    let mut byte = [0];
    far.read_exact(&mut byte).unwrap();
    assert!(house.ask(|fabric| fabric.close_line("fc")));
    assert!(path.exists(), "it is not ours");
    // A file that is no socket is not ours either, and one without a listener is taken over.
    fs::write(house.port_path("fc", 1006), b"precious").unwrap();
    drop(program);
    house.add("fc", 3);
    assert!(dial(&house.path("fc"), 5000).is_ok());
    assert_eq!(fs::read(house.port_path("fc", 1006)).unwrap(), b"precious");
}

#[test]
fn a_line_without_a_directory_is_not_opened() {
    let house = House::new(HashMap::new());
    let error = house.try_add_at("fc", 3, house.path("fc").join("nowhere"));
    let Err(OpenLineError::Socket { error, .. }) = error else {
        panic!("{error:?}");
    };
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(house.ask(|fabric| fabric.lines().is_empty()));
    house.add("fc", 3);
}

#[test]
fn sockets_that_cannot_be_made_are_tried_again_until_they_are_there() {
    let house = House::new(HashMap::new());
    let directory = house.path("fc").join("later");
    let config = HybridConfig {
        address: Address::new("fc", 3),
        limits: Limits::default(),
        path: directory.join("v.sock"),
        host: house.host_path("fc"),
    };
    let opened = house.ask(move |fabric| fabric.open_hybrid_line(&config));
    opened.unwrap();
    let fault = || house.ask(|fabric| fabric.lines()[0].last_fault.clone());
    let path = directory.join("v.sock_1007");
    eventually(|| fault().is_some_and(|fault| fault.contains("cannot call port")));
    std::fs::create_dir_all(&directory).unwrap();
    // Its guest can be called meanwhile.
    let vmm = Vmm::start(&directory.join("v.sock"), Manner::Accept(b""));
    let _client = house.publish("fc", 80);
    assert_eq!(vmm.accept().0, 80);
    eventually(|| path.exists() && fault().is_none());
}

fn eventually(mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_name_or_an_identifier_that_is_taken_changes_nothing() {
    let house = House::new(HashMap::new());
    house.add("fc", 3);
    for (name, cid) in [("fc", 4), ("other", 3)] {
        let config = HybridConfig {
            address: Address::new(name, cid),
            limits: Limits::default(),
            path: house.path("other"),
            host: house.host_path("other"),
        };
        let error = house.ask(move |fabric| fabric.open_hybrid_line(&config));
        assert!(matches!(error, Err(OpenLineError::Directory(_))));
    }
    assert_eq!(offered(&house), [1006, 1007].into());
    assert!(!house.port_path("other", 1006).exists());
}
