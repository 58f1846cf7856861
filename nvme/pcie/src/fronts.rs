//! [`Fronts`]: what stands in front of a namespace, a cache, as the drive and its manager see it: memory that
//! the drive reaches besides the cores' pools, and who is told when others may have written to it.
//!
//! One mapping of an area serves all cores that have the namespace open: a cache may be as large as the
//! machine, and to pin it takes seconds. An area comes and goes while cores work, so each core has a copy of
//! the windows, and the *generation* that it was made at. A copy of another generation is not used: where an
//! area was, another one may be, which the drive sees elsewhere.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::lock::Lock;
use spindle_reactor::mem::Area;

use crate::function::{Function, MapError, Mapping};
use crate::pointers::Window;

/// Areas that are not used any more, for the manager to let go of: to unmap one takes as long as to map it,
/// and the last that uses it may be a core.
pub(crate) type Released = Arc<Lock<Vec<Arc<Attached>>>>;

/// What a cache wants to be called.
type Act = Box<dyn Fn() + Send + Sync>;

/// An area of memory, and its mapping.
pub(crate) struct Attached {
    area: Area,
    /// For the function that is open now; one that is opened again gets a new one.
    mapping: Lock<Option<Box<dyn Mapping>>>,
}

impl Attached {
    /// Where the drive sees it; `None` where it does not.
    fn mapped(&self) -> Option<Window> {
        self.mapping.lock().as_ref().map(|mapping| Window::new(&self.area, mapping.iova()))
    }

    /// It is mapped from now on, for the function that is open.
    pub(crate) fn put(&self, mapping: Box<dyn Mapping>) {
        *self.mapping.lock() = Some(mapping);
    }

    /// The drive does not see it any more.
    pub(crate) fn unmap(&self) {
        let mapping = self.mapping.lock().take();
        drop(mapping);
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Fronts {
    /// Changes with `attached`, after it.
    generation: AtomicU64,
    attached: Lock<Vec<Arc<Attached>>>,
    acts: Lock<Vec<Act>>,
    released: Released,
}

impl Fronts {
    /// Of a drive whose manager lets go of what is released.
    pub(crate) fn new(released: &Released) -> Arc<Fronts> {
        Arc::new(Fronts { released: Arc::clone(released), ..Fronts::default() })
    }

    /// An area that is not mapped yet and that no core uses.
    pub(crate) fn area(area: &Area) -> Arc<Attached> {
        Arc::new(Attached { area: area.clone(), mapping: Lock::new(None) })
    }

    /// Cores may use it until what is returned is dropped. Then nothing of it may be in flight.
    pub(crate) fn add(self: &Arc<Self>, attached: Arc<Attached>) -> Lease {
        self.attached.lock().push(Arc::clone(&attached));
        self.generation.fetch_add(1, Ordering::Release);
        Lease { fronts: Arc::clone(self), attached }
    }

    /// All of them.
    pub(crate) fn attached(&self) -> Vec<Arc<Attached>> {
        self.attached.lock().clone()
    }

    /// All of them, mapped for this function where they are not.
    pub(crate) fn map(self: &Arc<Self>, function: &dyn Function) -> Result<Windows, MapError> {
        for attached in self.attached() {
            if attached.mapped().is_none() {
                // Without a lock: this may take seconds.
                attached.put(function.map(&attached.area)?);
            }
        }
        Ok(Windows::of(self))
    }

    /// To be called by [`Fronts::tell`].
    pub(crate) fn on_foreign_change(&self, act: Act) {
        self.acts.lock().push(act);
    }

    /// Others may have written to the namespace. While no core can give the drive a command.
    pub(crate) fn tell(&self) {
        self.acts.lock().iter().for_each(|act| act());
    }
}

/// A use of an area. No core uses it after this. The drive loses it in the manager's next step, when nothing
/// else keeps it; until then its memory stays.
pub(crate) struct Lease {
    fronts: Arc<Fronts>,
    attached: Arc<Attached>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.fronts.attached.lock().retain(|other| !Arc::ptr_eq(other, &self.attached));
        self.fronts.generation.fetch_add(1, Ordering::Release);
        self.fronts.released.lock().push(Arc::clone(&self.attached));
    }
}

/// A core's copy of where the drive sees the areas.
pub(crate) struct Windows {
    fronts: Arc<Fronts>,
    generation: u64,
    windows: Vec<Window>,
}

impl Windows {
    /// As they are now.
    pub(crate) fn of(fronts: &Arc<Fronts>) -> Windows {
        // First: should one come or go in between, the copy is old and not used.
        let generation = fronts.generation.load(Ordering::Acquire);
        let windows = fronts.attached.lock().iter().filter_map(|attached| attached.mapped()).collect();
        Windows { fronts: Arc::clone(fronts), generation, windows }
    }

    /// Where the drive sees these bytes. `None` outside, and where the copy is old.
    #[inline]
    pub(crate) fn iova(&self, piece: &[u8]) -> Option<u64> {
        if self.is_old() {
            return None;
        }
        self.windows.iter().find_map(|window| window.iova(piece))
    }

    fn is_old(&self) -> bool {
        self.generation != self.fronts.generation.load(Ordering::Acquire)
    }

    /// A new copy, if this one is old. False where it is not.
    #[cold]
    pub(crate) fn renew(&mut self) -> bool {
        let is_old = self.is_old();
        if is_old {
            *self = Windows::of(&self.fronts);
        }
        is_old
    }
}
