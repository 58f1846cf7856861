//! [`Domains`]: the protection domains of caches, and the registrations in them.

use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nvme_spec::optimistic::{OPTIMISTIC_PAGE_SHIFT, OPTIMISTIC_VERSION, OptimisticAccept};
use nvme_spec::zerocopy::little_endian::{U16, U32, U64};
use spindle_rdma::{Access, CompletionQueue, Device, Domain, MemoryRegion, VerbsError};
use spindle_reactor::mem::{Area, SealedFrames};
use spindle_reactor::net::Waker;

use super::admission::CONNECTIONS_MAX;

/// Time that a domain is kept without a connection: a registration takes seconds for a large cache.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// Time after a failed registration of a cache before the next one.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// A cache's memory, registered with one device in a domain of its own.
pub(crate) struct CacheDomain {
    pub(crate) domain: Arc<Domain>,
    /// Completion queue of the probes, each connection's one.
    pub(crate) queue: CompletionQueue,
    frames_region: MemoryRegion,
    seals_region: MemoryRegion,
    frames: Arc<dyn SealedFrames>,
    /// When it was last in use.
    used: Instant,
}

impl CacheDomain {
    fn new(
        device: &Arc<Device>,
        frames: &Arc<dyn SealedFrames>,
        seals: Area,
    ) -> Result<CacheDomain, VerbsError> {
        let domain = Arc::new(Domain::new(device)?);
        let begin = Instant::now();
        let frames_region = domain.register(frames.area(), Access::REMOTE_READ)?;
        let seals_region = domain.register(seals, Access::REMOTE_READ)?;
        let (bytes, took_ms) = (frames_region.bytes(), begin.elapsed().as_millis());
        let device_name = device.name();
        tracing::info!(device = device_name, bytes, took_ms, "a cache is registered for optimistic reads");
        let entries = device.limits().cqe.min(u32::try_from(CONNECTIONS_MAX).unwrap_or(u32::MAX));
        let queue = CompletionQueue::new(device, entries, 0, None)?;
        // Not the time at which it began: a registration may take longer than IDLE_MAX.
        let (frames, used) = (Arc::clone(frames), Instant::now());
        Ok(CacheDomain { domain, queue, frames_region, seals_region, frames, used })
    }

    /// Private data for the accept of a connection.
    pub(crate) fn accept(&self) -> OptimisticAccept {
        OptimisticAccept {
            version: U16::new(OPTIMISTIC_VERSION),
            epoch: self.frames.epoch(),
            page_shift: OPTIMISTIC_PAGE_SHIFT,
            frames: U32::new(self.frames.frames()),
            frames_base: U64::new(self.frames_region.base() as u64),
            seals_base: U64::new(self.seals_region.base() as u64),
            frames_key: U32::new(self.frames_region.remote_key()),
            seals_key: U32::new(self.seals_region.remote_key()),
            ..OptimisticAccept::default()
        }
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        self.domain.device()
    }

    fn is_of(&self, device: &Arc<Device>, frames: &Arc<dyn SealedFrames>) -> bool {
        // Without its queue no connection can be probed.
        let is_sound = !self.queue.is_broken();
        is_sound && Arc::ptr_eq(self.device(), device) && Arc::ptr_eq(&self.frames, frames)
    }
}

/// A registration on a thread of its own, which takes seconds for a large cache.
struct Registration {
    device: Arc<Device>,
    frames: Arc<dyn SealedFrames>,
    done: Receiver<Result<CacheDomain, VerbsError>>,
}

/// A registration that failed, not tried again for [`RETRY_AFTER`]: each attempt pins memory for seconds.
struct Failed {
    /// Not strong: the removal of a device waits for its users.
    device: Weak<Device>,
    frames: Weak<dyn SealedFrames>,
    at: Instant,
    error: VerbsError,
}

/// The domains in use, one for each cache and device.
pub(crate) struct Domains {
    domains: Vec<CacheDomain>,
    /// One at a time: a peer that connects to all caches at once pins one after the other.
    registration: Option<Registration>,
    failed: Vec<Failed>,
    /// Wakes the service's thread at the end of a registration.
    waker: Waker,
}

impl Domains {
    pub(crate) fn new(waker: Waker) -> Domains {
        Domains { domains: Vec::new(), registration: None, failed: Vec::new(), waker }
    }

