//! [`Pieces`]: the parts of a pool's memory that are registered with the kernel.
//!
//! Registered memory is pinned. Registering a whole pool would make all of its memory resident, even in an
//! unused target. Zones are therefore cut into pieces, and each is registered at the first use of a buffer in
//! it. The pool reuses the same few buffers, so a busy ring soon has all needed pieces registered. Once the
//! kernel refuses a piece (locked memory is limited without privilege), no more are registered.

use arrayvec::ArrayVec;

/// Maximum bytes of a piece, unless one buffer is larger. Pinning it takes a polling core about 0.1 ms.
const PIECE_BYTES: usize = 1 << 20;
/// Maximum number of registered buffers of a ring (IORING_MAX_REG_BUFFERS).
const PIECES_MAX: usize = 1 << 14;

/// A zone of the pool: whole buffers from address `start` on.
#[derive(Debug, Clone, Copy)]
struct Zone {
    start: usize,
    bytes: usize,
    piece_bytes: usize,
    /// Index of the zone's first piece in the kernel's table.
    first: usize,
}

/// Memory that is registered, or can be, at `index` of the kernel's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) index: u16,
    pub(super) start: usize,
    pub(super) bytes: usize,
}

/// Registration of the memory in which a buffer lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BufferLocation {
    /// Memory that is not registered and will not be.
    Unknown,
    /// A piece that is not registered yet.
    Fresh(Piece),
    /// The registered piece with this index.
    Registered(u16),
}

#[derive(Debug, Default)]
pub(super) struct Pieces {
    zones: ArrayVec<Zone, 16>,
    is_registered: Box<[bool]>,
    is_refused: bool,
}

impl Pieces {
    /// Creates the pieces of `zones`: (start address, bytes, bytes of a buffer), in the pool's order.
    pub(super) fn new(zones: impl Iterator<Item = (usize, usize, usize)>) -> Pieces {
        let mut first = 0;
        let zones = zones.map(|(start, bytes, buffer_bytes)| {
            let buffer_bytes = buffer_bytes.max(1);
            let piece_bytes = (PIECE_BYTES / buffer_bytes).max(1) * buffer_bytes;
            let zone = Zone { start, bytes, piece_bytes, first };
            first += bytes.div_ceil(piece_bytes);
            zone
        });
        let zones = zones.collect();
        Pieces { zones, is_registered: vec![false; first.min(PIECES_MAX)].into(), is_refused: false }
    }

    /// Returns the count of entries that the kernel's table needs.
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.is_registered.len()).unwrap_or(0)
    }

    /// Returns the registration of the buffer at `addr`, which is in `zone` of its pool.
    #[inline]
    pub(super) fn location_of(&self, addr: usize, zone: u8) -> BufferLocation {
        let Some(zone) = self.zones.get(usize::from(zone)) else { return BufferLocation::Unknown };
        // The buffer may be of another pool; its address is then outside of this zone.
        let Some(at) = addr.checked_sub(zone.start).filter(|at| *at < zone.bytes) else {
            return BufferLocation::Unknown;
        };
        let nth = at / zone.piece_bytes;
        let number = zone.first + nth;
        let (Some(is_registered), Ok(index)) = (self.is_registered.get(number), u16::try_from(number)) else {
            return BufferLocation::Unknown;
        };
        if *is_registered {
            return BufferLocation::Registered(index);
        }
        if self.is_refused {
            return BufferLocation::Unknown;
        }
        let begin = nth * zone.piece_bytes;
        let bytes = zone.piece_bytes.min(zone.bytes - begin);
        BufferLocation::Fresh(Piece { index, start: zone.start + begin, bytes })
    }

    pub(super) fn on_registered(&mut self, piece: Piece) {
        if let Some(is_registered) = self.is_registered.get_mut(usize::from(piece.index)) {
            *is_registered = true;
        }
    }

    /// Prevents further registrations.
    pub(super) fn on_refused(&mut self) {
        self.is_refused = true;
    }

    #[cfg(test)]
    pub(super) fn registered(&self) -> usize {
        self.is_registered.iter().filter(|is_registered| **is_registered).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn every_buffer_lies_whole_in_one_piece_and_pieces_cover_each_zone_once() {
        let buffers = [4096, 12_288, 700 << 10, MIB, 3 * MIB];
        let mut start = 0x1000_0000;
        let zones: Vec<(usize, usize, usize)> = buffers
            .iter()
            .map(|bytes| {
                let zone = (start, bytes * 301, *bytes);
                start += zone.1;
                zone
            })
            .collect();
        let mut pieces = Pieces::new(zones.iter().copied());
        let mut covered = 0;
        for (number, (start, bytes, buffer)) in (0u8..).zip(&zones) {
            for addr in (*start..start + bytes).step_by(*buffer) {
                match pieces.location_of(addr, number) {
                    BufferLocation::Fresh(piece) => {
                        assert_eq!(piece.start, addr, "the first buffer in it");
                        assert!(piece.start + piece.bytes <= start + bytes);
                        covered += piece.bytes;
                        pieces.on_registered(piece);
                        assert_eq!(
                            pieces.location_of(addr + buffer - 1, number),
                            BufferLocation::Registered(piece.index)
                        );
                    }
                    BufferLocation::Registered(index) => {
                        assert_eq!(
                            pieces.location_of(addr + buffer - 1, number),
                            BufferLocation::Registered(index)
                        );
                    }
                    BufferLocation::Unknown => panic!("a buffer of the pool"),
                }
            }
        }
        assert_eq!(covered, zones.iter().map(|zone| zone.1).sum::<usize>());
        assert_eq!(pieces.registered(), pieces.len() as usize);
    }

    #[test]
    fn other_memory_and_what_comes_after_a_refusal_is_unknown() {
        let mut pieces = Pieces::new([(16 * MIB, 4 * MIB, 4096)].into_iter());
        for (addr, zone) in [(16 * MIB - 1, 0), (20 * MIB, 0), (16 * MIB, 1), (0, 0)] {
            assert_eq!(pieces.location_of(addr, zone), BufferLocation::Unknown, "{addr:#x}");
        }
        let BufferLocation::Fresh(first) = pieces.location_of(17 * MIB + 4096, 0) else {
            panic!("of the zone")
        };
        assert_eq!(first, Piece { index: 1, start: 17 * MIB, bytes: MIB });
        pieces.on_registered(first);
        pieces.on_refused();
        assert_eq!(pieces.location_of(17 * MIB, 0), BufferLocation::Registered(1));
        assert_eq!(pieces.location_of(16 * MIB, 0), BufferLocation::Unknown);
    }

    #[test]
    fn a_pool_with_more_pieces_than_the_kernel_takes_is_registered_in_part() {
        let pieces = Pieces::new((0..16).map(|zone| (zone << 30, 1 << 30, 768 << 10)));
        assert_eq!(pieces.len() as usize, PIECES_MAX);
        assert!(matches!(pieces.location_of(0, 0), BufferLocation::Fresh(_)));
        assert_eq!(pieces.location_of((16 << 30) - 1, 15), BufferLocation::Unknown);
    }
}
