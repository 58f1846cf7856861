//! Numbered writes, which of them were acknowledged as durable, and whether those are there.
//!
//! A write has a number, and its place follows from the number and the device's name. Each of its sectors
//! says all that, and is filled with what follows from it. Two regions of a device are written so: one
//! whose writes are flushed, one whose writes have FUA. `ACKS/NAME.flush` and `ACKS/NAME.fua` say with a
//! line `begin N` that the next number is N and with `kept N` that all since then up to N are durable. A
//! third region is noise: it is written and never asked for, so that a cut has something to lose.
//!
//! A sector of a block that was durable may hold that write or a later one of the same block: each sector
//! by itself, since no write of several sectors is atomic here.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use crate::medium::{SECTOR_BYTES, Sector, mix};

const MIB: u64 = 1 << 20;
/// A write is one block, one in [`LONG_EVERY`] sixteen of them.
const BLOCK_BYTES: usize = 4096;
const LONG_BLOCKS: u64 = 16;
const LONG_EVERY: u64 = 8;
const REGION_BLOCKS: u64 = 256;
const MAGIC: u64 = u64::from_le_bytes(*b"durable?");
/// Linux on x86-64.
const O_DIRECT: i32 = 0o40000;
/// Before a flush there are at most so many writes.
const FLUSH_EVERY_MAX: u64 = 8;

/// Where on a device the writes of a kind are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Region {
    /// Flushed from time to time.
    Flush,
    /// Each with FUA. It is behind where the disks of files have ended before they grew.
    Fua,
    /// Never.
    Noise,
}

impl Region {
    fn begin(self) -> u64 {
        match self {
            Region::Flush => 0,
            Region::Noise => 8 * MIB,
            Region::Fua => 40 * MIB,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Region::Flush => "flush",
            Region::Fua => "fua",
            Region::Noise => "noise",
        }
    }
}

/// The writes of one region of one device.
#[derive(Debug, Clone, Copy)]
struct Writes {
    region: Region,
    /// Which device, and which region.
    seed: u64,
}

impl Writes {
    fn new(name: &str, region: Region) -> Writes {
        let seed =
            name.bytes().chain(region.name().bytes()).fold(0, |seed, byte| mix(seed ^ u64::from(byte)));
        Writes { region, seed }
    }

    /// Which blocks of the region write `number` covers.
    fn blocks(self, number: u64) -> std::ops::Range<u64> {
        let drawn = mix(self.seed ^ number);
        let count = if drawn.is_multiple_of(LONG_EVERY) { LONG_BLOCKS } else { 1 };
        let first = (drawn >> 8) % (REGION_BLOCKS - count + 1);
        first..first + count
    }

    /// The offset of a block of the region.
    fn offset(self, block: u64) -> u64 {
        self.region.begin() + block * BLOCK_BYTES as u64
    }

    /// A sector at `offset` of write `number`.
    fn sector(self, number: u64, offset: u64) -> Sector {
        let mut sector = [0; SECTOR_BYTES];
        let head = [MAGIC, self.seed, number, offset];
        let key = head.iter().fold(0, |key, word| mix(key ^ word));
        for (index, word) in sector.chunks_exact_mut(8).enumerate() {
            let value = head.get(index).copied().unwrap_or_else(|| mix(key ^ index as u64));
            word.copy_from_slice(&value.to_le_bytes());
        }
        sector
    }

    /// The number that a sector at `offset` has, if it is whole and belongs there.
    fn number(self, sector: &[u8], offset: u64) -> Option<u64> {
        let number = u64::from_le_bytes(sector.get(16..24)?.try_into().ok()?);
        let block = (offset - self.region.begin()) / BLOCK_BYTES as u64;
        let is_ours = self.blocks(number).contains(&block) && sector == self.sector(number, offset);
        is_ours.then_some(number)
    }

    /// The bytes of write `number`.
    fn fill(self, number: u64, bytes: &mut [u8]) {
        let begin = self.offset(self.blocks(number).start);
        for (index, sector) in bytes.chunks_exact_mut(SECTOR_BYTES).enumerate() {
            sector.copy_from_slice(&self.sector(number, begin + (index * SECTOR_BYTES) as u64));
        }
    }

