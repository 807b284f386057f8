//! With a QEMU that has no guest, where there is one; and with VMMs that lie.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};

use device::window::WindowFile;

use super::*;

const LEN: u64 = 8 << 20;

/// A VMM that answers each line with what the script says of its command; it ends with the connection, or with the script.
fn lying(
    path: &Path,
    greeting: &'static str,
    mut script: impl FnMut(&str, &Value) -> Option<String> + Send + 'static,
) -> JoinHandle<Vec<String>> {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut commands = Vec::new();
        if stream.write_all(greeting.as_bytes()).is_err() {
            return commands;
        }
        let lines = BufReader::new(stream.try_clone().unwrap()).lines();
        for line in lines.map_while(Result::ok) {
            let message: Value = serde_json::from_str(&line).unwrap();
            let command = message["execute"].as_str().unwrap().to_owned();
            let answer = script(&command, &message["id"]);
            commands.push(command);
            let Some(answer) = answer else { break };
            if stream.write_all(answer.as_bytes()).is_err() {
                break;
            }
        }
        commands
    })
}

const GREETING: &str = "{\"QMP\": {}}\n";

fn returning(id: &Value, value: &str) -> String {
    format!("{{\"return\": {value}, \"id\": {id}}}\n")
}

fn refusing(id: &Value, words: &str) -> String {
    format!("{{\"error\": {{\"class\": \"GenericError\", \"desc\": \"{words}\"}}, \"id\": {id}}}\n")
}

fn add(path: &Path) -> Result<(), QmpError> {
    let window = WindowFile::sealed([1; 16], LEN).unwrap();
    let file = window.descriptor().unwrap();
    Qmp::connect(path)?.add_window("w", file.as_fd(), LEN, 2)
}

/// A VMM may set a link there, and another one would get its window.
#[test]
fn a_link_of_another_user_leads_to_no_other_vmm() {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
    let (other, path) = (directory.path().join("other"), directory.path().join("qmp"));
    let others = UnixListener::bind(&other).unwrap();
    others.set_nonblocking(true).unwrap();
    symlink(&other, &path).unwrap();
    let error = add(&path).unwrap_err();
    assert!(matches!(error, QmpError::Connect { .. }), "{error}");
    assert!(others.accept().is_err());
}

#[test]
fn nobody_is_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let error = add(&path).unwrap_err();
    assert!(matches!(error, QmpError::Connect { .. }), "{error}");
    assert!(error.to_string().contains("-qmp unix:"), "{error}");
}

#[test]
fn a_vmm_that_says_nothing_is_not_waited_for_longer() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let _listener = UnixListener::bind(&path).unwrap();
    let error = Qmp::connect_within(&path, Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, QmpError::Timeout), "{error}");
}

#[test]
fn events_for_ever_end_at_the_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.write_all(GREETING.as_bytes());
        while stream.write_all(b"{\"event\": \"STOP\"}\n").is_ok() {}
    });
    let error = Qmp::connect_within(&path, Duration::from_millis(200)).unwrap_err();
    assert!(matches!(error, QmpError::Timeout), "{error}");
    server.join().unwrap();
}

#[test]
fn messages_have_a_length() {
    let greeting = |len: usize| {
        let fill = len - "{\"QMP\":{\"a\":\"\"}}\n".len();
        let text = format!("{{\"QMP\":{{\"a\":\"{}\"}}}}\n", "x".repeat(fill));
        assert_eq!(text.len(), len);
        &*text.leak()
    };
    for (len, is_taken) in [
        (MAX_MESSAGE_LEN - 1, true),
        (MAX_MESSAGE_LEN, true),
        (MAX_MESSAGE_LEN + 1, false),
        (100 * MAX_MESSAGE_LEN, false),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let vmm = lying(&path, greeting(len), |_, id| Some(returning(id, "{}")));
        match Qmp::connect(&path) {
            Ok(_) => assert!(is_taken, "{len}"),
            Err(QmpError::Unexpected { found, .. }) => {
                assert!(!is_taken && found == "a longer one", "{len}: {found}");
            }
            Err(error) => panic!("{len}: {error}"),
        }
        vmm.join().unwrap();
    }
}

#[test]
fn what_is_no_vmm_is_refused() {
    for greeting in [
        "220 mail.example ESMTP\n",
        "{}\n",
        "[1]\n",
        "null\n",
        "{\"QMP\"\n",
        "\0\n",
    ] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let vmm = lying(&path, greeting, |_, _| None);
        let error = add(&path).unwrap_err();
        assert!(
            matches!(error, QmpError::Unexpected { .. }),
            "{greeting:?}: {error}"
        );
        assert!(!error.to_string().contains('\0'));
        assert!(vmm.join().unwrap().is_empty());
    }
}

