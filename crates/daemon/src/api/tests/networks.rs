//! Networks over the control API, with a fake switch behind it.

use std::os::unix::net::UnixStream;
use std::time::Instant;

use wire::pcapng;

use super::*;
use crate::api::types::{CAPTURE_MEDIA_TYPE, MacList, NetworkDetails, NetworkList, PortKind};
use crate::fake::FakeCapture;
use crate::runtime::control_socket;

const FILE: &str = r#"
[[network]]
name = "lan"
ipv4 = "10.1.2.0/24"

[[network]]
name = "lan"
domain = "red"

[[vm]]
name = "web"
aliases = ["www"]
networks = ["lan"]
"#;

fn get<T: serde::de::DeserializeOwned>(daemon: &FakeDaemon, target: &str) -> T {
    let (status, body) = daemon.request("GET", target, "");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect(&body)
}

fn refused(daemon: &FakeDaemon, method: &str, target: &str, body: &str) -> (u16, String) {
    let (status, answer) = daemon.request(method, target, body);
    let problem = json_of(&answer);
    (status, problem["detail"].as_str().unwrap().to_owned())
}

#[test]
fn a_network_is_listed_and_shown_with_its_ports() {
    let daemon = FakeDaemon::with_file(FILE);
    let list: NetworkList = get(&daemon, "/v1/networks");
    let names: Vec<String> = list
        .networks
        .iter()
        .map(|network| network.full_name())
        .collect();
    assert_eq!(names, ["lan", "red/lan"]);
    assert_eq!((list.networks[0].vms, list.networks[0].attached), (1, 0));
    daemon.net().set_state("lan", "web", true, 8);
    let details: NetworkDetails = get(&daemon, "/v1/networks/lan");
    assert_eq!(details.network.ipv4.as_deref(), Some("10.1.2.1/24"));
    assert_eq!(details.network.attached, 1);
    assert_eq!(details.network.counters["received_frames"], 8);
    assert_eq!(details.network.refused["other_source"], 4);
    let [port, station] = details.ports.as_slice() else {
        panic!("{details:?}");
    };
    assert_eq!((port.kind, station.kind), (PortKind::Vm, PortKind::Station));
    assert_eq!(
        (port.vm.as_deref(), port.attached, port.link_up),
        (Some("web"), true, true)
    );
    let attachment = port.attachment.as_ref().unwrap();
    assert_eq!(attachment.ipv4.unwrap().to_string(), "10.1.2.2");
    assert_eq!(
        attachment.vhost_user,
        daemon.runtime_dir().join("web.net-lan.vhost")
    );
    // The same is a part of the VM.
    assert_eq!(
        &status_of(&daemon, "/v1/vms/web").nets[..],
        std::slice::from_ref(attachment)
    );
    let macs: MacList = get(&daemon, "/v1/networks/default%2Flan/macs");
    assert_eq!(macs.macs.len(), 1);
    assert_eq!(
        (macs.macs[0].mac, macs.macs[0].fixed),
        (attachment.mac, true)
    );
    assert_eq!(
        get::<NetworkDetails>(&daemon, "/v1/networks/red%2Flan")
            .network
            .vms,
        0
    );
    let (status, page) = daemon.request("GET", "/v1/metrics", "");
    assert_eq!(status, 200);
    for line in [
        "ringdown_network_vms{network=\"lan\"} 1",
        "ringdown_network_attached{network=\"lan\"} 1",
        "ringdown_network_port_up{network=\"lan\",vm=\"web\"} 1",
        "ringdown_network_port_events_total{network=\"lan\",vm=\"web\",event=\"received_frames\"} 8",
        "ringdown_network_port_refused_frames_total{network=\"lan\",vm=\"web\",reason=\"other_source\"} 4",
    ] {
        assert!(page.contains(&format!("{line}\n")), "{line}\n{page}");
    }
}

