//! The one shape of what `--json` prints: an object with `version`, and what was asked for under its name. A list has its plural. Where lines are
//! printed as they come, each is such an object.

use std::collections::BTreeMap;

use serde::Serialize;

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
    serde_json::to_string_pretty(&document).map(|text| text + "\n")
}

/// A document of one line.
pub fn line(content: impl Serialize) -> serde_json::Result<String> {
    let document = Document {
        version: VERSION,
        content,
    };
    serde_json::to_string(&document).map(|text| text + "\n")
}
