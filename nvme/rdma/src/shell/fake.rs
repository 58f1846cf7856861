//! A device for tests that records registrations: area and access.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use spindle_rdma::{Access, DeviceLimits, RegisterPermit, VerbsError};
use spindle_reactor::mem::Area;

use super::keys::{Registered, Registers};

const ENOMEM: i32 = 12;

/// One recorded registration.
#[derive(Debug, Clone)]
pub(super) struct Registration {
    pub(super) base: usize,
    pub(super) access: Access,
    /// The area's last page was resident.
    pub(super) is_resident: bool,
}

#[derive(Debug)]
pub(super) struct Fake {
    name: &'static str,
    serial: u64,
    limits: DeviceLimits,
    registrations: Mutex<Vec<Registration>>,
    /// Registrations that succeed before all others fail.
    room: AtomicUsize,
    live: Arc<AtomicUsize>,
    is_gone: AtomicBool,
    is_lost: AtomicBool,
}

/// A registration; counts the live ones.
#[derive(Debug)]
pub(super) struct FakeRegion {
    area: Area,
    live: Arc<AtomicUsize>,
}

impl Registered for FakeRegion {
    fn area(&self) -> &Area {
        &self.area
    }

    fn local_key(&self) -> u32 {
        7
    }
}

impl Drop for FakeRegion {
    fn drop(&mut self) {
        self.live.fetch_sub(1, Ordering::Relaxed);
    }
}

fn make(name: &'static str, limits: DeviceLimits) -> Arc<Fake> {
    static SERIALS: AtomicU64 = AtomicU64::new(0);
    Arc::new(Fake {
        name,
        serial: SERIALS.fetch_add(1, Ordering::Relaxed),
        limits,
        registrations: Mutex::default(),
        room: AtomicUsize::new(usize::MAX),
        live: Arc::default(),
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

/// Returns true if the page at this address is resident (`PM_PRESENT` of the page's entry).
fn is_resident(address: usize) -> bool {
    let entries = std::fs::File::open("/proc/self/pagemap").expect("a page map");
    let mut entry = [0; 8];
    entries.read_exact_at(&mut entry, (address / 4096 * 8) as u64).expect("an entry");
    u64::from_ne_bytes(entry) >> 63 == 1
}

impl Fake {
    pub(super) fn registrations(&self) -> Vec<Registration> {
        self.registrations.lock().expect("not poisoned").clone()
    }

    /// Returns the count of live registrations.
    pub(super) fn registered(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Lets `count` more registrations succeed and all later ones fail.
    pub(super) fn refuse_after(&self, count: usize) {
        self.room.store(count, Ordering::Relaxed);
    }

    /// Simulates the removal of the device.
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

    fn serial(&self) -> u64 {
        self.serial
    }

    fn register(
        self: &Arc<Self>,
        _: &RegisterPermit,
        area: Area,
        access: Access,
    ) -> Result<FakeRegion, VerbsError> {
        let base = area.base().addr().get();
        let is_resident = is_resident(base + area.bytes() - 1);
        self.registrations.lock().expect("not poisoned").push(Registration { base, access, is_resident });
        let room = self.room.load(Ordering::Relaxed);
        self.room.store(room.saturating_sub(1), Ordering::Relaxed);
        if room == 0 {
            return Err(VerbsError { verb: "ibv_reg_mr", errno: ENOMEM });
        }
        self.live.fetch_add(1, Ordering::Relaxed);
        Ok(FakeRegion { area, live: Arc::clone(&self.live) })
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
