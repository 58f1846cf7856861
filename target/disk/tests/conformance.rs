//! The contract of `DiskChannel` (`docs/disk-contract.md`) for the kinds of this crate.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Pages;
use spindle_target_disk::{
    Disk, DiskError, Fault, FaultControl, FaultDisk, FileDisk, FileSpec, NullDisk, NullSpec, OpKind, RamDisk,
    RamSpec,
};
use spindle_tests_conformance::{Rig, check};

const BYTES: u64 = 1 << 20;

/// A file that is removed with the value.
struct TempFile(PathBuf);

impl TempFile {
    fn new() -> TempFile {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        TempFile(std::env::temp_dir().join(format!("spindle-conformance-{}-{number}", std::process::id())))
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A disk of memory or of a file.
struct Simple {
    source: Arc<dyn Disk>,
    now: Nanos,
    /// Faults of the device.
    control: Option<Arc<FaultControl>>,
    is_held: bool,
    _file: Option<TempFile>,
}

impl Simple {
    fn of(source: Arc<dyn Disk>) -> Box<dyn Rig> {
        Box::new(Simple { source, now: Nanos::from_secs(1), control: None, is_held: false, _file: None })
    }

    fn file(has_faults: bool) -> Box<dyn Rig> {
        let file = TempFile::new();
        let spec = FileSpec { create_bytes: Some(BYTES), ..FileSpec::new(&file.0, 512) };
        let disk: Arc<dyn Disk> = FileDisk::new("disk", &spec).expect("a file");
        let (source, control) = if has_faults {
            let (source, control) = FaultDisk::new(disk, 3);
            (source, Some(control))
        } else {
            (disk, None)
        };
        Box::new(Simple { source, now: Nanos::from_secs(1), control, is_held: false, _file: Some(file) })
    }
}

impl Rig for Simple {
    fn source(&self) -> Arc<dyn Disk> {
        Arc::clone(&self.source)
    }

    fn pass(&mut self, time: Nanos) -> Nanos {
        self.now += time;
        // Again and again: the file may end a command of before later.
        if let Some(control) = self.control.as_ref().filter(|_| !self.is_held) {
            control.release_dropped();
        }
        self.now
    }

    fn can_have_cache(&self) -> bool {
        !matches!(self.source.kind(), "ram" | "null")
    }

    fn keeps_data(&self) -> bool {
        self.source.kind() != "null"
    }

    fn hold(&mut self, is_held: bool) -> bool {
        let Some(control) = &self.control else { return false };
        control.set_all(Fault::Drop, if is_held { 1_000_000 } else { 0 });
        self.is_held = is_held;
        true
    }

    fn fail_reads(&mut self, fails: bool) -> Option<DiskError> {
        let control = self.control.as_ref()?;
        control.set_error(OpKind::Read, DiskError::Internal);
        control.set(Fault::Error, OpKind::Read, if fails { 1_000_000 } else { 0 });
        Some(DiskError::Internal)
    }
}

#[test]
fn a_ram_disk_keeps_the_contract() {
    let spec = || RamSpec { bytes: BYTES, block_bytes: 512, pages: Pages::Base, has_seals: true };
    let shown = check(|| Simple::of(RamDisk::new("disk", spec()).expect("memory")));
    assert_eq!(shown, ["content", "once", "compose", "resize", "cancel"]);
}

#[test]
fn a_null_disk_keeps_the_contract() {
    let spec = || NullSpec { bytes: BYTES, block_bytes: 512 };
    let shown = check(|| Simple::of(NullDisk::new("disk", spec()).expect("a disk")));
    assert_eq!(shown, ["once", "resize", "cancel"]);
}

#[test]
fn a_file_keeps_the_contract() {
    let shown = check(|| Simple::file(false));
    assert_eq!(shown, ["content", "once", "compose", "cancel"]);
}

/// A file behind which commands are held and fail.
#[test]
fn a_file_that_fails_keeps_the_contract() {
    let shown = check(|| Simple::file(true));
    assert_eq!(shown, ["content", "once", "compose", "cancel", "error"]);
}
