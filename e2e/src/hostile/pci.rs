//! The guest's vsock device on its PCI bus, taken from the kernel's driver (virtio 1.2, section 4.1).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guestmem_driver::Window;

/// Vendor and device of a virtio socket device: 0x1040 and the device's type, 19.
const VENDOR: &str = "0x1af4";
const DEVICE: &str = "0x1053";

/// The kernel's driver of virtio devices on PCI buses.
const DRIVER: &str = "/sys/bus/pci/drivers/virtio-pci";

/// How many huge pages the guest's system is to have for us.
const HUGE_PAGES: &str = "2";

/// Configuration space (PCI Local Bus Specification 3.0, section 6.1).
const COMMAND: u64 = 4;
const CAPABILITIES: u64 = 0x34;
const BASE_ADDRESSES: u64 = 0x10;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
const COMMAND_NO_INTERRUPT: u16 = 1 << 10;
const VENDOR_CAPABILITY: u8 = 9;

/// No list of capabilities is longer: it lives in 192 bytes, and each takes four.
const MOST_CAPABILITIES: usize = 48;

/// Types of virtio's own capabilities (virtio 1.2, section 4.1.4).
const COMMON: u8 = 1;
const NOTIFY: u8 = 2;
const DEVICE_CONFIGURATION: u8 = 4;

/// The device in sysfs.
fn directory() -> Result<PathBuf> {
    for entry in fs::read_dir("/sys/bus/pci/devices")? {
        let path = entry?.path();
        let is = |name: &str, wanted: &str| {
            fs::read_to_string(path.join(name)).is_ok_and(|found| found.trim() == wanted)
        };
        if is("vendor", VENDOR) && is("device", DEVICE) {
            return Ok(path);
        }
    }
    anyhow::bail!("this guest has no vsock device")
}

/// Takes the device from the kernel, enables it, and sees that there are huge pages.
pub(super) fn take() -> Result<()> {
    let directory = directory()?;
    if directory.join("driver").exists() {
        fs::write(Path::new(DRIVER).join("unbind"), address(&directory)?)?;
    }
    fs::write(directory.join("enable"), "1")?;
    let configuration = Configuration::open(&directory)?;
    configuration.set_command(COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_NO_INTERRUPT)?;
    fs::write("/proc/sys/vm/nr_hugepages", HUGE_PAGES)?;
    Ok(())
}

/// Gives the device back to the kernel, and waits until its driver has it.
pub(super) fn give_back() -> Result<()> {
    let directory = directory()?;
    fs::write(directory.join("enable"), "0")?;
    fs::write(Path::new(DRIVER).join("bind"), address(&directory)?)?;
    fs::write("/proc/sys/vm/nr_hugepages", "0")?;
    let until = Instant::now() + Duration::from_secs(10);
    while !directory.join("driver").exists() {
        ensure!(
            Instant::now() < until,
            "the kernel does not want it any more"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn address(directory: &Path) -> Result<String> {
    let name = directory.file_name().context("a device has a name")?;
    Ok(name.to_string_lossy().into_owned())
}

/// The device's configuration space.
#[derive(Debug)]
pub(super) struct Configuration(File);

impl Configuration {
    fn open(directory: &Path) -> Result<Configuration> {
        let path = directory.join("config");
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Configuration(file))
    }

    fn u8(&self, offset: u64) -> io::Result<u8> {
        let mut bytes = [0];
        self.0.read_exact_at(&mut bytes, offset)?;
        Ok(bytes[0])
    }

    fn u32(&self, offset: u64) -> io::Result<u32> {
        let mut bytes = [0; 4];
        self.0.read_exact_at(&mut bytes, offset)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn set_command(&self, command: u16) -> io::Result<()> {
        self.0.write_all_at(&command.to_le_bytes(), COMMAND)
    }

    /// Lets the device reach memory, or not.
    pub(super) fn set_bus_master(&self, allowed: bool) -> io::Result<()> {
        let bus_master = if allowed { COMMAND_BUS_MASTER } else { 0 };
        self.set_command(COMMAND_MEMORY | COMMAND_NO_INTERRUPT | bus_master)
    }

    /// Where in the device's memory a virtio structure lies: base address register, offset in bytes, and the capability's own place.
    fn find(&self, wanted: u8) -> Result<(u8, usize, u64)> {
        let mut place = u64::from(self.u8(CAPABILITIES)? & 0xfc);
        for _ in 0..MOST_CAPABILITIES {
            if place == 0 {
                break;
            }
            if self.u8(place)? == VENDOR_CAPABILITY && self.u8(place + 3)? == wanted {
                return Ok((self.u8(place + 4)?, self.u32(place + 8)? as usize, place));
            }
            place = u64::from(self.u8(place + 1)? & 0xfc);
        }
        anyhow::bail!("the device has no structure of type {wanted}")
    }
}

/// The device's registers and where they are.
#[derive(Debug)]
pub(super) struct Registers {
    pub(super) window: Window,
    pub(super) configuration: Configuration,
    /// The window's own address in the guest's physical memory.
    pub(super) window_address: u64,
    /// Offsets in the window, in bytes.
    pub(super) common: usize,
    pub(super) notify: usize,
    pub(super) device: usize,
    /// Bytes between the places where two queues are notified.
    pub(super) notify_stride: usize,
}

impl Registers {
    /// Maps the registers of the device, which must have been [taken](take).
    pub(super) fn map() -> Result<Registers> {
        let directory = directory()?;
        let configuration = Configuration::open(&directory)?;
        let (bar, common, _) = configuration.find(COMMON)?;
        let (notify_bar, notify, capability) = configuration.find(NOTIFY)?;
        let (device_bar, device, _) = configuration.find(DEVICE_CONFIGURATION)?;
        ensure!(
            bar == notify_bar && bar == device_bar,
            "the structures are in more than one place"
        );
        let low = configuration.u32(BASE_ADDRESSES + 4 * u64::from(bar))?;
        let mut window_address = u64::from(low & !0xf);
        if low & 0b110 == 0b100 {
            let high = configuration.u32(BASE_ADDRESSES + 4 * u64::from(bar) + 4)?;
            window_address |= u64::from(high) << 32;
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(directory.join(format!("resource{bar}")))?;
        let len = usize::try_from(file.metadata()?.len())?;
        Ok(Registers {
            window: Window::map(&file, len).context("cannot map the device's registers")?,
            notify_stride: configuration.u32(capability + 16)? as usize,
            configuration,
            window_address,
            common,
            notify,
            device,
        })
    }
}
