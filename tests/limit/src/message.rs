//! Messages of the exchange, and parsing of a byte stream into them.
//!
//! The first byte of a message is its [`Kind`]. Kind and block size determine the length. So a receive may
//! end at any byte, and a head never has to be joined from two receives.

/// Bytes of a request's head: those of a command capsule PDU (8 bytes of header, 64 of SQE).
pub(super) const REQUEST_BYTES: usize = 72;
/// Bytes of the other heads: those of a data PDU's header, an R2T PDU and a response capsule PDU.
pub(super) const HEAD_BYTES: usize = 24;

/// Kind of a message; the value is its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Requester: read command.
    Read = 1,
    /// Requester: write command with in-capsule data.
    WriteInline = 2,
    /// Requester: write command whose data follows the ready-to-transfer.
    WriteAnnounced = 3,
    /// Requester: data of a [`WriteAnnounced`](Kind::WriteAnnounced).
    WriteData = 4,
    /// Server: R2T for a [`WriteAnnounced`](Kind::WriteAnnounced).
    ReadyToTransfer = 5,
    /// Server: data and completion of a read.
    ReadReply = 6,
    /// Server: completion of a write.
    Done = 7,
}

impl Kind {
    /// All kinds, in the order of their first bytes, from 1 up.
    pub(super) const ALL: [Kind; 7] = [
        Kind::Read,
        Kind::WriteInline,
        Kind::WriteAnnounced,
        Kind::WriteData,
        Kind::ReadyToTransfer,
        Kind::ReadReply,
        Kind::Done,
    ];

    #[inline]
    fn from_first_byte(byte: u8) -> Option<Kind> {
        Kind::ALL.get(usize::from(byte).wrapping_sub(1)).copied()
    }

    #[inline]
    pub(super) fn first_byte(self) -> u8 {
        self as u8
    }

    /// Returns the bytes before the payload.
    #[inline]
    pub(super) fn head_bytes(self) -> usize {
        match self {
            Kind::Read | Kind::WriteInline | Kind::WriteAnnounced => REQUEST_BYTES,
            Kind::WriteData | Kind::ReadyToTransfer | Kind::ReadReply | Kind::Done => HEAD_BYTES,
        }
    }

    /// Returns whether a block follows the head.
    #[inline]
    pub(super) fn has_payload(self) -> bool {
        match self {
            Kind::WriteInline | Kind::WriteData | Kind::ReadReply => true,
            Kind::Read | Kind::WriteAnnounced | Kind::ReadyToTransfer | Kind::Done => false,
        }
    }

    /// Returns the length of a message in bytes, head and payload.
    #[inline]
    pub(super) fn bytes(self, block_bytes: usize) -> usize {
        self.head_bytes() + if self.has_payload() { block_bytes } else { 0 }
    }
}

/// Part of a message, from one receive.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece<'a> {
    pub(super) kind: Kind,
    /// Offset of the piece in the message.
    pub(super) offset: usize,
    pub(super) bytes: &'a [u8],
    /// Whether the piece ends the message.
    pub(super) is_last: bool,
}

/// First byte of a message that belongs to no [`Kind`].
#[derive(Debug, PartialEq, Eq)]
pub(super) struct UnknownKind(pub(super) u8);

/// Parser position in a stream of messages.
#[derive(Debug)]
pub(super) struct Cursor {
    block_bytes: usize,
    /// Kind of the current message; unused while `remaining` is 0.
    kind: Kind,
    /// Bytes of the current message not received yet; 0 between two messages.
    remaining: usize,
}

impl Cursor {
    /// Creates a cursor at the start of a stream.
    pub(super) fn new(block_bytes: usize) -> Cursor {
        Cursor { block_bytes, kind: Kind::Read, remaining: 0 }
    }

    /// Removes the next piece from the front of `bytes`; `None` if `bytes` is empty. Fails if a message
    /// begins with an unknown byte.
    #[inline]
    pub(super) fn next<'a>(&mut self, bytes: &mut &'a [u8]) -> Result<Option<Piece<'a>>, UnknownKind> {
        let Some(first) = bytes.first() else { return Ok(None) };
        if self.remaining == 0 {
            self.kind = Kind::from_first_byte(*first).ok_or(UnknownKind(*first))?;
            self.remaining = self.kind.bytes(self.block_bytes);
        }
        let (piece, rest) = bytes.split_at(self.remaining.min(bytes.len()));
        let offset = self.kind.bytes(self.block_bytes) - self.remaining;
        self.remaining -= piece.len();
        *bytes = rest;
        Ok(Some(Piece { kind: self.kind, offset, bytes: piece, is_last: self.remaining == 0 }))
    }

    /// Returns the bytes of the current message's payload not received yet; 0 within a head and between
    /// messages.
    #[inline]
    pub(super) fn payload_remaining(&self) -> usize {
        if self.kind.has_payload() && self.remaining <= self.block_bytes { self.remaining } else { 0 }
    }

    /// Skips `bytes` bytes of payload that were received into their final memory. Returns the kind of the
    /// message if they complete it. Panics if the message has less payload left.
    #[inline]
    pub(super) fn skip_payload(&mut self, bytes: usize) -> Option<Kind> {
        assert!(bytes <= self.payload_remaining(), "more bytes skipped than there was payload");
        self.remaining -= bytes;
        (self.remaining == 0 && bytes > 0).then_some(self.kind)
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
        assert_eq!(cursor.payload_remaining(), 0, "a head comes first");
        for bytes in stream[..HEAD_BYTES + 10].chunks(5) {
            assert_eq!(cursor.payload_remaining(), 0);
            assert!(cursor.next(&mut &*bytes).expect("known").is_some());
            if cursor.payload_remaining() > 0 {
                break;
            }
        }
        assert_eq!(cursor.payload_remaining(), BLOCK - 1, "25 bytes are in");
        assert_eq!(cursor.skip_payload(BLOCK - 2), None);
        assert_eq!(cursor.skip_payload(0), None);
        assert_eq!(cursor.skip_payload(1), Some(Kind::WriteData));
        assert_eq!(cursor.payload_remaining(), 0);
    }

    #[test]
    fn a_byte_that_begins_no_message_is_an_error() {
        for byte in [0u8, 8, 255] {
            assert_eq!(Cursor::new(BLOCK).next(&mut [byte].as_slice()), Err(UnknownKind(byte)));
        }
    }
}
