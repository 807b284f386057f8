//! What opens the proxy, 256 random bits, and the host name of its page, 64 of them.

use std::fmt;
use std::io;

use rustix::rand::{GetRandomFlags, getrandom};
use subtle::ConstantTimeEq;

const LEN: usize = 32;

const NAME_LEN: usize = 8;

/// A token, in lower-case hexadecimal digits.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// A new one, of the system's random numbers.
    ///
    /// # Errors
    /// The system has none.
    pub fn new() -> io::Result<Token> {
        random::<LEN>().map(Token)
    }

    /// Its digits, for its owner.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Whether this is the token. How long it takes to find out shows nothing of the digits.
    pub fn is(&self, shown: &str) -> bool {
        self.0.as_bytes().ct_eq(shown.as_bytes()).into()
    }
}

/// A host name on this machine that no browser has seen.
///
/// # Errors
/// The system has no random numbers.
pub fn host_name() -> io::Result<String> {
    Ok(format!("{}.localhost", random::<NAME_LEN>()?))
}

/// As many random bytes, in lower-case hexadecimal digits.
fn random<const LEN: usize>() -> io::Result<String> {
    let mut bytes = [0; LEN];
    // So few bytes come at once or not at all (getrandom(2)).
    let len = getrandom(&mut bytes[..], GetRandomFlags::empty())?;
    if len != LEN {
        return Err(io::Error::other("the system gave too few random bytes"));
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_itself_and_nothing_else() {
        let (token, other) = (Token::new().unwrap(), Token::new().unwrap());
        let digits = token.reveal();
        assert_eq!(digits.len(), 64);
        assert!(
            digits
                .bytes()
                .all(|digit| b"0123456789abcdef".contains(&digit))
        );
        assert!(token.is(digits));
        let longer = format!("{digits}0");
        for wrong in ["", &digits[1..], &longer, other.reveal()] {
            assert!(!token.is(wrong), "{wrong}");
        }
        assert_eq!(format!("{token:?}"), "Token(…)");
    }

    #[test]
    fn a_host_name_is_new_each_time_and_of_this_machine() {
        let (name, other) = (host_name().unwrap(), host_name().unwrap());
        assert_ne!(name, other);
        let label = name.strip_suffix(".localhost").unwrap();
        assert_eq!(label.len(), 16);
        assert!(label.bytes().all(|digit| digit.is_ascii_hexdigit()));
    }
}
