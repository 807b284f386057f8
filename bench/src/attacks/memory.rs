//! The guest's memory, as a VMM hands it over and takes it away.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use ::guestmem::guest::RegionSpec;
use guestmem_driver::Arena;

use crate::frontend::raw::{NEED_REPLY, RawVmm, VERSION, request};
use crate::guest::GUEST_BASE;

use super::scene::{Scene, assert_works};
use super::{Attack, line_fails, nothing, refused};

const fn fails(name: &'static str, what: &'static str, run: fn(&mut Scene<'_>)) -> Attack {
    line_fails(name, what, "the guest's device failed", run)
}

const REGION: &str = "refused a memory region";

pub(super) const ATTACKS: &[Attack] = &[
    refused(
        "region-of-no-size",
        "a region of no bytes",
        "connection ended with an error",
        |scene| {
            add(scene, &[(0, 0, 0x1000)]);
        },
    ),
    refused(
        "region-beyond-its-file",
        "a region that is longer than its file",
        REGION,
        |scene| {
            add(scene, &[(GUEST_BASE, 64 << 20, 0x1000_0000)]);
        },
    ),
    refused(
        "region-around-the-end",
        "a region that wraps around the end of all addresses",
        "connection ended with an error",
        |scene| {
            add(scene, &[(u64::MAX - 0xfff, 2 << 20, 0x1000_0000)]);
        },
    ),
    refused(
        "regions-that-overlap",
        "two regions with the same guest addresses",
        REGION,
        |scene| {
            add(
                scene,
                &[
                    (GUEST_BASE, 1 << 20, 0x1000_0000),
                    (GUEST_BASE + 4096, 1 << 20, 0x2000_0000),
                ],
            );
        },
    ),
    refused(
        "regions-that-overlap-in-the-vmm",
        "two regions with the same addresses of the VMM",
        REGION,
        |scene| {
            add(
                scene,
                &[
                    (GUEST_BASE, 1 << 20, 0x1000_0000),
                    (GUEST_BASE << 4, 1 << 20, 0x1000_0000),
                ],
            );
        },
    ),
    refused(
        "six-hundred-regions",
        "more regions than there are slots",
        REGION,
        |scene| {
            let regions: Vec<_> = (0..600)
                .map(|index| {
                    (
                        GUEST_BASE + (index << 20),
                        4096,
                        0x1_0000_0000 + (index << 20),
                    )
                })
                .collect();
            add(scene, &regions);
        },
    ),
    refused(
        "a-device-as-memory",
        "a region whose file is /dev/zero",
        "not a regular file",
        |scene| {
            let zero = File::options().read(true).write(true).open("/dev/zero");
            add_file(scene, &zero.expect("there is one"));
        },
    ),
    refused(
        "a-socket-as-memory",
        "a region whose file is a socket",
        "not a regular file",
        |scene| {
            let (one, other) = std::os::unix::net::UnixStream::pair().expect("a pair");
            add_file(scene, &one);
            scene.keep(other);
        },
    ),
    refused(
        "a-file-of-proc-as-memory",
        "a region whose file is of a file system that is not memory",
        "on a file system",
        |scene| {
            add_file(scene, &File::open("/proc/self/maps").expect("there is one"));
        },
    ),
    refused(
        "a-file-on-a-disk-as-memory",
        "a region whose file is on a disk, beside this program",
        "on a file system",
        |scene| {
            let program = std::env::current_exe().expect("this program");
            let directory = program.parent().expect("it is in a directory");
            let file = tempfile::tempfile_in(directory).expect("a file");
            file.set_len(8 << 20).expect("it grows");
            add_file(scene, &file);
        },
    ),
    refused(
        "read-only-memory",
        "a region whose file is open for reading only",
        REGION,
        |scene| {
            let arena = Arena::new(8 << 20).expect("memory");
            let path = format!("/proc/self/fd/{}", arena.file().as_raw_fd());
            add_file(scene, &File::open(path).expect("it is there"));
        },
    ),
    refused(
        "a-region-that-is-not-there",
        "a region is removed that was never added",
        "no region",
        |scene| {
            let mut guest = scene.attach();
            let other = Arena::new(4096).expect("memory");
            let region = other.region(0x10).expect("a region");
            assert!(guest.vmm().remove_region(&region).is_err());
            scene.keep(guest);
        },
    ),
    refused(
        "memory-removed-from-under-the-rings",
        "the only region is removed while the rings run",
        "is not inside one memory region",
        |scene| {
            let mut guest = scene.attach();
            let regions = guest.regions().expect("regions");
            assert!(guest.vmm().remove_region(&regions[0]).is_err());
            scene.keep(guest);
        },
    ),
    fails(
        "file-truncated",
        "the memory's file is cut to nothing while the rings run",
        |scene| {
            let mut guest = scene.attach();
            assert_works(&mut guest);
            guest.arena().file().set_len(0).expect("it shrinks");
            guest.tamper(crate::frontend::TX);
            guest.notify(crate::frontend::TX);
            scene.keep(guest);
        },
    ),
    fails(
        "file-truncated-under-parked-data",
        "the file is cut while packets to a VM that does not run are parked in it",
        parked_and_truncated,
    ),
    fails(
        "file-truncated-before-a-program-writes",
        "the file is cut, and then a program of the host sends data",
        |scene| {
            use std::io::Write;
            let (mut guest, _, mut program) = scene.circuit();
            guest.arena().file().set_len(0).expect("it shrinks");
            guest.tamper(crate::frontend::TX);
            // The line may have failed by then.
            let _ = program.write_all(&[7; 10_000]);
            scene.keep((guest, program));
        },
    ),
    nothing(
        "add-and-remove",
        "a region is added and removed 500 times while the rings run",
        add_and_remove,
    ),
    nothing(
        "holes-punched",
        "the memory's pages are taken away, one after the other, while data flows",
        holes,
    ),
];

fn region_bytes(address: u64, size: u64, frontend_address: u64) -> Vec<u8> {
    [0, address, size, frontend_address, 0]
        .iter()
        .flat_map(|word: &u64| word.to_le_bytes())
        .collect()
}

fn negotiated(scene: &Scene<'_>) -> RawVmm {
    let raw = scene.raw_with_features();
    // What is not asked is not answered.
    for question in [request::GET_FEATURES, request::GET_PROTOCOL_FEATURES] {
        raw.send(question, &[], &[]).expect("it is open");
        raw.receive().expect("an answer");
    }
    // MQ, REPLY_ACK, CONFIGURE_MEM_SLOTS.
    let protocol: u64 = 1 | 1 << 3 | 1 << 15;
    raw.send(request::SET_PROTOCOL_FEATURES, &protocol.to_le_bytes(), &[])
        .expect("it is open");
    raw
}

/// Adds regions one by one, of a file of 32 MiB. They may be refused by an answer or by the end of the connection.
fn add(scene: &mut Scene<'_>, regions: &[(u64, u64, u64)]) {
    let raw = negotiated(scene);
    let file = Arena::new(32 << 20).expect("memory");
    for (address, size, frontend_address) in regions {
        let bytes = region_bytes(*address, *size, *frontend_address);
        if send_region(&raw, &bytes, file.file().as_fd()) {
            break;
        }
    }
    scene.keep(raw);
}

/// Returns whether it was refused.
fn send_region(raw: &RawVmm, bytes: &[u8], file: BorrowedFd<'_>) -> bool {
    let flags = VERSION | NEED_REPLY;
    let sent = raw.send_header(
        request::ADD_MEM_REG,
        flags,
        bytes.len() as u32,
        bytes,
        &[file],
    );
    match sent.and_then(|()| raw.receive()) {
        Ok((_, _, answer)) => answer != 0_u64.to_le_bytes(),
        Err(_) => true,
    }
}

fn add_file(scene: &mut Scene<'_>, file: &impl AsFd) {
    let raw = negotiated(scene);
    let bytes = region_bytes(GUEST_BASE, 4 << 20, 0x1000_0000);
    assert!(send_region(&raw, &bytes, file.as_fd()), "it was taken");
    scene.keep(raw);
}

fn parked_and_truncated(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let mut victim = scene.victim();
    victim.listen(1);
    let circuits: Vec<_> = (0..8)
        .map(|_| guest.dial(4, 1, wire::vsock::SocketType::Stream))
        .collect();
    let open = crate::guest::drive(
        &mut [&mut guest, &mut victim],
        super::scene::PATIENCE,
        |guests| {
            circuits
                .iter()
                .all(|end| guests[0].state(*end) == crate::guest::State::Connected)
                .then_some(())
        },
    );
    open.expect("the victim answers");
    for circuit in &circuits {
        guest.try_send(*circuit, &[7; 200_000]).expect("it is open");
    }
    guest.arena().file().set_len(0).expect("it shrinks");
    guest.tamper(crate::frontend::TX);
    guest.notify(crate::frontend::TX);
    // The victim comes for what was parked: it gets what was sent, or a reset.
    let ended = crate::guest::drive(&mut [&mut victim], super::scene::PATIENCE, |guests| {
        let mut all = true;
        while let Some(far) = guests[0].try_accept(1) {
            let mut bytes = Vec::new();
            guests[0].try_receive(far, usize::MAX, &mut bytes);
            assert!(
                bytes.iter().all(|byte| *byte == 7),
                "other bytes than were sent"
            );
            all = false;
        }
        all.then_some(())
    });
    ended.expect("it gets that far");
    scene.keep((guest, victim));
}

fn add_and_remove(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let other = Arena::new(1 << 20).expect("memory");
    let region: RegionSpec = other.region(GUEST_BASE << 8).expect("a region");
    for _ in 0..500 {
        guest.vmm().add_region(&region).expect("it is added");
        guest.vmm().remove_region(&region).expect("it is removed");
    }
    assert_works(&mut guest);
    scene.keep(guest);
}

fn holes(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let circuit = guest.connect(2, super::scene::ECHO_PORT);
    let circuit = circuit.expect("the host answers");
    let file = guest.arena().file().try_clone().expect("a descriptor");
    let mut echoed = 0;
    for page in 200..1200_u64 {
        // Behind the rings, so that the driver itself lives.
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, flags, page * 4096, 4096).expect("a hole");
        guest.service();
        let _ = guest.try_send(circuit, &[7; 100]);
        let mut bytes = Vec::new();
        guest.try_receive(circuit, usize::MAX, &mut bytes);
        echoed += bytes.len();
    }
    assert!(echoed < 200_000);
    scene.keep(guest);
}
