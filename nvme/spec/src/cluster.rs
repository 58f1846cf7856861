//! Coherent caches on client hosts, an extension of Spindle: hosts (*members*) cache a disk, and the target
//! tells them which pages to drop before it writes. `docs/extensions.md` specifies it.
//!
//! ```text
//!   admin queue   Join (NSID, incarnation) ──────> member number, size of an extent
//!                 Next (acknowledged sequence) ──> NextData: Invalidate and Done entries; renews the lease
//!   I/O queue     Register, Read and Register ───> KEEP: the member may cache these extents
//! ```

use bitfield_struct::bitfield;
use zerocopy::FromBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::opcode::{AdminOpcode, IoOpcode};
use crate::sqe::Sqe;

/// Opcode of Join: vendor specific, data from host to controller (bits 1:0 are 01b).
pub const JOIN: AdminOpcode = AdminOpcode(0xc1);
/// Opcode of Next: vendor specific, data from controller to host (bits 1:0 are 10b).
pub const NEXT: AdminOpcode = AdminOpcode(0xc6);
/// Opcode of Leave: vendor specific, no data.
pub const LEAVE: AdminOpcode = AdminOpcode(0xc8);
/// Opcode of Register: vendor specific, no data.
pub const REGISTER: IoOpcode = IoOpcode(0x88);
/// Opcode of Read and Register: vendor specific, data from controller to host.
pub const READ_AND_REGISTER: IoOpcode = IoOpcode(0x8a);

/// Version of [`JoinData`].
pub const CLUSTER_VERSION: u16 = 1;
/// Size of [`JoinData`] in bytes.
pub const JOIN_BYTES: usize = 64;
/// Size of [`NextData`] in bytes.
pub const NEXT_BYTES: usize = 4096;
/// Most entries of one [`NextData`].
pub const NEXT_ENTRIES_MAX: usize = 255;
/// Most Next commands that a member has outstanding.
pub const NEXT_OUTSTANDING_MAX: usize = 2;
/// Most writes that a member was told of (Invalidate) and that have not ended (Done).
pub const OPEN_WRITES_MAX: usize = 4096;
/// Most members of a disk.
pub const MEMBERS_MAX: usize = 64;
/// log2 of the bytes of a page.
pub const PAGE_SHIFT: u32 = 12;
/// log2 of the pages of the smallest extent.
pub const EXTENT_SHIFT_MIN: u32 = 4;
/// Most bytes of the target's table, which has 8 bytes for each extent.
pub const TABLE_BYTES_MAX: u64 = 64 << 20;
/// Most pages of one Register.
pub const REGISTER_PAGES_MAX: u64 = 1024;

/// Returns log2 of the pages of an extent of a disk with `pages` pages: the smallest size for which the
/// table has at most [`TABLE_BYTES_MAX`].
#[must_use]
pub const fn extent_shift(pages: u64) -> u32 {
    let mut shift = EXTENT_SHIFT_MIN;
    while shift < 63 && pages.div_ceil(1 << shift) * 8 > TABLE_BYTES_MAX {
        shift += 1;
    }
    shift
}

wire! {
    /// Data of Join.
    pub struct JoinData[JOIN_BYTES] {
        /// VER: [`CLUSTER_VERSION`].
        version @ 0: U16,
        reserved2 @ 2: [u8; 6],
        /// INC: random, not 0; names this membership.
        incarnation @ 8: U64,
        /// FINC: incarnation of a former membership of this host whose pages are dropped; 0: none.
        former @ 16: U64,
        reserved24 @ 24: [u8; 40],
    }
}

wire! {
    /// An entry of [`NextData`].
    pub struct NextEntry[16] {
        /// Number and kind, see [`EntryWord`].
        word @ 0: U32,
        /// Count of pages of an Invalidate.
        pages @ 4: U32,
        /// First page of an Invalidate.
        first @ 8: U64,
    }
}

wire! {
    /// Data of Next.
    pub struct NextData[NEXT_BYTES] {
        /// SEQ: sequence of the last entry; the member acknowledges it by the Next that it sends afterwards.
        sequence @ 0: U64,
        /// Reserved for flags.
        flags @ 8: U32,
        /// COUNT: number of entries.
        count @ 12: U32,
        entries @ 16: [NextEntry; NEXT_ENTRIES_MAX],
    }
}

open_enum! {
    /// Kind of a [`NextEntry`].
    pub struct EntryKind: u8 {
        /// A write of these pages begins: drop them, and keep nothing of them until its Done.
        INVALIDATE = 0,
        /// The write with this number has ended.
        DONE = 1,
    }
}

