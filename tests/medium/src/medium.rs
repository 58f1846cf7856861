//! [`LoggedDisk`]: an image file behind a volatile write cache.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::str::FromStr;

/// What is written at once, whatever happens: smaller pieces of a sector are never seen.
pub const SECTOR_BYTES: usize = 512;

/// One sector.
pub type Sector = [u8; SECTOR_BYTES];

/// What a power cut takes of the sectors that were not flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Every one.
    All,
    /// Each by chance, drawn from this seed.
    Half(u64),
}

impl FromStr for Loss {
    type Err = String;

    fn from_str(text: &str) -> Result<Loss, String> {
        match text.split_once(':') {
            None if text == "all" => Ok(Loss::All),
            Some(("half", seed)) => {
                seed.parse().map(Loss::Half).map_err(|error| format!("'{text}': {error}"))
            }
            _ => Err(format!("'{text}': wanted all or half:SEED")),
        }
    }
}

/// What became of the sectors that were not flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// They are gone.
    pub lost: usize,
    /// They had reached the medium by themselves.
    pub kept: usize,
}

/// An image file, and what was written and not flushed, which only this process has.
#[derive(Debug)]
pub struct LoggedDisk {
    image: File,
    bytes: u64,
    volatile: BTreeMap<u64, Sector>,
    /// A flush and FUA do nothing, as on a drive that does not keep its word.
    is_forgetful: bool,
}

impl LoggedDisk {
    /// The image, whose size is that of the medium.
    pub fn open(image: &Path, is_forgetful: bool) -> io::Result<LoggedDisk> {
        let image = File::options().read(true).write(true).open(image)?;
        let bytes = image.metadata()?.len();
        Ok(LoggedDisk { image, bytes, volatile: BTreeMap::new(), is_forgetful })
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whole sectors within the medium?
    pub fn has(&self, offset: u64, bytes: usize) -> bool {
        let is_whole = offset.is_multiple_of(SECTOR_BYTES as u64) && bytes.is_multiple_of(SECTOR_BYTES);
        is_whole && offset.checked_add(bytes as u64).is_some_and(|end| end <= self.bytes)
    }

    /// What a host sees: the newest that was written.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.image.read_exact_at(bytes, offset)?;
        let first = offset / SECTOR_BYTES as u64;
        for (place, sector) in self.volatile.range(first..first + (bytes.len() / SECTOR_BYTES) as u64) {
            let at = usize::try_from((place - first) * SECTOR_BYTES as u64).expect("within the buffer");
            bytes[at..at + SECTOR_BYTES].copy_from_slice(sector);
        }
        Ok(())
    }

    /// Into the cache; with `fua` onto the medium, these sectors and no others.
    pub fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
        let sectors =
            bytes.chunks_exact(SECTOR_BYTES).map(|sector| Sector::try_from(sector).expect("its size"));
        let places = offset / SECTOR_BYTES as u64..;
        if !fua || self.is_forgetful {
            self.volatile.extend(places.zip(sectors));
            return Ok(());
        }
        for (place, _) in places.zip(sectors) {
            self.volatile.remove(&place);
        }
        self.image.write_all_at(bytes, offset)
    }

    /// All that was written is on the medium.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.is_forgetful { Ok(()) } else { self.cut_where(|_| false).map(drop) }
    }

    /// The power goes.
    pub fn cut(&mut self, loss: Loss) -> io::Result<Cut> {
        match loss {
            Loss::All => self.cut_where(|_| true),
            Loss::Half(seed) => self.cut_where(|place| mix(seed ^ place) & 1 == 0),
        }
    }

    fn cut_where(&mut self, is_lost: impl Fn(u64) -> bool) -> io::Result<Cut> {
        let mut cut = Cut { lost: 0, kept: 0 };
        for (place, sector) in std::mem::take(&mut self.volatile) {
            if is_lost(place) {
                cut.lost += 1;
            } else {
                cut.kept += 1;
                self.image.write_all_at(&sector, place * SECTOR_BYTES as u64)?;
            }
        }
        Ok(cut)
    }
}

/// A number without any pattern (splitmix64).
pub fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// An image of so many sectors of zeroes, which nothing but the medium has by name.
    pub fn medium(sectors: u64, is_forgetful: bool) -> LoggedDisk {
        let name = format!("spindle-medium-{}-{:?}", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        File::create(&path).expect("a file").set_len(sectors * 512).expect("its size");
        let medium = LoggedDisk::open(&path, is_forgetful).expect("an image");
        std::fs::remove_file(path).expect("it is there");
        medium
    }

    fn sector(medium: &LoggedDisk, place: u64) -> u8 {
        let mut sector = [0; SECTOR_BYTES];
        medium.read(place * 512, &mut sector).expect("it is there");
        assert!(sector.iter().all(|byte| *byte == sector[0]), "sectors are whole");
        sector[0]
    }

    #[test]
    fn a_cut_loses_what_was_not_flushed_and_nothing_else() {
        let mut medium = medium(64, false);
        medium.write(0, &[1; 1024], false).expect("written");
        medium.flush().expect("flushed");
        medium.write(512, &[2; 1024], false).expect("written");
        medium.write(1024, &[3; 512], true).expect("written");
        medium.write(2048, &[4; 512], false).expect("written");
        assert_eq!((0..5).map(|place| sector(&medium, place)).collect::<Vec<_>>(), [1, 2, 3, 0, 4]);
        assert_eq!(medium.cut(Loss::All).expect("cut"), Cut { lost: 2, kept: 0 });
        assert_eq!((0..5).map(|place| sector(&medium, place)).collect::<Vec<_>>(), [1, 1, 3, 0, 0]);
    }

    #[test]
    fn a_cut_by_chance_keeps_some_sectors_of_a_write() {
        let mut medium = medium(64, false);
        medium.write(0, &[7; 64 * 512], false).expect("written");
        let cut = medium.cut(Loss::Half(1)).expect("cut");
        assert!(cut.lost > 10 && cut.kept > 10, "{cut:?}");
        assert_eq!((0..64).filter(|place| sector(&medium, *place) == 7).count(), cut.kept);
    }

    #[test]
    fn a_forgetful_medium_loses_what_was_flushed_and_what_had_fua() {
        let mut medium = medium(64, true);
        medium.write(0, &[1; 512], true).expect("written");
        medium.write(512, &[1; 512], false).expect("written");
        medium.flush().expect("flushed");
        assert_eq!(medium.cut(Loss::All).expect("cut"), Cut { lost: 2, kept: 0 });
        assert_eq!((sector(&medium, 0), sector(&medium, 1)), (0, 0));
    }

    #[test]
    fn only_whole_sectors_within_the_medium_are_taken() {
        let medium = medium(2, false);
        assert!(medium.has(0, 1024) && medium.has(1024, 0));
        assert!(!medium.has(512, 1024) && !medium.has(1, 512) && !medium.has(0, 100));
        assert!(!medium.has(u64::MAX - 511, 1024), "the end does not wrap");
    }
}