#[test]
fn answers_that_cannot_be_are_errors() {
    let answers = [
        "null",
        "[]",
        "{}",
        "{\"fdset-id\": 1}",
        "{\"fdset-id\": -1, \"fd\": 1}",
        "{\"fdset-id\": \"1\", \"fd\": \"/../x\"}",
        "{\"fdset-id\": 1.5, \"fd\": 1}",
    ];
    for answer in answers {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let vmm = lying(&path, GREETING, move |command, id| match command {
            "add-fd" => Some(returning(id, answer)),
            _ => Some(returning(id, "{}")),
        });
        let error = add(&path).unwrap_err();
        assert!(
            matches!(error, QmpError::Unexpected { .. }),
            "{answer}: {error}"
        );
        assert_eq!(vmm.join().unwrap(), ["qmp_capabilities", "add-fd"]);
    }
}

#[test]
fn a_vmm_that_hangs_up_or_answers_something_else_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hangs-up");
    let vmm = lying(&path, GREETING, |_, _| None);
    assert!(matches!(add(&path).unwrap_err(), QmpError::Broken(_)));
    vmm.join().unwrap();
    let path = directory.path().join("neither");
    let vmm = lying(&path, GREETING, |_, id| Some(format!("{{\"id\": {id}}}\n")));
    assert!(matches!(
        add(&path).unwrap_err(),
        QmpError::Unexpected { .. }
    ));
    vmm.join().unwrap();
}

#[test]
fn what_was_done_is_undone_when_a_step_fails() {
    let cases: [(&str, &[&str]); 2] = [
        (
            "object-add",
            &["qmp_capabilities", "add-fd", "object-add", "remove-fd"],
        ),
        (
            "device_add",
            &[
                "qmp_capabilities",
                "add-fd",
                "object-add",
                "remove-fd",
                "qom-list",
                "device_add",
                "object-del",
            ],
        ),
    ];
    for (failing, expected) in cases {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let vmm = lying(&path, GREETING, move |command, id| {
            Some(match command {
                "add-fd" => returning(id, "{\"fdset-id\": 3, \"fd\": 17}"),
                "qom-list" => returning(id, "[]"),
                _ if command == failing => refusing(id, "no \\u0007way"),
                _ => returning(id, "{}"),
            })
        });
        let error = add(&path).unwrap_err();
        assert!(
            matches!(error, QmpError::Refused { command, .. } if command == failing),
            "{error}"
        );
        assert_eq!(vmm.join().unwrap(), expected);
    }
}

/// QEMU 7.2 may stand still for good when it refuses a device.
#[test]
fn no_device_is_added_to_a_port_that_has_one() {
    let taken = r#"[{"name": "type"}, {"name": "child[3]"}]"#;
    let cases = [
        (vec![taken, "[]"], vec!["device_add"]),
        (vec![taken, taken], vec!["object-del"]),
        (vec!["{}"], vec!["object-del"]),
    ];
    for (buses, expected) in cases {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let (asked, mut buses) = (buses.len(), buses.into_iter());
        let vmm = lying(&path, GREETING, move |command, id| {
            Some(match command {
                "add-fd" => returning(id, "{\"fdset-id\": 3, \"fd\": 17}"),
                "qom-list" => returning(id, buses.next().unwrap()),
                _ => returning(id, "{}"),
            })
        });
        assert_eq!(add(&path).is_ok(), expected == ["device_add"]);
        let commands = vmm.join().unwrap();
        assert_eq!(commands[4..4 + asked], vec!["qom-list"; asked]);
        assert_eq!(commands[4 + asked..], expected);
    }
}

#[test]
fn a_list_of_objects_has_our_windows_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let objects =
        r#"[{"name": "mem0"}, {"name": "ringdown-window-0a"}, {"type": "x"}, {"name": 7}]"#;
    let vmm = lying(&path, GREETING, move |command, id| match command {
        "qom-list" => Some(returning(id, objects)),
        _ => Some(returning(id, "{}")),
    });
    let windows = Qmp::connect(&path).unwrap().windows().unwrap();
    assert_eq!(Vec::from_iter(windows), ["0a"]);
    vmm.join().unwrap();
}

