//! A VM's ports in networks: `networks` and `[[vm.net]]` of a file, `--net` of the command line, `nets` of the control API.
//!
//! All of them say the same, so all of them are read into [`NewPort`] first, and what they say is checked once, there.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use l2::bridge::{Rates, Vlan, VlanId};
use serde::{Deserialize, Serialize};
use toml::de::DeValue;
use utoipa::ToSchema;
use wire::ethernet::MacAddress;

use crate::ConfigError;
use crate::fields::fields;
use crate::input::{InputError, check_name_of, check_socket_path};
use crate::net::{Moderation, VLAN_BOUNDS};
use crate::pattern::{malformed, parse_ipv4};
use crate::schema;
use crate::source::{MAX_LIST_LEN, Source, Table, Value};

/// The most networks that one VM can be in.
pub const MAX_NETS: usize = 8;

/// The queues of a port come in pairs, of which a guest with as many processors can use one each.
const QUEUE_PAIRS_BOUNDS: RangeInclusive<u64> = 1..=8;

const FRAMES_BOUNDS: RangeInclusive<u64> = 1..=100_000_000;
const BYTES_BOUNDS: RangeInclusive<u64> = 65_536..=1_000_000_000_000;
const BROADCASTS_BOUNDS: RangeInclusive<u64> = 0..=1_000_000;

/// The longest window of moderation that can be asked for. A guest's timers of TCP are not far above it.
const MAX_WINDOW: Duration = Duration::from_millis(10);

/// The keys that describe a port.
pub const NET_KEYS: [&str; 14] = [
    "network",
    "mac",
    "ipv4",
    "vhost-user",
    "vlan",
    "trunk",
    "native",
    "isolated",
    "learn",
    "frames-per-second",
    "bytes-per-second",
    "broadcasts-per-second",
    "queue-pairs",
    "moderation",
];

/// A port as somebody wrote it. Nothing has been checked.
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
    /// How many frames for everybody it may send in a second.
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

    /// Checks what was written.
    ///
    /// # Errors
    /// [`InputError`] says what cannot be meant.
    pub fn check(&self) -> Result<PortRequest, InputError> {
        check_name_of("a network", &self.network)?;
        let mac = self.mac.as_deref().map(parse_mac).transpose()?;
        let ipv4 = self.ipv4.as_deref().map(parse_ipv4).transpose()?;
        if let Some(path) = &self.vhost_user {
            check_socket_path(path)?;
        }
        let learn = self.learn.unwrap_or_default();
        let bounded = |key, value: Option<u64>, bounds| {
            let check = |value| check_number(key, value, bounds);
            value.map(check).transpose()
        };
        let frames = bounded("frames-per-second", self.frames_per_second, FRAMES_BOUNDS)?;
        let bytes = bounded("bytes-per-second", self.bytes_per_second, BYTES_BOUNDS)?;
        let broadcasts = self.broadcasts_per_second;
        let broadcasts = bounded("broadcasts-per-second", broadcasts, BROADCASTS_BOUNDS)?;
        let pairs = bounded("queue-pairs", self.queue_pairs, QUEUE_PAIRS_BOUNDS)?;
        let moderation = self.moderation.as_deref();
        Ok(PortRequest {
            network: self.network.clone(),
            mac,
            ipv4,
            vhost_user: self.vhost_user.clone(),
            vlan: vlan_of(self.vlan, self.trunk.clone(), self.native)?,
            isolated: self.isolated,
            learn,
            // The bounds fit.
            rates: Rates {
                frames_per_second: frames.map(|number| number as u32),
                bytes_per_second: bytes,
                broadcasts_per_second: broadcasts
                    .map_or(Rates::guest().broadcasts_per_second, |number| number as u32),
                ..Rates::guest()
            },
            queue_pairs: pairs.unwrap_or(1) as u16,
            moderation: moderation.map(parse_moderation).transpose()?,
            place: None,
        })
    }
}

