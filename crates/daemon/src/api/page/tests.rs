use super::*;
use crate::fake_daemon::FakeDaemon;

fn all_parts() -> impl Iterator<Item = (&'static str, &'static str)> {
    let parts = PARTS.iter().map(|(name, _, text)| (*name, *text));
    parts.chain([("index.html", INDEX)])
}

fn head(daemon: &FakeDaemon, target: &str) -> String {
    let request = format!("GET {target} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
    let answer = daemon.raw_request(&request).unwrap();
    let (head, _) = answer.split_once("\r\n\r\n").unwrap();
    head.to_ascii_lowercase()
}

#[test]
fn the_page_and_each_part_come_with_their_type_and_the_policy() {
    let daemon = FakeDaemon::start(&[], &[]);
    let index = [("/".to_owned(), HTML)];
    let parts = PARTS.map(|(name, media_type, _)| (format!("/page/{name}"), media_type));
    for (target, media_type) in index.into_iter().chain(parts) {
        let head = head(&daemon, &target);
        assert!(head.starts_with("http/1.1 200 "), "{target}: {head}");
        for line in [
            format!("content-type: {media_type}"),
            format!("content-security-policy: {POLICY}").to_ascii_lowercase(),
            "x-content-type-options: nosniff".to_owned(),
            "cache-control: no-store".to_owned(),
        ] {
            assert!(head.lines().any(|found| found == line), "{line}: {head}");
        }
    }
}

#[test]
fn what_is_no_part_is_a_problem_that_says_so() {
    let daemon = FakeDaemon::start(&[], &[]);
    for name in ["x.js", "..%2Fpage.rs", "tests.rs", "%00"] {
        let (status, body) = daemon.request("GET", &format!("/page/{name}"), "");
        assert_eq!(status, 404, "{name}: {body}");
        assert!(body.contains("the page has no part"), "{body}");
    }
    assert_eq!(daemon.request("POST", "/", "").0, 405);
}

/// Every part that another names is there, and every part is named by another.
#[test]
fn the_bundle_is_whole() {
    let mut named = std::collections::BTreeSet::new();
    for (_, text) in all_parts() {
        for (before, after) in [("\"/page/", '"'), ("from \"./", '"')] {
            for rest in text.split(before).skip(1) {
                named.insert(rest.split_once(after).unwrap().0);
            }
        }
    }
    let parts: std::collections::BTreeSet<&str> = PARTS.iter().map(|(name, ..)| *name).collect();
    assert_eq!(named, parts);
}

/// The security policy would stop these in a browser; here they are found before.
#[test]
fn no_part_makes_markup_of_text_or_names_another_place() {
    let markup = [
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "srcdoc",
        "DOMParser",
        "setHTML",
        " style=",
        " onclick=",
        "javascript:",
    ];
    for (name, text) in all_parts() {
        let text = text.replace("http://www.w3.org/2000/svg", "");
        for word in markup
            .iter()
            .chain(&["http://", "https://", "@import", "url("])
        {
            assert!(!text.contains(word), "{name} has {word}");
        }
    }
}
