//! Which crate may import which: the allowed edges, for the check.

use anyhow::{Result, ensure};
use serde_json::Value;

/// Each crate and the crates that it may import; ARCHITECTURE.md has the reasons.
const EDGES: &[(&str, &[&str])] = &[
    ("ringdown-wire", &[]),
    ("ringdown-guestmem", &[]),
    ("ringdown-shmring", &["ringdown-guestmem"]),
    ("ringdown-sys", &[]),
    ("ringdown-keeper", &["ringdown-sys"]),
    ("ringdown-policy", &["ringdown-wire"]),
    ("ringdown-vsock", &["ringdown-policy", "ringdown-wire"]),
    ("ringdown-l2", &["ringdown-policy", "ringdown-wire"]),
    (
        "ringdown-device",
        &[
            "ringdown-guestmem",
            "ringdown-keeper",
            "ringdown-l2",
            "ringdown-policy",
            "ringdown-shmring",
            "ringdown-sys",
            "ringdown-vsock",
            "ringdown-wire",
        ],
    ),
    ("ringdown-serial", &["ringdown-wire"]),
    (
        "ringdown-config",
        &[
            "ringdown-l2",
            "ringdown-policy",
            "ringdown-sys",
            "ringdown-vsock",
            "ringdown-wire",
        ],
    ),
    (
        "ringdown-api",
        &["ringdown-config", "ringdown-policy", "ringdown-wire"],
    ),
    (
        "ringdown-runtime",
        &[
            "ringdown-config",
            "ringdown-device",
            "ringdown-policy",
            "ringdown-sys",
            "ringdown-wire",
        ],
    ),
    (
        "ringdown-hostside",
        &[
            "ringdown-api",
            "ringdown-config",
            "ringdown-device",
            "ringdown-policy",
            "ringdown-runtime",
            "ringdown-serial",
            "ringdown-sys",
            "ringdown-vsock",
            "ringdown-wire",
        ],
    ),
    (
        "ringdown-windows",
        &[
            "ringdown-config",
            "ringdown-device",
            "ringdown-policy",
            "ringdown-runtime",
            "ringdown-sys",
            "ringdown-vsock",
            "ringdown-wire",
        ],
    ),
    (
        "ringdown-daemon",
        &[
            "ringdown-api",
            "ringdown-config",
            "ringdown-device",
            "ringdown-hostside",
            "ringdown-keeper",
            "ringdown-l2",
            "ringdown-policy",
            "ringdown-runtime",
            "ringdown-sys",
            "ringdown-vsock",
            "ringdown-windows",
            "ringdown-wire",
        ],
    ),
    (
        "ringdown-circuit",
        &["ringdown-shmring", "ringdown-sys", "ringdown-wire"],
    ),
    ("ringdown-circuit-c", &["ringdown-circuit"]),
    ("ringdown-transfer", &["ringdown-sys", "ringdown-wire"]),
    (
        "ringdown-agent",
        &[
            "ringdown-serial",
            "ringdown-sys",
            "ringdown-transfer",
            "ringdown-wire",
        ],
    ),
    (
        "ringdown-cli",
        &[
            "ringdown-api",
            "ringdown-config",
            "ringdown-daemon",
            "ringdown-hostside",
            "ringdown-keeper",
            "ringdown-policy",
            "ringdown-runtime",
            "ringdown-sys",
            "ringdown-transfer",
            "ringdown-windows",
            "ringdown-wire",
        ],
    ),
];

/// Crates that move bytes, run in guests or only describe: no async runtime there.
const WITHOUT_RUNTIME: &[&str] = &[
    "ringdown-wire",
    "ringdown-guestmem",
    "ringdown-shmring",
    "ringdown-sys",
    "ringdown-keeper",
    "ringdown-policy",
    "ringdown-vsock",
    "ringdown-device",
    "ringdown-serial",
    "ringdown-l2",
    "ringdown-config",
    "ringdown-api",
    "ringdown-circuit",
    "ringdown-circuit-c",
    "ringdown-transfer",
    "ringdown-agent",
];

const RUNTIMES: &[&str] = &["tokio", "async-std", "smol", "futures", "mio"];

/// Findings about the packages below `crates/`.
pub fn check(metadata: &Value) -> Result<Vec<String>> {
    let root = metadata["workspace_root"].as_str().unwrap_or_default();
    let rooms_directory = format!("{root}/crates/");
    let mut findings = Vec::new();
    let mut room_count = 0;
    for package in super::packages(metadata) {
        let manifest = package["manifest_path"].as_str().unwrap_or_default();
        if !manifest.starts_with(&rooms_directory) {
            continue;
        }
        room_count += 1;
        let name = package["name"].as_str().unwrap_or_default();
        let Some((_, allowed)) = EDGES.iter().find(|(room, _)| *room == name) else {
            findings.push(format!(
                "{name}: this crate is not in the list of allowed imports"
            ));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let imported = dependency["name"].as_str().unwrap_or_default();
            // Tests may use the counterpart, as the command's tests use the real agent.
            if dependency["kind"] == "dev" {
                continue;
            }
            if dependency["path"].is_string() && !allowed.contains(&imported) {
                findings.push(format!(
                    "{name} imports {imported}, allowed are {allowed:?}"
                ));
            }
            // What is optional is for an application's own runtime.
            let is_forced = dependency["optional"] != true;
            if is_forced && WITHOUT_RUNTIME.contains(&name) && RUNTIMES.contains(&imported) {
                findings.push(format!(
                    "{name} imports the async runtime {imported}: it must do without"
                ));
            }
        }
    }
    ensure!(
        room_count > 0,
        "there are no crates below {rooms_directory}"
    );
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn workspace(name: &str, dependencies: Value) -> Value {
        json!({
            "workspace_root": "/w",
            "packages": [{ "name": name, "manifest_path": "/w/crates/x/Cargo.toml", "dependencies": dependencies }]
        })
    }

    fn local(name: &str) -> Value {
        json!([{ "name": name, "path": "/w/crates/y" }])
    }

    #[test]
    fn an_allowed_import_passes_and_another_is_found() {
        assert!(
            check(&workspace("ringdown-device", local("ringdown-guestmem")))
                .unwrap()
                .is_empty()
        );
        assert_eq!(
            check(&workspace("ringdown-vsock", local("ringdown-guestmem")))
                .unwrap()
                .len(),
            1
        );
        assert_eq!(
            check(&workspace("ringdown-wire", local("ringdown-e2e")))
                .unwrap()
                .len(),
            1
        );
    }

    #[test]
    fn an_unknown_room_and_a_runtime_in_the_data_path_are_found() {
        assert_eq!(
            check(&workspace("ringdown-attic", json!([])))
                .unwrap()
                .len(),
            1
        );
        assert_eq!(
            check(&workspace(
                "ringdown-device",
                json!([{ "name": "tokio", "path": null }])
            ))
            .unwrap()
            .len(),
            1
        );
        let optional = json!([{ "name": "tokio", "optional": true }]);
        assert!(
            check(&workspace("ringdown-circuit", optional))
                .unwrap()
                .is_empty()
        );
        assert!(
            check(&workspace("ringdown-daemon", json!([{ "name": "tokio" }])))
                .unwrap()
                .is_empty()
        );
    }

    #[test]
    fn a_workspace_without_rooms_is_an_error() {
        assert!(check(&json!({ "workspace_root": "/w", "packages": [] })).is_err());
    }
}
