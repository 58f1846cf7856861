//! [`Fronts`]: memory and callbacks of the caches in front of a namespace. The memory is mapped for the drive
//! in addition to the cores' pools. The callbacks report that others may have changed the namespace.
//!
//! All cores that have the namespace open share one mapping of an area: a cache may be as large as the
//! machine's memory, and pinning takes seconds. Areas are added and removed while cores work, so each core
//! has a copy of the windows with its *generation*. A copy of an older generation is not used, because
//! another area with another IOVA may have the same address by then.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::lock::Lock;
use spindle_reactor::mem::Area;

use crate::function::{Function, MapError, Mapping};
use crate::pointers::Window;

/// Areas that no core uses any more. The manager unmaps them, because unmapping takes seconds and the last
/// user may be a core.
pub(crate) type Released = Arc<Lock<Vec<Arc<CacheArea>>>>;

/// Callback of a cache for possible changes of the namespace by others.
type Callback = Box<dyn Fn() + Send + Sync>;

pub(crate) struct CacheArea {
    area: Area,
    /// Mapping for the function that is open; `None` while there is none.
    mapping: Lock<Option<Box<dyn Mapping>>>,
}

impl CacheArea {
    /// Returns the area's window; `None` while the area is not mapped.
    fn window(&self) -> Option<Window> {
        self.mapping.lock().as_ref().map(|mapping| Window::new(&self.area, mapping.iova()))
    }

    /// Sets the mapping for the function that is open.
    pub(crate) fn set_mapping(&self, mapping: Box<dyn Mapping>) {
        *self.mapping.lock() = Some(mapping);
    }

    pub(crate) fn unmap(&self) {
        let mapping = self.mapping.lock().take();
        drop(mapping);
    }
}

#[derive(Default)]
pub(crate) struct Fronts {
    nsid: u32,
    /// Incremented after each addition to and removal from `attached`.
    generation: AtomicU64,
    attached: Lock<Vec<Arc<CacheArea>>>,
    callbacks: Lock<Vec<Callback>>,
    released: Released,
}

impl Fronts {
    /// Creates a `Fronts` of a namespace without areas and callbacks. Areas that were in use are added to
    /// `released`, for the drive's manager to unmap.
    pub(crate) fn new(nsid: u32, released: &Released) -> Arc<Fronts> {
        Arc::new(Fronts { nsid, released: Arc::clone(released), ..Fronts::default() })
    }

    pub(crate) fn nsid(&self) -> u32 {
        self.nsid
    }

    pub(crate) fn new_area(area: &Area) -> Arc<CacheArea> {
        Arc::new(CacheArea { area: area.clone(), mapping: Lock::new(None) })
    }

    /// Makes the area usable by cores until the lease is dropped. No command may use the area at that time.
    pub(crate) fn add(self: &Arc<Self>, attached: Arc<CacheArea>) -> Lease {
        self.attached.lock().push(Arc::clone(&attached));
        self.generation.fetch_add(1, Ordering::Release);
        Lease { fronts: Arc::clone(self), attached }
    }

    pub(crate) fn attached(&self) -> Vec<Arc<CacheArea>> {
        self.attached.lock().clone()
    }

    /// Maps all areas that are not mapped, and returns the windows of all areas.
    pub(crate) fn map(self: &Arc<Self>, function: &dyn Function) -> Result<Windows, MapError> {
        for attached in self.attached() {
            if attached.window().is_none() {
                // Without a lock: mapping may take seconds.
                attached.set_mapping(function.map(&attached.area)?);
            }
        }
        Ok(Windows::of(self))
    }

    /// Adds a callback for [`Fronts::notify`].
    pub(crate) fn on_foreign_change(&self, callback: Callback) {
        self.callbacks.lock().push(callback);
    }

    /// Calls all callbacks: others may have changed the namespace. What cores read from the drive after this
    /// call is not older than the change, which came before its cause.
    pub(crate) fn notify(&self) {
        self.callbacks.lock().iter().for_each(|callback| callback());
    }
}

/// Keeps an area usable. After the drop no core uses the area. The manager unmaps the area in its next step
/// unless another owner exists.
pub(crate) struct Lease {
    fronts: Arc<Fronts>,
    attached: Arc<CacheArea>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.fronts.attached.lock().retain(|other| !Arc::ptr_eq(other, &self.attached));
        self.fronts.generation.fetch_add(1, Ordering::Release);
        self.fronts.released.lock().push(Arc::clone(&self.attached));
    }
}

/// A core's copy of the windows, valid for one generation.
pub(crate) struct Windows {
    fronts: Arc<Fronts>,
    generation: u64,
    windows: Vec<Window>,
}

impl Windows {
    pub(crate) fn of(fronts: &Arc<Fronts>) -> Windows {
        // Read first: if an area changes in between, the copy is outdated and not used.
        let generation = fronts.generation.load(Ordering::Acquire);
        let windows = fronts.attached.lock().iter().filter_map(|attached| attached.window()).collect();
        Windows { fronts: Arc::clone(fronts), generation, windows }
    }

    /// Returns the IOVA of `piece`; `None` if `piece` is in no window or the copy is outdated.
    #[inline]
    pub(crate) fn iova(&self, piece: &[u8]) -> Option<u64> {
        if self.is_outdated() {
            return None;
        }
        self.windows.iter().find_map(|window| window.iova(piece))
    }

    fn is_outdated(&self) -> bool {
        self.generation != self.fronts.generation.load(Ordering::Acquire)
    }

    /// Replaces an outdated copy. Returns false if the copy is current.
    #[cold]
    pub(crate) fn refresh(&mut self) -> bool {
        let is_outdated = self.is_outdated();
        if is_outdated {
            *self = Windows::of(&self.fronts);
        }
        is_outdated
    }
}
