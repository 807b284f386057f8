//! Freezing real file systems under load, with everything that can come in between: nothing stays frozen.

use std::time::Duration;

use e2e::{CommandSpec, Guest};

use super::{PATIENCE, Scene, refused, ringdown, said, scene_alone};

/// How often it is frozen in each guest.
fn rounds() -> usize {
    if e2e::is_full() { 200 } else { 10 }
}

/// How long a freeze may take to end: the time of the longest, and a slow guest's patience.
const ENDS: Duration = Duration::from_secs(120);

/// How long all of it may take.
const WRITERS_END: Duration = Duration::from_secs(2 * 3600);

/// A file system, another in a file of it, and a writer to both without pause, and syncs.
const LOAD: &str = "modprobe loop; head -c 50331648 /dev/zero > /tmp/outer; mke2fs -F /tmp/outer > /dev/null 2>&1; mkdir -p /mnt/outer && \
    mount -t ext4 -o loop /tmp/outer /mnt/outer && head -c 16777216 /dev/zero > /mnt/outer/inner; mke2fs -F /mnt/outer/inner > /dev/null 2>&1; \
    mkdir -p /mnt/inner && mount -t ext4 -o loop /mnt/outer/inner /mnt/inner && touch /tmp/loaded";
const WRITE: &str = "for place in /mnt/outer /mnt/inner /mnt/inner; do while [ -e /tmp/loaded ]; do \
    dd if=/dev/zero of=$place/load.$$ bs=64k count=32 conv=fsync 2> /dev/null; rm $place/load.$$; done & done; wait";

/// Kills the process that holds what is frozen, if there is one. The agent starts it by the kernel's link `exe`.
const KILL: &str = "for file in $(grep -lx exe /proc/[0-9]*/comm 2> /dev/null); do process=${file#/proc/}; kill -9 ${process%/comm}; done; true";

#[test]
fn nothing_stays_frozen_under_load() {
    let scene = scene_alone();
    std::thread::scope(|scope| {
        for guest in &scene.guests[..2] {
            let scene = &*scene;
            scope.spawn(move || freeze_again_and_again(scene, guest));
        }
    });
}

fn freeze_again_and_again(scene: &Scene, guest: &Guest) {
    guest.shell(LOAD).unwrap();
    let writers = CommandSpec::new(WRITE).deadline(WRITERS_END);
    let writers = guest.start_spec(writers).unwrap();
    let name = guest.name();
    let run = |arguments: &[&str]| scene.daemon.run(arguments).unwrap();
    let mut frozen = 0;
    for round in 0..rounds() {
        let freeze = |time: &str| run(&["freeze", name, "--timeout", time]);
        let done = match round % 5 {
            // As it is meant to be used.
            0 => {
                let done = freeze("60s");
                assert!(done.status.success(), "{}", said(&done));
                let thawed = run(&["thaw", name]);
                assert!(thawed.status.success(), "{}", said(&thawed));
                done
            }
            // It thaws by itself; freezing may take longer than that.
            1 => freeze("1s"),
            // The process that holds it is killed.
            2 => {
                let done = freeze("3600s");
                guest.shell(KILL).unwrap();
                done
            }
            // It is killed while it freezes, or before or after.
            3 => std::thread::scope(|scope| {
                let freezing = scope.spawn(|| freeze("3600s"));
                let delay = round * 7919 % 400_000;
                guest.shell(&format!("usleep {delay}; {KILL}")).unwrap();
                let done = freezing.join().unwrap();
                guest.shell(KILL).unwrap();
                done
            }),
            // `thaw` comes meanwhile.
            _ => std::thread::scope(|scope| {
                let freezing = scope.spawn(|| freeze("20s"));
                while !run(&["thaw", name]).status.success() && !freezing.is_finished() {}
                let done = freezing.join().unwrap();
                run(&["thaw", name]);
                done
            }),
        };
        frozen += usize::from(done.status.success());
        let write = format!(
            "[ ! -e /run/ringdown-freeze/list ] && echo {round} > /mnt/outer/round && echo {round} > /mnt/inner/round"
        );
        guest
            .wait_until(&write, ENDS)
            .unwrap_or_else(|error| panic!("round {round} in {name}: {error}; {}", said(&done)));
    }
    assert!(frozen > rounds() / 4, "it was frozen only {frozen} times");
    guest.shell("rm /tmp/loaded").unwrap();
    writers.wait().unwrap();
    guest
        .wait_until(
            "umount /mnt/inner && umount /mnt/outer && rm /tmp/outer",
            PATIENCE,
        )
        .unwrap();
}

/// A file system that is a user's, and another that root has mounted in a directory of that user's.
const HOME: &str = "modprobe loop; for disk in home data; do head -c 8388608 /dev/zero > /tmp/$disk; mke2fs -F /tmp/$disk > /dev/null 2>&1; done; \
    mkdir -p /mnt/home && mount -t ext4 -o loop /tmp/home /mnt/home && mkdir -p /mnt/home/p/disk && chown -R user /mnt/home && \
    mount -t ext4 -o loop /tmp/data /mnt/home/p/disk";

/// What the user begins while all is frozen. It goes on when the first is thawed, and is done before the other is.
const RENAME: &str = "su user -c 'mv /mnt/home/p /mnt/home/q && mkdir -p /mnt/home/p/disk'";
const WAITS: &str = "grep -q ' D ' /proc/$(pidof mv)/stat";
const BACK: &str = "rm -r /mnt/home/p && mv /mnt/home/q /mnt/home/p";

#[test]
fn what_a_user_renames_or_hides_does_not_stay_frozen() {
    let scene = scene_alone();
    for guest in &scene.guests[..2] {
        guest.shell(HOME).unwrap();
        let name = guest.name();
        for is_asked in [true, false] {
            let time = if is_asked { "600s" } else { "20s" };
            let frozen = ringdown(&scene, &["freeze", name, "--timeout", time]);
            assert!(frozen.contains("/mnt/home/p/disk"), "{frozen}");
            let rename = guest.start(RENAME).unwrap();
            guest.wait_until(WAITS, PATIENCE).unwrap();
            if is_asked {
                let thawed = ringdown(&scene, &["thaw", name]);
                assert!(thawed.contains("/mnt/home/p/disk"), "{thawed}");
            }
            assert_eq!(rename.wait().unwrap().code, 0);
            let write =
                "[ ! -e /run/ringdown-freeze/list ] && echo written > /mnt/home/q/disk/file";
            guest.wait_until(write, ENDS).unwrap();
            guest.shell(BACK).unwrap();
        }
        guest.shell("mount -t tmpfs over /mnt/home/p/disk").unwrap();
        let words = refused(&scene, &["freeze", name]);
        assert!(
            words.contains("/mnt/home/p/disk: something is mounted over it"),
            "{words}"
        );
        guest
            .wait_until(
                "umount /mnt/home/p/disk && umount /mnt/home/p/disk && umount /mnt/home && rm /tmp/home /tmp/data",
                PATIENCE,
            )
            .unwrap();
    }
}
