//! `[control]`: groups of the host's users that may use the control socket.

use crate::input::InputError;
use crate::parse_user_group;
use crate::source::{Reading, Source, Value};

/// Users of the control socket beside the daemon's own user and root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ControlGroups {
    /// The group whose members may look.
    pub read: Option<u32>,
    /// The group whose members may do everything.
    pub operate: Option<u32>,
}

impl ControlGroups {
    /// The one group that there is, or none if there are two.
    pub fn only_one(self) -> Option<u32> {
        match (self.read, self.operate) {
            (Some(read), Some(operate)) => (read == operate).then_some(read),
            (one, other) => one.or(other),
        }
    }
}

impl Source<'_> {
    pub(super) fn control(&self, key: &str, value: &Value<'_>) -> Reading<ControlGroups> {
        let expected = "a table, as in operate-group = \"ringdown\"";
        let table = self.table(key, value, expected)?;
        let mut keys = self.keys(&table);
        let groups = ControlGroups {
            read: keys.parsed("read-group", parse_user_group)?,
            operate: keys.parsed("operate-group", parse_user_group)?,
        };
        keys.end()?;
        if groups == ControlGroups::default() {
            let error = InputError::MissingKey {
                what: "[control]",
                key: "operate-group",
                example: "operate-group = \"ringdown\", or remove this table",
            };
            return keys.refuse(Err(error));
        }
        Ok(groups)
    }
}