#[test]
fn a_vm_is_added_to_networks_and_leaves_them_when_it_is_removed() {
    let daemon = FakeDaemon::with_file(FILE);
    let new = r#"{"name":"db","nets":[{"network":"lan","ipv4":"10.1.2.9","trunk":[10],"native":1,"queue_pairs":2}]}"#;
    let (status, body) = daemon.request("POST", "/v1/vms", new);
    assert_eq!(status, 201, "{body}");
    let added: VmStatus = serde_json::from_str(&body).unwrap();
    let port = &added.nets[0];
    assert_eq!(
        (port.vlan.as_str(), port.queue_pairs, port.mtu),
        ("trunk 10 native 1", 2, 1500)
    );
    UnixStream::connect(&port.vhost_user).unwrap();
    let names = || -> Vec<String> {
        let hosts = daemon.net().hosts("lan");
        hosts.into_iter().map(|host| host.name).collect()
    };
    assert_eq!(names(), ["db", "web"]);
    let table = [
        (
            r#"{"name":"x","nets":[{"network":"lan","ipv4":"10.1.2.9"}]}"#,
            409,
            "belongs to \"db\"",
        ),
        (
            r#"{"name":"x","nets":[{"network":"wan"}]}"#,
            400,
            "there is no network named \"wan\"",
        ),
        (
            r#"{"name":"x","domain":"red","nets":[{"network":"lan"},{"network":"lan"}]}"#,
            400,
            "is there already",
        ),
        (
            r#"{"name":"x","nets":[{"network":"lan","vlan":0}]}"#,
            400,
            "vlan cannot be 0",
        ),
        (
            r#"{"name":"x","nets":[{"network":"lan","speed":1}]}"#,
            400,
            "unknown field `speed`",
        ),
        (
            r#"{"name":"x","nets":[{}]}"#,
            400,
            "missing field `network`",
        ),
        (
            r#"{"name":"x","nets":[{"network":"lan","vhost_user":"/nowhere/x"}]}"#,
            422,
            "vhost-user = ",
        ),
    ];
    for (body, expected, detail) in table {
        let (status, found) = refused(&daemon, "POST", "/v1/vms", body);
        assert_eq!(status, expected, "{body}: {found}");
        assert!(found.contains(detail), "{body}: {found}");
    }
    // Of those nothing remains.
    let list = json_of(&daemon.request("GET", "/v1/vms", "").1);
    assert_eq!(list["vms"].as_array().unwrap().len(), 2);
    assert!(!daemon.runtime_dir().join("x.sock").exists());
    assert_eq!(daemon.request("DELETE", "/v1/vms/db", "").0, 204);
    assert!(!port.vhost_user.exists());
    assert_eq!(names(), ["web"]);
    assert_eq!(daemon.net().ports("lan").len(), 1);
}

