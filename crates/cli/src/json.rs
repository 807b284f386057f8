//! The one shape of what `--json` prints: an object with `version`, and what was asked for under its name. A list has its plural. Where lines are
//! printed as they come, each is such an object.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::guest::is_harmful;

/// The version of all these objects. It grows when a name goes away or means something else; names may be added.
const VERSION: u32 = 1;

#[derive(Serialize)]
struct Document<T> {
    version: u32,
    #[serde(flatten)]
    content: T,
}

/// One thing under its name.
pub fn named<T: Serialize>(name: &'static str, value: T) -> impl Serialize {
    BTreeMap::from([(name, value)])
}

/// A document of several lines. The content is an object itself.
///
/// # Errors
/// It is none, or has names that JSON cannot have.
pub fn document(content: impl Serialize) -> serde_json::Result<String> {
    let document = Document {
        version: VERSION,
        content,
    };
    pretty(document)
}

/// What has a shape of its own, such as another program's configuration.
pub fn pretty(content: impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string_pretty(&content).map(|text| harmless(&text) + "\n")
}

/// A document of one line.
pub fn line(content: impl Serialize) -> serde_json::Result<String> {
    let document = Document {
        version: VERSION,
        content,
    };
    serde_json::to_string(&document).map(|text| harmless(&text) + "\n")
}

/// The same JSON without characters that could steer a terminal, as guests may choose them: serde_json escapes those below U+0020 alone. Outside of strings
/// only line feeds are such.
fn harmless(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for character in json.chars() {
        if is_harmful(character) && character != '\n' {
            for unit in character.encode_utf16(&mut [0; 2]) {
                text.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            text.push(character);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_says_steers_no_terminal_and_means_the_same() {
        let said = "\u{9b}2J\u{9d}0;title\u{9c}\u{7f}\u{85}\u{202e}\u{61c}\u{2028}\u{2029}\u{200f}\u{2066}\x1b[2J\t\r\n\"\\grün";
        let content = || BTreeMap::from([(said, [said])]);
        for text in [
            document(content()).unwrap(),
            line(content()).unwrap(),
            pretty(content()).unwrap(),
        ] {
            let left = text.chars().find(|it| is_harmful(*it) && *it != '\n');
            assert_eq!(left, None, "{text}");
            let read: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(read[said][0], said);
        }
        assert_eq!(line(content()).unwrap().matches('\n').count(), 1);
    }
}
