//! `[[vm]]` and `[[group]]`.

use std::path::PathBuf;

use toml::de::DeValue;
use vsock::Limits;

use crate::input::{InputError, check_cid, parse_cid};
use crate::keys::Keys;
use crate::limits::{LIMIT_KEYS, LIMIT_MEMBERS, LIMIT_OPTIONS, LimitNames, set, set_in_words};
use crate::source::{Reading, Source, Table, Value, integer};
use crate::{
    Chardev, ChardevRequest, GroupRequest, VmRequest, VmmSocket, WindowsSpec, parse_windows,
};

impl Source<'_> {
    pub(super) fn vm(&self, table: &Table<'_>) -> Reading<VmRequest> {
        let mut keys = self.keys(table);
        let name = keys.name("a VM")?;
        let mut request = VmRequest::named("");
        request.domain = keys.domain()?;
        request.cid = keys.read("cid", Source::cid)?;
        let vhost_user = keys.read("vhost-user", Source::socket)?;
        request.host = keys.read("host", Source::socket)?;
        let hybrid = keys.read("hybrid", Source::socket)?;
        let listening = keys.read("serial", Source::serial)?.flatten();
        let connecting = keys.read("serial-connect", Source::socket)?;
        let groups = keys.read("groups", |of, key, value| of.names(key, "a group", value))?;
        request.groups = groups.unwrap_or_default();
        let aliases = keys.read("aliases", |of, key, value| of.names(key, "a VM", value))?;
        request.aliases = aliases.unwrap_or_default();
        let limits = &mut request.limits;
        keys.read_table("limits", |of, key, value| of.limits(key, value, limits))?;
        let channels = keys.read_table("channel", Source::channels)?;
        request.channels = channels.unwrap_or_default();
        let ports = keys.read("networks", Source::networks)?;
        request.ports = ports.unwrap_or_default();
        // After the short form, whichever comes first in the file.
        let ports = &mut request.ports;
        keys.read_table("net", |of, key, value| of.nets(key, value, ports))?;
        request.windows = keys.read("windows", Source::windows)?;
        request.qmp = keys.read("qmp", Source::socket)?;
        keys.limits(&mut request.limits)?;
        keys.end()?;
        request.name = keys.required(name, "this [[vm]]", "name", "name = \"web\"")?;
        let vmm = vmm_socket(vhost_user, hybrid, listening, connecting);
        let refused = |(key, error)| keys.refuse_at(key, Err(error));
        request.vmm = vmm.or_else(refused)?;
        Ok(request)
    }

    /// `true`, or the path where the VMM connects.
    fn serial(&self, key: &'static str, value: &Value<'_>) -> Reading<Option<ChardevRequest>> {
        let path = match value.get_ref() {
            DeValue::Boolean(false) => return Ok(None),
            DeValue::Boolean(true) => None,
            DeValue::String(_) => Some(self.socket(key, value)?),
            _ => {
                let expected = "true, or the path of the socket where the VMM connects";
                return Err(self.wrong_type(key, expected, value));
            }
        };
        Ok(Some(ChardevRequest::Listen(path)))
    }

    fn windows(&self, key: &str, value: &Value<'_>) -> Reading<WindowsSpec> {
        let DeValue::String(text) = value.get_ref() else {
            let expected = "a number and size, as in \"4x16M\"";
            return Err(self.wrong_type(key, expected, value));
        };
        self.refuse(value.span(), parse_windows(text))
    }

    pub(super) fn group(&self, table: &Table<'_>) -> Reading<GroupRequest> {
        let mut keys = self.keys(table);
        let name = keys.name("a group")?;
        let domain = keys.domain()?;
        let members = keys.read("members", Source::members)?;
        keys.end()?;
        let what = "this [[group]]";
        let example = "members = [\"web\", \"www\"]";
        Ok(GroupRequest {
            name: keys.required(name, what, "name", "name = \"frontends\"")?,
            domain,
            members: keys.required(members, what, "members", example)?,
        })
    }

    /// The members of a group: as many as a daemon has VMs, unlike other lists.
    fn members(&self, key: &str, value: &Value<'_>) -> Reading<Vec<String>> {
        let DeValue::Array(array) = value.get_ref() else {
            return Err(self.wrong_type(key, "a list of names of VMs", value));
        };
        if let Some(beyond) = array.get(crate::MAX_VMS) {
            let (what, limit) = ("members of one group", crate::MAX_VMS);
            return self.refuse(beyond.span(), Err(InputError::TooMany { what, limit }));
        }
        array
            .iter()
            .map(|member| self.name(key, "a VM", member))
            .collect()
    }

    fn limits(&self, key: &str, value: &Value<'_>, limits: &mut Limits) -> Reading<()> {
        let table = self.table(key, value, "a table, as in { circuits = 1000 }")?;
        for (key, value) in table.get_ref().iter() {
            let (span, key) = (key.span(), key.get_ref().as_ref());
            let valid = self.limit_names();
            if !valid.contains(&key) {
                let (key, valid) = (key.to_owned(), valid.to_vec());
                return self.refuse(span, Err(InputError::UnknownKey { key, valid }));
            }
            self.limit(key, value, limits)?;
        }
        Ok(())
    }

    fn limit(&self, name: &str, value: &Value<'_>, limits: &mut Limits) -> Reading<()> {
        let names = self.limit_names();
        let set = match value.get_ref() {
            DeValue::Integer(number) => match integer(number) {
                Some(number) => set(limits, names, name, number),
                None => set_in_words(limits, names, name, number.as_str()),
            },
            DeValue::String(text) if !self.is_file() => set_in_words(limits, names, name, text),
            _ => return Err(self.wrong_type(name, "a whole number", value)),
        };
        self.refuse(value.span(), set)
    }

    fn limit_names(&self) -> &'static LimitNames {
        match self.is_request() {
            true => &LIMIT_MEMBERS,
            false => &LIMIT_KEYS,
        }
    }

    fn cid(&self, key: &str, value: &Value<'_>) -> Reading<u32> {
        let cid = match value.get_ref() {
            DeValue::Integer(number) => integer(number)
                .ok_or_else(|| InputError::Cid {
                    cid: number.as_str().to_owned(),
                })
                .and_then(check_cid),
            DeValue::String(text) if !self.is_file() => parse_cid(text),
            _ => return Err(self.wrong_type(key, "a number", value)),
        };
        self.refuse(value.span(), cid)
    }
}

