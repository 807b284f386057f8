//! Lines and what they mean, said once: of each there is a type, a reader and a writer.

/// Fields that stand together: each with its type and with how [`Fields`](super::Fields) takes it.
macro_rules! fields {
    ($(#[$about:meta])* pub struct $name:ident { $($(#[$of:meta])* $field:ident: $type:ty = $take:ident,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $name { $($(#[$of])* pub $field: $type,)* }

        impl $name {
            fn take(fields: &mut super::Fields<'_>) -> Result<$name, super::LineError> {
                Ok($name { $($field: fields.$take(stringify!($field))?,)* })
            }
        }

        impl std::fmt::Display for $name {
            /// The fields, a space before each.
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $(write!(formatter, concat!(" ", stringify!($field), "={}"), self.$field)?;)*
                Ok(())
            }
        }
    };
}

/// What one party says: of each line its verb, its variant, and its fields or a type made by `fields!`.
macro_rules! messages {
    ($(#[$about:meta])* pub enum $name:ident, one of $expected:literal {
        $($(#[$of:meta])* $verb:literal = $variant:ident
            $({ $($field:ident: $type:ty = $take:ident),* })? $(($inner:ident: $inner_type:ident))?,)*
    }) => {
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        #[allow(missing_docs)] // The fields are those of the lines above.
        pub enum $name { $($(#[$of])* $variant $({ $($field: $type),* })? $(($inner_type))?,)* }

        impl $name {
            /// Reads a line without its end.
            pub fn parse(line: &[u8]) -> Result<$name, super::LineError> {
                let mut fields = super::Fields::parse(line)?;
                let said = match fields.verb {
                    $($verb => $name::$variant
                        $({ $($field: fields.$take(stringify!($field))?),* })?
                        $(($inner_type::take(&mut fields)?))?,)*
                    _ => return Err(super::LineError::Verb { expected: $expected }),
                };
                fields.end()?;
                Ok(said)
            }
        }

        impl std::fmt::Display for $name {
            /// The line, with its end.
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self {
                    $($name::$variant $({ $($field),* })? $(($inner))? => {
                        formatter.write_str($verb)?;
                        $($(write!(formatter, concat!(" ", stringify!($field), "={}"), $field)?;)*)?
                        $($inner.fmt(formatter)?;)?
                    })*
                }
                formatter.write_str("\n")
            }
        }
    };
}