    fn bytes(self, number: u64) -> usize {
        self.blocks(number).count() * BLOCK_BYTES
    }
}

/// Memory for writes past the page cache.
struct Aligned {
    memory: Vec<u8>,
    begin: usize,
}

impl Aligned {
    fn new() -> Aligned {
        let bytes_max = usize::try_from(LONG_BLOCKS).expect("few") * BLOCK_BYTES;
        let memory = vec![0; bytes_max + BLOCK_BYTES];
        let begin = memory.as_ptr().align_offset(BLOCK_BYTES);
        Aligned { memory, begin }
    }

    fn of(&mut self, bytes: usize) -> &mut [u8] {
        &mut self.memory[self.begin..self.begin + bytes]
    }
}

/// What is known to be durable of a region: the numbers of each session, first to last.
#[derive(Debug, Default)]
struct Acks {
    sessions: Vec<(u64, Option<u64>)>,
}

impl Acks {
    fn read(acks: &Path, name: &str, region: Region) -> io::Result<Acks> {
        let path = acks.join(format!("{name}.{}", region.name()));
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                Acks::parse(&text).ok_or_else(|| io::Error::other(format!("{}: {text}", path.display())))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Acks::default()),
            Err(error) => Err(error),
        }
    }

    /// The last line may be half of one: its writer was killed.
    fn parse(text: &str) -> Option<Acks> {
        let mut acks = Acks::default();
        for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            let (word, number) = line.split_once(' ')?;
            let number = number.parse().ok()?;
            match word {
                "begin" => acks.sessions.push((number, None)),
                "kept" => acks.sessions.last_mut()?.1 = Some(number),
                _ => return None,
            }
        }
        Some(acks)
    }

    /// The next number: what was begun and not acknowledged is never used again.
    fn next(&self) -> u64 {
        let last = self.sessions.last().map_or(0, |(begin, kept)| kept.unwrap_or(*begin));
        last + 100_000
    }

    fn numbers(&self) -> impl Iterator<Item = u64> {
        self.sessions.iter().flat_map(|(begin, kept)| kept.map(|kept| *begin..=kept).into_iter().flatten())
    }
}

fn append(acks: &Path, name: &str, region: Region) -> io::Result<File> {
    File::options().create(true).append(true).open(acks.join(format!("{name}.{}", region.name())))
}

fn open(device: &Path) -> io::Result<File> {
    File::options().write(true).custom_flags(O_DIRECT).open(device)
}

/// All of them at once; returns with the first error.
fn each<'a, T: Copy + Send + 'a>(
    devices: &[(&'a str, &'a Path)],
    extra: T,
    run: fn(&str, &Path, T) -> io::Result<()>,
) -> io::Result<()> {
    let (ended, ends) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for (name, device) in devices {
            let ended = ended.clone();
            scope.spawn(move || {
                let result = run(name, device, extra);
                // Its reader is there until all have ended.
                let _ = ended.send(result.map_err(|error| io::Error::other(format!("{name}: {error}"))));
            });
        }
        drop(ended);
        ends.iter().collect()
    })
}

/// Write, flush, and say so, on each of these devices, until killed; between them writes that are never
/// flushed.
pub fn write(acks: &Path, devices: &[(&str, &Path)]) -> io::Result<()> {
    each(devices, acks, |name, device, acks| {
        let (writes, noise) = (Writes::new(name, Region::Flush), Writes::new(name, Region::Noise));
        let mut number = Acks::read(acks, name, Region::Flush)?.next();
        let (mut acks, mut memory) = (append(acks, name, Region::Flush)?, Aligned::new());
        let device = open(device)?;
        acks.write_all(format!("begin {number}\n").as_bytes())?;
        loop {
            for _ in 0..=mix(number) % FLUSH_EVERY_MAX {
                put(&device, writes, number, &mut memory)?;
                number += 1;
            }
            device.sync_data()?;
            acks.write_all(format!("kept {}\n", number - 1).as_bytes())?;
            put(&device, noise, number, &mut memory)?;
        }
    })
}

