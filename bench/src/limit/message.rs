//! The messages of the exchange and how a stream of bytes is cut into them.
//!
//! A message says its [`Kind`] in its first byte; with the size of a block the kind gives the length. So a
//! stream can be cut at any byte, and no header ever has to be put together from two receives.

/// Bytes of a request's head: a command capsule's header and SQE.
pub(super) const REQUEST_BYTES: usize = 72;
/// Bytes of every other head: a data PDU's header, a ready-to-transfer, a response capsule.
pub(super) const HEAD_BYTES: usize = 24;

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Requester: send a block.
    Read = 1,
    /// Requester: take this block.
    WriteInline = 2,
    /// Requester: take a block that I send when you ask.
    WriteAnnounced = 3,
    /// Requester: the block that you asked for.
    WriteData = 4,
    /// Server: send the block now.
    ReadyToTransfer = 5,
    /// Server: the block that you asked for.
    ReadReply = 6,
    /// Server: the block that you sent is in its place.
    Done = 7,
}

impl Kind {
    /// All of them.
    pub(super) const ALL: [Kind; 7] = [
        Kind::Read,
        Kind::WriteInline,
        Kind::WriteAnnounced,
        Kind::WriteData,
        Kind::ReadyToTransfer,
        Kind::ReadReply,
        Kind::Done,
    ];

    /// The kind whose messages begin with this byte.
    #[inline]
    fn from_first_byte(byte: u8) -> Option<Kind> {
        Kind::ALL.get(usize::from(byte).wrapping_sub(1)).copied()
    }

    /// The byte that messages of this kind begin with.
    #[inline]
    pub(super) fn first_byte(self) -> u8 {
        self as u8
    }

    /// Bytes before the payload.
    #[inline]
    pub(super) fn head_bytes(self) -> usize {
        match self {
            Kind::Read | Kind::WriteInline | Kind::WriteAnnounced => REQUEST_BYTES,
            Kind::WriteData | Kind::ReadyToTransfer | Kind::ReadReply | Kind::Done => HEAD_BYTES,
        }
    }

    /// Whether a block follows the head.
    #[inline]
    pub(super) fn has_payload(self) -> bool {
        match self {
            Kind::WriteInline | Kind::WriteData | Kind::ReadReply => true,
            Kind::Read | Kind::WriteAnnounced | Kind::ReadyToTransfer | Kind::Done => false,
        }
    }

    /// Bytes of a whole message.
    #[inline]
    pub(super) fn bytes(self, block_bytes: usize) -> usize {
        self.head_bytes() + if self.has_payload() { block_bytes } else { 0 }
    }
}

/// A part of a message, as large as a receive left it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece<'a> {
    /// What the message is.
    pub(super) kind: Kind,
    /// Where in the message the piece begins.
    pub(super) offset: usize,
    /// The bytes of the piece.
    pub(super) bytes: &'a [u8],
    /// Whether the message ends with it.
    pub(super) is_last: bool,
}

/// A first byte that begins no message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct UnknownKind(pub(super) u8);

/// Where in a stream of messages its reader stands.
#[derive(Debug)]
pub(super) struct Cursor {
    block_bytes: usize,
    /// The message that the stream is in; meaningless while `left` is 0.
    kind: Kind,
    /// Bytes of it that are still to come; 0 between two messages.
    left: usize,
}

impl Cursor {
    /// At the begin of a stream whose payloads are blocks of that size.
    pub(super) fn new(block_bytes: usize) -> Cursor {
        Cursor { block_bytes, kind: Kind::Read, left: 0 }
    }

