use super::*;

const STAT: &str = "cpu  100 20 30 4000 50 6 7 8 0 0\ncpu0 50 10 15 2000 25 3 3 4 0 0\ncpu1 50 10 15 2000 25 3 4 4 0 0\n\
                    intr 12345 0\nctxt 99\nbtime 1\n";

#[test]
fn processors() {
    assert_eq!(cpus(STAT), 2);
    let expected = Cpu {
        user: 1200,
        system: 300,
        idle: 40_000,
        io_wait: 500,
        interrupt: 130,
        stolen: 80,
    };
    assert_eq!(cpu(STAT, 10), expected);
    assert_eq!(cpu("", 10), Cpu::default());
    let huge = format!("cpu {0} {0} {0}", u64::MAX);
    assert_eq!(
        cpu(&huge, 10).user,
        u64::MAX,
        "a kernel's nonsense is no overflow"
    );
}

#[test]
fn load_and_uptime() {
    assert_eq!(load("0.20 1.18 12.02 1/80 11206\n"), ([20, 118, 1202], 80));
    assert_eq!(load("nonsense"), ([0, 0, 0], 0));
    assert_eq!(uptime_ms("12345.67 23456.78\n"), 12_345_670);
    assert_eq!(uptime_ms(""), 0);
}

#[test]
fn memory_is_in_bytes() {
    let text = "MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable: 3 kB\nBuffers: 2 kB\nCached: 5 kB\nSwapCached: 9 kB\n\
                SwapTotal: 7 kB\nSwapFree: 6 kB\n";
    let expected = Memory {
        total: 2048 * 1024,
        free: 1024,
        available: 3 * 1024,
        cached: 7 * 1024,
        swap_total: 7 * 1024,
        swap_free: 6 * 1024,
    };
    assert_eq!(memory(text), expected);
}

#[test]
fn each_file_system_is_listed_once_and_foreign_ones_never() {
    let text = "proc /proc proc rw 0 0\n/dev/vda1 / ext4 rw 0 0\n/dev/vda1 /var/bind ext4 rw 0 0\n\
                server:/x /mnt nfs4 rw 0 0\ntmpfs /run tmpfs rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n\
                tmpfs /tmp tmpfs rw,size=1m 0 0\n/dev/vdb /with\\040space\\134x xfs rw 0 0\nbroken\n";
    let mounts = mounts(text);
    let places: Vec<&str> = mounts
        .iter()
        .map(|mount| mount.mounted_at.as_str())
        .collect();
    assert_eq!(places, ["/", "/run", "/tmp", "/with space\\x"]);
    assert_eq!(mounts[0].device, "/dev/vda1");
    assert_eq!(unescape("a\\"), "a\\");
    assert_eq!(unescape("\\999\\é"), "\\999\\é");
}

#[test]
fn disks_are_whole_and_used() {
    let text = "   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0\n 253       0 vda 10 1 16 5 20 2 64 7 0 9 12 0 0 0 0 0 0\n \
                253       1 vda1 9 1 8 5 20 2 64 7 0 9 12\n";
    let expected = Disk {
        name: "vda".to_owned(),
        reads: 10,
        read_bytes: 16 * 512,
        writes: 20,
        written_bytes: 64 * 512,
        busy_ms: 9,
    };
    assert_eq!(disks(text, |name| name != "vda1"), [expected]);
    let many: String = (0..100)
        .map(|n| format!("8 0 sd{n} 1 0 0 0 0 0 0 0 0 0 0\n"))
        .collect();
    assert_eq!(disks(&many, |_| true).len(), MAX_LISTED);
}

#[test]
fn network_links() {
    let text = "Inter-|   Receive                    |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes\n    \
                lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n  eth0:100 2 3 4 0 0 0 0 500 6 7 8 0 0 0 0\n";
    let expected = NetworkLink {
        name: "eth0".to_owned(),
        received_bytes: 100,
        received_packets: 2,
        receive_errors: 3,
        receive_drops: 4,
        sent_bytes: 500,
        sent_packets: 6,
        send_errors: 7,
        send_drops: 8,
    };
    assert_eq!(links(text), [expected]);
}

#[test]
fn this_machine_has_figures_that_fit_their_frame() {
    let stats = collect();
    assert!(stats.uptime_ms > 0 && stats.cpus > 0 && stats.tasks > 0);
    assert!(stats.memory.total > stats.memory.available && stats.cpu.idle > 0);
    wire::agent::Frame::Answer(Answer::Stats(Box::new(stats)))
        .to_bytes(1)
        .unwrap();
}