/// Dword 0 of a [`NextEntry`].
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct EntryWord {
    /// Number of the write, which an Invalidate and its Done share.
    #[bits(30)]
    pub number: u32,
    /// [`EntryKind`]
    #[bits(2)]
    pub kind: u8,
}

wire_bits!(EntryWord => U32);

/// Dword 0 of the completion of Join.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Joined {
    /// NUM: number of the member, below [`MEMBERS_MAX`].
    pub number: u8,
    /// ESHIFT: log2 of the pages of an extent.
    pub extent_shift: u8,
    #[bits(16)]
    __: u16,
}

/// Dword 0 of the completion of Register and of Read and Register.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Registered {
    /// KEEP: the member may keep the pages of these extents.
    pub keep: bool,
    #[bits(31)]
    __: u32,
}

view! {
    /// Next.
    pub struct Next(sqe) {
        /// ACK, dwords 10 and 11: sequence of the last entry that the member has executed.
        acknowledged: u64 = u64::from(sqe.cdw11()) << 32 | u64::from(sqe.cdw10()),
    }
}

/// What an entry tells a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// A write of these pages begins.
    Invalidate {
        /// Number of the write.
        number: u32,
        /// First page.
        first: u64,
        /// Count of pages, at least 1.
        pages: u32,
    },
    /// A write has ended.
    Done {
        /// Number of the write.
        number: u32,
    },
}

impl NextEntry {
    /// Makes the entry of `notice`.
    #[must_use]
    pub fn new(notice: Notice) -> Self {
        match notice {
            Notice::Invalidate { number, first, pages } => Self {
                word: EntryWord::new().with_number(number).with_kind(EntryKind::INVALIDATE.0).into(),
                pages: U32::new(pages),
                first: U64::new(first),
            },
            Notice::Done { number } => Self {
                word: EntryWord::new().with_number(number).with_kind(EntryKind::DONE.0).into(),
                ..Self::default()
            },
        }
    }

    /// Returns the notice; `None`: an entry of another kind, or an Invalidate without pages.
    #[must_use]
    pub fn notice(&self) -> Option<Notice> {
        let (word, pages) = (EntryWord::from(self.word), self.pages.get());
        let number = word.number();
        match EntryKind(word.kind()) {
            EntryKind::INVALIDATE if pages > 0 => {
                Some(Notice::Invalidate { number, first: self.first.get(), pages })
            }
            EntryKind::DONE => Some(Notice::Done { number }),
            _ => None,
        }
    }
}

impl NextData {
    /// Returns the entries; `None` if COUNT is more than [`NEXT_ENTRIES_MAX`].
    #[must_use]
    pub fn entries(&self) -> Option<&[NextEntry]> {
        usize::try_from(self.count.get()).ok().and_then(|count| self.entries.get(..count))
    }
}

impl JoinData {
    /// Makes the data of a Join.
    #[must_use]
    pub fn new(incarnation: u64, former: u64) -> Self {
        let version = U16::new(CLUSTER_VERSION);
        Self { version, incarnation: U64::new(incarnation), former: U64::new(former), ..Self::default() }
    }

    /// Parses the data; `None`: too short, another version, or incarnation 0.
    #[must_use]
    pub fn parse(data: &[u8]) -> Option<Self> {
        let (join, _) = Self::read_from_prefix(data).ok()?;
        let is_known = join.version.get() == CLUSTER_VERSION && join.incarnation.get() != 0;
        is_known.then_some(join)
    }
}

/// Builders for hosts.
impl Sqe {
    /// Builds Join for a namespace; its data is a [`JoinData`].
    #[must_use]
    pub fn join(cid: u16, nsid: u32) -> Self {
        Self::new(JOIN.0, cid, nsid)
    }

    /// Builds Next, which acknowledges the entries up to `acknowledged`; its data is a [`NextData`].
    #[must_use]
    pub fn next_notices(cid: u16, acknowledged: u64) -> Self {
        let [low, high] =
            [acknowledged & 0xffff_ffff, acknowledged >> 32].map(|half| u32::try_from(half).unwrap_or(0));
        Self { cdw10: U32::new(low), cdw11: U32::new(high), ..Self::new(NEXT.0, cid, 0) }
    }

    /// Builds Leave.
    #[must_use]
    pub fn leave(cid: u16) -> Self {
        Self::new(LEAVE.0, cid, 0)
    }

    /// Builds Register of the extents of `blocks` blocks from `lba`.
    #[must_use]
    pub fn register(cid: u16, nsid: u32, lba: u64, blocks: u32) -> Self {
        Self { opcode: REGISTER.0, ..Self::read(cid, nsid, lba, blocks) }
    }

