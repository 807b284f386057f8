//! What opens the proxy: 256 random bits.

use std::fmt;
use std::io;

use rustix::rand::{GetRandomFlags, getrandom};
use subtle::ConstantTimeEq;

const LEN: usize = 32;

/// A token, in lower-case hexadecimal digits.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// A new one, of the system's random numbers.
    ///
    /// # Errors
    /// The system has none.
    pub fn new() -> io::Result<Token> {
        let mut bytes = [0; LEN];
        // So few bytes come at once or not at all (getrandom(2)).
        let len = getrandom(&mut bytes[..], GetRandomFlags::empty())?;
        if len != LEN {
            return Err(io::Error::other("the system gave too few random bytes"));
        }
        Ok(Token(
            bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
        ))
    }

    /// Its digits, for who is to have it.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Whether this is the token. How long it takes to find out tells nothing about the digits.
    pub fn is(&self, shown: &str) -> bool {
        self.0.as_bytes().ct_eq(shown.as_bytes()).into()
    }
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
}
