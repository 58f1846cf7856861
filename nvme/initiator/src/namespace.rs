//! Parameters of a namespace for I/O commands: NSID, block size, number of blocks, and identity.

use nvme_spec::identify::{
    IdentifyController, IdentifyNamespace, NamespaceDescriptor, NamespaceDescriptorType,
};

/// Identifiers by which a disk is recognized after a reconnect. Zeroes: the identifier was not reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Identity {
    /// NGUID of Identify Namespace. Many targets report none, such as nvmet by default.
    pub nguid: [u8; 16],
    /// EUI64 of Identify Namespace.
    pub eui64: [u8; 8],
    /// UUID of the Namespace Identification Descriptors.
    pub uuid: [u8; 16],
    /// SN of Identify Controller, with its padding.
    pub serial: [u8; 20],
}

impl Identity {
    /// Collects the identifiers from Identify data. `descriptors`: Namespace Identification Descriptors (CNS
    /// 03h), empty if not supported.
    pub(crate) fn new(
        controller: &IdentifyController,
        namespace: &IdentifyNamespace,
        descriptors: &[u8],
    ) -> Identity {
        let uuid = NamespaceDescriptor::iter(descriptors)
            .filter(|(kind, _)| *kind == NamespaceDescriptorType::UUID)
            .find_map(|(_, identifier)| identifier.try_into().ok());
        Identity {
            nguid: namespace.nguid,
            eui64: namespace.eui64,
            uuid: uuid.unwrap_or_default(),
            serial: controller.sn,
        }
    }

    /// Returns true if the target reports at least one identifier. A blank serial number counts as none.
    #[must_use]
    pub fn is_given(&self) -> bool {
        let has_serial = self.serial.iter().any(|byte| !matches!(byte, 0 | b' '));
        has_serial || (self.nguid, self.eui64, self.uuid) != ([0; 16], [0; 8], [0; 16])
    }
}

/// A namespace of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Namespace {
    /// Namespace Identifier.
    pub nsid: u32,
    /// NSZE: number of logical blocks.
    pub blocks: u64,
    /// Identifiers, compared by [`Namespace::is_same_disk`].
    pub identity: Identity,
    /// log2 of the block size in bytes.
    shift: u32,
}

impl Namespace {
    /// Converts Identify Namespace; `None` if the block size is not a power of two from 512 bytes to 64 KiB.
    #[must_use]
    pub fn new(nsid: u32, identify: &IdentifyNamespace, identity: Identity) -> Option<Namespace> {
        let block_bytes = identify.block_bytes().filter(|bytes| (512..=65_536).contains(bytes))?;
        let (blocks, shift) = (identify.nsze.get(), block_bytes.trailing_zeros());
        Some(Namespace { nsid, blocks, identity, shift })
    }

    /// Returns true when NSID, block size and all identifiers equal those of `other`, and at least one
    /// identifier is reported. The number of blocks may differ.
    #[must_use]
    pub fn is_same_disk(&self, other: &Namespace) -> bool {
        let is_same = (self.nsid, self.identity, self.shift) == (other.nsid, other.identity, other.shift);
        is_same && self.identity.is_given()
    }

    /// Returns the block size in bytes.
    #[inline]
    #[must_use]
    pub fn block_bytes(&self) -> u32 {
        1 << self.shift
    }

    /// Returns the capacity in bytes, at most `u64::MAX`.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(u64::from(self.block_bytes()))
    }

    /// Returns the offset in bytes of a block.
    #[inline]
    pub(crate) fn offset(&self, lba: u64) -> u64 {
        lba.saturating_mul(u64::from(self.block_bytes()))
    }

    /// Converts bytes to blocks; `None` unless they are 1 to 65,536 whole blocks.
    #[inline]
    #[must_use]
    pub fn blocks_of(&self, bytes: usize) -> Option<u32> {
        let blocks = bytes >> self.shift;
        let is_whole = blocks << self.shift == bytes;
        u32::try_from(blocks).ok().filter(|blocks| is_whole && (1..=65_536).contains(blocks))
    }
}

