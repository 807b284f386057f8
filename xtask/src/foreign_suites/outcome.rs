//! What became of each test, from what a suite has printed, and where two runs of it differ.

use std::collections::BTreeMap;

/// What became of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Passed,
    Failed,
    Skipped,
}

/// By the names of the tests.
pub type Outcomes = BTreeMap<String, Outcome>;

/// In which form a suite says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The file that CPython's `test --junit-xml` writes.
    Junit,
    /// What `-test.v` of Go prints.
    Go,
    /// TAP, as libuv's tests print it.
    Tap,
}

impl Form {
    pub fn parse(self, text: &str) -> Outcomes {
        match self {
            Form::Junit => text
                .split("<testcase ")
                .skip(1)
                .filter_map(junit_case)
                .collect(),
            Form::Go => go(text),
            Form::Tap => text.lines().filter_map(tap_line).collect(),
        }
    }
}

/// The rest of the file, from the attributes of a test on.
fn junit_case(rest: &str) -> Option<(String, Outcome)> {
    let name = rest.split_once("name=\"")?.1.split_once('"')?.0;
    let (head, inside) = rest.split_once('>')?;
    let inside = inside.split("</testcase>").next().unwrap_or_default();
    let has = |element: &str| !head.ends_with('/') && inside.contains(element);
    let outcome = match () {
        () if has("<error") || has("<failure") => Outcome::Failed,
        () if has("<skipped") => Outcome::Skipped,
        () => Outcome::Passed,
    };
    Some((name.to_owned(), outcome))
}

/// A test that has begun and of which nothing more is said has not passed.
fn go(text: &str) -> Outcomes {
    let mut outcomes = Outcomes::new();
    for line in text.lines() {
        // What a test prints may come before it on the line.
        for (mark, outcome) in [
            ("=== RUN   ", Outcome::Failed),
            ("--- PASS: ", Outcome::Passed),
            ("--- FAIL: ", Outcome::Failed),
            ("--- SKIP: ", Outcome::Skipped),
        ] {
            let name = line
                .split_once(mark)
                .and_then(|(_, rest)| rest.split(' ').next());
            if let Some(name) = name.filter(|name| !name.is_empty()) {
                outcomes.insert(name.to_owned(), outcome);
            }
        }
    }
    outcomes
}

fn tap_line(line: &str) -> Option<(String, Outcome)> {
    let (failed, rest) = match line.strip_prefix("not ok ") {
        Some(rest) => (true, rest),
        None => (false, line.strip_prefix("ok ")?),
    };
    let (name, remark) = rest
        .split_once(" - ")?
        .1
        .split_once(" # ")
        .unwrap_or((rest.split_once(" - ")?.1, ""));
    let outcome = match (failed, remark.starts_with("SKIP")) {
        (_, true) => Outcome::Skipped,
        (true, _) => Outcome::Failed,
        (false, _) => Outcome::Passed,
    };
    Some((name.trim().to_owned(), outcome))
}

/// How many passed, failed and were skipped.
pub fn counts(outcomes: &Outcomes) -> [usize; 3] {
    [Outcome::Passed, Outcome::Failed, Outcome::Skipped]
        .map(|wanted| outcomes.values().filter(|found| **found == wanted).count())
}

/// The tests that did not end alike, with what became of each; nothing stands for a test that was not run.
pub fn differences(
    one: &Outcomes,
    other: &Outcomes,
) -> Vec<(String, Option<Outcome>, Option<Outcome>)> {
    let names: std::collections::BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    let both = |name: &String| {
        (
            name.clone(),
            one.get(name).copied(),
            other.get(name).copied(),
        )
    };
    names
        .into_iter()
        .map(both)
        .filter(|(_, one, other)| one != other)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(form: Form, text: &str, name: &str) -> Option<Outcome> {
        form.parse(text).get(name).copied()
    }

    #[test]
    fn a_file_of_junit_is_read() {
        let text = "<testsuites tests=\"3\"><testsuite><testcase name=\"a.one\" status=\"run\" time=\"0.1\" />\
                    <testcase name=\"a.two\" status=\"run\"><skipped>no &lt;cable&gt;</skipped></testcase>\
                    <testcase name=\"a.three\"><system-out>x</system-out><failure type=\"x\">no</failure></testcase>\
                    <testcase name=\"a.four\"><error type=\"x\" /></testcase></testsuite></testsuites>";
        assert_eq!(found(Form::Junit, text, "a.one"), Some(Outcome::Passed));
        assert_eq!(found(Form::Junit, text, "a.two"), Some(Outcome::Skipped));
        assert_eq!(found(Form::Junit, text, "a.three"), Some(Outcome::Failed));
        assert_eq!(found(Form::Junit, text, "a.four"), Some(Outcome::Failed));
    }

    #[test]
    fn what_go_prints_is_read() {
        let text = "=== RUN   TestOne\n=== RUN   TestOne/part\nsome words --- PASS: TestOne (0.00s)\n    --- SKIP: TestOne/part (0.00s)\n\
                    === RUN   TestTwo\n--- FAIL: TestTwo (1.00s)\n=== RUN   TestThree\npanic: no\n";
        assert_eq!(found(Form::Go, text, "TestOne"), Some(Outcome::Passed));
        assert_eq!(
            found(Form::Go, text, "TestOne/part"),
            Some(Outcome::Skipped)
        );
        assert_eq!(found(Form::Go, text, "TestTwo"), Some(Outcome::Failed));
        assert_eq!(found(Form::Go, text, "TestThree"), Some(Outcome::Failed));
    }

    #[test]
    fn tap_is_read() {
        let text =
            "1..3\nok 1 - one\nnot ok 2 - two\n# exit code 6\nok 3 - three # SKIP no cable\n";
        assert_eq!(found(Form::Tap, text, "one"), Some(Outcome::Passed));
        assert_eq!(found(Form::Tap, text, "two"), Some(Outcome::Failed));
        assert_eq!(found(Form::Tap, text, "three"), Some(Outcome::Skipped));
        assert_eq!(counts(&Form::Tap.parse(text)), [1, 1, 1]);
    }

    #[test]
    fn a_test_that_was_not_run_differs() {
        let one = Form::Tap.parse("ok 1 - one\nok 2 - two\n");
        let other = Form::Tap.parse("not ok 1 - one\n");
        let found = differences(&one, &other);
        assert_eq!(
            found,
            [
                ("one".into(), Some(Outcome::Passed), Some(Outcome::Failed)),
                ("two".into(), Some(Outcome::Passed), None)
            ]
        );
    }
}
