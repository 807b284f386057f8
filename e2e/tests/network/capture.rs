//! Captures of a network's frames, which tshark reads while guests send.

use e2e::{CommandSpec, LiveCapture, Row, is_full, read_capture};

use super::{PATIENCE, address_of, assert_answers, scene};

const FIELDS: [&str; 11] = [
    "frame.interface_name",
    "frame.len",
    "eth.src",
    "eth.dst",
    "ip.src",
    "ip.dst",
    "icmp.type",
    "tcp.dstport",
    "tcp.len",
    "tcp.checksum.status",
    "_ws.malformed",
];

/// An Ethernet frame of the network is no longer than this, in bytes, unless a guest leaves its segmentation to others.
const LONGEST_FRAME: u64 = 1514;

/// What tshark says of a checksum that it has checked and found wrong.
const BAD: &str = "0";

fn has(row: &Row, wanted: &[(&str, &str)]) -> bool {
    wanted.iter().all(|(field, value)| row.get(field) == *value)
}

fn number(row: &Row, field: &str) -> u64 {
    row.get(field).parse().unwrap_or(0)
}

#[test]
fn tshark_shows_pings_while_they_go() {
    let scene = scene();
    let [web, db] = ["web", "db"].map(|vm| {
        let mac = address_of(&scene, "lan", vm, "mac");
        (address_of(&scene, "lan", vm, "ipv4"), mac)
    });
    let mut capture =
        LiveCapture::begin(&scene.daemon, &["net", "capture", "lan"], &FIELDS).unwrap();
    assert_answers(scene.guest("web"), &db.0);
    // Each of the two is seen where it comes from and where it goes.
    for (kind, from, to) in [("8", &web, &db), ("0", &db, &web)] {
        for port in ["web", "db"] {
            let wanted = [
                ("frame.interface_name", port),
                ("eth.src", &from.1),
                ("eth.dst", &to.1),
                ("ip.src", &from.0),
                ("ip.dst", &to.0),
                ("icmp.type", kind),
                ("_ws.malformed", ""),
            ];
            let seen = |rows: &[Row]| rows.iter().any(|row| has(row, &wanted));
            capture.wait_for(&format!("{wanted:?}"), seen).unwrap();
        }
    }
    let (rows, said) = capture.end().unwrap();
    assert_eq!(said, format!("{} frames captured, 0 lost\n", rows.len()));
}

#[test]
fn a_file_has_what_iperf3_sends_and_checksums_left_to_others_are_no_error() {
    let scene = scene();
    let seconds = if is_full() { 10 } else { 1 };
    scene
        .guest("db")
        .shell("pgrep iperf3 > /dev/null || iperf3 -s -D")
        .unwrap();
    let file = scene.daemon.runtime_directory().join("web.pcapng");
    let name = file.display().to_string();
    // The headers only, so that the file stays small.
    let arguments = [
        "net",
        "capture",
        "lan",
        "web",
        "--snaplen",
        "128",
        "-w",
        &name,
    ];
    let capture = LiveCapture::begin_to_file(&scene.daemon, &arguments).unwrap();
    let line = format!("iperf3 -c db -4 -t {seconds} --connect-timeout 10000");
    let spec = CommandSpec::new(line).deadline(PATIENCE);
    let output = scene.guest("web").run_spec(spec).unwrap();
    assert_eq!(output.code, 0, "{}", output.text());
    let (_, said) = capture.end().unwrap();
    let rows = read_capture(&file, &FIELDS).unwrap();
    assert!(
        said.starts_with(&format!("{} frames captured", rows.len())),
        "{said}"
    );
    let own = address_of(&scene, "lan", "web", "ipv4");
    let sent: Vec<&Row> = rows
        .iter()
        .filter(|row| has(row, &[("ip.src", &own), ("tcp.dstport", "5201")]))
        .collect();
    let longest = sent.iter().map(|row| number(row, "frame.len")).max();
    let bytes: u64 = sent.iter().map(|row| number(row, "tcp.len")).sum();
    eprintln!("{} frames of {bytes} bytes, up to {longest:?}", sent.len());
    assert!(
        longest > Some(LONGEST_FRAME),
        "as the guest has handed them over"
    );
    for row in &rows {
        let port = row.get("frame.interface_name");
        assert_eq!((port, row.get("_ws.malformed")), ("web", ""), "{row:?}");
        assert_ne!(row.get("tcp.checksum.status"), BAD, "{row:?}");
    }
}