/// Writes that are never flushed, on each of these devices, until killed.
pub fn noise(devices: &[(&str, &Path)]) -> io::Result<()> {
    each(devices, (), |name, device, ()| {
        let (writes, mut memory, device) = (Writes::new(name, Region::Noise), Aligned::new(), open(device)?);
        for number in 0.. {
            put(&device, writes, number, &mut memory)?;
            // The machine has two processors, and others have work.
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Ok(())
    })
}

fn put(device: &File, writes: Writes, number: u64, memory: &mut Aligned) -> io::Result<()> {
    let bytes = memory.of(writes.bytes(number));
    writes.fill(number, bytes);
    device.write_all_at(bytes, writes.offset(writes.blocks(number).start))
}

/// The next `count` writes with FUA, as files in `folder`: `list` has their numbers and offsets. Their writer
/// adds to `ACKS/NAME.fua`, in which they are begun here.
pub fn prepare(acks: &Path, name: &str, count: u64, folder: &Path) -> io::Result<()> {
    let writes = Writes::new(name, Region::Fua);
    let begin = Acks::read(acks, name, Region::Fua)?.next();
    append(acks, name, Region::Fua)?.write_all(format!("begin {begin}\n").as_bytes())?;
    let mut list = File::create(folder.join("list"))?;
    for number in begin..begin + count {
        let mut bytes = vec![0; writes.bytes(number)];
        writes.fill(number, &mut bytes);
        std::fs::write(folder.join(number.to_string()), bytes)?;
        writeln!(list, "{number} {}", writes.offset(writes.blocks(number).start))?;
    }
    Ok(())
}

/// What [`check`] found.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Writes that are durable, with a flush and with FUA.
    durable: [usize; 2],
    /// Sectors that must be there, and are.
    sectors: usize,
    /// What is wrong, a sentence each.
    wrong: Vec<String>,
}

impl Verdict {
    /// All that must be there is.
    pub fn is_fine(&self) -> bool {
        self.wrong.is_empty()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [flushed, fua] = self.durable;
        let (sectors, wrong) = (self.sectors, self.wrong.len());
        write!(f, "{flushed} flushed, {fua} with FUA, {sectors} sectors right, {wrong} wrong")?;
        self.wrong.iter().take(3).try_for_each(|wrong| write!(f, "; {wrong}"))
    }
}

/// Is all there that was acknowledged as durable?
pub fn check(acks: &Path, name: &str, device: &Path) -> io::Result<Verdict> {
    let (device, mut verdict) = (File::open(device)?, Verdict::default());
    for (index, region) in [Region::Flush, Region::Fua].into_iter().enumerate() {
        let (writes, acks) = (Writes::new(name, region), Acks::read(acks, name, region)?);
        let mut newest = BTreeMap::new();
        for number in acks.numbers() {
            verdict.durable[index] += 1;
            newest.extend(writes.blocks(number).map(|block| (block, number)));
        }
        if newest.is_empty() {
            continue;
        }
        for block in 0..REGION_BLOCKS {
            let (mut bytes, offset) = ([0; BLOCK_BYTES], writes.offset(block));
            device.read_exact_at(&mut bytes, offset)?;
            let sectors = (offset..).step_by(SECTOR_BYTES).zip(bytes.chunks_exact(SECTOR_BYTES));
            for (offset, sector) in sectors {
                verdict.look_at(writes, offset, sector, newest.get(&block).copied());
            }
        }
    }
    Ok(verdict)
}

