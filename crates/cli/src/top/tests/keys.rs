//! What keys do.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::*;
use crate::top::app::Subject;
use crate::top::keys::Next;

fn press(app: &mut App, codes: &[KeyCode]) {
    for code in codes {
        let next = app.press(KeyEvent::new(*code, KeyModifiers::NONE));
        assert_eq!(next, Next::GoOn, "{code:?}");
        // As the loop does it: rows are known once they are drawn.
        drawn(app, 80, 24);
    }
}

fn type_in(app: &mut App, text: &str) {
    for character in text.chars() {
        press(app, &[KeyCode::Char(character)]);
    }
}

#[test]
fn q_and_control_c_leave() {
    for (code, modifiers) in [
        (KeyCode::Char('q'), KeyModifiers::NONE),
        (KeyCode::Char('c'), KeyModifiers::CONTROL),
    ] {
        assert_eq!(seen().press(KeyEvent::new(code, modifiers)), Next::Leave);
        let mut helped = seen();
        helped.shows_help = true;
        assert_eq!(helped.press(KeyEvent::new(code, modifiers)), Next::Leave);
    }
    let released = KeyEvent::new_with_kind(
        KeyCode::Char('q'),
        KeyModifiers::NONE,
        KeyEventKind::Release,
    );
    assert_eq!(seen().press(released), Next::GoOn);
}

#[test]
fn enter_goes_from_a_vm_to_its_circuits_to_one_and_esc_back() {
    let mut app = seen();
    press(&mut app, &[KeyCode::Down, KeyCode::Enter]);
    assert_eq!(app.place().subject, Subject::Vm("db".to_owned()));
    assert!(text(&mut app).contains("db, ready"));
    press(&mut app, &[KeyCode::Down, KeyCode::Enter]);
    assert_eq!(app.place().subject, Subject::Circuit("2-3".to_owned()));
    let circuit = text(&mut app);
    assert!(circuit.contains("host(uid 1000, pid 4711)"), "{circuit}");
    // There is nothing closer to look at.
    press(&mut app, &[KeyCode::Enter, KeyCode::Down]);
    press(&mut app, &[KeyCode::Esc]);
    assert_eq!(app.place().subject, Subject::Vm("db".to_owned()));
    assert_eq!(app.place().marked.as_deref(), Some("2-3"));
    press(&mut app, &[KeyCode::Esc, KeyCode::Esc, KeyCode::Esc]);
    assert_eq!(app.place().subject, Subject::Vms);
    assert_eq!(app.place().marked.as_deref(), Some("db"));
}

#[test]
fn tab_turns_to_circuits_and_back() {
    let mut app = seen();
    press(&mut app, &[KeyCode::Tab]);
    let circuits = text(&mut app);
    assert_eq!(
        first_words(&circuits, "FROM"),
        ["web:40001", "cache:40002", "host"]
    );
    press(&mut app, &[KeyCode::Tab]);
    assert_eq!(app.place().subject, Subject::Vms);
}

#[test]
fn rows_stand_in_the_order_that_was_asked_for() {
    let of_vms = [
        (Sort::Rate, ["web", "db", "cache"]),
        (Sort::Sent, ["web", "cache", "db"]),
        (Sort::Received, ["db", "web", "cache"]),
        (Sort::Queued, ["cache", "db", "web"]),
        (Sort::Bytes, ["web", "db", "cache"]),
        (Sort::Circuits, ["cache", "db", "web"]),
        (Sort::Name, ["cache", "db", "web"]),
        (Sort::State, ["cache", "db", "web"]),
    ];
    assert_eq!(of_vms.map(|(sort, _)| sort), Sort::OF_VMS);
    for (sort, mut expected) in of_vms {
        let mut app = seen_with(Settings { sort, ..settings() });
        assert_eq!(first_words(&text(&mut app), "VM"), expected, "{sort:?}");
        press(&mut app, &[KeyCode::Char('r')]);
        expected.reverse();
        assert_eq!(
            first_words(&text(&mut app), "VM"),
            expected,
            "{sort:?} turned round"
        );
    }
    let of_circuits = [
        (Sort::Rate, ["web:40001", "cache:40002", "host"]),
        (Sort::Sent, ["web:40001", "cache:40002", "host"]),
        (Sort::Received, ["web:40001", "cache:40002", "host"]),
        (Sort::Queued, ["web:40001", "cache:40002", "host"]),
        (Sort::Bytes, ["web:40001", "cache:40002", "host"]),
        (Sort::Age, ["web:40001", "cache:40002", "host"]),
        (Sort::Name, ["cache:40002", "host", "web:40001"]),
        (Sort::To, ["host", "web:40001", "cache:40002"]),
        (Sort::Rule, ["web:40001", "cache:40002", "host"]),
        (Sort::State, ["web:40001", "cache:40002", "host"]),
    ];
    assert_eq!(of_circuits.map(|(sort, _)| sort), Sort::OF_CIRCUITS);
    for (sort, expected) in of_circuits {
        let circuits = true;
        let mut app = seen_with(Settings {
            sort,
            circuits,
            ..settings()
        });
        assert_eq!(first_words(&text(&mut app), "FROM"), expected, "{sort:?}");
    }
}

