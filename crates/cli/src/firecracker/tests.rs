use super::*;

fn vm(kind: &str, socket: &str) -> VmStatus {
    let mut vm = serde_json::json!({ "name": "fc", "kind": kind, "cid": 3, "state": "waiting", "circuits": 0, "host": "/run/ringdown/fc.sock" });
    if kind == "hybrid" {
        vm["hybrid"] = socket.into();
    }
    serde_json::from_value(vm).unwrap()
}

#[test]
fn the_page_shows_what_is_printed() {
    let vm = vm("hybrid", "/run/ringdown/fc.vsock");
    let printed = serde_json::to_string_pretty(&configuration(&vm).unwrap()).unwrap();
    let shown = format!("# ringdown args fc --vmm firecracker\n{printed}\n```");
    let page = include_str!("../../../../docs/firecracker.md");
    assert!(
        page.contains(&shown),
        "not in docs/firecracker.md:\n{shown}"
    );
}

#[test]
fn only_a_hybrid_line_is_one_that_it_can_have() {
    for kind in ["vsock", "serial"] {
        assert_eq!(configuration(&vm(kind, "/r/fc.sock")), None, "{kind}");
    }
}

#[test]
fn the_path_means_the_same_in_json() {
    let vm = vm("hybrid", "/tmp/it's \"here\"\\");
    let printed = serde_json::to_string(&configuration(&vm).unwrap()).unwrap();
    let read: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(read["vsock"]["uds_path"], "/tmp/it's \"here\"\\");
}
