//! What was configured, with its place.

/// Something together with the place where it was written, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written<T> {
    /// The place in words, such as `ringdown.toml: line 3, column 1` or `--vm name=web`.
    pub place: String,
    /// What was written there.
    pub value: T,
}
