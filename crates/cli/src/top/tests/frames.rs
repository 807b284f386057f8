//! Frames, at their sizes.

use ratatui::style::Modifier;

use super::*;

#[test]
fn eighty_columns_show_all_that_matters() {
    let text = text(&mut seen());
    let title = "ringdown top   3 VMs (3 ready)   3 circuits                 by rate▼   every 1 s";
    assert!(text.starts_with(title), "{text}");
    for words in [
        "guests send 5.0 MiB/s",
        "guests receive 5.0 MiB/s",
        "peak 5.0 MiB",
        "q leave",
    ] {
        assert!(text.contains(words), "{words}\n{text}");
    }
    let web = text.lines().find(|line| line.starts_with("web")).unwrap();
    let columns: Vec<&str> = web.split_whitespace().collect();
    assert_eq!(columns, ["web", "ready", "2", "4.0M", "1.0M", "64K", "▇▇"]);
    assert_eq!(first_words(&text, "VM "), ["web", "db", "cache"]);
    assert!(
        text.lines().all(|line| line.chars().count() <= 80),
        "{text}"
    );
    assert_eq!(text.lines().count(), 24);
}

#[test]
fn a_smaller_terminal_is_told_so_and_nothing_breaks() {
    for (width, height) in [(79, 24), (80, 23), (79, 23), (40, 10)] {
        let text = plain(&drawn(&mut seen(), width, height));
        assert!(text.contains("ringdown top needs 80 by 24"), "{text}");
        assert!(text.contains(&format!("has {width} by {height}")), "{text}");
        assert!(!text.contains("web"), "{text}");
    }
    for (width, height) in [(1, 1), (3, 2), (0, 0), (200, 1), (1, 200)] {
        drawn(&mut seen(), width, height);
    }
}

#[test]
fn a_larger_terminal_shows_more() {
    let small = text(&mut seen());
    let large = plain(&drawn(&mut seen(), 200, 50));
    for title in ["LINE", "CID", "REFUSED"] {
        assert!(!small.contains(title), "{small}");
        assert!(large.contains(title), "{large}");
    }
    let mut circuits = seen_with(Settings {
        circuits: true,
        ..settings()
    });
    let large = plain(&drawn(&mut circuits, 200, 50));
    for word in ["KIND", "RULE", "web-to-db", "BYTES", "host pid 4711"] {
        assert!(large.contains(word), "{large}");
    }
    assert!(!text(&mut circuits).contains("KIND"));
}

#[test]
fn every_view_is_drawn_at_every_size() {
    for width in (60..=220).step_by(35).chain([80]) {
        for height in (10..=60).step_by(14).chain([24]) {
            for subject in ["vms", "circuits", "vm", "circuit", "help"] {
                let mut app = seen_with(Settings {
                    circuits: subject == "circuits",
                    vm: subject
                        .starts_with("vm")
                        .then(|| "web".to_owned())
                        .filter(|_| subject == "vm"),
                    ..settings()
                });
                if subject == "circuit" {
                    app.enter(crate::top::app::Subject::Circuit("0-1".to_owned()));
                }
                app.shows_help = subject == "help";
                drawn(&mut app, width, height);
            }
        }
    }
}

#[test]
fn a_vm_has_its_facts_and_its_circuits() {
    let mut app = seen_with(Settings {
        vm: Some("web".to_owned()),
        ..settings()
    });
    let text = text(&mut app);
    for words in [
        "web, ready, vsock line, CID 3",
        "ringdown-agent 0.1.0 in web.example",
        "2 circuits of 16384, 64 KiB queued of 256 MiB",
        "peer reset 7, denied 3",
        "it sends 4.0 MiB/s",
    ] {
        assert!(text.contains(words), "{words}\n{text}");
    }
    assert_eq!(first_words(&text, "FROM"), ["web:40001", "cache:40002"]);
    let mut gone = seen_with(Settings {
        vm: Some("nobody".to_owned()),
        ..settings()
    });
    assert!(super::text(&mut gone).contains("there is no VM \"nobody\""));
}

#[test]
fn a_circuit_says_who_whom_and_why_and_stays_when_it_is_over() {
    let mut app = seen();
    app.enter(crate::top::app::Subject::Circuit("0-1".to_owned()));
    let open = text(&mut app);
    for words in [
        "web:40001",
        "db:5432",
        "web-to-db",
        "open",
        "stream",
        "10m",
        "4.0 MiB/s",
        "22 MiB",
        "4.0 KiB",
        "256 KiB",
    ] {
        assert!(open.contains(words), "{words}\n{open}");
    }
    app.take(sample(4, &[vm("web", 3, [0, 0])], Vec::new()));
    let over = text(&mut app);
    assert!(over.contains("over: these are its last figures"), "{over}");
    assert!(over.contains("web-to-db"), "{over}");
}

