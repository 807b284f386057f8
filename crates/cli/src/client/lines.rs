//! The lines of a stream of events.

use crate::failure::Failure;

/// The longest line of a stream, in bytes: well above an event whose every text is as long as it may be.
const MAX_LINE_LEN: usize = 256 * 1024;

/// The `data` lines of a stream that comes in pieces (HTML Living Standard, section 9.2.6).
#[derive(Debug, Default)]
pub(crate) struct Lines {
    line: Vec<u8>,
}

impl Lines {
    /// Hands over the data of each line that is whole now.
    ///
    /// # Errors
    /// A line is too long, or what `show` says.
    pub(crate) fn take(
        &mut self,
        bytes: &[u8],
        mut show: impl FnMut(&str) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(piece);
            if self.line.len() > MAX_LINE_LEN {
                return Err(Failure::failed("the daemon sent an event that is too long"));
            }
            if !piece.ends_with(b"\n") {
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let line = String::from_utf8_lossy(&line);
            if let Some(data) = line.trim_end().strip_prefix("data: ") {
                show(data)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_may_come_in_any_pieces() {
        let text = b": events\n\nid: 1\nevent: reload\ndata: {\"a\":1}\n\n:\n\ndata: {\"b\":2}\n\n";
        for len in 1..text.len() {
            let mut lines = Lines::default();
            let mut shown = Vec::new();
            for piece in text.chunks(len) {
                let taken = lines.take(piece, |data| {
                    shown.push(data.to_owned());
                    Ok(())
                });
                taken.unwrap();
            }
            assert_eq!(shown, ["{\"a\":1}", "{\"b\":2}"]);
        }
    }

    #[test]
    fn a_line_without_end_is_not_taken_for_ever() {
        let mut lines = Lines::default();
        lines.take(&vec![b'x'; MAX_LINE_LEN], |_| Ok(())).unwrap();
        assert!(lines.take(b"x", |_| Ok(())).is_err());
    }
}