/// A QEMU without a guest, which ends with the test.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn qemu(path: &Path, machine: &[&str]) -> Option<Qemu> {
    let program = "qemu-system-x86_64";
    let monitor = format!("unix:{},server=on,wait=off", path.display());
    let child = Command::new(program)
        .args([
            "-S",
            "-accel",
            "tcg",
            "-display",
            "none",
            "-nodefaults",
            "-qmp",
            &monitor,
        ])
        .args(["-m", "64M,slots=4,maxmem=1G", "-machine"])
        .args(machine)
        .stdin(Stdio::null())
        .spawn();
    let mut qemu = match child {
        Ok(child) => Qemu(child),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            eprintln!("skipped: there is no {program}");
            return None;
        }
        Err(error) => panic!("{program}: {error}"),
    };
    // Its socket listens before it reads anything else; there is no event to be awaited.
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::os::unix::net::UnixStream::connect(path).is_err() {
        assert!(qemu.0.try_wait().unwrap().is_none(), "QEMU has ended");
        assert!(Instant::now() < deadline, "QEMU does not listen");
        thread::sleep(Duration::from_millis(10));
    }
    Some(qemu)
}

#[test]
fn a_real_vmm_gets_windows_and_says_when_there_is_no_room() {
    let port = |index: u32| {
        format!(
            "pcie-root-port,id={},chassis={}",
            port_name(index),
            200 + index
        )
    };
    let (first, second) = (port(0), port(1));
    let machines: [&[&str]; 2] = [&["q35", "-device", &first, "-device", &second], &["pc"]];
    for machine in machines {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let Some(_qemu) = qemu(&path, machine) else {
            return;
        };
        let windows =
            [[1; 16], [2; 16], [3; 16]].map(|uuid| WindowFile::sealed(uuid, LEN).unwrap());
        for (index, window) in windows[..2].iter().enumerate() {
            let name = format!("w{index}");
            let file = window.descriptor().unwrap();
            let mut qmp = Qmp::connect(&path).unwrap();
            assert!(!qmp.windows().unwrap().contains(&name));
            qmp.add_window(&name, file.as_fd(), LEN, 2).unwrap();
            assert!(qmp.windows().unwrap().contains(&name));
        }
        let mut qmp = Qmp::connect(&path).unwrap();
        let devices = qmp.execute("query-memory-devices", json!({})).unwrap();
        let devices = devices.as_array().unwrap();
        assert_eq!(devices.len(), 2, "{devices:?}");
        for device in devices {
            assert_eq!(device["type"], "virtio-pmem");
            assert_eq!(device["data"]["size"], LEN);
        }
        // More than the machine may have: nothing of it stays.
        let file = windows[2].descriptor().unwrap();
        let error = qmp
            .add_window("huge", file.as_fd(), 2 << 30, 2)
            .unwrap_err();
        assert!(matches!(error, QmpError::Refused { .. }), "{error}");
        if machine[0] == "q35" {
            // Both ports are taken.
            let error = qmp.add_window("third", file.as_fd(), LEN, 2).unwrap_err();
            assert!(matches!(error, QmpError::NoPort { ports: 2 }), "{error}");
        }
        assert_eq!(Vec::from_iter(qmp.windows().unwrap()), ["w0", "w1"]);
    }
}

/// What it says of itself stands in the log and in answers to people.
#[test]
fn the_words_of_a_vmm_break_no_line_and_steer_no_terminal() {
    let words = r#"boo\n2026-11-27T09:00:00Z INFO forged \u001b[31mred \u202e\u0007 'a' \"b\""#;
    let said = format!("{words}{}", "x".repeat(2 * MAX_SHOWN));
    for failing in ["qmp_capabilities", "add-fd"] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let said = said.clone();
        let vmm = lying(&path, GREETING, move |command, id| {
            Some(match command == failing {
                true => refusing(id, &said),
                false => returning(id, "{}"),
            })
        });
        let error = add(&path).unwrap_err();
        assert!(matches!(error, QmpError::Refused { .. }), "{error}");
        let shown = error.to_string();
        let plain = |character: char| character.is_ascii_graphic() || character == ' ';
        assert!(shown.chars().all(plain), "{shown:?}");
        assert!(shown.contains(r"boo\n2026"), "{shown}");
        assert!(shown.contains("'a' \"b\"xx"), "{shown}");
        assert!(shown.len() < MAX_SHOWN + 100, "{shown}");
        vmm.join().unwrap();
    }
}
