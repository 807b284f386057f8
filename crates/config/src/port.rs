//! A VM's ports in networks: `networks` and `[[vm.net]]` of a file, `--net` of the command line, `nets` of the control API.
//!
//! All of them say the same, so all of them are read into [`NewPort`] first, and what they say is checked once, there.

use std::net::Ipv4Addr;
use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;
use std::time::Duration;

use l2::bridge::{Rates, Vlan, VlanId};
use serde::{Deserialize, Serialize};
use toml::de::DeValue;
use utoipa::ToSchema;
use wire::ethernet::MacAddress;

use crate::input::{InputError, check_name_of};
use crate::net::{Moderation, VLAN_BOUNDS};
use crate::pattern::{malformed, parse_ipv4};
use crate::schema;
use crate::source::{MAX_LIST_LEN, Reading, Source, Table, Value, out_of_bounds};

/// The most networks that one VM can be in.
pub const MAX_NETS: usize = 8;

/// The queues of a port come in pairs, of which a guest with as many processors can use one each.
const QUEUE_PAIRS_BOUNDS: RangeInclusive<u64> = 1..=8;

const FRAMES_BOUNDS: RangeInclusive<u64> = 1..=100_000_000;
const BYTES_BOUNDS: RangeInclusive<u64> = 65_536..=1_000_000_000_000;
const BROADCASTS_BOUNDS: RangeInclusive<u64> = 0..=1_000_000;

/// The longest window of moderation that can be asked for. A guest's timers of TCP are not far above it.
const MAX_WINDOW: Duration = Duration::from_millis(10);

/// A port as it was written. What its words mean has not been checked.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewPort {
    /// Name of the network, which is of the VM's domain.
    #[schema(schema_with = schema::name)]
    pub network: String,
    /// The guest's MAC address; left out, one is made that stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = described::mac)]
    pub mac: Option<String>,
    /// The guest's IPv4 address; left out, one of the network is given that stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = described::ipv4)]
    pub ipv4: Option<String>,
    /// Absolute path of the socket where the VMM connects; left out, `NAME.net-NETWORK.vhost` in the runtime directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::optional::socket_path)]
    pub vhost_user: Option<PathBuf>,
    /// The VLAN of all its frames, 1 to 4094; left out, 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = described::vlan)]
    pub vlan: Option<u64>,
    /// Instead: the VLANs of its frames, which have tags.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::optional::vlans)]
    pub trunk: Option<Vec<u64>>,
    /// The VLAN of frames of a trunk that have no tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = described::vlan)]
    pub native: Option<u64>,
    /// It reaches the uplink and the network itself only; left out, as the network says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolated: Option<bool>,
    /// It may send from other addresses than its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learn: Option<bool>,
    /// How many frames it may send in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = described::frames)]
    pub frames_per_second: Option<u64>,
    /// How many bytes it may send in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = described::bytes)]
    pub bytes_per_second: Option<u64>,
    /// How many broadcast frames it may send in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = described::broadcasts)]
    pub broadcasts_per_second: Option<u64>,
    /// How many pairs of queues it has, 1 to 8; left out, 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = described::queue_pairs)]
    pub queue_pairs: Option<u64>,
    /// `adaptive`, `off`, or a time such as `50us`; left out, as the network says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = described::moderation)]
    pub moderation: Option<String>,
}

/// A port as a person described it: what was left out is still open. What is there has been checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortRequest {
    /// Name of the network, which is of the VM's domain.
    pub network: String,
    /// The guest's MAC address.
    pub mac: Option<MacAddress>,
    /// The guest's IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// Where the VMM connects.
    pub vhost_user: Option<PathBuf>,
    /// Its VLANs.
    pub vlan: Vlan,
    /// It reaches the uplink and the station only.
    pub isolated: Option<bool>,
    /// It may send from other addresses than its own.
    pub learn: bool,
    /// How much it may send.
    pub rates: Rates,
    /// How many pairs of queues it has.
    pub queue_pairs: u16,
    /// When it is interrupted.
    pub moderation: Option<Moderation>,
    /// Where a file names the network.
    pub place: Option<String>,
}

impl NewPort {
    /// A port in this network, of which nothing else is said.
    pub fn of(network: &str) -> NewPort {
        NewPort {
            network: network.to_owned(),
            ..NewPort::default()
        }
    }

