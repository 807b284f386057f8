//! Names whose addresses are written down.

use std::path::Path;

use super::super::{MAX_HOSTS, parse_file};

fn parse(text: &str) -> Result<super::super::Config, String> {
    parse_file(text, "ringdown.toml", Path::new("/etc")).map_err(|error| error.to_string())
}

#[test]
fn names_lead_to_the_addresses_that_are_written_down() {
    let text = "[hosts]\n\"Deb.Example.\" = \"192.0.2.1\"\n\"both.example\" = [\"192.0.2.2\", \"2001:db8::1\"]\n";
    let hosts = parse(text).unwrap().hosts;
    assert_eq!(
        hosts["deb.example"],
        ["192.0.2.1".parse::<std::net::IpAddr>().unwrap()]
    );
    assert_eq!(hosts["both.example"].len(), 2);
}

#[test]
fn what_is_no_name_or_no_address_is_refused_with_its_place() {
    for (text, words) in [
        (
            "[hosts]\n\"10.0.0.1\" = \"10.0.0.2\"\n",
            "line 2, column 1: \"10.0.0.1\" is not the name of a host",
        ),
        (
            "[hosts]\n\"a b\" = \"10.0.0.2\"\n",
            "is not the name of a host",
        ),
        (
            "[hosts]\na = \"10.0.0.2:80\"\n",
            "line 2, column 5: \"10.0.0.2:80\" is not an address",
        ),
        ("[hosts]\na = []\n", "line 2"),
        ("[hosts]\na = 7\n", "a string or a list of strings"),
        ("hosts = 7\n", "must be a table"),
        (
            "[hosts]\na = \"10.0.0.2\"\nA = \"10.0.0.3\"\n",
            "given twice",
        ),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.contains(words), "{text}: {error}");
    }
}

#[test]
fn there_may_be_so_many_and_no_more() {
    let names = |count: usize| {
        let line = |number| {
            format!("h{number}.example = \"192.0.2.1\"\n")
                .replace("h", "\"h")
                .replace(".example", ".example\"")
        };
        format!("[hosts]\n{}", (0..count).map(line).collect::<String>())
    };
    assert_eq!(parse(&names(MAX_HOSTS)).unwrap().hosts.len(), MAX_HOSTS);
    let error = parse(&names(MAX_HOSTS + 1)).unwrap_err();
    assert!(
        error.contains("too many names in [hosts]: at most 4096"),
        "{error}"
    );
}
