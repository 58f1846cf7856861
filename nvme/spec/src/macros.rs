//! Macros that declare the wire types: `open_enum!`, `wire!`, `wire_bits!`, `view!`.

/// Declares a newtype over an integer with named constants. Unknown values are kept unchanged.
///
/// The macro appends the value to the documentation of each constant.
///
/// `Debug` prints the constant's name, or the type and the hexadecimal value if no constant has the value.
/// Only a `u8` newtype can be a field of a `wire!` structure. Accessors convert little-endian fields to the
/// wider newtypes.
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

            /// Returns the name of the constant with this value; `None` if no constant has it.
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

/// Declares a wire structure from its size in bytes and the name, byte offset and type of each field. All
/// fields are public. Size, offsets and alignment 1 are asserted at compile time; `Default` is all zeroes.
///
/// The macro appends the offset to the documentation of each field. Fields whose name begins with `reserved`
/// cover bytes that are reserved or that Spindle does not use.
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
            $($(#[$field_meta])* #[doc = concat!("Byte offset ", stringify!($offset), ".")]
            pub $field: $type,)*
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

/// Implements `From` in both directions between a bitfield and a little-endian integer.
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

/// Declares a typed view of an [`Sqe`](crate::sqe::Sqe): a reference to the entry, with one method for each
/// field of the command. The method evaluates the field's expression over the entry.
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
            /// Interprets `sqe` as this command. Does not check the opcode; the caller does.
            #[must_use]
            pub const fn new(sqe: &'a crate::sqe::Sqe) -> Self {
                Self(sqe)
            }

            /// Returns the submission queue entry, for the fields of the common format.
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
