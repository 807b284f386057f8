//! What the VMMs' arguments have in common.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use clap::ValueEnum;

/// What runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Accelerator {
    /// The processor: `-accel kvm`, libvirt's `<domain type='kvm'>`.
    Kvm,
    /// QEMU emulates it: `-accel tcg`, libvirt's `<domain type='qemu'>`.
    Tcg,
}

impl Accelerator {
    /// How many MSI-X vectors a network card has, if that is not for QEMU to choose.
    ///
    /// QEMU before 8.0 ends with a segmentation fault when a guest sets up MSI-X for a vhost-user card and KVM does not deliver its interrupts: it uses
    /// `vector_irqfd`, which is null then (`virtio_pci_set_guest_notifiers`). Without vectors the queues share one interrupt.
    pub(crate) fn card_vectors(self, queue_pairs: u16) -> Option<u16> {
        match (self, queue_pairs) {
            (Accelerator::Tcg, _) => Some(0),
            (Accelerator::Kvm, 1) => None,
            // One for each queue, one for the control queue, and one for changes of the device.
            (Accelerator::Kvm, pairs) => Some(2 * pairs + 2),
        }
    }

    /// What to know about network cards that are printed for this.
    pub fn note(self) -> &'static str {
        match self {
            Accelerator::Kvm => {
                "note: the network cards are for KVM. To emulate the guest (-accel tcg, <domain type='qemu'>) print them with --accel tcg: QEMU before 8.0 \
                 crashes with these"
            }
            Accelerator::Tcg => {
                "note: the network cards are without MSI-X, as QEMU before 8.0 crashes with it when it emulates the guest. With KVM, print faster ones with \
                 --accel kvm"
            }
        }
    }
}

/// The size of a guest's memory as QEMU takes it: a number and a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    amount: u64,
    unit: char,
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Memory, String> {
        let wrong = || {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            match is_number {
                true => format!("a unit is needed, one of K, M, G and T, such as {text}M"),
                false => {
                    "expected a number above 0 and one of K, M, G and T, such as 256M".to_owned()
                }
            }
        };
        let unit = text
            .chars()
            .next_back()
            .filter(|unit| "KMGT".contains(*unit))
            .ok_or_else(wrong)?;
        let digits = &text[..text.len() - 1];
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(wrong());
        }
        let amount = digits.parse().map_err(|_| wrong())?;
        if amount == 0 {
            return Err(wrong());
        }
        Ok(Memory { amount, unit })
    }
}

impl Memory {
    /// In bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let power = match self.unit {
            'K' => 10,
            'M' => 20,
            'G' => 30,
            _ => 40,
        };
        self.amount.saturating_mul(1 << power)
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}{}", self.amount, self.unit)
    }
}

/// A path inside a value of an option. QEMU ends a value at a comma; two in a row stand for one.
pub(crate) fn qemu_path(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(text: &str) -> Memory {
        text.parse().unwrap()
    }

    #[test]
    fn memory_is_a_number_and_a_unit() {
        assert_eq!(memory("4096M").to_string(), "4096M");
        for wrong in [
            "",
            "M",
            "0M",
            "256",
            "256m",
            "-1M",
            "+1M",
            "1.5G",
            "256M,share=off",
            "99999999999999999999M",
            "1µ",
        ] {
            assert!(wrong.parse::<Memory>().is_err(), "{wrong:?} was taken");
        }
        let without_unit = "256".parse::<Memory>().unwrap_err();
        assert_eq!(
            without_unit,
            "a unit is needed, one of K, M, G and T, such as 256M"
        );
    }
}
