//! VLANs: which frames a port may send and get, and with which tag.

use std::fmt;
use std::num::NonZeroU16;

use wire::ethernet::TagControl;

/// A VLAN, 1 to 4094.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VlanId(NonZeroU16);

impl VlanId {
    /// Where ports are that say nothing of VLANs.
    pub const DEFAULT: VlanId = VlanId(NonZeroU16::MIN);
    /// How many there are, and the number of the last one.
    pub const MAX: u16 = 4094;

    /// The VLAN with this number. 0 means none and 4095 is reserved (IEEE 802.1Q, section 9.6).
    pub const fn new(number: u16) -> Option<VlanId> {
        match NonZeroU16::new(number) {
            Some(number) if number.get() <= VlanId::MAX => Some(VlanId(number)),
            _ => None,
        }
    }

    /// Its number.
    pub const fn get(self) -> u16 {
        self.0.get()
    }
}

impl fmt::Display for VlanId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// Some VLANs.
#[derive(Clone, PartialEq, Eq)]
pub struct VlanSet(Box<[u64; 64]>);

impl VlanSet {
    /// None at all.
    pub fn none() -> VlanSet {
        VlanSet(Box::new([0; 64]))
    }

    /// Every one.
    pub fn all() -> VlanSet {
        (1..=VlanId::MAX).filter_map(VlanId::new).collect()
    }

    /// Adds one.
    pub fn insert(&mut self, vlan: VlanId) {
        self.0[usize::from(vlan.get() / 64)] |= 1 << (vlan.get() % 64);
    }

    /// Whether it is one of them.
    pub fn contains(&self, vlan: VlanId) -> bool {
        self.0[usize::from(vlan.get() / 64)] & 1 << (vlan.get() % 64) != 0
    }

    /// All of them, in their order.
    pub fn iter(&self) -> impl Iterator<Item = VlanId> + '_ {
        (1..=VlanId::MAX)
            .filter_map(VlanId::new)
            .filter(|vlan| self.contains(*vlan))
    }
}

impl FromIterator<VlanId> for VlanSet {
    fn from_iter<I: IntoIterator<Item = VlanId>>(vlans: I) -> VlanSet {
        let mut set = VlanSet::none();
        vlans.into_iter().for_each(|vlan| set.insert(vlan));
        set
    }
}

impl fmt::Debug for VlanSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_set().entries(self.iter()).finish()
    }
}

/// A port's place among the VLANs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Vlan {
    /// In one VLAN, without tags in either direction. A tag that carries only a priority is accepted and taken off.
    Access(VlanId),
    /// In several, distinguished by tags.
    Trunk {
        /// Whose frames have no tag. Without one such frames are refused.
        native: Option<VlanId>,
        /// Whose frames have one.
        allowed: VlanSet,
    },
}

impl Default for Vlan {
    fn default() -> Vlan {
        Vlan::Access(VlanId::DEFAULT)
    }
}

/// What has to happen to the tag of a frame before it leaves at some port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tagging {
    /// Nothing: the frame leaves as it came.
    Keep,
    /// Its tag is taken off.
    Strip,
    /// This tag is put in.
    Insert(TagControl),
    /// Its tag becomes this one.
    Replace(TagControl),
}

impl Vlan {
    /// The VLAN of frames without a tag.
    pub fn untagged(&self) -> Option<VlanId> {
        match self {
            Vlan::Access(vlan) => Some(*vlan),
            Vlan::Trunk { native, .. } => *native,
        }
    }

    /// Whether the port has anything to do with a VLAN.
    pub fn contains(&self, vlan: VlanId) -> bool {
        match self {
            Vlan::Access(own) => *own == vlan,
            Vlan::Trunk { native, allowed } => *native == Some(vlan) || allowed.contains(vlan),
        }
    }

    /// The VLAN of a frame that arrives here with this tag, if it may.
    #[inline]
    pub(super) fn admit(&self, tag: Option<TagControl>) -> Option<VlanId> {
        let number = tag.map_or(0, TagControl::vlan);
        if number == 0 {
            return self.untagged();
        }
        match self {
            Vlan::Access(_) => None,
            Vlan::Trunk { .. } => VlanId::new(number).filter(|vlan| self.contains(*vlan)),
        }
    }

    /// What happens to the tag of a frame of `vlan` that leaves here, unless it may not.
    ///
    /// `tag` is the one it came with; `nested` says that there is another one inside. That one must never come to be the outermost: it would
    /// carry the frame into whatever VLAN its sender has chosen, and filters have not looked behind it.
    #[inline]
    pub(super) fn tagging(
        &self,
        vlan: VlanId,
        tag: Option<TagControl>,
        nested: bool,
    ) -> Option<Tagging> {
        let untag = match tag {
            None => Tagging::Keep,
            Some(_) => Tagging::Strip,
        };
        match self {
            Vlan::Access(own) => (*own == vlan && !nested).then_some(untag),
            Vlan::Trunk { native, .. } if *native == Some(vlan) => (!nested).then_some(untag),
            Vlan::Trunk { allowed, .. } => allowed.contains(vlan).then(|| match tag {
                None => Tagging::Insert(TagControl(vlan.get())),
                Some(tag) if tag.vlan() == vlan.get() => Tagging::Keep,
                Some(tag) => Tagging::Replace(tag.with_vlan(vlan.get())),
            }),
        }
    }
}
