//! Bytes between guests: none is lost or changed, whatever each card leaves to the other side.

use e2e::{CommandSpec, Guest, Scene, is_full};

use super::{PATIENCE, address_of, counted, scene};

/// How much is sent each way, in MiB.
fn size_mib() -> u64 {
    if is_full() { 64 } else { 4 }
}

/// Has a guest offer a file to all others, and gives its checksum. Its parts are the same 64 KiB of random bytes, each with its number:
/// an emulated guest takes ten seconds for so many random bytes.
pub fn offer(guest: &Guest, size_mib: u64) -> String {
    let line = format!(
        "mkdir -p /tmp/www; [ -e /tmp/www/listens ] || {{ httpd -p 8000 -h /tmp/www && touch /tmp/www/listens; }}; \
         head -c 65536 /dev/urandom > /tmp/seed; \
         for part in $(seq {}); do cat /tmp/seed; echo $part; done > /tmp/www/file; sha256sum < /tmp/www/file",
        size_mib << 4
    );
    guest.shell(&line).unwrap()
}

/// Has a guest fetch what is offered at an address, and gives the checksum of what arrived.
pub fn fetch(guest: &Guest, address: &str) -> String {
    let address = match address.contains(':') {
        true => format!("[{address}]"),
        false => address.to_owned(),
    };
    let line = format!("set -o pipefail; wget -q -O - http://{address}:8000/file | sha256sum");
    let output = guest
        .run_spec(CommandSpec::new(line).deadline(2 * PATIENCE))
        .unwrap();
    let (name, said) = (guest.name(), output.error_text());
    assert_eq!(output.code, 0, "{name} from {address}: {said}");
    output.text()
}

/// Every guest fetches from every other.
fn everybody_fetches(scene: &Scene, kind: &str) {
    for from in &scene.guests {
        let expected = offer(from, size_mib());
        let address = address_of(scene, "lan", from.name(), kind);
        for to in scene.guests.iter().filter(|to| to.name() != from.name()) {
            let (found, from, to) = (fetch(to, &address), from.name(), to.name());
            assert_eq!(found, expected, "from {from} to {to} over {kind}");
        }
    }
}

#[test]
fn what_arrives_is_what_was_sent() {
    let scene = scene();
    let softly = |counter| counted(&scene, "lan", "box", counter);
    let before = ["segmented_frames", "checksummed_frames"].map(softly);
    everybody_fetches(&scene, "ipv4");
    everybody_fetches(&scene, "ipv6");
    let after = ["segmented_frames", "checksummed_frames"].map(softly);
    // The card of `box` takes neither: what the others leave to be done, is done on the way.
    assert!(after[0] > before[0], "{before:?} {after:?}");
    assert!(after[1] > before[1], "{before:?} {after:?}");
    for vm in ["web", "db"] {
        let softly = counted(&scene, "lan", vm, "segmented_frames");
        assert_eq!(softly, 0, "{vm} takes frames as they are");
    }
}

#[test]
fn a_guest_may_cut_its_own_segments() {
    let scene = scene();
    let web = scene.guest("web");
    let expected = offer(web, size_mib());
    let address = address_of(&scene, "lan", "web", "ipv4");
    let segments = (size_mib() << 20) / 1448;
    let fetch_counting = || {
        let before = counted(&scene, "lan", "web", "received_frames");
        assert_eq!(fetch(scene.guest("db"), &address), expected);
        counted(&scene, "lan", "web", "received_frames") - before
    };
    let whole = fetch_counting();
    assert!(whole < segments, "{whole} frames for {segments} segments");
    web.shell("ethtool -K eth0 tso off gso off tx off").unwrap();
    let cut = fetch_counting();
    web.shell("ethtool -K eth0 tx on tso on gso on").unwrap();
    assert!(cut >= segments, "{cut} frames for {segments} segments");
}

#[test]
fn iperf3_measures_tcp_and_udp() {
    let scene = scene();
    let seconds = if is_full() { 10 } else { 1 };
    let db = scene.guest("db");
    db.shell("pgrep iperf3 > /dev/null || iperf3 -s -D")
        .unwrap();
    for options in ["", "-R", "-u -b 20M", "-u -b 20M -R"] {
        for guest in ["web", "box"] {
            let line =
                format!("iperf3 -c db -4 -t {seconds} --connect-timeout 10000 --json {options}");
            let spec = CommandSpec::new(line).deadline(PATIENCE);
            let output = scene.guest(guest).run_spec(spec).unwrap();
            let text = output.text();
            assert_eq!(output.code, 0, "{guest} {options}: {text}");
            let report: serde_json::Value = serde_json::from_str(&text).unwrap();
            let end = &report["end"];
            let sum = match options.contains("-u") {
                true => &end["sum"],
                false => &end["sum_received"],
            };
            let rate = sum["bits_per_second"].as_f64();
            let rate = rate.unwrap_or_else(|| panic!("{guest} {options}: {report}"));
            eprintln!("{guest} and db, iperf3 {options}: {:.0} Mbit/s", rate / 1e6);
            let lost = sum["lost_percent"].as_f64().unwrap_or(0.0);
            assert!(rate > 0.0 && lost < 100.0, "{guest} {options}: {sum}");
        }
    }
}