    /// Builds Read and Register of `blocks` blocks from `lba`.
    #[must_use]
    pub fn read_and_register(cid: u16, nsid: u32, lba: u64, blocks: u32) -> Self {
        Self { opcode: READ_AND_REGISTER.0, ..Self::read(cid, nsid, lba, blocks) }
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    #[test]
    fn the_commands_are_these_bytes() {
        let commands = [
            Sqe::join(7, 3),
            Sqe::next_notices(7, 0x1122_3344_5566_7788),
            Sqe::leave(7),
            Sqe::register(7, 3, 0x1_0000_0008, 16),
            Sqe::read_and_register(7, 3, 8, 16),
        ];
        let heads = commands.map(|sqe| sqe.as_bytes()[..8].try_into().unwrap_or([0; 8]));
        let head = |opcode, nsid| [opcode, 0x40, 7, 0, nsid, 0, 0, 0];
        assert_eq!(heads, [head(0xc1, 3), head(0xc6, 0), head(0xc8, 0), head(0x88, 3), head(0x8a, 3)]);
        assert_eq!(commands[1].as_bytes()[40..48], [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        assert_eq!(Next::new(&commands[1]).acknowledged(), 0x1122_3344_5566_7788);
        assert_eq!(commands[3].as_bytes()[40..52], [8, 0, 0, 0, 1, 0, 0, 0, 15, 0, 0, 0]);
    }

    #[test]
    fn the_data_of_join_is_these_bytes_and_other_data_is_refused() {
        let join = JoinData::new(0x0102_0304_0506_0708, 9);
        let bytes = join.as_bytes();
        assert_eq!(bytes[..24], [1, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, 9, 0, 0, 0, 0, 0, 0, 0]);
        assert!(bytes[24..] == [0; 40] && JoinData::parse(bytes) == Some(join));
        assert_eq!(JoinData::parse(&bytes[..63]), None);
        assert_eq!(JoinData::parse(JoinData::new(0, 9).as_bytes()), None, "an incarnation is not 0");
        let other = JoinData { version: U16::new(2), ..join };
        assert_eq!(JoinData::parse(other.as_bytes()), None);
    }

    #[test]
    fn an_entry_is_these_bytes() {
        let invalidate =
            Notice::Invalidate { number: 0x2bcd_ef01, first: 0x12_3456_789a, pages: 0x0102_0304 };
        let bytes = [0x01, 0xef, 0xcd, 0x2b, 4, 3, 2, 1, 0x9a, 0x78, 0x56, 0x34, 0x12, 0, 0, 0];
        assert_eq!(NextEntry::new(invalidate).as_bytes(), bytes);
        let done = Notice::Done { number: 5 };
        assert_eq!(NextEntry::new(done).as_bytes(), [5, 0, 0, 0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        for notice in [invalidate, done] {
            assert_eq!(NextEntry::new(notice).notice(), Some(notice));
        }
        let word = |kind| EntryWord::new().with_kind(kind).into();
        assert_eq!(NextEntry { word: word(0), ..NextEntry::default() }.notice(), None, "no pages");
        assert_eq!(NextEntry { word: word(3), pages: U32::new(1), ..NextEntry::default() }.notice(), None);
    }

    #[test]
    fn the_data_of_next_has_as_many_entries_as_it_says() {
        let mut data = NextData { sequence: U64::new(7), count: U32::new(2), ..NextData::default() };
        data.entries[1] = NextEntry::new(Notice::Done { number: 6 });
        let bytes = data.as_bytes();
        assert_eq!(bytes[..16], [7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(bytes[32..36], [6, 0, 0, 0x40]);
        assert_eq!(data.entries().map(<[NextEntry]>::len), Some(2));
        data.count.set(256);
        assert_eq!(data.entries(), None);
    }

    #[test]
    fn answers_are_these_dwords() {
        assert_eq!(Joined::new().with_number(63).with_extent_shift(9).into_bits(), 0x093f);
        assert_eq!(Registered::new().with_keep(true).into_bits(), 1);
    }

    #[test]
    fn an_extent_is_as_small_as_the_table_allows() {
        const TIB: u64 = 1 << 40 >> PAGE_SHIFT;
        assert_eq!(extent_shift(1), 4);
        assert_eq!(extent_shift(TIB / 2), 4, "64 KiB: 8 million extents");
        assert_eq!(extent_shift(TIB / 2 + 1), 5);
        assert_eq!(extent_shift(TIB), 5);
        assert_eq!(extent_shift(16 * TIB), 9, "2 MiB");
        assert!(extent_shift(u64::MAX / 16) < 63);
    }
}
