//! `windows` and `qmp`.

use super::*;

#[test]
fn windows_are_written_in_the_file_and_as_an_option() {
    let config = file(
        "[[vm]]\nname = \"web\"\nwindows = \"4x16M\"\nqmp = \"web.qmp\"\n[[vm]]\nname = \"db\"",
    )
    .unwrap();
    let [web, db] = [0, 1].map(|index| config.vms[index].value.clone());
    let spec = WindowsSpec {
        count: 4,
        len: 16 << 20,
    };
    assert_eq!(
        (web.windows, web.qmp),
        (Some(spec), Some("/etc/ringdown/web.qmp".into()))
    );
    assert_eq!((db.windows, db.qmp), (None, None));
    let option = vm("name=web,windows=4x16M,qmp=web.qmp").unwrap();
    assert_eq!(
        (option.windows, option.qmp),
        (Some(spec), Some("/srv/web.qmp".into()))
    );
    assert_eq!(vm("name=web,windows=1x8M").unwrap().qmp, None);
}

#[test]
fn what_no_windows_can_be_is_refused_with_its_place() {
    let place = "ringdown.toml: line 3, column 11: ";
    for (written, expected) in [
        ("\"9x16M\"", "\"9x16M\" is not a number and size of windows"),
        (
            "\"4x6M\"",
            "1 to 8 windows of 8M to 1G each, in steps of 2M",
        ),
        ("4", "4x16M"),
        ("true", "4x16M"),
    ] {
        let found = refusal(&format!("[[vm]]\nname = \"web\"\nwindows = {written}"));
        assert!(found.contains(place) && found.contains(expected), "{found}");
    }
    let found = vm("name=web,windows=0x16M").unwrap_err();
    assert!(found.contains("1 to 8 windows"), "{found}");
    let long = format!(
        "name=web,windows=4x16M,qmp=/{}",
        "q".repeat(MAX_SOCKET_PATH_LEN)
    );
    assert!(vm(&long).unwrap_err().contains("108 bytes"));
}

#[test]
fn windows_need_a_line_of_vsock_and_qmp_needs_windows() {
    let found = plan(&["name=web,qmp=/run/web.qmp"]).unwrap_err();
    assert!(found.contains("write windows = \"4x16M\""), "{found}");
    let found = plan(&["name=web,serial,windows=4x16M"]).unwrap_err();
    assert!(
        found.contains("\"windows\" has no meaning beside it"),
        "{found}"
    );
    let found = plan(&["name=fc,hybrid=/run/v.sock,windows=4x16M"]).unwrap_err();
    assert!(
        found.contains("\"windows\" has no meaning beside it"),
        "{found}"
    );
}

#[test]
fn no_two_have_one_control_socket_of_a_vmm() {
    let found = plan(&[
        "name=web,windows=1x8M,qmp=/q",
        "name=db,windows=1x8M,qmp=/q",
    ])
    .unwrap_err();
    assert!(
        found.contains("/q is used by VM \"web\" already"),
        "{found}"
    );
    let found = plan(&["name=web,windows=1x8M,qmp=/run/ringdown/web.sock"]).unwrap_err();
    assert!(found.contains("/run/ringdown/web.sock"), "{found}");
}

#[test]
fn all_vms_together_have_a_limit() {
    let full = MAX_WINDOWS_OF_ALL / 8;
    let mut config = Config::default();
    for index in 0..full {
        let option = format!("name=vm{index},windows=8x8M");
        config
            .vms
            .push(parse_vm_option(&option, Path::new("/srv")).unwrap());
    }
    let plan = Plan::from_config("/run/ringdown".into(), &config, Cids::default());
    let mut plan = plan.unwrap();
    plan.add(&VmRequest::named("without")).unwrap();
    let mut one_more = VmRequest::named("one-more");
    one_more.windows = Some(parse_windows("1x8M").unwrap());
    let error = plan.add(&one_more).unwrap_err().to_string();
    assert!(
        error.contains("4096") && error.contains("windows of all VMs"),
        "{error}"
    );
    plan.remove("vm0").unwrap();
    plan.add(&one_more).unwrap();
}
