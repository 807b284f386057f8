//! The virtio device behind its registers (virtio 1.2, sections 2.1, 3.1 and 4.1.4.3).

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::pci::{Configuration, Registers};

/// Bits of the device's status.
pub(super) const ACKNOWLEDGE: u8 = 1;
pub(super) const DRIVER: u8 = 2;
pub(super) const DRIVER_OK: u8 = 4;
pub(super) const FEATURES_OK: u8 = 8;

/// Offsets in the common configuration.
const DEVICE_FEATURE_SELECT: usize = 0;
const DEVICE_FEATURE: usize = 4;
const DRIVER_FEATURE_SELECT: usize = 8;
const DRIVER_FEATURE: usize = 12;
const STATUS: usize = 20;
const QUEUE_SELECT: usize = 22;
const QUEUE_SIZE: usize = 24;
const QUEUE_ENABLE: usize = 28;
const QUEUE_NOTIFY_OFFSET: usize = 30;
const QUEUE_ADDRESSES: [usize; 3] = [32, 40, 48];

/// How long the device may take to be reset.
const PATIENCE: Duration = Duration::from_secs(10);

/// Guest physical addresses of a queue's three parts: descriptors, available ring, used ring.
pub(super) type QueueAddresses = [u64; 3];

/// A virtio device. Dropping it resets it, so that it leaves the memory that it was given alone.
#[derive(Debug)]
pub(super) struct Device {
    registers: Registers,
}

impl Device {
    pub(super) fn open() -> Result<Device> {
        Ok(Device {
            registers: Registers::map()?,
        })
    }

    /// Resets it and waits until that has happened.
    pub(super) fn reset(&self) -> Result<()> {
        self.set_status(0);
        let until = Instant::now() + PATIENCE;
        while self.status() != 0 {
            ensure!(Instant::now() < until, "the device is not reset");
        }
        Ok(())
    }

    pub(super) fn status(&self) -> u8 {
        self.registers.window.load_u8(self.common(STATUS))
    }

    pub(super) fn set_status(&self, status: u8) {
        self.registers.window.store_u8(self.common(STATUS), status);
    }

    /// What the device offers.
    pub(super) fn features(&self) -> u64 {
        let half = |select: u32| {
            self.store_u32(DEVICE_FEATURE_SELECT, select);
            u64::from(self.registers.window.load_u32(self.common(DEVICE_FEATURE)))
        };
        half(0) | half(1) << 32
    }

    /// Takes features.
    pub(super) fn set_features(&self, features: u64) {
        for (select, half) in [(0, features as u32), (1, (features >> 32) as u32)] {
            self.store_u32(DRIVER_FEATURE_SELECT, select);
            self.store_u32(DRIVER_FEATURE, half);
        }
    }

    /// Writes the addresses of a queue. It is not enabled by that.
    pub(super) fn set_queue(&self, queue: u16, size: u16, addresses: QueueAddresses) {
        let window = &self.registers.window;
        window.store_u16(self.common(QUEUE_SELECT), queue);
        window.store_u16(self.common(QUEUE_SIZE), size);
        for (place, address) in QUEUE_ADDRESSES.into_iter().zip(addresses) {
            self.store_u32(place, address as u32);
            self.store_u32(place + 4, (address >> 32) as u32);
        }
    }

    pub(super) fn enable_queue(&self, queue: u16) {
        let window = &self.registers.window;
        window.store_u16(self.common(QUEUE_SELECT), queue);
        window.store_u16(self.common(QUEUE_ENABLE), 1);
    }

    /// The largest size of a queue.
    pub(super) fn queue_size(&self, queue: u16) -> u16 {
        let window = &self.registers.window;
        window.store_u16(self.common(QUEUE_SELECT), queue);
        window.load_u16(self.common(QUEUE_SIZE))
    }

    /// Where a queue is notified, as an offset in the window.
    pub(super) fn notify_place(&self, queue: u16) -> usize {
        let registers = &self.registers;
        registers.window.store_u16(self.common(QUEUE_SELECT), queue);
        let offset = registers.window.load_u16(self.common(QUEUE_NOTIFY_OFFSET));
        registers.notify + usize::from(offset) * registers.notify_stride
    }

    /// Notifies a queue at its [place](Self::notify_place).
    pub(super) fn notify(&self, place: usize, queue: u16) {
        self.registers.window.store_u16(place, queue);
    }

    /// The guest's context identifier, from the device's own configuration (virtio 1.2, section 5.10.4).
    pub(super) fn cid(&self) -> u64 {
        let window = &self.registers.window;
        let place = self.registers.device;
        u64::from(window.load_u32(place)) | u64::from(window.load_u32(place + 4)) << 32
    }

    /// Writes over the device's own configuration, which is not the driver's to write.
    pub(super) fn set_cid(&self, cid: u64) {
        let place = self.registers.device;
        self.registers.window.store_u32(place, cid as u32);
        self.registers
            .window
            .store_u32(place + 4, (cid >> 32) as u32);
    }

    /// The address of the registers themselves in the guest's physical memory.
    pub(super) fn window_address(&self) -> u64 {
        self.registers.window_address
    }

    pub(super) fn configuration(&self) -> &Configuration {
        &self.registers.configuration
    }

    fn common(&self, offset: usize) -> usize {
        self.registers.common + offset
    }

    fn store_u32(&self, offset: usize, value: u32) {
        self.registers.window.store_u32(self.common(offset), value);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Without bus mastering the device would ignore it in some states. A failure here costs only the guest.
        let _ = self.configuration().set_bus_master(true);
        let _ = self.reset();
    }
}
