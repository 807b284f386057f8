//! Groups that may use the control socket.

use std::path::Path;

use crate::{ControlGroups, parse_file};

fn read(text: &str) -> Result<ControlGroups, String> {
    let config = parse_file(text, "ringdown.toml", Path::new("/etc"));
    config
        .map(|config| config.control)
        .map_err(|error| error.to_string())
}

#[test]
fn groups_are_named_or_numbered() {
    let both = read("[control]\nread-group = \"root\"\noperate-group = \"4711\"").unwrap();
    assert_eq!(
        (both.read, both.operate, both.only_one()),
        (Some(0), Some(4711), None)
    );
    let one = read("control = { read-group = \"7\", operate-group = \"7\" }").unwrap();
    assert_eq!(one.only_one(), Some(7));
    let one = read("control.operate-group = \"8\"").unwrap();
    assert_eq!(
        (one.read, one.operate, one.only_one()),
        (None, Some(8), Some(8))
    );
    assert_eq!(read("").unwrap(), ControlGroups::default());
}

#[test]
fn what_names_no_group_is_refused() {
    for (text, expected) in [
        ("control = 3", "must be a table"),
        ("[control]", "has no \"operate-group\""),
        ("[control]\ngroup = \"root\"", "unknown key \"group\""),
        ("[control]\nread-group = 7", "must be"),
        ("[control]\nread-group = \"\"", "knows no group of users"),
        (
            "[control]\nread-group = \"4294967295\"",
            "knows no group of users",
        ),
        (
            "[control]\nread-group = \"no such group\"",
            "knows no group of users",
        ),
    ] {
        let error = read(text).unwrap_err();
        assert!(
            error.starts_with("ringdown.toml: line ") && error.contains(expected),
            "{text}: {error}"
        );
    }
}
