//! The lines' part of a turn. Each is drained and given what there is for it, with those that it has sent to; what this gives back to guests is
//! published at once, so that no guest waits for what others have in the same turn.

use super::Fabric;

impl Fabric {
    /// Serves each line once that has something.
    pub(super) fn serve_lines(&mut self) {
        for _ in 0..self.woken.len() {
            let Some(id) = self.woken.pop_front() else {
                break;
            };
            match self.line(id) {
                // It is pumped when it has been drained: that may bring credit.
                Some(line) if line.draining => line.woken = false,
                _ => {
                    self.pump_early(id);
                    self.publish_touched();
                }
            }
        }
        self.woken_later.append(&mut self.woken);
        for _ in 0..self.draining.len() {
            let Some(id) = self.draining.pop_front() else {
                break;
            };
            self.drain(id);
            if self.switch.has_work(id) && self.line(id).is_some_and(|line| !line.woken) {
                self.pump_early(id);
            }
            for _ in 0..self.woken.len() {
                if let Some(receiver) = self.woken.pop_front() {
                    self.pump_early(receiver);
                }
            }
            self.publish_touched();
            // These have had their share of the turn, or have been woken by what others took.
            self.woken_later.append(&mut self.woken);
        }
        std::mem::swap(&mut self.woken, &mut self.woken_later);
    }

    fn publish_touched(&mut self) {
        if !self.touched.is_empty() {
            self.publish();
        }
    }
}