/// What the keys of which one may be there say together, or the one to blame.
fn vmm_socket(
    vhost_user: Option<PathBuf>,
    hybrid: Option<PathBuf>,
    listening: Option<ChardevRequest>,
    connecting: Option<PathBuf>,
) -> Result<VmmSocket<Option<PathBuf>>, (&'static str, InputError)> {
    let (vhost, serial) = ("vhost-user", "serial");
    Err(match (vhost_user, hybrid, listening, connecting) {
        (path, None, None, None) => return Ok(VmmSocket::Vsock(path)),
        (None, Some(path), None, None) => return Ok(VmmSocket::Hybrid(path)),
        (None, None, Some(chardev), None) => return Ok(VmmSocket::Serial(chardev)),
        (None, None, None, Some(path)) => return Ok(VmmSocket::Serial(Chardev::Connect(path))),
        (_, _, Some(_), Some(_)) => {
            let beside = "beside \"serial\": either the VMM connects to a socket of Ringdown's, or Ringdown to one of the VMM's";
            let key = "serial-connect";
            (key, InputError::Pointless { key, beside })
        }
        (Some(_), Some(_), ..) => (vhost, InputError::BesideHybrid { key: vhost }),
        (Some(_), None, ..) => (vhost, InputError::BesideSerial { key: vhost }),
        (None, _, Some(_), _) => (serial, InputError::BesideHybrid { key: serial }),
        (None, ..) => ("serial-connect", InputError::BesideHybrid { key: serial }),
    })
}

impl Keys<'_, '_> {
    /// The limits of a VM as an option has them.
    fn limits(&mut self, limits: &mut Limits) -> Reading<()> {
        let options = LIMIT_OPTIONS.into_iter().zip(LIMIT_KEYS);
        for (option, name) in options.filter(|_| self.source.is_option()) {
            self.read(option, |of, _, value| of.limit(name, value, limits))?;
        }
        Ok(())
    }
}