    /// The domain of `frames` on `device`; `None`: a registration has to end first, see
    /// [`Domains::take_registered`].
    ///
    /// # Errors
    /// The device refuses, or the limit of locked memory is exceeded. EINVAL: the cache has no seals.
    pub(crate) fn get(
        &mut self,
        device: &Arc<Device>,
        frames: &Arc<dyn SealedFrames>,
    ) -> Result<Option<&CacheDomain>, VerbsError> {
        if let Some(at) = self.domains.iter().position(|it| it.is_of(device, frames)) {
            return Ok(Some(&self.domains[at]));
        }
        self.failed.retain(|it| it.at.elapsed() < RETRY_AFTER);
        let is_it = |it: &&Failed| {
            it.device.upgrade().is_some_and(|of| Arc::ptr_eq(&of, device))
                && it.frames.upgrade().is_some_and(|these| Arc::ptr_eq(&these, frames))
        };
        if let Some(failed) = self.failed.iter().find(is_it) {
            return Err(failed.error);
        }
        if self.registration.is_none() {
            match self.register(device, frames) {
                Ok(registration) => self.registration = Some(registration),
                Err(error) => {
                    self.note_failure(device, frames, error);
                    return Err(error);
                }
            }
        }
        Ok(None)
    }

    fn note_failure(&mut self, device: &Arc<Device>, frames: &Arc<dyn SealedFrames>, error: VerbsError) {
        let (device, frames) = (Arc::downgrade(device), Arc::downgrade(frames));
        self.failed.push(Failed { device, frames, at: Instant::now(), error });
    }

    fn register(
        &self,
        device: &Arc<Device>,
        frames: &Arc<dyn SealedFrames>,
    ) -> Result<Registration, VerbsError> {
        let missing = VerbsError { verb: "ibv_reg_mr", errno: INVALID };
        let seals = frames.seals_area().ok_or(missing)?;
        let (send, done) = channel();
        let of_thread = (Arc::clone(device), Arc::clone(frames), self.waker.clone());
        let work = move || {
            let (device, frames, waker) = of_thread;
            // Fails if the device has been lost meanwhile.
            let _ = send.send(CacheDomain::new(&device, &frames, seals));
            waker.wake();
        };
        let spawned = std::thread::Builder::new().name("register".to_owned()).spawn(work);
        spawned.map_err(|error| VerbsError {
            verb: "pthread_create",
            errno: error.raw_os_error().unwrap_or(INVALID),
        })?;
        Ok(Registration { device: Arc::clone(device), frames: Arc::clone(frames), done })
    }

    /// Takes the registration if it has ended. False: it has not, or there is none.
    pub(crate) fn take_registered(&mut self) -> bool {
        let Some(Registration { device, frames, done }) = &self.registration else { return false };
        let result = match done.try_recv() {
            Ok(result) => result,
            Err(TryRecvError::Empty) => return false,
            // The thread has panicked.
            Err(TryRecvError::Disconnected) => Err(VerbsError { verb: "ibv_reg_mr", errno: INVALID }),
        };
        let (device, frames) = (Arc::clone(device), Arc::clone(frames));
        self.registration = None;
        match result {
            Ok(domain) => self.domains.push(domain),
            Err(error) => self.note_failure(&device, &frames, error),
        }
        true
    }

    /// All domains, to poll their queues.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut CacheDomain> {
        self.domains.iter_mut()
    }

    pub(crate) fn devices(&self) -> impl Iterator<Item = &Arc<Device>> {
        let registering = self.registration.iter().map(|it| &it.device);
        self.domains.iter().map(CacheDomain::device).chain(registering)
    }

    /// Drops the domains of a device. True: its registration, for which others wait, is among them.
    pub(crate) fn drop_device(&mut self, is_it: impl Fn(&Device) -> bool) -> bool {
        give_back(self.domains.extract_if(.., |it| is_it(it.device())).collect());
        self.registration.take_if(|it| is_it(&it.device)).is_some()
    }

    /// Drops the domains that `is_used` has not found in use for [`IDLE_MAX`]; at once those of caches that
    /// were removed, and those whose queue has failed.
    pub(crate) fn drop_idle(&mut self, now: Instant, is_used: impl Fn(&Arc<Domain>) -> bool) {
        let is_over = |it: &mut CacheDomain| {
            if is_used(&it.domain) {
                it.used = now;
                return false;
            }
            !it.frames.is_open() || it.queue.is_broken() || now.saturating_duration_since(it.used) > IDLE_MAX
        };
        give_back(self.domains.extract_if(.., is_over).collect());
    }
}

/// Ends registrations on a thread of its own: that unpins as much memory as registering pins.
fn give_back(domains: Vec<CacheDomain>) {
    if !domains.is_empty() {
        // Without a thread it is done here, as `drop` is then called with the closure.
        let _ = std::thread::Builder::new().name("deregister".to_owned()).spawn(move || drop(domains));
    }
}

const INVALID: i32 = rustix::io::Errno::INVAL.raw_os_error();