#[test]
fn a_link_is_taken_down_and_up() {
    let daemon = FakeDaemon::with_file(FILE);
    daemon.net().set_state("lan", "web", true, 0);
    let link = "/v1/networks/lan/ports/www/link";
    assert_eq!(daemon.request("PUT", link, r#"{"up":false}"#).0, 204);
    let socket = daemon.runtime_dir().join("web.net-lan.vhost");
    assert!(UnixStream::connect(&socket).is_err());
    let port = || {
        get::<NetworkDetails>(&daemon, "/v1/networks/lan")
            .ports
            .swap_remove(0)
    };
    assert_eq!((port().link_up, port().attached), (false, false));
    assert_eq!(daemon.request("PUT", link, r#"{"up":true}"#).0, 204);
    UnixStream::connect(&socket).unwrap();
    assert!(port().link_up);
    let table = [
        (
            "/v1/networks/wan/ports/web/link",
            r#"{"up":true}"#,
            404,
            "there is no network named \"wan\"",
        ),
        (
            "/v1/networks/lan/ports/db/link",
            r#"{"up":true}"#,
            404,
            "there is no VM named \"db\"",
        ),
        (
            "/v1/networks/red%2Flan/ports/web/link",
            r#"{"up":true}"#,
            404,
            "VM \"web\" has no port in the network \"red/lan\"",
        ),
        (link, r#"{"up":1}"#, 400, "invalid type"),
        (link, r#"{"up":true,"down":true}"#, 400, "unknown field"),
        (link, "", 400, "does not say whether the link is to be up"),
    ];
    for (target, body, expected, detail) in table {
        let (status, found) = refused(&daemon, "PUT", target, body);
        assert_eq!(status, expected, "{target} {body}: {found}");
        assert!(found.contains(detail), "{target} {body}: {found}");
    }
    let (status, found) = refused(&daemon, "GET", "/v1/networks/wan", "");
    assert_eq!(status, 404, "{found}");
    assert_eq!(refused(&daemon, "GET", "/v1/networks/wan/macs", "").0, 404);
    assert_eq!(refused(&daemon, "POST", "/v1/networks", "").0, 405);
}

/// How long anything may take. Nothing takes that long unless it is broken.
const PATIENCE: Duration = Duration::from_secs(20);

/// The one capture that was asked for, once it was.
fn asked_for(daemon: &FakeDaemon) -> FakeCapture {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(capture) = daemon.net().take_captures().pop() {
            return capture;
        }
        assert!(Instant::now() < deadline, "nobody asked for a capture");
        std::thread::yield_now();
    }
}

/// Asks for a capture, and reads the answer's head.
fn begin(daemon: &FakeDaemon, query: &str) -> (FakeCapture, UnixStream, String) {
    let mut stream = UnixStream::connect(control_socket(daemon.runtime_dir())).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = format!("GET /v1/networks/lan/capture{query} HTTP/1.1\r\nHost: test\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let capture = asked_for(daemon);
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.extend(byte);
    }
    (capture, stream, String::from_utf8(head).unwrap())
}

#[test]
fn a_capture_streams_until_it_ends() {
    let daemon = FakeDaemon::with_file(FILE);
    let (mut capture, mut stream, head) = begin(&daemon, "?vm=www&snaplen=96&count=5");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert!(head.contains(CAPTURE_MEDIA_TYPE), "{head}");
    assert_eq!(
        (capture.network.as_str(), capture.vm.as_deref()),
        ("lan", Some("web"))
    );
    assert_eq!(
        (capture.options.snaplen, capture.options.count),
        (96, Some(5))
    );
    // Each piece comes at once, as a chunk of its own.
    for piece in ["first", "second"] {
        assert!(capture.show(piece.as_bytes()));
        let expected = format!("{:X}\r\n{piece}\r\n", piece.len());
        let mut chunk = vec![0; expected.len()];
        stream.read_exact(&mut chunk).unwrap();
        assert_eq!(String::from_utf8(chunk).unwrap(), expected);
    }
    drop(capture);
    let mut end = [0; 5];
    stream.read_exact(&mut end).unwrap();
    assert_eq!(&end, b"0\r\n\r\n");
}

#[test]
fn a_capture_ends_when_its_client_hangs_up() {
    let daemon = FakeDaemon::with_file(FILE);
    let (capture, stream, _) = begin(&daemon, "");
    assert_eq!(capture.vm, None);
    assert_eq!(
        (capture.options.snaplen, capture.options.count),
        (pcapng::MAX_SNAPLEN, None)
    );
    assert!(!capture.is_gone());
    drop(stream);
    let deadline = Instant::now() + PATIENCE;
    while !capture.is_gone() {
        assert!(Instant::now() < deadline, "the capture goes on for nobody");
        std::thread::yield_now();
    }
}

#[test]
fn a_capture_that_cannot_be_is_refused() {
    let daemon = FakeDaemon::with_file(FILE);
    let table = [
        ("/v1/networks/wan/capture", 404, "\"wan\""),
        ("/v1/networks/lan/capture?vm=db", 404, "\"db\""),
        (
            "/v1/networks/red%2Flan/capture?vm=web",
            404,
            "has no port in the network",
        ),
        (
            "/v1/networks/lan/capture?snaplen=0",
            400,
            "from 1 to 262144",
        ),
        (
            "/v1/networks/lan/capture?snaplen=262145",
            400,
            "snaplen is 262145",
        ),
        ("/v1/networks/lan/capture?count=0", 400, "1 frame or more"),
        (
            "/v1/networks/lan/capture?colour=red",
            400,
            "unknown field `colour`",
        ),
    ];
    for (target, status, detail) in table {
        let answer = refused(&daemon, "GET", target, "");
        assert_eq!(answer.0, status, "{target}: {answer:?}");
        assert!(answer.1.contains(detail), "{target}: {answer:?}");
    }
    assert!(daemon.net().take_captures().is_empty());
}
