//! The four macros that declare everything in this crate: `open_enum!`, `wire!`, `wire_bits!`, `view!`.

/// Declares a code: a newtype over an integer with named constants, in which an unknown value stays a
/// value.
///
/// A constant is documented with its value, and with words where its name does not say all of it.
///
/// `Debug` prints the name, or the type and the number where there is no name. Only a `u8` code may stand
/// in a wire structure; wider ones are read from a little-endian field by an accessor.
macro_rules! open_enum {
    ($(#[$meta:meta])* pub struct $name:ident: u8 { $($body:tt)* }) => {
        open_enum!(@declare [derive(zerocopy::Unaligned)] $(#[$meta])* $name u8 { $($body)* });
    };
    ($(#[$meta:meta])* pub struct $name:ident: $repr:ident { $($body:tt)* }) => {
        open_enum!(@declare [] $(#[$meta])* $name $repr { $($body)* });
    };
    (@declare [$($extra:meta)?] $(#[$meta:meta])* $name:ident $repr:ident {
        $($(#[$vmeta:meta])* $variant:ident = $value:expr),* $(,)?
    }) => {
        $(#[$meta])*
        #[repr(transparent)]
        #[derive(
            Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default,
            zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout,
        )]
        $(#[$extra])?
        pub struct $name(pub $repr);

        impl $name {
            $($(#[$vmeta])* #[doc = concat!("Value ", stringify!($value), ".")]
            pub const $variant: Self = Self($value);)*

            /// The name of the constant with this value, if the specification (as written here) has one.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$variant => Some(stringify!($variant)),)*
                    _ => None,
                }
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, concat!(stringify!($name), "({:#x})"), self.0),
                }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                core::fmt::Debug::fmt(self, f)
            }
        }

        impl From<$repr> for $name {
            fn from(value: $repr) -> Self {
                Self(value)
            }
        }
    };
}

/// Declares a wire structure: its size in bytes, and each field with its offset and type, all of them
/// public. Size, alignment 1 and offsets are asserted; `Default` is all zeroes.
macro_rules! wire {
    ($(#[$meta:meta])* pub struct $name:ident[$size:expr] {
        $($(#[$field_meta:meta])* $field:ident @ $offset:literal: $type:ty,)*
    }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable,
            zerocopy::KnownLayout, zerocopy::Unaligned,
        )]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        const _: () = {
            assert!(core::mem::size_of::<$name>() == $size, concat!("size of ", stringify!($name)));
            assert!(core::mem::align_of::<$name>() == 1, concat!("alignment of ", stringify!($name)));
            $(assert!(
                core::mem::offset_of!($name, $field) == $offset,
                concat!("offset of ", stringify!($name), "::", stringify!($field))
            );)*
        };

        impl Default for $name {
            fn default() -> Self {
                zerocopy::FromZeros::new_zeroed()
            }
        }
    };
}

/// Converts a bitfield from and to the little-endian field that carries it.
macro_rules! wire_bits {
    ($($name:ident => $wire:ident),* $(,)?) => {
        $(
            impl From<$name> for zerocopy::little_endian::$wire {
                fn from(bits: $name) -> Self {
                    Self::new(bits.into_bits())
                }
            }
            impl From<zerocopy::little_endian::$wire> for $name {
                fn from(wire: zerocopy::little_endian::$wire) -> Self {
                    Self::from_bits(wire.get())
                }
            }
        )*
    };
}

/// Declares a command as a typed view of an [`Sqe`](crate::sqe::Sqe): the same 64 bytes with the command's
/// own field names. Each field is a method of its name, with an expression over the entry.
macro_rules! view {
    (
        $(#[$meta:meta])* pub struct $name:ident($sqe:ident) {
            $($(#[$field_meta:meta])* $field:ident: $type:ty = $value:expr,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        pub struct $name<'a>(&'a crate::sqe::Sqe);

        impl<'a> $name<'a> {
            /// Reads `sqe` as this command; the caller has looked at the opcode.
            #[must_use]
            pub const fn new(sqe: &'a crate::sqe::Sqe) -> Self {
                Self(sqe)
            }

            /// The command entry itself.
            #[must_use]
            pub const fn sqe(self) -> &'a crate::sqe::Sqe {
                self.0
            }

            $(
                $(#[$field_meta])*
                #[must_use]
                pub fn $field(self) -> $type {
                    let $sqe = self.0;
                    $value
                }
            )*
        }
    };
}
