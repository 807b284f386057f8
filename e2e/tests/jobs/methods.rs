//! What the guest's administrator switches off in the agent's configuration.

use super::{PATIENCE, eventually, ringdown, said, scene_alone};

#[test]
fn a_method_that_is_off_is_refused_and_the_others_go_on() {
    let scene = scene_alone();
    for guest in &scene.guests {
        let name = guest.name();
        set_methods(guest, "exec = false\ncp = false\npower = false");
        eventually("the agent is there again", || {
            scene.daemon.run(&["stats", name]).unwrap().status.success()
        });
        let there = format!("{name}:/tmp/");
        for arguments in [
            ["exec", name, "--", "true"].as_slice(),
            &["cp", "/etc/passwd", &there],
            &["shutdown", name],
        ] {
            let output = scene.daemon.run(arguments).unwrap();
            let words = said(&output);
            assert!(!output.status.success(), "{arguments:?}: {words}");
            assert!(
                words.contains("is off in its /etc/ringdown/agent.toml"),
                "{arguments:?}: {words}"
            );
        }
        // What cannot be meant keeps the agent from starting: better than to allow what was to be off.
        guest
            .write_file(
                "/etc/ringdown/agent.toml",
                "[methods]\nexek = false\n",
                0o644,
            )
            .unwrap();
        let output = guest.run("ringdown-agent").unwrap();
        assert_ne!(output.code, 0);
        assert!(
            output.error_text().contains("exec"),
            "{}",
            output.error_text()
        );
        guest.shell("rm /etc/ringdown/agent.toml").unwrap();
        restart_agent(guest);
        eventually("everything is allowed again", || {
            scene
                .daemon
                .run(&["exec", name, "--", "true"])
                .unwrap()
                .status
                .success()
        });
        ringdown(&scene, &["cp", "/etc/passwd", &there]);
    }
}

/// Starts the agent anew with these lines about its methods.
pub(super) fn set_methods(guest: &e2e::Guest, lines: &str) {
    guest.shell("mkdir -p /etc/ringdown").unwrap();
    guest
        .write_file(
            "/etc/ringdown/agent.toml",
            format!("[methods]\n{lines}\n"),
            0o644,
        )
        .unwrap();
    restart_agent(guest);
}

pub(super) fn restart_agent(guest: &e2e::Guest) {
    let old = guest.shell("pidof ringdown-agent").unwrap();
    guest.shell("killall -9 ringdown-agent").unwrap();
    let line =
        format!("pidof ringdown-agent > /dev/null && [ \"$(pidof ringdown-agent)\" != \"{old}\" ]");
    guest.wait_until(&line, PATIENCE).unwrap();
}