    /// Checks what was read. Numbers are within their bounds.
    pub(crate) fn check(&self) -> Result<PortRequest, InputError> {
        check_name_of("a network", &self.network)?;
        let default = Rates::guest();
        let broadcasts = self.broadcasts_per_second.map(|number| number as u32);
        Ok(PortRequest {
            network: self.network.clone(),
            mac: self.mac.as_deref().map(parse_mac).transpose()?,
            ipv4: self.ipv4.as_deref().map(parse_ipv4).transpose()?,
            vhost_user: self.vhost_user.clone(),
            vlan: vlan_of(self.vlan, self.trunk.clone(), self.native)?,
            isolated: self.isolated,
            learn: self.learn.unwrap_or_default(),
            rates: Rates {
                frames_per_second: self.frames_per_second.map(|number| number as u32),
                bytes_per_second: self.bytes_per_second,
                broadcasts_per_second: broadcasts.unwrap_or(default.broadcasts_per_second),
                ..default
            },
            queue_pairs: self.queue_pairs.unwrap_or(1) as u16,
            moderation: self
                .moderation
                .as_deref()
                .map(parse_moderation)
                .transpose()?,
            place: None,
        })
    }
}

fn check_new(ports: &[PortRequest], port: &PortRequest) -> Result<(), InputError> {
    if ports.len() >= MAX_NETS {
        let (what, limit) = ("networks of one VM", MAX_NETS);
        return Err(InputError::TooMany { what, limit });
    }
    if ports.iter().any(|other| other.network == port.network) {
        let (what, name) = ("a port of this VM in the network", port.network.clone());
        return Err(InputError::Duplicate { what, name });
    }
    Ok(())
}

impl Source<'_> {
    /// `networks = ["lan"]`, as short for tables with nothing but the name.
    pub(super) fn networks(
        &self,
        key: &'static str,
        value: &Value<'_>,
    ) -> Reading<Vec<PortRequest>> {
        let mut ports = Vec::new();
        for (span, name) in self.listed(key, value)? {
            let port = NewPort::of(name);
            let place = self.place_of(key, span.clone());
            self.add_port(&mut ports, &port, span, place)?;
        }
        Ok(ports)
    }

    /// The `[[vm.net]]` tables of a VM that has these ports already.
    pub(super) fn nets(
        &self,
        key: &'static str,
        value: &Value<'_>,
        ports: &mut Vec<PortRequest>,
    ) -> Reading<()> {
        let limit = ("networks of one VM", MAX_NETS);
        if let DeValue::Array(list) = value.get_ref() {
            if let Some(name) = list.iter().find(|of| of.get_ref().as_str().is_some()) {
                let expected = "a list of tables, written [[vm.net]], or be named \"networks\", as in networks = [\"lan\"]";
                return Err(self.wrong_type(key, expected, name));
            }
        }
        for (_, table) in self.tables(key, value, limit)? {
            let port = self.net(&table)?;
            let name = table.get_ref().get("network");
            let place = name.and_then(|name| self.place_of("network", name.span()));
            self.add_port(ports, &port, table.span(), place)?;
        }
        Ok(())
    }

    fn add_port(
        &self,
        ports: &mut Vec<PortRequest>,
        port: &NewPort,
        span: Range<usize>,
        place: Option<String>,
    ) -> Reading<()> {
        let mut port = self.refuse(span.clone(), port.check())?;
        self.refuse(span, check_new(ports, &port))?;
        port.place = place;
        ports.push(port);
        Ok(())
    }

    pub(super) fn net(&self, table: &Table<'_>) -> Reading<NewPort> {
        let mut keys = self.keys(table);
        let words = |text: &str| Ok(text.to_owned());
        let number = |bounds: RangeInclusive<u64>| {
            move |of: &Source<'_>, key, value: &Value<'_>| of.number(key, value, bounds)
        };
        let network = keys.read("network", |of, key, value| of.name(key, "a network", value))?;
        let port = NewPort {
            network: String::new(),
            mac: keys.parsed("mac", words)?,
            ipv4: keys.parsed("ipv4", words)?,
            vhost_user: keys.read("vhost-user", Source::socket)?,
            vlan: keys.read("vlan", Source::vlan)?,
            trunk: keys.read("trunk", Source::vlans)?,
            native: keys.read("native", Source::vlan)?,
            isolated: keys.read("isolated", Source::boolean)?,
            learn: keys.read("learn", Source::boolean)?,
            frames_per_second: keys.read("frames-per-second", number(FRAMES_BOUNDS))?,
            bytes_per_second: keys.read("bytes-per-second", number(BYTES_BOUNDS))?,
            broadcasts_per_second: keys.read("broadcasts-per-second", number(BROADCASTS_BOUNDS))?,
            queue_pairs: keys.read("queue-pairs", number(QUEUE_PAIRS_BOUNDS))?,
            moderation: keys.parsed("moderation", words)?,
        };
        keys.end()?;
        let (what, example) = ("this [[vm.net]]", "network = \"lan\"");
        let network = keys.required(network, what, "network", example)?;
        Ok(NewPort { network, ..port })
    }
}

