//! [`Keys`]: a buffer as devices name it.

use spindle_reactor::slab::Slot;

/// A contiguous piece of a buffer, and the registration that it lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Its address, here and for the other side.
    pub address: u64,
    /// Its length.
    pub bytes: u32,
    /// The key that the other side needs.
    pub remote_key: u32,
    /// The key that our own device needs.
    pub local_key: u32,
    /// The registration, for the code that made it.
    pub lease: Slot,
}

/// All pieces of one buffer, in order.
///
/// Nearly every buffer is one piece; a handle to that is small and allocates nothing.
#[derive(Debug)]
pub struct Keys(Pieces);

#[derive(Debug)]
enum Pieces {
    One(Piece),
    Many(Vec<Piece>),
}

impl Keys {
    /// A buffer of one piece.
    #[inline]
    #[must_use]
    pub fn one(piece: Piece) -> Keys {
        Keys(Pieces::One(piece))
    }

    /// A buffer of several.
    #[must_use]
    pub fn many(pieces: Vec<Piece>) -> Keys {
        Keys(Pieces::Many(pieces))
    }

    /// The pieces.
    #[inline]
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        match &self.0 {
            Pieces::One(piece) => std::slice::from_ref(piece),
            Pieces::Many(pieces) => pieces,
        }
    }

    /// How long all of them are.
    pub(super) fn bytes(&self) -> u64 {
        self.pieces().iter().map(|piece| u64::from(piece.bytes)).sum()
    }
}