impl Verdict {
    fn look_at(&mut self, writes: Writes, offset: u64, sector: &[u8], durable: Option<u64>) {
        let region = writes.region.name();
        match (writes.number(sector, offset), durable) {
            (Some(number), Some(durable)) if number < durable => {
                self.wrong.push(format!("{region} at {offset}: write {number}, but {durable} is durable"));
            }
            (Some(_), Some(_)) => self.sectors += 1,
            (Some(_), None) => {}
            (None, None) if sector.iter().all(|byte| *byte == 0) => {}
            (None, None) => self.wrong.push(format!("{region} at {offset}: something never written")),
            (None, Some(durable)) => {
                let found = if sector.iter().all(|byte| *byte == 0) { "zeroes" } else { "damage" };
                self.wrong.push(format!("{region} at {offset}: {found}, but {durable} is durable"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device of zeroes and a folder for what is acknowledged.
    struct TestDevice {
        folder: std::path::PathBuf,
        device: File,
    }

    impl TestDevice {
        fn new(test: &str) -> TestDevice {
            // A failed test of an earlier process with this number may have left its own.
            let place = |number| format!("spindle-stamps-{}-{test}-{number}", std::process::id());
            let mut places = (0..1000).map(|number| std::env::temp_dir().join(place(number)));
            let folder = places.find(|place| std::fs::create_dir(place).is_ok()).expect("a folder");
            let device = File::create(folder.join("device")).expect("a file");
            device.set_len(64 * MIB).expect("its size");
            TestDevice { folder, device }
        }

        fn put(&self, region: Region, numbers: std::ops::Range<u64>) {
            for number in numbers {
                put(&self.device, Writes::new("a", region), number, &mut Aligned::new()).expect("written");
            }
        }

        fn acks(&self, region: Region, text: &str) {
            append(&self.folder, "a", region)
                .and_then(|mut file| file.write_all(text.as_bytes()))
                .expect("written");
        }

        fn check(&self) -> Verdict {
            check(&self.folder, "a", &self.folder.join("device")).expect("it can be read")
        }
    }

    impl Drop for TestDevice {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.folder).expect("it is there");
        }
    }

    #[test]
    fn what_is_durable_and_there_is_fine_whatever_came_later() {
        let device = TestDevice::new("fine");
        device.put(Region::Flush, 100..350);
        device.put(Region::Fua, 7..20);
        device.acks(Region::Flush, "begin 100\nkept 150\nkept 300\nkept 3");
        device.acks(Region::Fua, "begin 7\nkept 19\n");
        let verdict = device.check();
        assert!(verdict.is_fine(), "{verdict}");
        assert_eq!(verdict.durable, [201, 13]);
        assert!(verdict.sectors > 1000);
    }

    #[test]
    fn what_is_durable_and_not_there_is_found() {
        let device = TestDevice::new("lost");
        device.put(Region::Flush, 100..300);
        device.acks(Region::Flush, "begin 100\nkept 300\n");
        assert!(device.check().wrong[0].contains("300 is durable"), "{}", device.check());
        device.acks(Region::Fua, "begin 7\nkept 7\n");
        assert!(device.check().wrong.iter().any(|wrong| wrong.contains("zeroes, but 7 is durable")));
    }

    #[test]
    fn an_older_write_and_a_damaged_sector_are_found() {
        let device = TestDevice::new("older");
        device.put(Region::Flush, 100..300);
        device.acks(Region::Flush, "begin 100\nkept 299\n");
        assert!(device.check().is_fine());
        let writes = Writes::new("a", Region::Flush);
        let offset = writes.offset(writes.blocks(299).start);
        device.device.write_all_at(&[1; 1], offset + 511).expect("written");
        assert!(device.check().wrong[0].contains("damage"), "{}", device.check());
        let older =
            (1..).find(|number| writes.blocks(*number).contains(&writes.blocks(299).start)).expect("one");
        device.device.write_all_at(&writes.sector(older, offset), offset).expect("written");
        assert!(device.check().wrong[0].contains(&format!("write {older}, but 299")), "{}", device.check());
    }

    #[test]
    fn numbers_go_on_behind_those_that_were_begun() {
        let device = TestDevice::new("next");
        device.acks(Region::Flush, "begin 100\nkept 120\nbegin 5000\n");
        let acks = Acks::read(&device.folder, "a", Region::Flush).expect("it can be read");
        assert!(acks.next() > 5000);
        assert_eq!(acks.numbers().count(), 21);
        std::fs::create_dir(device.folder.join("fua")).expect("a folder");
        prepare(&device.folder, "a", 30, &device.folder.join("fua")).expect("prepared");
        let list = std::fs::read_to_string(device.folder.join("fua/list")).expect("a list");
        assert_eq!(list.lines().count(), 30);
        for line in list.lines() {
            let (number, offset) = line.split_once(' ').expect("two words");
            let bytes = std::fs::read(device.folder.join("fua").join(number)).expect("its bytes");
            device.device.write_all_at(&bytes, offset.parse().expect("a number")).expect("written");
            device.acks(Region::Fua, &format!("kept {number}\n"));
        }
        assert!(device.check().wrong.iter().all(|wrong| wrong.starts_with("flush")), "{}", device.check());
    }
}
