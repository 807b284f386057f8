use std::os::unix::fs::MetadataExt;

use rustix::event::{PollFd, PollFlags};

use super::*;
use crate::switchboard::tests::kernel::{Kernel, LEN, name, uuid};

#[test]
fn windows_are_found_and_nothing_else() {
    let kernel = Kernel::new();
    assert_eq!(kernel.devices().list(), []);
    assert_eq!(Devices::at("/nonexistent", "/nonexistent").list(), []);
    kernel.add(3);
    // A seed has no name; other memory has another; a device of another sort is none.
    kernel.add_foreign("dax0.0", "\n");
    kernel.add_foreign("dax0.1", "e23063d9-ac69-a540-b87d-048c65080b7d\n");
    kernel.add_foreign("pfn0.1", "52494e47-444e-8000-8000-000000000000\n");
    kernel.add_foreign("daxx.1", "52494e47-444e-8000-8000-000000000000\n");
    let window = Device {
        uuid: uuid(3),
        name: name(3),
    };
    assert_eq!(kernel.devices().list(), [window]);
    // Another device with the same name.
    let text = fs::read_to_string(kernel.devices().device("dax3.1").join("uuid")).unwrap();
    kernel.add_foreign("dax4.1", &text);
    assert_eq!(kernel.devices().list().len(), 1);
}

#[test]
fn a_reset_makes_another_device_that_is_ours_alone() {
    let kernel = Kernel::new();
    kernel.add(1);
    let old = fs::metadata(kernel.node(1)).unwrap();
    let devices = kernel.devices();
    assert_eq!(devices.reset(&name(1)).unwrap(), LEN);
    let new = fs::metadata(kernel.node(1)).unwrap();
    assert_ne!(old.created().unwrap(), new.created().unwrap());
    assert_eq!(new.mode() & 0o777, 0o600);
    assert_eq!(kernel.resets(1), 1);
    let opened = File::from(devices.open(&name(1)).unwrap());
    assert_eq!(opened.metadata().unwrap().ino(), new.ino());
}

#[test]
fn a_window_whose_reset_was_cut_short_is_bound_again() {
    let kernel = Kernel::new();
    kernel.add(1);
    kernel.unbind(1);
    assert_eq!(kernel.devices().list().len(), 1);
    assert_eq!(kernel.devices().reset(&name(1)).unwrap(), LEN);
}

#[test]
fn what_cannot_be_taken_away_is_an_error() {
    let kernel = Kernel::new();
    kernel.add(1);
    kernel.hold(true);
    let error = kernel.devices().reset(&name(1)).unwrap_err();
    assert!(error.to_string().contains("not unbound"), "{error}");
    kernel.hold(false);
    assert_eq!(kernel.devices().reset(&name(1)).unwrap(), LEN);
}

#[test]
fn a_link_in_the_place_of_a_node_is_not_followed() {
    let kernel = Kernel::new();
    kernel.add(1);
    fs::rename(kernel.node(1), kernel.node(2)).unwrap();
    std::os::unix::fs::symlink(kernel.node(2), kernel.node(1)).unwrap();
    assert!(kernel.devices().open(&name(1)).is_err());
}

#[test]
fn new_nodes_wake_whoever_watches() {
    let kernel = Kernel::new();
    let watch = kernel.devices().watch().unwrap();
    let poll = |timeout| {
        let timeout = rustix::event::Timespec {
            tv_sec: timeout,
            tv_nsec: 0,
        };
        rustix::event::poll(&mut [PollFd::new(&watch, PollFlags::IN)], Some(&timeout)).unwrap()
    };
    assert_eq!(poll(0), 0);
    kernel.add(1);
    assert_eq!(poll(30), 1);
}
