//! Registrations of the caller's buffers: one cache for each device and thread, shared by its links.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use spindle_rdma::host::{Keys, Piece};
use spindle_rdma::registration::{Cache, CacheError, Limits, Registrar};
use spindle_rdma_verbs::{Access, Device, MemoryRegion, VerbsError};
use spindle_reactor::mem::{Area, Buf, News, Watch, unmaps};

/// Registers with one device. A registration keeps its memory mapped, so that it never is of other pages than
/// it says.
#[derive(Debug)]
struct Verbs(Arc<Device>);

impl Registrar for Verbs {
    type Region = MemoryRegion;
    type Memory = Option<Area>;
    type Error = VerbsError;

    fn register(
        &mut self,
        memory: &Option<Area>,
        address: usize,
        bytes: usize,
        is_writable: bool,
    ) -> Result<MemoryRegion, VerbsError> {
        // The heap's: no device may have it.
        let Some(memory) = memory else { return Err(VerbsError { verb: VERB, errno: BAD_ADDRESS }) };
        let access = if is_writable {
            Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE
        } else {
            Access::REMOTE_READ
        };
        let offset = address.wrapping_sub(memory.base().as_ptr() as usize);
        self.0.register_part(memory.clone(), offset, bytes, access)
    }

    fn keys(region: &MemoryRegion) -> (u32, u32) {
        (region.local_key(), region.remote_key())
    }
}

/// The registrations with one device that one thread has.
#[derive(Debug)]
pub(super) struct Registrations {
    device: Arc<Device>,
    limits: Limits,
    cache: RefCell<Cache<Verbs>>,
    unmaps: RefCell<Watch<'static>>,
}

thread_local! {
    static KNOWN: RefCell<Vec<Weak<Registrations>>> = const { RefCell::new(Vec::new()) };
}

impl Registrations {
    /// Those of this device on this thread, which go when the last link does.
    pub(super) fn of(device: &Arc<Device>, limits: Limits) -> Rc<Registrations> {
        KNOWN.with_borrow_mut(|known| {
            known.retain(|one| one.strong_count() > 0);
            let is_same = |one: &Rc<Registrations>| Arc::ptr_eq(&one.device, device) && one.limits == limits;
            if let Some(one) = known.iter().filter_map(Weak::upgrade).find(is_same) {
                return one;
            }
            let cache = RefCell::new(Cache::new(Verbs(Arc::clone(device)), limits));
            let unmaps = RefCell::new(unmaps().watch());
            let one = Rc::new(Registrations { device: Arc::clone(device), limits, cache, unmaps });
            known.push(Rc::downgrade(&one));
            one
        })
    }

    /// A buffer as the device and the other side need it.
    #[inline]
    pub(super) fn acquire(&self, buf: &Buf) -> Result<Keys, VerbsError> {
        let mut cache = self.cache.borrow_mut();
        if let Some(all) = buf.as_slice() {
            return piece(&mut cache, buf, all.as_ptr() as usize, all.len()).map(Keys::one);
        }
        let mut pieces: Vec<Piece> = Vec::new();
        let outcome = joined(buf).into_iter().try_for_each(|(address, bytes)| {
            pieces.push(piece(&mut cache, buf, address, bytes)?);
            Ok(())
        });
        if let Err(error) = outcome {
            pieces.iter().for_each(|piece| cache.release(piece.lease));
            return Err(error);
        }
        Ok(Keys::many(pieces))
    }

    /// The buffer's command is over.
    #[inline]
    pub(super) fn release(&self, keys: &Keys) {
        let mut cache = self.cache.borrow_mut();
        keys.pieces().iter().for_each(|piece| cache.release(piece.lease));
    }

    /// Once a turn, when the commands are on their way. What is not needed any more (its pool is gone) is let
    /// go here: a registration keeps its memory mapped, so that a lookup cannot find another's.
    #[inline]
    pub(super) fn tidy(&self) {
        let mut cache = self.cache.borrow_mut();
        let news = self.unmaps.borrow_mut().news(|range| cache.invalidate(range.start, range.len()));
        if news == News::Everything {
            cache.invalidate(0, usize::MAX);
        }
        cache.tidy();
    }
}

#[inline]
fn piece(cache: &mut Cache<Verbs>, buf: &Buf, address: usize, bytes: usize) -> Result<Piece, VerbsError> {
    let lease = cache.acquire(address, bytes, buf.is_writable(), || area(buf, address));
    let lease = lease.map_err(|error| match error {
        CacheError::Register(error) => error,
        CacheError::Full | CacheError::Range => VerbsError { verb: VERB, errno: NO_MEMORY },
    })?;
    Ok(Piece {
        address: address as u64,
        bytes: u32::try_from(bytes).unwrap_or(u32::MAX),
        remote_key: lease.remote_key,
        local_key: lease.local_key,
        lease: lease.slot,
    })
}

const VERB: &str = "ibv_reg_mr";
const NO_MEMORY: i32 = rustix::io::Errno::NOMEM.raw_os_error();
const BAD_ADDRESS: i32 = rustix::io::Errno::FAULT.raw_os_error();

/// Where an address of a buffer lies: blocks of a RAM disk that were never written are not in its memory.
#[cold]
fn area(buf: &Buf, address: usize) -> Option<Area> {
    let zeroes = Area::zeroes();
    let begin = zeroes.base().as_ptr() as usize;
    if (begin..begin + zeroes.bytes()).contains(&address) { Some(zeroes) } else { buf.area() }
}

/// The pieces of a buffer, with neighbours joined.
#[cold]
fn joined(buf: &Buf) -> Vec<(usize, usize)> {
    let mut pieces: Vec<(usize, usize)> = Vec::new();
    for segment in buf.segments() {
        let address = segment.as_ptr() as usize;
        match pieces.last_mut() {
            Some((begin, bytes)) if *begin + *bytes == address => *bytes += segment.len(),
            Some(_) | None => pieces.push((address, segment.len())),
        }
    }
    pieces
}
