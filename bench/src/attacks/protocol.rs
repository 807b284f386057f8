//! The vhost-user protocol.

use std::os::fd::AsFd;

use rustix::event::{EventfdFlags, eventfd};

use crate::frontend::raw::{RawVmm, VERSION, request};
use crate::guest::GUEST_BASE;

use super::scene::Scene;
use super::{Attack, nothing};

const ENDED: &str = "the VMM's connection ended with an error";

const fn refused(name: &'static str, what: &'static str, run: fn(&mut Scene<'_>)) -> Attack {
    super::refused(name, what, ENDED, run)
}

pub(super) const ATTACKS: &[Attack] = &[
    refused("garbage", "bytes that are no message", |scene| {
        hangs_up(scene, |raw| raw.send_bytes(&[0xa5; 400], &[]));
    }),
    refused("unknown-request", "request 9999", |scene| {
        hangs_up(scene, |raw| raw.send(9999, &[0; 8], &[]));
    }),
    refused("wrong-version", "a message of version 3", |scene| {
        hangs_up(scene, |raw| {
            raw.send_header(request::GET_FEATURES, 3, 0, &[], &[])
        });
    }),
    refused(
        "an-answer-instead-of-a-question",
        "a message that says it is an answer",
        |scene| {
            hangs_up(scene, |raw| {
                raw.send_header(request::GET_FEATURES, VERSION | 4, 0, &[], &[])
            });
        },
    ),
    refused(
        "length-of-four-gigabytes",
        "a message that announces 2^32 - 1 bytes",
        |scene| {
            hangs_up(scene, |raw| {
                raw.send_header(request::SET_FEATURES, VERSION, u32::MAX, &[0; 8], &[])
            });
        },
    ),
    refused(
        "length-that-does-not-fit",
        "a message of 8 bytes where 40 belong",
        |scene| {
            hangs_up(scene, |raw| raw.send(request::SET_VRING_ADDR, &[0; 8], &[]));
        },
    ),
    refused(
        "files-that-do-not-belong",
        "descriptors with a message that has none",
        |scene| {
            let event = eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor");
            let files = vec![event.as_fd(); 30];
            hangs_up(scene, |raw| {
                raw.send(request::SET_FEATURES, &[0; 8], &files)
            });
        },
    ),
    refused(
        "regions-without-files",
        "a memory table of three regions and one file",
        |scene| {
            let event = eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor");
            let mut table = vec![3, 0, 0, 0, 0, 0, 0, 0];
            for index in 0..3_u64 {
                for word in [
                    GUEST_BASE + (index << 20),
                    1 << 20,
                    0x1000_0000 + (index << 20),
                    0,
                ] {
                    table.extend_from_slice(&u64::to_le_bytes(word));
                }
            }
            hangs_up(scene, |raw| {
                raw.send(request::SET_MEM_TABLE, &table, &[event.as_fd()])
            });
        },
    ),
    refused(
        "a-table-of-a-million-regions",
        "a memory table that announces a million regions",
        |scene| {
            let table = [1_000_000_u32.to_le_bytes(), [0; 4]].concat();
            hangs_up(scene, |raw| raw.send(request::SET_MEM_TABLE, &table, &[]));
        },
    ),
    refused(
        "unknown-features",
        "features that were not offered",
        |scene| {
            hangs_up(scene, |raw| {
                raw.send(request::SET_FEATURES, &u64::MAX.to_le_bytes(), &[])
            });
        },
    ),
    refused("a-ring-that-does-not-exist", "ring 99", |scene| {
        hangs_up(scene, |raw| {
            raw.send(request::SET_VRING_NUM, &pair(99, 128), &[])
        });
    }),
    refused(
        "a-ring-of-70000",
        "a ring of more entries than 16 bits can count",
        |scene| {
            hangs_up(scene, |raw| {
                raw.send(request::SET_VRING_NUM, &pair(0, 70_000), &[])
            });
        },
    ),
    refused(
        "a-base-of-70000",
        "a ring that begins at an index beyond 16 bits",
        |scene| {
            hangs_up(scene, |raw| {
                raw.send(request::SET_VRING_BASE, &pair(0, 70_000), &[])
            });
        },
    ),
    refused(
        "rings-of-odd-sizes",
        "a ring of three entries, started",
        |scene| {
            started(scene, 3, [0, 0, 0]);
        },
    ),
    refused(
        "rings-of-no-size",
        "a ring of no entries, started",
        |scene| {
            started(scene, 0, [0, 0, 0]);
        },
    ),
    refused(
        "rings-outside-of-memory",
        "a ring where there is no memory",
        |scene| {
            started(scene, 128, [0xdead_0000, 0xdead_1000, 0xdead_2000]);
        },
    ),
    refused(
        "a-ring-before-anything",
        "a kick descriptor for a ring of which nothing is known, which is then enabled",
        |scene| {
            hangs_up(scene, |raw| {
                let event = eventfd(0, EventfdFlags::CLOEXEC)?;
                raw.send(
                    request::SET_VRING_KICK,
                    &0_u64.to_le_bytes(),
                    &[event.as_fd()],
                )?;
                raw.send(request::SET_VRING_ENABLE, &pair(0, 1), &[])
            });
        },
    ),
    refused(
        "a-ring-to-be-polled",
        "a ring without a kick descriptor",
        |scene| {
            hangs_up(scene, |raw| {
                raw.send(request::SET_VRING_KICK, &256_u64.to_le_bytes(), &[])
            });
        },
    ),
    refused(
        "configuration-out-of-range",
        "a part of the configuration that it does not have",
        |scene| {
            let payload = [4_u32, 200, 0].iter().flat_map(|word| word.to_le_bytes());
            let payload: Vec<u8> = payload.chain([0; 200]).collect();
            hangs_up(scene, |raw| raw.send(request::GET_CONFIG, &payload, &[]));
        },
    ),
    refused(
        "features-that-are-not-offered",
        "migration's log, an inflight region",
        |scene| {
            let event = eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor");
            hangs_up(scene, |raw| {
                raw.send(request::SET_LOG_BASE, &[0; 16], &[event.as_fd()])
            });
            hangs_up(scene, |raw| {
                raw.send(request::GET_INFLIGHT_FD, &[0; 24], &[])
            });
        },
    ),
    nothing(
        "half-a-message",
        "a VMM that stops in the middle of a message",
        |scene| {
            let raw = scene.raw();
            raw.send_bytes(&[1, 0, 0, 0, 1], &[]).expect("it is open");
            scene.keep(raw);
        },
    ),
    nothing(
        "half-a-payload",
        "a VMM that stops in the middle of a payload",
        |scene| {
            let raw = scene.raw();
            raw.send_header(request::SET_FEATURES, VERSION, 8, &[1, 2], &[])
                .expect("it is open");
            scene.keep(raw);
        },
    ),
    nothing(
        "questions-without-listening",
        "100,000 questions from a VMM that reads no answer",
        deaf,
    ),
    nothing(
        "two-vmms-at-once",
        "100 VMMs that connect to the socket of one line",
        |scene| {
            for _ in 0..100 {
                let raw = scene.raw();
                scene.keep(raw);
            }
        },
    ),
    nothing(
        "connect-storm",
        "1000 VMMs that connect and leave",
        |scene| {
            for _ in 0..1000 {
                drop(scene.raw());
            }
        },
    ),
    nothing(
        "a-call-descriptor-that-is-full",
        "interrupts go to an eventfd whose counter is at its end",
        call_that_is_full,
    ),
    super::refused(
        "no-eventfds",
        "kick and call descriptors that are pipes, sockets, devices and files",
        "has to be an eventfd",
        no_eventfds,
    ),
];

fn pair(first: u32, second: u32) -> Vec<u8> {
    [first.to_le_bytes(), second.to_le_bytes()].concat()
}

fn hangs_up(scene: &mut Scene<'_>, send: impl Fn(&RawVmm) -> std::io::Result<()>) {
    let raw = scene.raw_with_features();
    send(&raw).expect("it is open");
    raw.wait_for_hang_up().expect("the device hangs up");
}

/// Starts a ring with these addresses.
fn started(scene: &mut Scene<'_>, size: u32, addresses: [u64; 3]) {
    hangs_up(scene, |raw| {
        raw.send(request::SET_VRING_NUM, &pair(0, size), &[])?;
        let mut bytes = vec![0; 8];
        for address in addresses {
            bytes.extend_from_slice(&address.to_le_bytes());
        }
        bytes.extend_from_slice(&[0; 8]);
        raw.send(request::SET_VRING_ADDR, &bytes, &[])?;
        let event = eventfd(0, EventfdFlags::CLOEXEC)?;
        // The device may have hung up by then.
        let _ = raw.send(
            request::SET_VRING_KICK,
            &0_u64.to_le_bytes(),
            &[event.as_fd()],
        );
        Ok(())
    });
}

fn deaf(scene: &mut Scene<'_>) {
    let raw = scene.raw();
    raw.stream().set_nonblocking(true).expect("it is a socket");
    let mut refusals = 0;
    for _ in 0..100_000 {
        if raw.send(request::GET_FEATURES, &[], &[]).is_err() {
            refusals += 1;
        }
    }
    assert!(refusals > 0, "the device waits for its answers to be read");
    scene.keep(raw);
}

fn call_that_is_full(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let full = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    let most = (u64::MAX - 1).to_ne_bytes();
    assert_eq!(rustix::io::write(&full, &most), Ok(8));
    for ring in 0..2_u64 {
        guest
            .vmm()
            .raw()
            .send(
                request::SET_VRING_CALL,
                &ring.to_le_bytes(),
                &[full.as_fd()],
            )
            .expect("it is open");
    }
    // It is said in between messages of the library, which expects no answer to it: another question is the proof.
    guest.vmm().enable_ring(0, true).expect("it lives");
    for _ in 0..50 {
        super::scene::assert_works(&mut guest);
    }
    scene.keep((guest, full));
}

fn no_eventfds(scene: &mut Scene<'_>) {
    let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
    let (near, far) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let file = tempfile::tempfile().expect("a file");
    let zero = std::fs::File::open("/dev/zero").expect("there is one");
    for message in [request::SET_VRING_KICK, request::SET_VRING_CALL] {
        let wrong = [
            reader.as_fd(),
            writer.as_fd(),
            near.as_fd(),
            file.as_fd(),
            zero.as_fd(),
        ];
        for descriptor in wrong {
            hangs_up(scene, |raw| {
                raw.send(message, &0_u64.to_le_bytes(), &[descriptor])
            });
        }
    }
    scene.keep((reader, writer, near, far));
}