#[test]
fn before_anything_is_known_and_with_nothing_there() {
    let empty = text(&mut app());
    assert!(empty.starts_with("ringdown top "), "{empty}");
    let mut app = app();
    app.take(sample(1, &[], Vec::new()));
    assert!(text(&mut app).contains("`ringdown vm add NAME` makes one"));
    assert!(text(&mut app).contains("0 VMs (0 ready)   0 circuits"));
}

#[test]
fn circuits_that_are_not_listed_are_counted() {
    let mut app = seen_with(Settings {
        circuits: true,
        ..settings()
    });
    let mut sample = vms_at(4);
    sample.more = 12;
    app.take(sample);
    let text = text(&mut app);
    assert!(text.contains("15 circuits"), "{text}");
    assert!(text.contains("and 12 more"), "{text}");
}

#[test]
fn a_daemon_that_is_away_is_waited_for_and_its_return_is_seen() {
    let mut app = seen();
    app.miss("no daemon serves /run/x\x1b[31m: start it".to_owned());
    let away = text(&mut app);
    assert!(away.contains("waiting for the daemon"), "{away}");
    assert!(
        away.contains("no daemon serves /run/x\u{fffd}[31m"),
        "{away}"
    );
    assert!(away.contains("web"), "what was known stays: {away}");
    // The new daemon counts from zero, and its circuits have the numbers of the old one's.
    let young = CircuitInfo {
        age_ms: Some(500),
        ..circuit("0-1", at("db", 1), at("web", 2), [2 * MIB, 0])
    };
    app.take(sample(13, &[vm("web", 3, [5 * MIB, 0])], vec![young]));
    let back = text(&mut app);
    assert!(!back.contains("waiting for the daemon"), "{back}");
    let web = back.lines().find(|line| line.starts_with("web")).unwrap();
    assert!(web.contains("512K"), "5 MiB in ten seconds: {web}");
}

#[test]
fn what_others_have_named_cannot_steer_the_terminal() {
    let hostile = "\x1b]0;owned\x07\u{202e}x\r\n\u{9b}2J";
    let mut bad = vm("web", 3, [0, 0]);
    bad.agent = Some(AgentInfo {
        software: hostile.to_owned(),
        hostname: hostile.to_owned(),
        boot_id: String::new(),
        generation: String::new(),
        capabilities: Vec::new(),
    });
    let wrong = CircuitInfo {
        rule: Some(hostile.to_owned()),
        ..circuit(
            hostile,
            at(hostile, 1),
            CircuitEnd::Published {
                name: hostile.to_owned(),
            },
            [0, 0],
        )
    };
    let mut app = seen_with(Settings {
        vm: Some("web".to_owned()),
        filter: String::new(),
        ..settings()
    });
    app.take(sample(4, &[bad], vec![wrong]));
    let harmless = |buffer: &Buffer| {
        let mut symbols = buffer.content.iter().flat_map(|cell| cell.symbol().chars());
        symbols.all(|symbol| !crate::guest::is_harmful(symbol))
    };
    assert!(harmless(&drawn(&mut app, 160, 40)));
    assert!(text(&mut app).contains("\u{fffd}]0;owned"));
    app.places.truncate(1);
    app.enter(crate::top::app::Subject::Circuits);
    assert!(harmless(&drawn(&mut app, 160, 40)));
    assert!(plain(&drawn(&mut app, 160, 40)).contains("owned"));
}

#[test]
fn without_colours_the_marked_row_is_reversed() {
    for (theme, is_plain) in [(Theme::Plain, true), (Theme::Colour, false)] {
        let mut app = seen_with(Settings {
            theme,
            ..settings()
        });
        let buffer = drawn(&mut app, 80, 24);
        let colours = buffer.content.iter().any(|cell| {
            let plain = ratatui::style::Color::Reset;
            cell.fg != plain || cell.bg != plain
        });
        assert_eq!(colours, !is_plain);
        let reversed = buffer
            .content
            .iter()
            .any(|cell| cell.modifier.contains(Modifier::REVERSED));
        assert_eq!(reversed, is_plain);
    }
}
