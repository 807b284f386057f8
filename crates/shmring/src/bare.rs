//! The least that a ring in shared memory can be, as a baseline for benches: no checks, no sleeping, no end.
//!
//! It uses the two counts and the bytes of a window's rings, and nothing else. Both sides have to be honest, so it is worth nothing for anything
//! but measuring: whole messages are made, summed and copied in here, where raw memory may be touched.

use std::hint::spin_loop;
use std::sync::atomic::Ordering;

use crate::layout::RingFields;
use crate::spec::Side;
use crate::window::Window;

/// One side of such a ring pair.
#[derive(Debug)]
pub struct Bare {
    window: Window,
    side: Side,
    head: u64,
    tail: u64,
}

impl Bare {
    /// In this window, which has no other user.
    pub fn new(window: Window, side: Side) -> Bare {
        Bare {
            window,
            side,
            head: 0,
            tail: 0,
        }
    }

    /// Writes a message of `len` bytes, a multiple of eight, in place: the numbers from `first` on.
    pub fn produce(&mut self, len: usize, first: u64) {
        self.wait_for_room(len);
        let (place, whole) = self.window.span(self.side, self.head, len).pieces()[0];
        assert_eq!(whole, len, "the rings are mapped twice");
        // SAFETY: so many bytes are mapped there and belong to this side. (Both sides being honest.)
        let words = unsafe { std::slice::from_raw_parts_mut(place.cast::<u64>(), len / 8) };
        for (word, number) in words.iter_mut().zip(first..) {
            *word = number;
        }
        self.publish(len);
    }

    /// Copies a message in.
    pub fn send(&mut self, message: &[u8]) {
        self.wait_for_room(message.len());
        let mut span = self.window.span(self.side, self.head, message.len());
        span.write(0, message);
        self.publish(message.len());
    }

    /// Waits for a message of `len` bytes, a multiple of eight, and sums its numbers in place.
    pub fn sum(&mut self, len: usize) -> u64 {
        self.wait_for_bytes(len);
        let other = self.side.other();
        let (place, whole) = self.window.span(other, self.tail, len).pieces()[0];
        assert_eq!(whole, len, "the rings are mapped twice");
        // SAFETY: so many bytes are mapped there, and the other side does not write to them now. (It is honest.)
        let words = unsafe { std::slice::from_raw_parts(place.cast::<u64>(), len / 8) };
        let sum = words
            .iter()
            .fold(0_u64, |sum, word| sum.wrapping_add(*word));
        self.release(len);
        sum
    }

    /// Waits for a message and copies it out.
    pub fn receive(&mut self, into: &mut [u8]) {
        self.wait_for_bytes(into.len());
        let other = self.side.other();
        self.window.span(other, self.tail, into.len()).read(0, into);
        self.release(into.len());
    }

    fn wait_for_room(&self, len: usize) {
        let tail = RingFields::written_by(self.side).tail;
        let most = self.window.ring_len() - len;
        while self.head - self.window.load(tail, Ordering::Acquire) > most as u64 {
            spin_loop();
        }
    }

    fn publish(&mut self, len: usize) {
        self.head += len as u64;
        let head = RingFields::written_by(self.side).head;
        self.window.store(head, self.head, Ordering::Release);
    }

    fn wait_for_bytes(&self, len: usize) {
        let head = RingFields::written_by(self.side.other()).head;
        while self.window.load(head, Ordering::Acquire) - self.tail < len as u64 {
            spin_loop();
        }
    }

    fn release(&mut self, len: usize) {
        self.tail += len as u64;
        let tail = RingFields::written_by(self.side.other()).tail;
        self.window.store(tail, self.tail, Ordering::Release);
    }
}
