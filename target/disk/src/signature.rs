//! Detects the contents of a medium by the magic numbers of file systems, swap areas, encryption, volume
//! managers, RAID members, caches and partition tables. The contents need not be in use: a RAID member is
//! also found while its array is stopped.
//!
//! Sources of the offsets: Linux `md_p.h`, LVM2 `label.h`, the LUKS on-disk formats, OpenZFS `vdev_impl.h`,
//! UEFI 2.10 section 5, and the superblocks of the file systems.
//!
//! A match is no proof of use: old signatures remain until they are overwritten.

use std::io::{self, Read, Seek, SeekFrom};

/// Bytes read from the start of the medium: 68 KiB, which includes the magic number of btrfs.
const HEAD_BYTES: usize = 68 << 10;
/// Bytes of a ZFS label. A medium has two labels at its start and two at its end.
const ZFS_LABEL_BYTES: u64 = 256 << 10;
/// Smallest size of a ZFS uberblock. The uberblocks fill the second half of a label.
const ZFS_UBERBLOCK_BYTES: usize = 1 << 10;
const ZFS_MAGIC: u64 = 0x00ba_b10c;
const MD_MAGIC: u32 = 0xa92b_4efc;

/// Magic numbers in the first [`HEAD_BYTES`]: name, byte offset, bytes.
const IN_HEAD: [(&str, usize, &[u8]); 18] = [
    ("crypto_LUKS", 0, b"LUKS\xba\xbe"),
    ("LVM2_member", 0, b"LABELONE"),
    ("LVM2_member", 512, b"LABELONE"),
    ("LVM2_member", 1024, b"LABELONE"),
    ("LVM2_member", 1536, b"LABELONE"),
    ("xfs", 0, b"XFSB"),
    ("ext4", 0x438, b"\x53\xef"),
    ("btrfs", 0x1_0040, b"_BHRfS_M"),
    ("f2fs", 0x400, b"\x10\x20\xf5\xf2"),
    ("ntfs", 3, b"NTFS    "),
    ("vfat", 0x52, b"FAT32   "),
    ("vfat", 0x36, b"FAT1"),
    ("swap", 4086, b"SWAPSPACE2"),
    ("swap", 4086, b"SWAP-SPACE"),
    ("bcache", 4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    ("ceph_bluestore", 0, b"bluestore block device"),
    ("gpt", 512, b"EFI PART"),
    ("gpt", 4096, b"EFI PART"),
];

/// Magic numbers of firmware RAID members: name, sectors from the end, bytes. Sources: mdadm's
/// `super-intel.c` for Intel VROC, SNIA's Common RAID Disk Data Format for DDF.
const AT_END: [(&str, u64, &[u8]); 2] =
    [("isw_raid_member", 2, b"Intel Raid ISM Cfg Sig. "), ("ddf_raid_member", 1, b"\xde\x11\xde\x11")];

/// Returns the names of the signatures on a medium of `bytes` bytes, as blkid spells them, each once. `ext4`
/// stands for ext2 to ext4. `dos` is reported only without any other signature. Fails as seek and read.
pub fn find(medium: &mut (impl Read + Seek), bytes: u64) -> io::Result<Vec<&'static str>> {
    let head = read(medium, 0, HEAD_BYTES)?;
    let mut found = Vec::new();
    let mut note = |name| {
        if !found.contains(&name) {
            found.push(name);
        }
    };
    for (name, offset, magic) in IN_HEAD {
        if head.get(offset..).is_some_and(|rest| rest.starts_with(magic)) {
            note(name);
        }
    }
    if is_raid(medium, bytes)? {
        note("linux_raid_member");
    }
    if is_zfs(medium, bytes)? {
        note("zfs_member");
    }
    for (name, sectors_from_end, magic) in AT_END {
        // The sector size of the device may be 512 or 4096 bytes.
        for sector_bytes in [512, 4096] {
            let Some(at) = (bytes / sector_bytes).checked_sub(sectors_from_end) else { continue };
            if read(medium, at * sector_bytes, magic.len())? == magic {
                note(name);
            }
        }
    }
    if found.is_empty() && has_partitions(&head) {
        found.push("dos");
    }
    Ok(found)
}

/// Reads `bytes` bytes from `offset` on; fewer if the medium ends before.
fn read(medium: &mut (impl Read + Seek), offset: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let mut data = Vec::with_capacity(bytes);
    medium.seek(SeekFrom::Start(offset))?;
    medium.take(bytes as u64).read_to_end(&mut data)?;
    Ok(data)
}

