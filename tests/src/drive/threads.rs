//! [`Threads`]: a drive of our own on the emulator, with the threads that it has in a process: its manager's,
//! and one that is the drive. What a core does is then all that its own thread does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use spindle_nvme_pcie::{Drive, Settings, finish};
use spindle_target_disk::Disk;
use spindle_tests_emulator::{Emulator, EmulatorSpec, NamespaceSpec};

/// Namespace 1 of a drive, served by threads until it is dropped.
pub struct Threads {
    disk: Option<Arc<dyn Disk>>,
    /// The drive.
    pub emulator: Emulator,
    stop: Arc<AtomicBool>,
    is_paused: Arc<Mutex<bool>>,
    thread: Option<JoinHandle<()>>,
}

impl Threads {
    /// A namespace of `bytes` in blocks of 4 KiB, with a write cache.
    ///
    /// # Panics
    /// It does not open.
    #[must_use]
    pub fn new(bytes: u64) -> Threads {
        let namespace = NamespaceSpec { block_bytes: 4096, blocks: bytes / 4096, ..NamespaceSpec::default() };
        let spec =
            EmulatorSpec { namespaces: vec![namespace], has_write_cache: true, ..EmulatorSpec::default() };
        let emulator = Emulator::new(spec);
        let (stop, is_paused) = (Arc::<AtomicBool>::default(), Arc::<Mutex<bool>>::default());
        let (its, paused, drive) = (Arc::clone(&stop), Arc::clone(&is_paused), emulator.clone());
        let run = move || {
            while !its.load(Ordering::Relaxed) {
                // Held over the step, so that none goes on behind a pause.
                let is_paused = paused.lock().expect("no thread panics with it");
                if !*is_paused {
                    drive.step();
                }
                drop(is_paused);
                std::thread::yield_now();
            }
        };
        let thread = Some(std::thread::spawn(run));
        let drive = Drive::open(Arc::new(emulator.clone()), Settings::default()).expect("opens");
        let disk: Arc<dyn Disk> = drive.disk("drive", 1).expect("namespace 1");
        Threads { disk: Some(disk), emulator, stop, is_paused, thread }
    }

    /// The namespace.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn disk(&self) -> &Arc<dyn Disk> {
        self.disk.as_ref().expect("until it is dropped")
    }

    /// From now on the drive takes no command and ends none.
    pub fn pause(&self) {
        *self.is_paused.lock().expect("no thread panics with it") = true;
    }

    /// It goes on.
    pub fn go_on(&self) {
        *self.is_paused.lock().expect("no thread panics with it") = false;
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.disk = None;
        self.go_on();
        // The manager shuts the drive down, which has to answer.
        finish();
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
