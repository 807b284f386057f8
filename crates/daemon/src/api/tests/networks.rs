//! Networks over the control API, with a fake switch behind it.

use api::{MacList, NetworkDetails, NetworkList, PortKind};

use super::*;

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
            422,
            "there is no network named \"wan\"",
        ),
        (
            r#"{"name":"x","domain":"red","nets":[{"network":"lan"},{"network":"lan"}]}"#,
            422,
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
            "nets[0].network is missing: add it, a string",
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
        (link, r#"{"up":1}"#, 400, "up is 1: use true or false"),
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
