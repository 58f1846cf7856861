//! Charges of a [`Pool`](super::Pool): who has its buffers, and how many more each may take.
//!
//! Buffers are counted by zone, since a command cannot use every zone: of buffers that are too small it
//! takes at most [`PIECES_MAX`](super::PIECES_MAX). A holder that has no buffer of a zone may take any
//! that is free. Another may take one while it has fewer of that zone than are free (a dynamic threshold
//! with factor 1, Choudhury and Hahne 1998): one greedy holder gets half of each zone, n get about 1/(n+1)
//! each, so a new holder finds buffers of every size. The only host of the process gets all but
//! [`reserve`], which the next host finds.

use std::cell::{Cell, RefCell};

use crate::slab::Slot;

pub(super) const ZONES_MAX: usize = 16;

/// Who is charged for a buffer until it is dropped: a host, a stranger, or a connection that has no host yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder(u32);

/// Marks a holder that is a host; the other bits are its number.
const HOST: u32 = 1 << 31;
/// Marks a holder that is a stranger; the other bits are its number.
const STRANGER: u32 = 1 << 30;
/// Strangers that are told apart.
const STRANGERS: u32 = 64;

impl Holder {
    /// Holder of buffers that are not charged: no table has an entry for it.
    pub(super) const UNCHARGED: Holder = Holder(STRANGER - 1);

    /// The host with this number, of all its connections.
    #[inline]
    #[must_use]
    pub fn host(client: u16) -> Holder {
        Holder(HOST | u32::from(client))
    }

    /// The strangers (peers without a right to any subsystem) of an address with this hash.
    #[must_use]
    pub fn stranger(hash: u32) -> Holder {
        Holder(STRANGER | (hash % STRANGERS))
    }

    /// The connection in this entry of a slab, whatever its generation. Buffers that an ended connection
    /// still has count for its successor.
    #[inline]
    #[must_use]
    pub fn connection(id: Slot) -> Holder {
        Holder(id.to_wire() & 0xffff)
    }
}

/// Buffers of one holder, by zone, and their bytes.
#[derive(Default)]
struct Charge {
    held: [Cell<u32>; ZONES_MAX],
    bytes: Cell<u64>,
}

/// Bytes of memory that each holder takes.
pub const SHARE_BYTES: usize = size_of::<Charge>();

#[derive(Default)]
pub(super) struct Shares {
    connections: RefCell<Vec<Charge>>,
    hosts: RefCell<Vec<Charge>>,
    strangers: RefCell<Vec<Charge>>,
    all_strangers: Charge,
    /// At most one host is connected to the process.
    is_alone: Cell<bool>,
}

/// Buffers of a zone of `count` that the only host leaves free. None of one or two: half would be idle.
fn reserve(count: u32) -> u32 {
    if count > 2 { count.div_ceil(8) } else { 0 }
}

impl Shares {
    /// Extends the table of connections. It never shrinks: a removed entry would lose its charge.
    pub(super) fn set_connections(&self, count: usize) {
        extend(&self.connections, count);
        extend(&self.strangers, STRANGERS as usize);
    }

    /// Extends the table of hosts, as [`Shares::set_connections`].
    pub(super) fn add_host(&self, client: u16) {
        extend(&self.hosts, usize::from(client) + 1);
    }

    pub(super) fn set_alone(&self, is_alone: bool) {
        self.is_alone.set(is_alone);
    }

    #[inline]
    fn with<R>(&self, holder: Holder, act: impl FnOnce(&Charge) -> R) -> Option<R> {
        let (table, index) = if holder.0 & HOST != 0 {
            (&self.hosts, holder.0 & !HOST)
        } else if holder.0 & STRANGER != 0 {
            (&self.strangers, holder.0 & !STRANGER)
        } else {
            (&self.connections, holder.0)
        };
        table.borrow().get(index as usize).map(act)
    }

    /// What all strangers have, if `holder` is one.
    fn group(&self, holder: Holder) -> Option<&Charge> {
        (holder.0 & (HOST | STRANGER) == STRANGER).then_some(&self.all_strangers)
    }

    /// Bytes of all buffers of a holder; 0 for one that is not charged.
    pub(super) fn bytes(&self, holder: Holder) -> u64 {
        self.with(holder, |charge| charge.bytes.get()).unwrap_or(0)
    }

    /// True when `holder` may take one more buffer of a zone of `count` that has `free`.
    #[inline]
    pub(super) fn may_take(&self, holder: Holder, zone: usize, free: u32, count: u32) -> bool {
        match self.with(holder, |charge| charge.held[zone].get()) {
            // Strangers together have no more than are free, and the first of them may have the only buffer.
            held if holder.0 & STRANGER != 0 && holder.0 & HOST == 0 => {
                let all = self.all_strangers.held[zone].get();
                free > if all == 0 { 0 } else { all + held.unwrap_or(0) }
            }
            None | Some(0) => free > 0,
            Some(held) if holder.0 & HOST == 0 => free >= held,
            Some(_) if self.is_alone.get() => free > reserve(count),
            Some(held) => free > held,
        }
    }

