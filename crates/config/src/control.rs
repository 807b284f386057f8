//! `[control]`: groups of the host's users that may use the control socket.

use toml::de::DeValue;

use crate::input::InputError;
use crate::source::{Source, Value};
use crate::{ConfigError, parse_user_group};

const CONTROL_KEYS: [&str; 2] = ["read-group", "operate-group"];

/// Who may use the control socket beside the daemon's own user and root.
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
    pub(super) fn control(&self, value: &Value<'_>) -> Result<ControlGroups, ConfigError> {
        let DeValue::Table(table) = value.get_ref() else {
            let expected = "a table, as in operate-group = \"ringdown\"";
            return Err(self.wrong_type("control", expected, value));
        };
        let mut groups = ControlGroups::default();
        for (key, value) in table.iter() {
            let group = |key| {
                let name = self.string(key, value)?;
                self.refuse::<u32>(value.span(), parse_user_group(name))
                    .map(Some)
            };
            match key.get_ref().as_ref() {
                "read-group" => groups.read = group("read-group")?,
                "operate-group" => groups.operate = group("operate-group")?,
                other => return self.unknown(key.span(), other, &CONTROL_KEYS),
            }
        }
        if groups == ControlGroups::default() {
            let error = InputError::MissingKey {
                what: "[control]",
                key: "operate-group",
                example: "operate-group = \"ringdown\", or remove this table",
            };
            return self.refuse(value.span(), Err(error));
        }
        Ok(groups)
    }
}
