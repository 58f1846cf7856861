//! Registrations of the caller's buffers. The links share one cache for each domain, thread and [`Limits`].

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use spindle_rdma::{Access, Domain, MemoryRegion, VerbsError};
use spindle_reactor::mem::{Area, Buf, NewUnmaps, Watch, unmaps};
use spindle_reactor::net::Errno;

use super::{Cache, CacheError, Limits, Registrar};
use crate::host::{Keys, Piece};

/// Registers memory in one domain. A registration keeps its memory mapped, so its addresses are not reused.
#[derive(Debug)]
struct DomainRegistrar(Arc<Domain>);

impl Registrar for DomainRegistrar {
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
        // No area: heap memory, which is never registered.
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

/// Registrations of one thread in one domain.
#[derive(Debug)]
pub struct Registrations {
    domain: Arc<Domain>,
    limits: Limits,
    cache: RefCell<Cache<DomainRegistrar>>,
    unmaps: RefCell<Watch<'static>>,
}

thread_local! {
    static REGISTRATIONS: RefCell<Vec<Weak<Registrations>>> = const { RefCell::new(Vec::new()) };
}

impl Registrations {
    /// Returns the registrations of this thread in this domain with these limits, created at first use. They
    /// are dropped with the last link.
    pub fn of(domain: &Arc<Domain>, limits: Limits) -> Rc<Registrations> {
        REGISTRATIONS.with_borrow_mut(|known| {
            known.retain(|one| one.strong_count() > 0);
            let is_same = |one: &Rc<Registrations>| Arc::ptr_eq(&one.domain, domain) && one.limits == limits;
            if let Some(one) = known.iter().filter_map(Weak::upgrade).find(is_same) {
                return one;
            }
            let cache = RefCell::new(Cache::new(DomainRegistrar(Arc::clone(domain)), limits));
            let unmaps = RefCell::new(unmaps().watch());
            let one = Rc::new(Registrations { domain: Arc::clone(domain), limits, cache, unmaps });
            known.push(Rc::downgrade(&one));
            one
        })
    }

    /// Registers a buffer, or finds its registrations. Returns its addresses and keys. An error keeps none.
    #[inline]
    pub fn acquire(&self, buf: &Buf) -> Result<Keys, VerbsError> {
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

    /// Releases a buffer's registrations after its command has completed.
    #[inline]
    pub fn release(&self, keys: &Keys) {
        let mut cache = self.cache.borrow_mut();
        keys.pieces().iter().for_each(|piece| cache.release(piece.lease));
    }

    /// Removes registrations of dropped pools, and deregisters a batch of parked registrations if a full
    /// batch is parked. One call per turn, after sending, is enough: a registration keeps its memory mapped,
    /// so a lookup cannot find another area at the same address.
    #[inline]
    pub fn tidy(&self) {
        let mut cache = self.cache.borrow_mut();
        let news = self.unmaps.borrow_mut().visit_new(|range| cache.invalidate(range.start, range.len()));
        if news == NewUnmaps::Everything {
            cache.invalidate(0, usize::MAX);
        }
        cache.tidy();
    }
}

#[inline]
fn piece(
    cache: &mut Cache<DomainRegistrar>,
    buf: &Buf,
    address: usize,
    bytes: usize,
) -> Result<Piece, VerbsError> {
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
const NO_MEMORY: i32 = Errno::NOMEM.raw_os_error();
const BAD_ADDRESS: i32 = Errno::FAULT.raw_os_error();

/// Returns the area of an address of a buffer; `None` for heap memory. Unwritten blocks of a RAM disk are in
/// the shared area of zeroes.
#[cold]
fn area(buf: &Buf, address: usize) -> Option<Area> {
    let zeroes = Area::zeroes();
    let begin = zeroes.base().as_ptr() as usize;
    if (begin..begin + zeroes.bytes()).contains(&address) { Some(zeroes) } else { buf.area() }
}

/// Returns address and length of a buffer's segments; adjacent segments are merged.
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