#[test]
fn s_goes_through_the_columns_and_comes_round() {
    let mut app = seen();
    for sort in &Sort::OF_VMS[1..] {
        press(&mut app, &[KeyCode::Char('s')]);
        assert_eq!(app.order_of_vms.sort, *sort);
    }
    press(&mut app, &[KeyCode::Char('s')]);
    assert_eq!(app.order_of_vms.sort, Sort::Rate);
    press(&mut app, &[KeyCode::Char('S')]);
    assert_eq!(app.order_of_vms.sort, Sort::State);
    assert!(text(&mut app).contains("STATE▲"));
    // The circuits' order is their own.
    press(&mut app, &[KeyCode::Tab, KeyCode::Char('s')]);
    assert_eq!(app.order_of_circuits.sort, Sort::Sent);
    assert!(text(&mut app).contains("SENT/s▼"));
    // What cannot be sorted by here is not.
    let age = seen_with(Settings {
        sort: Sort::Age,
        ..settings()
    });
    assert_eq!(age.order_of_vms.sort, Sort::Rate);
    assert_eq!(age.order_of_circuits.sort, Sort::Age);
}

#[test]
fn a_filter_shows_only_what_has_its_letters() {
    let mut app = seen();
    press(&mut app, &[KeyCode::Char('/')]);
    type_in(&mut app, "DBx");
    assert!(text(&mut app).contains("nothing here has the letters “DBx”"));
    assert!(text(&mut app).contains("only rows with: DBx"));
    press(&mut app, &[KeyCode::Backspace]);
    assert_eq!(first_words(&text(&mut app), "VM"), ["db"]);
    press(&mut app, &[KeyCode::Enter]);
    assert!(text(&mut app).contains("/DB"));
    // Letters are no keys while they are typed, and are again afterwards.
    press(&mut app, &[KeyCode::Char('/')]);
    type_in(&mut app, "q");
    press(&mut app, &[KeyCode::Esc]);
    assert_eq!(app.filter, "DB");
    press(&mut app, &[KeyCode::Esc]);
    assert_eq!(app.filter, "");
    // Circuits are found by their rule, too.
    press(&mut app, &[KeyCode::Tab, KeyCode::Char('/')]);
    type_in(&mut app, "web-to");
    assert_eq!(first_words(&text(&mut app), "FROM").len(), 3);
}

#[test]
fn a_filter_has_its_limit() {
    let mut app = seen();
    press(&mut app, &[KeyCode::Char('/')]);
    type_in(&mut app, &"x".repeat(70));
    assert_eq!(app.filter.len(), 64);
}

#[test]
fn what_is_held_still_does_not_change_until_it_goes_on() {
    let mut app = seen();
    press(&mut app, &[KeyCode::Char(' ')]);
    let still = text(&mut app);
    assert!(still.contains("held still"));
    app.take(vms_at(60));
    assert_eq!(text(&mut app), still);
    press(&mut app, &[KeyCode::Char(' ')]);
    app.take(vms_at(61));
    let on = text(&mut app);
    // The rate is that of the whole time meanwhile.
    assert!(on.contains("guests send 5.0 MiB/s"), "{on}");
}

#[test]
fn help_names_every_key_and_any_key_ends_it() {
    let mut app = seen();
    press(&mut app, &[KeyCode::Char('?')]);
    let help = text(&mut app);
    for (key, what) in crate::top::keys::KEYS {
        assert!(
            help.contains(key) && help.contains(what),
            "{key}: {what}\n{help}"
        );
    }
    assert!(help.contains("units of 1024"), "{help}");
    press(&mut app, &[KeyCode::Down]);
    assert!(!app.shows_help);
    assert_eq!(app.place().marked, None);
}

#[test]
fn the_marked_row_is_always_seen() {
    let vms: Vec<_> = (0..100)
        .map(|n| vm(&format!("vm{n:02}"), n + 3, [0, 0]))
        .collect();
    let mut app = App::new(Settings {
        sort: Sort::Name,
        ..settings()
    });
    app.take(sample(1, &vms, Vec::new()));
    let first = first_words(&text(&mut app), "VM")[0].clone();
    assert_eq!(first, "vm00");
    press(&mut app, &[KeyCode::End]);
    let names = first_words(&text(&mut app), "VM");
    assert_eq!(names.last().map(String::as_str), Some("vm99"));
    press(&mut app, &[KeyCode::PageUp]);
    let marked = app.place().marked.clone().unwrap();
    assert_eq!(marked, format!("vm{}", 99 - app.rows_seen));
    assert!(first_words(&text(&mut app), "VM").contains(&marked));
    press(&mut app, &[KeyCode::Home, KeyCode::Up]);
    assert_eq!(first_words(&text(&mut app), "VM")[0], "vm00");
    for _ in 0..99 {
        press(&mut app, &[KeyCode::Down]);
        let marked = app.place().marked.clone().unwrap();
        assert!(first_words(&text(&mut app), "VM").contains(&marked));
    }
    // It moves with what it is about, and when that goes the first row is marked.
    press(
        &mut app,
        &[KeyCode::Home, KeyCode::Down, KeyCode::Char('r')],
    );
    assert!(first_words(&text(&mut app), "VM").contains(&"vm01".to_owned()));
    app.take(sample(2, &vms[2..3], Vec::new()));
    press(&mut app, &[KeyCode::Enter]);
    assert_eq!(app.place().subject, Subject::Vm("vm02".to_owned()));
}

#[test]
fn looking_closer_has_its_limit() {
    let mut app = seen();
    for _ in 0..40 {
        app.enter(Subject::Vm("web".to_owned()));
    }
    assert_eq!(app.places.len(), 16);
}