    /// How many buffers of a zone of `count` that has `free` the pieces of one request of `holder` may be.
    /// All that are free for a holder that has nothing: what an unused pool can serve is served in the
    /// end.
    pub(super) fn quota(&self, holder: Holder, zone: usize, free: u32, count: u32) -> u32 {
        let of = |charge: &Charge| (charge.bytes.get(), charge.held[zone].get());
        let all = self.group(holder).map(of);
        match (self.with(holder, of), all) {
            (_, Some((0, _))) | (None | Some((0, _)), None) => free,
            (own, Some((_, all))) => free.saturating_sub(all + own.map_or(0, |(_, held)| held)) / 2,
            (Some(_), None) if holder.0 & HOST != 0 && self.is_alone.get() => {
                free.saturating_sub(reserve(count))
            }
            (Some((_, held)), None) => free.saturating_sub(held).div_ceil(2),
        }
    }

    /// True when the next free buffer of the zone is for `holder` if it waits: it has none, or there is no
    /// other host.
    pub(super) fn is_entitled(&self, holder: Holder, zone: usize) -> bool {
        self.is_alone.get() || self.with(holder, |charge| charge.held[zone].get() == 0).unwrap_or(true)
    }

    #[inline]
    pub(super) fn take(&self, holder: Holder, zone: usize, count: u32, bytes: u64) {
        let add = |charge: &Charge| {
            charge.held[zone].set(charge.held[zone].get() + count);
            charge.bytes.set(charge.bytes.get() + bytes);
        };
        self.with(holder, add).and(self.group(holder)).map(add);
    }

    #[inline]
    pub(super) fn give_back(&self, holder: Holder, zone: usize, bytes: u64) {
        let remove = |charge: &Charge| {
            debug_assert!(charge.held[zone].get() > 0, "given back twice, or taken before there was a table");
            charge.held[zone].set(charge.held[zone].get().saturating_sub(1));
            charge.bytes.set(charge.bytes.get().saturating_sub(bytes));
        };
        self.with(holder, remove).and(self.group(holder)).map(remove);
    }
}

fn extend(table: &RefCell<Vec<Charge>>, count: usize) {
    let mut table = table.borrow_mut();
    if count > table.len() {
        table.resize_with(count, Charge::default);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_without_buffers_may_take_all_and_a_greedy_one_half() {
        let shares = Shares::default();
        let host = Holder::host(3);
        assert_eq!(shares.quota(host, 0, 8, 8), 8, "not charged");
        shares.add_host(3);
        let mut free = 8;
        while shares.may_take(host, 0, free, 8) {
            shares.take(host, 0, 1, 4096);
            free -= 1;
        }
        assert_eq!((free, shares.bytes(host)), (4, 4 * 4096));
        assert!(shares.may_take(host, 1, 1, 1) && !shares.may_take(host, 1, 0, 1), "each zone by itself");
        assert_eq!([shares.quota(host, 0, free, 8), shares.quota(host, 1, 9, 9)], [0, 5], "of pieces half");
        assert!(!shares.is_entitled(host, 0) && shares.is_entitled(host, 1));
        assert_eq!(shares.quota(Holder::host(2), 0, free, 8), 4);
    }

    #[test]
    fn strangers_together_have_half_of_a_zone_and_one_a_third() {
        let shares = Shares::default();
        shares.set_connections(1);
        shares.set_alone(true);
        let take_all = |stranger: Holder, free: &mut u32, count: u32| {
            while shares.may_take(stranger, 0, *free, count) {
                shares.take(stranger, 0, 1, 4096);
                *free -= 1;
            }
        };
        let mut free = 32;
        take_all(Holder::stranger(1), &mut free, 32);
        assert_eq!(free, 21);
        (2..40).for_each(|hash| take_all(Holder::stranger(hash), &mut free, 32));
        assert_eq!((free, shares.all_strangers.held[0].get()), (16, 16));
        assert_eq!(shares.quota(Holder::stranger(1), 1, 8, 8), 4);
        (0..11).for_each(|_| shares.give_back(Holder::stranger(1), 0, 4096));
        assert_eq!((shares.bytes(Holder::stranger(65)), shares.all_strangers.held[0].get()), (0, 5));
        assert!(shares.may_take(Holder::stranger(0), 1, 1, 1), "the only buffer, of the first");
    }

    #[test]
    fn the_only_host_takes_all_but_the_reserve() {
        let shares = Shares::default();
        shares.add_host(1);
        shares.set_alone(true);
        let taken = |count: u32| {
            let mut free = count;
            let zone = usize::from(count > 20);
            while shares.may_take(Holder::host(1), zone, free, count) {
                shares.take(Holder::host(1), zone, 1, 1);
                free -= 1;
            }
            (0..count - free).for_each(|_| shares.give_back(Holder::host(1), zone, 1));
            count - free
        };
        assert_eq!([1, 2, 3, 16, 64].map(taken), [1, 2, 2, 14, 56]);
        assert_eq!(shares.bytes(Holder::host(1)), 0);
    }
}
