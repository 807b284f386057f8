//! Names whose addresses are written down.

use std::net::IpAddr;
use std::path::Path;

use super::super::{MAX_ADDRESSES, MAX_HOSTS, check_whole, parse_file};

fn parse(text: &str) -> Result<super::super::Config, String> {
    parse_file(text, "ringdown.toml", Path::new("/etc"))
        .and_then(|config| check_whole(&config).map(|()| config))
        .map_err(|error| error.to_string())
}

#[test]
fn names_lead_to_the_addresses_that_are_written_down() {
    let text = r#"
[hosts]
"Deb.Example." = "192.0.2.1"
"both.example" = ["192.0.2.2", "2001:db8::1", "::ffff:192.0.2.2"]
"port.example" = ["127.0.0.1:8080", "[::1]:8080", "127.0.0.2"]
"#;
    let hosts = parse(text).unwrap().hosts;
    for (name, port, expected) in [
        ("deb.example", 1, Some(&["192.0.2.1"][..])),
        ("both.example", 80, Some(&["192.0.2.2", "2001:db8::1"])),
        (
            "port.example",
            8080,
            Some(&["127.0.0.1", "::1", "127.0.0.2"]),
        ),
        ("port.example", 8081, Some(&["127.0.0.2"])),
        ("other.example", 80, None),
    ] {
        let parse = |text: &&str| text.parse::<IpAddr>().unwrap();
        let expected = expected.map(|texts| texts.iter().map(parse).collect::<Vec<_>>());
        assert_eq!(hosts.addresses(name, port), expected, "{name} {port}");
    }
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
            "[hosts]\nintranet.home.example = \"10.0.0.2\"\n",
            "line 2, column 1: the name of a host needs quotes: write \"intranet.home.example\" = …",
        ),
        (
            "[hosts]\na = \"10.0.0.2:0\"\n",
            "line 2, column 5: \"10.0.0.2:0\" is not an address",
        ),
        (
            "[hosts]\na = \"::1:80:\"\n",
            "write it as in 192.0.2.1 or 2001:db8::1, or with a port as in 192.0.2.1:80 or [2001:db8::1]:80",
        ),
        ("[hosts]\na = []\n", "line 2"),
        ("[hosts]\na = 7\n", "a string or a list of strings"),
        ("hosts = 7\n", "must be a table"),
        (
            "[hosts]\na = \"10.0.0.2\"\nA = \"10.0.0.3\"\n",
            "given twice",
        ),
        (
            "[hosts]\n\"db.example\" = \"127.0.0.1:5432\"\n[[service]]\nname = \"db\"\nport = 1\nto = \"tcp:DB.example:5433\"\n",
            "line 3, column 1: \"DB.example:5433\" is not a server that [hosts] knows: [hosts] lists db.example for port 5432 alone",
        ),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.contains(words), "{text}: {error}");
    }
    let fitting = "[hosts]\n\"db.example\" = \"127.0.0.1:5432\"\n[[service]]\nname = \"db\"\nport = 1\nto = \"tcp:db.example:5432\"\n";
    assert!(parse(fitting).is_ok());
}

#[test]
fn there_may_be_so_many_and_no_more() {
    let names = |count: usize| {
        let line = |number| format!("\"h{number}.example\" = \"192.0.2.1\"\n");
        format!("[hosts]\n{}", (0..count).map(line).collect::<String>())
    };
    assert_eq!(
        parse(&names(MAX_HOSTS)).unwrap().hosts.iter().count(),
        MAX_HOSTS
    );
    let error = parse(&names(MAX_HOSTS + 1)).unwrap_err();
    assert!(
        error.contains("too many names in [hosts]: at most 4096 are possible"),
        "{error}"
    );
    let addresses = |count: usize| {
        let addresses = (0..count).map(|number| format!("\"192.0.2.{number}\""));
        format!(
            "[hosts]\na = [{}]\n",
            addresses.collect::<Vec<_>>().join(", ")
        )
    };
    let hosts = parse(&addresses(MAX_ADDRESSES)).unwrap().hosts;
    assert_eq!(hosts.addresses("a", 1).map(|of| of.len()), Some(16));
    let error = parse(&addresses(MAX_ADDRESSES + 1)).unwrap_err();
    assert!(
        error.contains("too many addresses of one name: at most 16 are possible"),
        "{error}"
    );
}