/// Returns true if there is an md superblock: version 1.1 at byte 0, 1.2 at 4 KiB, 1.0 and 0.90 near the end.
fn is_raid(medium: &mut (impl Read + Seek), bytes: u64) -> io::Result<bool> {
    let sectors = bytes / 512;
    let near_end = sectors.saturating_sub(16) & !7;
    let of_old = (bytes & !0xffff).checked_sub(0x1_0000);
    let places = [Some(0), Some(4096), near_end.checked_mul(512).filter(|at| *at > 0), of_old];
    for at in places.into_iter().flatten() {
        let data = read(medium, at, 4)?;
        let Ok(magic) = <[u8; 4]>::try_from(data.as_slice()) else { continue };
        // Version 0.90 has the byte order of the machine that created it.
        if u32::from_le_bytes(magic) == MD_MAGIC || u32::from_be_bytes(magic) == MD_MAGIC {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns true if one of the four labels has an uberblock, in either byte order.
fn is_zfs(medium: &mut (impl Read + Seek), bytes: u64) -> io::Result<bool> {
    let whole = bytes / ZFS_LABEL_BYTES * ZFS_LABEL_BYTES;
    let ends = [whole.checked_sub(2 * ZFS_LABEL_BYTES), whole.checked_sub(ZFS_LABEL_BYTES)];
    for label in [Some(0), Some(ZFS_LABEL_BYTES)].into_iter().chain(ends).flatten() {
        let half = ZFS_LABEL_BYTES / 2;
        let uberblocks = read(medium, label + half, usize::try_from(half).unwrap_or(0))?;
        let has_magic = |block: &[u8]| {
            let magic = block.first_chunk::<8>().copied().unwrap_or_default();
            u64::from_le_bytes(magic) == ZFS_MAGIC || u64::from_be_bytes(magic) == ZFS_MAGIC
        };
        if uberblocks.chunks(ZFS_UBERBLOCK_BYTES).any(has_magic) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns true for a master boot record with at least one partition entry and no invalid entry. The
/// signature 55 AA alone is ambiguous.
fn has_partitions(head: &[u8]) -> bool {
    let Some((entries, magic)) = head.get(446..512).and_then(|bytes| bytes.split_at_checked(64)) else {
        return false;
    };
    let is_entry = |entry: &[u8]| matches!(entry, [0 | 0x80, _, _, _, kind, ..] if *kind != 0);
    let is_empty = |entry: &[u8]| entry.iter().all(|byte| *byte == 0);
    magic == [0x55, 0xaa]
        && entries.chunks(16).any(is_entry)
        && entries.chunks(16).all(|entry| is_entry(entry) || is_empty(entry))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    const BYTES: usize = 4 << 20;

    /// Signatures found on a medium that has these bytes at these offsets.
    fn with(parts: &[(usize, &[u8])]) -> Vec<&'static str> {
        let mut medium = vec![0; BYTES];
        for (offset, bytes) in parts {
            medium[*offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        find(&mut Cursor::new(medium), BYTES as u64).expect("read")
    }

    #[test]
    fn each_signature_is_found_at_its_place_and_nowhere_else() {
        assert_eq!(with(&[]), [""; 0]);
        for (name, offset, magic) in IN_HEAD {
            assert_eq!(with(&[(offset, magic)]), [name], "{offset}");
            assert_eq!(with(&[(offset + 1, magic)]), [""; 0], "{name} beside its place");
        }
        let md = MD_MAGIC.to_le_bytes();
        for offset in [0, 4096, BYTES - 8192, BYTES - 65536] {
            assert_eq!(with(&[(offset, &md)]), ["linux_raid_member"], "{offset}");
        }
        assert_eq!(with(&[(BYTES - 65536, &MD_MAGIC.to_be_bytes())]), ["linux_raid_member"]);
        assert_eq!(with(&[(8192, &md)]), [""; 0]);
        for offset in [128 << 10, (384 << 10) + 5 * 1024, BYTES - (384 << 10), BYTES - 1024] {
            for magic in [ZFS_MAGIC.to_le_bytes(), ZFS_MAGIC.to_be_bytes()] {
                assert_eq!(with(&[(offset, &magic)]), ["zfs_member"], "{offset}");
            }
        }
        for (name, sectors, magic) in AT_END {
            for sector_bytes in [512, 4096] {
                let at = BYTES - usize::try_from(sectors).expect("small") * sector_bytes;
                assert_eq!(with(&[(at, magic)]), [name], "{at}");
            }
        }
        let both = with(&[(0, b"LUKS\xba\xbe"), (4096, &md)]);
        assert_eq!(both, ["crypto_LUKS", "linux_raid_member"]);
    }

    #[test]
    fn a_boot_record_counts_with_partitions_only() {
        let entry = [0x80, 0, 2, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0];
        assert_eq!(with(&[(446, &entry), (510, b"\x55\xaa")]), ["dos"]);
        assert_eq!(with(&[(510, b"\x55\xaa")]), [""; 0]);
        assert_eq!(with(&[(446, &[7; 64]), (510, b"\x55\xaa")]), [""; 0], "no boot flags");
        let protective = [(446, &entry[..]), (510, b"\x55\xaa"), (512, b"EFI PART")];
        assert_eq!(with(&protective), ["gpt"]);
    }

    #[test]
    fn what_is_too_small_or_too_short_holds_nothing() {
        for bytes in [0, 1, 511, 4096, 70_000] {
            let mut medium = Cursor::new(vec![0; bytes]);
            assert_eq!(find(&mut medium, bytes as u64).expect("read"), [""; 0]);
            assert_eq!(find(&mut medium, u64::MAX).expect("read"), [""; 0], "it says that it is larger");
        }
    }
}