/// A range of consecutive blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRange {
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u32,
}

#[cfg(test)]
pub(crate) fn example(block_bytes: u32) -> Namespace {
    let identity = Identity { nguid: [1; 16], ..Identity::default() };
    Namespace { nsid: 1, blocks: 1000, identity, shift: block_bytes.trailing_zeros() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_blocks_are_a_transfer() {
        let namespace = example(4096);
        assert_eq!((namespace.block_bytes(), namespace.bytes()), (4096, 4_096_000));
        assert_eq!(namespace.blocks_of(8192), Some(2));
        assert_eq!([0, 1, 4095, 4097, 65_537 * 4096].map(|bytes| namespace.blocks_of(bytes)), [None; 5]);
        assert_eq!(example(512).blocks_of(65_536 * 512), Some(65_536));
    }

    #[test]
    fn a_disk_is_known_by_its_identifiers_and_its_blocks_and_not_by_its_size() {
        let namespace = example(4096);
        assert!(namespace.is_same_disk(&Namespace { blocks: 2000, ..namespace }));
        assert!(!namespace.is_same_disk(&example(512)));
        let own = Identity { nguid: [1; 16], eui64: [2; 8], uuid: [3; 16], serial: [b'4'; 20] };
        let others = [
            Identity { nguid: [9; 16], ..own },
            Identity { eui64: [9; 8], ..own },
            Identity { uuid: [9; 16], ..own },
            Identity { serial: [b'9'; 20], ..own },
            Identity { nguid: [0; 16], ..own },
        ];
        let with = |identity| Namespace { identity, ..namespace };
        assert!(with(own).is_same_disk(&with(own)));
        for other in others {
            assert!(!with(own).is_same_disk(&with(other)) && !with(other).is_same_disk(&with(own)));
        }
    }

    #[test]
    fn one_identifier_is_enough_and_none_is_not() {
        let namespace = example(512);
        let with = |identity| Namespace { identity, ..namespace };
        let none = Identity::default();
        for own in [
            Identity { eui64: [2; 8], ..none },
            Identity { uuid: [3; 16], ..none },
            Identity { serial: *b"S1                  ", ..none },
        ] {
            assert!(with(own).is_same_disk(&with(own)), "{own:?}");
        }
        for own in [none, Identity { serial: [b' '; 20], ..none }] {
            assert!(!with(own).is_same_disk(&with(own)), "{own:?}");
        }
    }

    #[test]
    fn the_uuid_is_the_descriptor_that_is_as_long_as_one() {
        let (controller, namespace) = (IdentifyController::default(), IdentifyNamespace::default());
        let uuid = |descriptors: &[u8]| Identity::new(&controller, &namespace, descriptors).uuid;
        let nguid = [&[2, 16, 0, 0][..], &[7; 16]].concat();
        let own = [&[3, 16, 0, 0][..], &[5; 16]].concat();
        assert_eq!(uuid(&[&nguid[..], &own, &[0; 4]].concat()), [5; 16]);
        let short = [&[3, 8, 0, 0][..], &[4; 8]].concat();
        assert_eq!(uuid(&[&short[..], &own].concat()), [5; 16]);
        for none in [&[][..], &nguid, &[0; 4096], &own[..19]] {
            assert_eq!(uuid(none), [0; 16]);
        }
    }

    #[test]
    fn a_format_without_a_block_size_is_no_namespace() {
        let mut identify = IdentifyNamespace::default();
        let new = |nsid, identify: &_| Namespace::new(nsid, identify, Identity::default());
        assert_eq!(new(1, &identify), None);
        identify.lbaf[0].lbads = 12;
        identify.nsze.set(7);
        let namespace = new(3, &identify).expect("4 KiB blocks");
        assert_eq!((namespace.nsid, namespace.blocks, namespace.block_bytes()), (3, 7, 4096));
        identify.lbaf[0].lbads = 40;
        assert_eq!(new(1, &identify), None);
    }
}