/// Checks the ports of one VM, of which there is one in a network.
///
/// # Errors
/// [`InputError`] says what cannot be meant.
pub fn check_ports(ports: &[NewPort]) -> Result<Vec<PortRequest>, InputError> {
    let mut checked: Vec<PortRequest> = Vec::new();
    for port in ports {
        let port = port.check()?;
        check_new(&checked, &port)?;
        checked.push(port);
    }
    Ok(checked)
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

/// Reads `NETWORK`, `NETWORK,KEY=VALUE…`, or `network=NETWORK,KEY=VALUE…`. A trunk's VLANs have a plus between them: `trunk=10+20`.
///
/// # Errors
/// [`InputError`] says what cannot be meant.
pub fn parse_net_option(text: &str) -> Result<NewPort, InputError> {
    let text = match text.split_once(',').map_or(text, |(first, _)| first) {
        network if !network.contains('=') => format!("network={text}"),
        _ => text.to_owned(),
    };
    let words = ["isolated", "learn"];
    let example = "--net lan,vlan=10";
    let fields = fields(&text, &NET_KEYS, &words, example)?;
    let [network, mac, ipv4, vhost_user, rest @ ..] = fields;
    let [vlan, trunk, native, isolated, learn, rest @ ..] = rest;
    let [frames, bytes, broadcasts, queue_pairs, moderation] = rest;
    let number = |key: &'static str, text: Option<String>, bounds: RangeInclusive<u64>| {
        let parse = |text: String| parse_number(key, &text, bounds.clone());
        text.map(parse).transpose()
    };
    let boolean = |key: &'static str, text: Option<String>| match text.as_deref() {
        None => Ok(None),
        Some("" | "true") => Ok(Some(true)),
        Some("false") => Ok(Some(false)),
        Some(other) => Err(InputError::Word {
            key,
            found: other.to_owned(),
            valid: &["true", "false"],
        }),
    };
    let trunk = trunk.map(|text| {
        let vlans = text.split('+');
        let vlans = vlans.map(|text| parse_number("trunk", text, VLAN_BOUNDS));
        vlans.collect::<Result<Vec<u64>, InputError>>()
    });
    Ok(NewPort {
        network: network.unwrap_or_default(),
        mac,
        ipv4,
        vhost_user: vhost_user.map(PathBuf::from),
        vlan: number("vlan", vlan, VLAN_BOUNDS)?,
        trunk: trunk.transpose()?,
        native: number("native", native, VLAN_BOUNDS)?,
        isolated: boolean("isolated", isolated)?,
        learn: boolean("learn", learn)?,
        frames_per_second: number("frames-per-second", frames, FRAMES_BOUNDS)?,
        bytes_per_second: number("bytes-per-second", bytes, BYTES_BOUNDS)?,
        broadcasts_per_second: number("broadcasts-per-second", broadcasts, BROADCASTS_BOUNDS)?,
        queue_pairs: number("queue-pairs", queue_pairs, QUEUE_PAIRS_BOUNDS)?,
        moderation,
    })
}

