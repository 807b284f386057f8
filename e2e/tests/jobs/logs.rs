//! `ringdown logs`: nothing lost and nothing doubled, whatever happens to the file, to the agent and to the connection.

use e2e::{CommandSpec, Guest};

use super::{Background, PATIENCE, ringdown, scene, scene_alone};

/// How many lines a guest writes while its log is followed.
const LINES: usize = 1500;

/// Writes numbered lines to a file that is renamed now and then, as logrotate does.
const ROTATING: &str = r#"
    mkdir -p /tmp/log; cd /tmp/log; i=1
    while [ $i -le 1500 ]; do
        echo "line $i" >> app.log
        [ $((i % 400)) = 0 ] && mv -f app.log.1 app.log.2 2>/dev/null; [ $((i % 400)) = 0 ] && mv app.log app.log.1
        [ $((i % 10)) = 0 ] && usleep 20000
        i=$((i + 1))
    done
    true"#;

#[test]
fn a_file_is_followed_over_its_rotations_and_the_agents_end() {
    let scene = scene_alone();
    for guest in &scene.guests {
        guest
            .shell("rm -rf /tmp/log; mkdir -p /tmp/log; echo line 0 > /tmp/log/app.log")
            .unwrap();
        let mut followed = Background::start(
            &scene.daemon,
            &["logs", guest.name(), "--follow", "/tmp/log/app.log"],
        );
        followed.wait_for("line 0\n");
        let writer = guest
            .start_spec(CommandSpec::new(ROTATING).deadline(PATIENCE))
            .unwrap();
        for at in [250, 700, 1100] {
            followed.wait_for(&format!("line {at}\n"));
            guest.shell("killall -9 ringdown-agent").unwrap();
        }
        followed.wait_for(&format!("line {LINES}\n"));
        assert_eq!(writer.wait().unwrap().code, 0);
        assert_numbered(&followed.text(), guest);
    }
}

#[test]
fn a_file_that_is_emptied_goes_on() {
    let scene = scene();
    for guest in &scene.guests {
        guest
            .shell("for i in 1 2 3; do echo before $i; done > /tmp/emptied.log")
            .unwrap();
        let mut followed = Background::start(
            &scene.daemon,
            &[
                "logs",
                guest.name(),
                "--follow",
                "--lines",
                "2",
                "/tmp/emptied.log",
            ],
        );
        followed.wait_for("before 3\n");
        assert!(!followed.text().contains("before 1"), "{}", followed.text());
        guest
            .shell(": > /tmp/emptied.log; sleep 1; echo after >> /tmp/emptied.log")
            .unwrap();
        followed.wait_for("after\n");
        assert_eq!(followed.text(), "before 2\nbefore 3\nafter\n");
    }
}

#[test]
fn the_journal_is_followed_over_the_agents_end() {
    let scene = scene_alone();
    for guest in &scene.guests {
        guest.shell("start-journal; logger -t app line 0").unwrap();
        let mut followed = Background::start(
            &scene.daemon,
            &["logs", guest.name(), "--follow", "--lines", "1"],
        );
        followed.wait_for("line 0\n");
        let line = "for i in $(seq 1 300); do logger -t app line $i; done";
        let writer = guest.start(line).unwrap();
        for at in [50, 150] {
            followed.wait_for(&format!("line {at}\n"));
            guest.shell("killall -9 ringdown-agent").unwrap();
        }
        followed.wait_for("line 300\n");
        assert_eq!(writer.wait().unwrap().code, 0);
        let lines = followed.text();
        let of_app: Vec<&str> = lines
            .lines()
            // The kernel writes into the journal, too, and may say something that ends like that.
            .filter_map(|line| Some(line.split_once(": line ")?.1))
            .collect();
        let expected: Vec<String> = (0..=300).map(|number| number.to_string()).collect();
        assert_eq!(of_app, expected, "{}", guest.name());
        let since = ringdown(&scene, &["logs", guest.name(), "--lines", "3"]);
        assert_eq!(since.lines().count(), 3, "{since}");
        // Another test may want a guest without a journal.
        guest.shell("killall systemd-journald; umount /sys/fs/cgroup; rm -rf /run/log /dev/log /run/systemd/journal").unwrap();
    }
}

fn assert_numbered(text: &str, guest: &Guest) {
    for (number, line) in text.lines().enumerate() {
        assert_eq!(
            line,
            format!("line {number}"),
            "{}: a line is lost or doubled",
            guest.name()
        );
    }
    assert_eq!(text.lines().count(), LINES + 1);
}
