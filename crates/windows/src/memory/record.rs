//! What is remembered of windows that have a path: which name each has, and whose it is. A guest can write into the file itself, so it is not asked.

use std::collections::BTreeMap;
use std::path::Path;

use config::{StateError, StateFile, check_version};
use serde::{Deserialize, Serialize};

use super::MAX_WINDOWS_OF_ALL;
use crate::switchboard::pool::WindowId;

/// The document, beside the windows.
const FILE: StateFile = StateFile {
    name: "windows.json",
    max_len: 512 * MAX_WINDOWS_OF_ALL as u64,
    without_it: "running guests go without zero-copy circuits until their VMMs are started anew",
};

/// What the first version remembers is forgotten: its files stand beside the document, where each that is held up holds up all, and are left there. A guest that has one goes on without zero-copy circuits.
const VERSION: u32 = 2;

/// A window that has a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Remembered {
    pub(super) uuid: WindowId,
    pub(super) len: u64,
    /// The user of the host whose programs may have had it mapped.
    pub(super) uid: Option<u32>,
    /// It is to be no more, and its file could not be removed yet: a VMM may have it mapped still.
    pub(super) is_over: bool,
}

/// By the VM's full name, and the window's number.
pub(super) type Record = BTreeMap<(String, u32), Remembered>;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    windows: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    vm: String,
    index: u32,
    uuid: String,
    bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    over: bool,
}

/// Reads what was remembered.
pub(super) fn load(directory: &Path) -> Result<Record, StateError> {
    let record = FILE.load(directory, |document: Document| {
        if document.version == 1 {
            for Entry { vm, index, .. } in document.windows {
                let file = directory.join(format!("{}.{index}", vm.replace('/', "@")));
                tracing::warn!(file = %file.display(), "a window of an earlier version is used no more: start its VMM with what `ringdown args` prints now, and remove the file");
            }
            return Ok(Record::new());
        }
        check_version(document.version, VERSION)?;
        let mut record = Record::new();
        for entry in document.windows {
            let Some(uuid) = WindowId::parse(&entry.uuid) else {
                return Err(format!("{:?} is no UUID", entry.uuid));
            };
            if record.values().any(|other| other.uuid == uuid) {
                return Err(format!("two windows are named {uuid}"));
            }
            let remembered = Remembered {
                uuid,
                len: entry.bytes,
                uid: entry.uid,
                is_over: entry.over,
            };
            let key = (entry.vm, entry.index);
            if record.insert(key, remembered).is_some() {
                return Err(format!("window {uuid} has another one's place"));
            }
        }
        Ok(record)
    })?;
    Ok(record.unwrap_or_default())
}

/// Replaces it.
pub(super) fn save(directory: &Path, record: &Record) -> Result<(), StateError> {
    let entry = |((vm, index), window): (&(String, u32), &Remembered)| Entry {
        vm: vm.clone(),
        index: *index,
        uuid: window.uuid.to_string(),
        bytes: window.len,
        uid: window.uid,
        over: window.is_over,
    };
    let document = Document {
        version: VERSION,
        windows: record.iter().map(entry).collect(),
    };
    FILE.save(directory, &document)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let window = |byte, uid| Remembered {
            uuid: WindowId([byte; 16]),
            len: 8 << 20,
            uid,
            is_over: uid == Some(0),
        };
        Record::from([
            (("web".to_owned(), 0), window(1, None)),
            (("red/web".to_owned(), 0), window(2, Some(1000))),
            (("web".to_owned(), 1), window(3, Some(0))),
        ])
    }

    #[test]
    fn what_was_remembered_is_found_again() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(load(directory.path()).unwrap(), Record::new());
        save(directory.path(), &record()).unwrap();
        assert_eq!(load(directory.path()).unwrap(), record());
    }

    #[test]
    fn what_the_first_version_made_is_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let entry = |vm: &str, uuid: &str| {
            format!(r#"{{"vm":"{vm}","index":0,"uuid":"{uuid}","bytes":8388608}}"#)
        };
        let entries = [
            entry("web", &"01".repeat(16)),
            entry("red/web", &"02".repeat(16)),
        ];
        let text = format!(r#"{{"version":1,"windows":[{}]}}"#, entries.join(","));
        std::fs::write(at("windows.json"), text).unwrap();
        assert_eq!(load(directory.path()).unwrap(), Record::new());
    }

    #[test]
    fn a_broken_record_is_no_record_and_says_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let entry = |vm: &str, uuid: &str| {
            format!(r#"{{"vm":"{vm}","index":0,"uuid":"{uuid}","bytes":8388608}}"#)
        };
        let document =
            |entries: &[String]| format!(r#"{{"version":2,"windows":[{}]}}"#, entries.join(","));
        let (first, second) = ("01".repeat(16), "02".repeat(16));
        let right = document(&[entry("a", &first), entry("b", &second)]);
        std::fs::write(directory.path().join("windows.json"), &right).unwrap();
        assert_eq!(load(directory.path()).unwrap().len(), 2);
        let broken = [
            String::new(),
            "{}".to_owned(),
            right.replace("\"version\":2", "\"version\":3"),
            document(&[entry("a", &first), entry("b", &first)]),
            document(&[entry("a", &first), entry("a", &second)]),
            document(&[entry("a", &first[1..])]),
            document(&[entry("a", &first.replace('1', "A"))]),
            right.replace("index", "number"),
        ];
        for text in broken {
            std::fs::write(directory.path().join("windows.json"), &text).unwrap();
            let error = load(directory.path()).unwrap_err().to_string();
            assert!(
                error.contains("windows.json") && error.contains("remove it"),
                "{error}"
            );
        }
    }
}
