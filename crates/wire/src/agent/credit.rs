//! The two ends of a stream's credit: what may be sent, and what room was promised.

/// The most credit that may be outstanding for one stream, in bytes. A peer that grants more is in error.
pub const MAX_CREDIT: u32 = 16 * 1024 * 1024;

/// The peer broke the rules of credit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CreditError {
    /// It granted more than [`MAX_CREDIT`] in all.
    #[error("the other side granted more than {MAX_CREDIT} bytes of credit")]
    Excessive,
    /// It sent more than it was granted.
    #[error("the other side sent {excess} bytes more than it had credit for")]
    Exceeded {
        /// By how many bytes.
        excess: u32,
    },
}

/// How much the sender of a stream may send.
#[derive(Debug, Default, Clone)]
pub struct SendCredit {
    available: u32,
}

impl SendCredit {
    /// The bytes that may be sent now.
    pub fn available(&self) -> usize {
        self.available as usize
    }

    /// The receiver has room for that many bytes more.
    ///
    /// # Errors
    /// More than [`MAX_CREDIT`] would be outstanding.
    pub fn grant(&mut self, bytes: u32) -> Result<(), CreditError> {
        let sum = self
            .available
            .checked_add(bytes)
            .filter(|sum| *sum <= MAX_CREDIT);
        self.available = sum.ok_or(CreditError::Excessive)?;
        Ok(())
    }

    /// That many bytes were sent, at most what was available.
    pub fn spend(&mut self, bytes: usize) {
        debug_assert!(
            bytes <= self.available(),
            "more was sent than the credit allowed"
        );
        self.available = self.available.saturating_sub(bytes as u32);
    }
}

/// How much room the receiver of a stream has granted, and the credit that it has yet to announce.
#[derive(Debug, Clone)]
pub struct ReceiveWindow {
    /// The buffer's size in bytes.
    size: u32,
    /// Granted and not received yet.
    granted: u32,
    /// Consumed and not granted again yet.
    owed: u32,
}

impl ReceiveWindow {
    /// A window of `size` bytes, at most [`MAX_CREDIT`], all of which the caller announces first.
    pub fn new(size: u32) -> ReceiveWindow {
        let size = size.min(MAX_CREDIT);
        ReceiveWindow {
            size,
            granted: size,
            owed: 0,
        }
    }

    /// The window's size: the first credit to announce, in bytes.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// That many bytes arrived.
    ///
    /// # Errors
    /// They are more than what was granted.
    pub fn received(&mut self, bytes: usize) -> Result<(), CreditError> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        match self.granted.checked_sub(bytes) {
            Some(rest) => {
                self.granted = rest;
                Ok(())
            }
            None => Err(CreditError::Exceeded {
                excess: bytes - self.granted,
            }),
        }
    }

    /// That many received bytes left the buffer.
    pub fn consumed(&mut self, bytes: usize) {
        self.owed = self
            .owed
            .saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX))
            .min(self.size - self.granted);
    }

    /// The credit to announce now, in bytes, if it is worth a frame: a quarter of the window or more.
    pub fn grant_due(&mut self) -> Option<u32> {
        if self.owed == 0 || self.owed < self.size / 4 {
            return None;
        }
        self.granted += self.owed;
        Some(std::mem::take(&mut self.owed))
    }
}
