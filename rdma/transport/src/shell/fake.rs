//! A device for tests: it notes what is registered with it, how, and on which thread.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use spindle_rdma_verbs::{Access, DeviceLimits, VerbsError};
use spindle_reactor::mem::Area;

use super::keys::Registers;

/// `ENOMEM`.
const NO_MEMORY: i32 = 12;

/// One registration.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    pub(super) base: usize,
    pub(super) access: Access,
    pub(super) thread: String,
    /// Where that thread may run.
    pub(super) cores: String,
    /// It has its last page.
    pub(super) is_resident: bool,
}

#[derive(Debug)]
pub(super) struct Fake {
    name: &'static str,
    limits: DeviceLimits,
    asked: Mutex<Vec<Asked>>,
    /// Where one waits that registers.
    gate: Mutex<Option<Receiver<()>>>,
    /// How many it takes.
    room: AtomicUsize,
    live: Arc<AtomicUsize>,
    is_waited_at: AtomicBool,
    is_gone: AtomicBool,
    is_lost: AtomicBool,
}

/// What it gives.
#[derive(Debug)]
pub(super) struct FakeRegion(Arc<AtomicUsize>);

impl Drop for FakeRegion {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn make(name: &'static str, limits: DeviceLimits) -> Arc<Fake> {
    Arc::new(Fake {
        name,
        limits,
        asked: Mutex::default(),
        gate: Mutex::default(),
        room: AtomicUsize::new(usize::MAX),
        live: Arc::default(),
        is_waited_at: AtomicBool::new(false),
        is_gone: AtomicBool::new(false),
        is_lost: AtomicBool::new(false),
    })
}

pub(super) fn fake(name: &'static str) -> Arc<Fake> {
    make(name, DeviceLimits::default())
}

pub(super) fn fake_iwarp(name: &'static str) -> Arc<Fake> {
    make(name, DeviceLimits { is_iwarp: true, ..DeviceLimits::default() })
}

pub(super) fn cores_of_this_thread() -> String {
    let status = std::fs::read_to_string("/proc/thread-self/status").expect("a status");
    let line = status.lines().find(|line| line.starts_with("Cpus_allowed_list:"));
    line.expect("its cores").to_owned()
}

/// The kernel has given it a page there (`PM_PRESENT` in the page's entry).
fn is_resident(address: usize) -> bool {
    let entries = std::fs::File::open("/proc/self/pagemap").expect("a page map");
    let mut entry = [0; 8];
    entries.read_exact_at(&mut entry, (address / 4096 * 8) as u64).expect("an entry");
    u64::from_ne_bytes(entry) >> 63 == 1
}

impl Fake {
    pub(super) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().expect("not poisoned").clone()
    }

    /// Registrations that there are.
    pub(super) fn registered(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// It takes so many more.
    pub(super) fn refuse_after(&self, count: usize) {
        self.room.store(count, Ordering::Relaxed);
    }

    /// Who registers waits until what this gives is dropped, at most for a while.
    pub(super) fn close(&self) -> Sender<()> {
        let (gate, is_open) = channel();
        *self.gate.lock().expect("not poisoned") = Some(is_open);
        gate
    }

    /// One waits, or has waited, for that.
    pub(super) fn is_waited_at(&self) -> bool {
        self.is_waited_at.load(Ordering::Relaxed)
    }

    /// It is taken out.
    pub(super) fn take_out(&self) {
        self.is_gone.store(true, Ordering::Relaxed);
    }
}

impl Registers for Fake {
    type Region = FakeRegion;

    fn name(&self) -> &str {
        self.name
    }

    fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    fn register(self: &Arc<Self>, area: Area, access: Access) -> Result<FakeRegion, VerbsError> {
        if let Some(gate) = self.gate.lock().expect("not poisoned").take() {
            self.is_waited_at.store(true, Ordering::Relaxed);
            let _ = gate.recv_timeout(Duration::from_secs(5));
        }
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        let (base, cores) = (area.base().addr().get(), cores_of_this_thread());
        self.asked.lock().expect("not poisoned").push(Asked {
            base,
            access,
            thread,
            cores,
            is_resident: is_resident(base + area.bytes() - 1),
        });
        let room = self.room.load(Ordering::Relaxed);
        self.room.store(room.saturating_sub(1), Ordering::Relaxed);
        if room == 0 {
            return Err(VerbsError { verb: "ibv_reg_mr", errno: NO_MEMORY });
        }
        self.live.fetch_add(1, Ordering::Relaxed);
        Ok(FakeRegion(Arc::clone(&self.live)))
    }

    fn is_listed(&self) -> bool {
        !self.is_gone.load(Ordering::Relaxed)
    }

    fn set_lost(&self) -> bool {
        !self.is_lost.swap(true, Ordering::Relaxed)
    }

    fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }
}
