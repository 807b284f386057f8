//! What the targets share.

use bolero::{Driver, ValueGenerator};

/// Bytes as they are when a fuzzer or a file gives them. Random ones are long: bolero's own slices have 64 bytes at most,
/// which is no time to get anywhere.
pub struct Decisions {
    /// In bytes.
    pub most: usize,
}

impl ValueGenerator for Decisions {
    type Output = Vec<u8>;

    fn generate<D: Driver>(&self, driver: &mut D) -> Option<Vec<u8>> {
        let bytes = driver.gen_from_bytes(
            || (0, Some(self.most)),
            |bytes| {
                let len = bytes.len().min(self.most);
                Some((len, bytes[..len].to_vec()))
            },
        );
        // An input without bytes is an input, too.
        Some(bytes.unwrap_or_default())
    }
}

/// Declares a test that is a fuzz target, with the length of its longest input in bytes.
#[macro_export]
macro_rules! target {
    ($name:ident, $most:expr, $function:path) => {
        #[test]
        fn $name() {
            bolero::check!(name = stringify!($name))
                .with_generator($crate::support::Decisions { most: $most })
                .with_max_len($most)
                .for_each(|bytes| $function(bytes));
        }
    };
}
