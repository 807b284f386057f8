//! What programs, agents and the daemon say to each other about circuits.

use std::fmt::{Debug, Display};

use wire::switchboard::link::{FromAgent, FromDaemon};
use wire::switchboard::program::{Answer, Request};
use wire::switchboard::{LineError, Lines, MAX_LINE_LEN};

use crate::Dice;

/// Lines come out the same however they are cut; what is understood of one says the same words when it is written, and is the same when it is read again.
pub fn lines(input: &[u8]) {
    let mut dice = Dice::new(input);
    let cuts: Vec<usize> = (0..8).map(|_| 1 + dice.below(700)).collect();
    let stream = dice.rest();
    let whole = read(stream, &[usize::MAX]);
    assert_eq!(read(stream, &cuts), whole);
    assert_eq!(read(stream, &[1]), whole);
    for line in &whole.0 {
        judge(line, Request::parse, false);
        judge(line, FromAgent::parse, false);
        judge(line, FromDaemon::parse, false);
        judge(line, Answer::parse, line.starts_with(b"ERROR"));
    }
}

/// The lines, and whether one was too long.
fn read(stream: &[u8], cuts: &[usize]) -> (Vec<Vec<u8>>, bool) {
    let mut lines = Lines::new();
    let mut found = Vec::new();
    let mut rest = stream;
    let mut cuts = cuts.iter().cycle();
    loop {
        loop {
            match lines.next_line() {
                Ok(Some(line)) => {
                    assert!(line.len() < MAX_LINE_LEN && !line.contains(&b'\n'));
                    found.push(line.to_vec());
                }
                Ok(None) => break,
                Err(_) => return (found, true),
            }
        }
        if rest.is_empty() {
            return (found, false);
        }
        let space = lines.space();
        let cut = *cuts.next().expect("a cycle of at least one cut");
        let len = cut.min(space.len()).min(rest.len());
        assert!(len > 0, "a reader that waits for a line has room for it");
        space[..len].copy_from_slice(&rest[..len]);
        lines.filled(len);
        rest = &rest[len..];
    }
}

fn judge<T: Display + Debug + PartialEq>(
    line: &[u8],
    parse: fn(&[u8]) -> Result<T, LineError>,
    has_free_words: bool,
) {
    let said = match parse(line) {
        Ok(said) => said,
        Err(error) => {
            assert!(error.to_string().starts_with("expected "));
            return;
        }
    };
    let written = said.to_string();
    let text = written.strip_suffix('\n').expect("an end");
    assert!(written.len() <= MAX_LINE_LEN && !text.contains('\n'));
    assert_eq!(parse(text.as_bytes()), Ok(said));
    if !has_free_words {
        assert_eq!(words(text.as_bytes()), words(line));
    }
}

/// The words of a line, in an order of their own. Numbers without zeros at their start, as they are written.
fn words(line: &[u8]) -> Vec<String> {
    let line = std::str::from_utf8(line).expect("it was understood");
    let mut words: Vec<String> = line.split(' ').map(canonical).collect();
    words.sort();
    words
}

fn canonical(word: &str) -> String {
    let (rest, last) = word.rsplit_once([':', '=']).unwrap_or(("", word));
    let is_number = last.bytes().all(|byte| byte.is_ascii_digit());
    // Hexadecimal numbers have all their digits, and may have no others.
    match is_number && last.len() < 32 {
        true => format!("{rest} {}", last.trim_start_matches('0')),
        false => word.to_owned(),
    }
}
