//! `[[vm]]` and `[[group]]`.

use policy::DEFAULT_DOMAIN;
use toml::de::DeValue;
use vsock::Limits;

use crate::input::{InputError, VM_KEYS, check_cid};
use crate::limits::{LIMIT_KEYS, set, set_in_words};
use crate::source::{Source, Table, Value, integer};
use crate::{ChardevRequest, ConfigError, GroupRequest, VmRequest, WindowsSpec, parse_windows};

const GROUP_KEYS: [&str; 3] = ["name", "domain", "members"];

impl Source<'_> {
    pub(super) fn vm(&self, table: &Table<'_>) -> Result<VmRequest, ConfigError> {
        let (mut name, mut listening, mut connecting) = (None, None, None);
        let (mut short, mut nets) = (Vec::new(), None);
        let mut request = VmRequest::named("");
        for (key, value) in table.get_ref().iter() {
            match key.get_ref().as_ref() {
                "name" => name = Some(self.name("name", "a VM", value)?),
                "domain" => request.domain = self.domain(value)?,
                "cid" => request.cid = Some(self.cid(value)?),
                "vhost-user" => request.vhost_user = Some(self.socket("vhost-user", value)?),
                "host" => request.host = Some(self.socket("host", value)?),
                "hybrid" => request.hybrid = Some(self.socket("hybrid", value)?),
                "serial" => listening = self.serial(value)?,
                "serial-connect" => {
                    let path = self.socket("serial-connect", value)?;
                    connecting = Some(ChardevRequest::Connect(path));
                }
                "channel" => request.channels = self.channels(value)?,
                "networks" => short = self.networks(value)?,
                "net" => nets = Some(value),
                "groups" => request.groups = self.names("groups", "a group", value)?,
                "aliases" => request.aliases = self.names("aliases", "a VM", value)?,
                "windows" => request.windows = Some(self.windows(value)?),
                "qmp" => request.qmp = Some(self.socket("qmp", value)?),
                "limits" => request.limits = self.limits(value)?,
                other => return self.unknown(key.span(), other, &VM_KEYS),
            }
        }
        // After the short form, whichever comes first in the file.
        if let Some(value) = nets {
            self.nets(value, &mut short)?;
        }
        request.ports = short;
        let serial = ChardevRequest::one_of(listening, connecting);
        request.serial = self.refuse(table.span(), serial)?;
        request.name = self.required(table, name, "this [[vm]]", "name", "name = \"web\"")?;
        Ok(request)
    }

    /// `true`, or the path where the VMM connects.
    fn serial(&self, value: &Value<'_>) -> Result<Option<ChardevRequest>, ConfigError> {
        let path = match value.get_ref() {
            DeValue::Boolean(false) => return Ok(None),
            DeValue::Boolean(true) => None,
            DeValue::String(_) => Some(self.socket("serial", value)?),
            _ => {
                let expected = "true, or the path of the socket where the VMM connects";
                return Err(self.wrong_type("serial", expected, value));
            }
        };
        Ok(Some(ChardevRequest::Listen(path)))
    }

    fn windows(&self, value: &Value<'_>) -> Result<WindowsSpec, ConfigError> {
        let DeValue::String(text) = value.get_ref() else {
            let expected = "a number and size, as in \"4x16M\"";
            return Err(self.wrong_type("windows", expected, value));
        };
        self.refuse(value.span(), parse_windows(text))
    }

    pub(super) fn group(&self, table: &Table<'_>) -> Result<GroupRequest, ConfigError> {
        let (mut name, mut members) = (None, None);
        let mut domain = DEFAULT_DOMAIN.to_owned();
        for (key, value) in table.get_ref().iter() {
            match key.get_ref().as_ref() {
                "name" => name = Some(self.name("name", "a group", value)?),
                "domain" => domain = self.domain(value)?,
                "members" => members = Some(self.members(value)?),
                other => return self.unknown(key.span(), other, &GROUP_KEYS),
            }
        }
        let what = "this [[group]]";
        Ok(GroupRequest {
            name: self.required(table, name, what, "name", "name = \"frontends\"")?,
            domain,
            members: self.required(
                table,
                members,
                what,
                "members",
                "members = [\"web\", \"www\"]",
            )?,
        })
    }

    pub(super) fn domain(&self, value: &Value<'_>) -> Result<String, ConfigError> {
        self.name("domain", "a domain", value)
    }

    /// The members of a group: as many as a daemon has VMs, unlike other lists.
    fn members(&self, value: &Value<'_>) -> Result<Vec<String>, ConfigError> {
        let DeValue::Array(array) = value.get_ref() else {
            return Err(self.wrong_type("members", "a list of names of VMs", value));
        };
        if let Some(beyond) = array.get(crate::MAX_VMS) {
            let (what, limit) = ("members of one group", crate::MAX_VMS);
            return self.refuse(beyond.span(), Err(InputError::TooMany { what, limit }));
        }
        array
            .iter()
            .map(|member| self.name("members", "a VM", member))
            .collect()
    }

    fn limits(&self, value: &Value<'_>) -> Result<Limits, ConfigError> {
        let DeValue::Table(table) = value.get_ref() else {
            let expected = "a table, as in { circuits = 1000 }";
            return Err(self.wrong_type("limits", expected, value));
        };
        let mut limits = Limits::default();
        for (key, value) in table.iter() {
            let name = key.get_ref().as_ref();
            if !LIMIT_KEYS.contains(&name) {
                return self.unknown(key.span(), name, &LIMIT_KEYS);
            }
            let DeValue::Integer(number) = value.get_ref() else {
                return Err(self.wrong_type(name, "a whole number", value));
            };
            let set = match integer(number) {
                Some(number) => set(&mut limits, &LIMIT_KEYS, name, number),
                None => set_in_words(&mut limits, &LIMIT_KEYS, name, number.as_str()),
            };
            self.refuse(value.span(), set)?;
        }
        Ok(limits)
    }

    fn cid(&self, value: &Value<'_>) -> Result<u32, ConfigError> {
        let DeValue::Integer(number) = value.get_ref() else {
            return Err(self.wrong_type("cid", "a number", value));
        };
        let written = number.as_str().to_owned();
        self.refuse(
            value.span(),
            integer(number)
                .ok_or(InputError::Cid { cid: written })
                .and_then(check_cid),
        )
    }
}