/// The VLANs of a port or an uplink.
///
/// # Errors
/// [`InputError`] when a number is no VLAN's, or two ways to say it are there.
pub(super) fn vlan_of(
    vlan: Option<u64>,
    trunk: Option<Vec<u64>>,
    native: Option<u64>,
) -> Result<Vlan, InputError> {
    let native = native.map(|vlan| vlan_id("native", vlan)).transpose()?;
    let Some(trunk) = trunk else {
        if native.is_some() {
            let (key, beside) = ("native", "without \"trunk\"");
            return Err(InputError::Pointless { key, beside });
        }
        let vlan = vlan.map(|vlan| vlan_id("vlan", vlan)).transpose()?;
        return Ok(Vlan::Access(vlan.unwrap_or(VlanId::DEFAULT)));
    };
    if vlan.is_some() {
        let (key, beside) = ("vlan", "beside \"trunk\": a port has one VLAN or several");
        return Err(InputError::Pointless { key, beside });
    }
    if trunk.is_empty() {
        return Err(InputError::EmptyList { key: "trunk" });
    }
    if trunk.len() > MAX_LIST_LEN {
        let (what, limit) = ("entries of one list", MAX_LIST_LEN);
        return Err(InputError::TooMany { what, limit });
    }
    let allowed = trunk.into_iter().map(|vlan| vlan_id("trunk", vlan));
    let allowed = allowed.collect::<Result<_, InputError>>()?;
    Ok(Vlan::Trunk { native, allowed })
}

fn vlan_id(key: &'static str, number: u64) -> Result<VlanId, InputError> {
    let vlan = u16::try_from(number).ok().and_then(VlanId::new);
    vlan.ok_or_else(|| out_of_bounds(key, &number.to_string(), &VLAN_BOUNDS))
}

/// Reads `adaptive`, `off`, `50us` or `1ms`.
///
/// # Errors
/// [`InputError::Malformed`].
pub(crate) fn parse_moderation(text: &str) -> Result<Moderation, InputError> {
    let wrong = || {
        let remedy = "write \"adaptive\", \"off\", or a time from \"1us\" to \"10ms\"";
        malformed("a way to moderate interrupts", text, remedy)
    };
    let window = |digits: &str, unit: u64| {
        let digits = digits
            .bytes()
            .all(|byte| byte.is_ascii_digit())
            .then_some(digits)?;
        let micros = digits.parse::<u64>().ok()?.checked_mul(unit)?;
        let window = Duration::from_micros(micros);
        (micros > 0 && window <= MAX_WINDOW).then_some(Moderation::Window(window))
    };
    match text {
        "adaptive" => return Ok(Moderation::Adaptive),
        "off" => return Ok(Moderation::Off),
        _ => {}
    }
    let micros = text.strip_suffix("us").and_then(|digits| window(digits, 1));
    let millis = || {
        text.strip_suffix("ms")
            .and_then(|digits| window(digits, 1000))
    };
    micros.or_else(millis).ok_or_else(wrong)
}

/// Reads the MAC address of a guest.
///
/// # Errors
/// [`InputError::Malformed`].
fn parse_mac(text: &str) -> Result<MacAddress, InputError> {
    let wrong = |remedy: &str| malformed("a guest's MAC address", text, remedy);
    let mac: MacAddress = text.parse().map_err(|_| {
        wrong("write it like \"02:00:5e:10:00:01\", or leave it out and one is made")
    })?;
    match mac.is_assignable() {
        true => Ok(mac),
        false => Err(wrong(
            "the first byte is even, and not all are zero: choose another, or leave it out and one is made",
        )),
    }
}

/// What the members look like in the API's description.
mod described {
    use utoipa::openapi::Object;

    use super::{
        BROADCASTS_BOUNDS, BYTES_BOUNDS, FRAMES_BOUNDS, QUEUE_PAIRS_BOUNDS, VLAN_BOUNDS, schema,
    };
    use schema::optional::{number, pattern};

    pub(super) fn mac() -> Object {
        // Not all zeros, and an even first byte: no group (IEEE 802).
        pattern("^(?!00([:-]00){5}$)[0-9a-fA-F][02468aceACE]([:-][0-9a-fA-F]{2}){5}$")
    }

    pub(super) fn ipv4() -> Object {
        let byte = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
        pattern(&format!("^({byte}\\.){{3}}{byte}$"))
    }

    pub(super) fn vlan() -> Object {
        number(VLAN_BOUNDS)
    }

    pub(super) fn frames() -> Object {
        number(FRAMES_BOUNDS)
    }

    pub(super) fn bytes() -> Object {
        number(BYTES_BOUNDS)
    }

    pub(super) fn broadcasts() -> Object {
        number(BROADCASTS_BOUNDS)
    }

    pub(super) fn queue_pairs() -> Object {
        number(QUEUE_PAIRS_BOUNDS)
    }

    pub(super) fn moderation() -> Object {
        pattern("^(adaptive|off|(10|[1-9])ms|(10000|[1-9][0-9]{0,3})us)$")
    }
}