impl Source<'_> {
    /// `networks = ["lan"]`, as short for tables with nothing but the name.
    pub(super) fn networks(&self, value: &Value<'_>) -> Result<Vec<PortRequest>, ConfigError> {
        let mut ports = Vec::new();
        for (span, name) in self.strings("networks", value, true)? {
            let mut port = self.refuse(span.clone(), NewPort::of(name).check())?;
            self.refuse(span.clone(), check_new(&ports, &port))?;
            port.place = Some(self.place_of("networks", span));
            ports.push(port);
        }
        Ok(ports)
    }

    /// The `[[vm.net]]` tables of a VM that has these ports already.
    pub(super) fn nets(
        &self,
        value: &Value<'_>,
        ports: &mut Vec<PortRequest>,
    ) -> Result<(), ConfigError> {
        let limit = ("networks of one VM", MAX_NETS);
        if let DeValue::Array(list) = value.get_ref() {
            if let Some(name) = list.iter().find(|of| of.get_ref().as_str().is_some()) {
                let expected = "a list of tables, written [[vm.net]], or be named \"networks\", as in networks = [\"lan\"]";
                return Err(self.wrong_type("net", expected, name));
            }
        }
        for (_, table) in self.tables("net", value, limit)? {
            let port = self.net(&table)?;
            let mut port = self.refuse(table.span(), port.check())?;
            self.refuse(table.span(), check_new(ports, &port))?;
            let name = table.get_ref().get("network");
            port.place = name.map(|name| self.place_of("network", name.span()));
            ports.push(port);
        }
        Ok(())
    }

    fn net(&self, table: &Table<'_>) -> Result<NewPort, ConfigError> {
        let (mut network, mut port) = (None, NewPort::default());
        let words = |key, value| -> Result<Option<String>, ConfigError> {
            Ok(Some(self.string(key, value)?.to_owned()))
        };
        for (key, value) in table.get_ref().iter() {
            match key.get_ref().as_ref() {
                "network" => network = Some(self.name("network", "a network", value)?),
                "mac" => port.mac = words("mac", value)?,
                "ipv4" => port.ipv4 = words("ipv4", value)?,
                "vhost-user" => port.vhost_user = Some(self.socket("vhost-user", value)?),
                "vlan" => port.vlan = Some(self.vlan("vlan", value)?),
                "trunk" => port.trunk = Some(self.vlans(value)?),
                "native" => port.native = Some(self.vlan("native", value)?),
                "isolated" => port.isolated = Some(self.boolean("isolated", value)?),
                "learn" => port.learn = Some(self.boolean("learn", value)?),
                "frames-per-second" => {
                    port.frames_per_second =
                        Some(self.number("frames-per-second", value, FRAMES_BOUNDS)?);
                }
                "bytes-per-second" => {
                    port.bytes_per_second =
                        Some(self.number("bytes-per-second", value, BYTES_BOUNDS)?);
                }
                "broadcasts-per-second" => {
                    port.broadcasts_per_second =
                        Some(self.number("broadcasts-per-second", value, BROADCASTS_BOUNDS)?);
                }
                "queue-pairs" => {
                    port.queue_pairs =
                        Some(self.number("queue-pairs", value, QUEUE_PAIRS_BOUNDS)?);
                }
                "moderation" => port.moderation = words("moderation", value)?,
                other => return self.unknown(key.span(), other, &NET_KEYS),
            }
        }
        let (what, example) = ("this [[vm.net]]", "network = \"lan\"");
        port.network = self.required(table, network, what, "network", example)?;
        Ok(port)
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
    vlan.ok_or_else(|| out_of_bounds(key, number.to_string(), &VLAN_BOUNDS))
}

/// Reads `adaptive`, `off`, `50us` or `1ms`.
///
/// # Errors
/// [`InputError::Malformed`].
pub fn parse_moderation(text: &str) -> Result<Moderation, InputError> {
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

fn parse_number(
    key: &'static str,
    text: &str,
    bounds: RangeInclusive<u64>,
) -> Result<u64, InputError> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text
        .parse()
        .ok()
        .filter(|number| digits && bounds.contains(number));
    number.ok_or_else(|| out_of_bounds(key, text.to_owned(), &bounds))
}

fn check_number(
    key: &'static str,
    value: u64,
    bounds: RangeInclusive<u64>,
) -> Result<u64, InputError> {
    match bounds.contains(&value) {
        true => Ok(value),
        false => Err(out_of_bounds(key, value.to_string(), &bounds)),
    }
}

fn out_of_bounds(key: &'static str, value: String, bounds: &RangeInclusive<u64>) -> InputError {
    InputError::Limit {
        key,
        value: value.chars().take(32).collect(),
        least: *bounds.start(),
        most: *bounds.end(),
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