    /// Cut the next piece off the front of `bytes`; `None` when there are none left.
    #[inline]
    pub(super) fn next<'a>(&mut self, bytes: &mut &'a [u8]) -> Result<Option<Piece<'a>>, UnknownKind> {
        let Some(first) = bytes.first() else { return Ok(None) };
        if self.left == 0 {
            self.kind = Kind::from_first_byte(*first).ok_or(UnknownKind(*first))?;
            self.left = self.kind.bytes(self.block_bytes);
        }
        let (piece, rest) = bytes.split_at(self.left.min(bytes.len()));
        let offset = self.kind.bytes(self.block_bytes) - self.left;
        self.left -= piece.len();
        *bytes = rest;
        Ok(Some(Piece { kind: self.kind, offset, bytes: piece, is_last: self.left == 0 }))
    }

    /// Bytes of payload that come next; 0 where a head comes first.
    #[inline]
    pub(super) fn payload_left(&self) -> usize {
        if self.kind.has_payload() && self.left <= self.block_bytes { self.left } else { 0 }
    }

    /// `bytes` of the payload that comes next were received to where they belong. Gives the kind of the
    /// message if it ends with them.
    #[inline]
    pub(super) fn landed(&mut self, bytes: usize) -> Option<Kind> {
        assert!(bytes <= self.payload_left(), "more landed than there was payload");
        self.left -= bytes;
        (self.left == 0 && bytes > 0).then_some(self.kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 40;

    fn stream(kinds: &[Kind]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for kind in kinds {
            bytes.push(kind.first_byte());
            bytes.resize(bytes.len() + kind.bytes(BLOCK) - 1, 0xee);
        }
        bytes
    }

    #[test]
    fn lengths_are_those_of_nvme_over_tcp() {
        let lengths: Vec<usize> = Kind::ALL.iter().map(|kind| kind.bytes(4096)).collect();
        assert_eq!(lengths, [72, 72 + 4096, 72, 24 + 4096, 24, 24 + 4096, 24]);
        for kind in Kind::ALL {
            assert_eq!(Kind::from_first_byte(kind.first_byte()), Some(kind));
        }
    }

    #[test]
    fn any_split_of_a_stream_gives_the_same_messages() {
        let kinds = [Kind::Read, Kind::WriteInline, Kind::Done, Kind::ReadReply, Kind::WriteData, Kind::Read];
        let whole = stream(&kinds);
        for first in 0..=whole.len() {
            for second in first..=whole.len() {
                let mut cursor = Cursor::new(BLOCK);
                let mut seen = Vec::new();
                let mut at = 0;
                for part in [&whole[..first], &whole[first..second], &whole[second..]] {
                    let mut rest = part;
                    while let Some(piece) = cursor.next(&mut rest).expect("known kinds") {
                        at = if piece.offset == 0 { 0 } else { at };
                        assert_eq!(piece.offset, at, "pieces of a message follow each other");
                        at += piece.bytes.len();
                        if piece.is_last {
                            seen.push(piece.kind);
                        }
                    }
                }
                assert_eq!(seen, kinds, "split at {first} and {second}");
            }
        }
    }

    #[test]
    fn payload_can_land_without_passing_through() {
        let stream = stream(&[Kind::WriteData]);
        let mut cursor = Cursor::new(BLOCK);
        assert_eq!(cursor.payload_left(), 0, "a head comes first");
        for bytes in stream[..HEAD_BYTES + 10].chunks(5) {
            assert_eq!(cursor.payload_left(), 0);
            assert!(cursor.next(&mut &*bytes).expect("known").is_some());
            if cursor.payload_left() > 0 {
                break;
            }
        }
        assert_eq!(cursor.payload_left(), BLOCK - 1, "25 bytes are in");
        assert_eq!(cursor.landed(BLOCK - 2), None);
        assert_eq!(cursor.landed(0), None);
        assert_eq!(cursor.landed(1), Some(Kind::WriteData));
        assert_eq!(cursor.payload_left(), 0);
    }

    #[test]
    fn a_byte_that_begins_no_message_is_an_error() {
        for byte in [0u8, 8, 255] {
            assert_eq!(Cursor::new(BLOCK).next(&mut [byte].as_slice()), Err(UnknownKind(byte)));
        }
    }
}
