//! The listeners of a shell. Suspended listeners are retried (`device_events`) until a device has their
//! address.

use std::net::SocketAddr;

use spindle_rdma_verbs::{CmChannel, CmId, CmToken, VerbsError};

/// Backlog of `rdma_listen`: pending connection requests.
pub(super) const BACKLOG: u32 = 1024;

/// Tests whether an address can be bound, and releases the address.
///
/// # Errors
/// The address is in use, no RDMA device has it, or there is no connection manager.
pub fn check_address(address: SocketAddr) -> Result<(), VerbsError> {
    CmId::new(&CmChannel::new()?)?.bind(address)
}

/// The connection manager's identifier of a listener; tests implement it without librdmacm. Dropping it
/// releases the address.
pub(super) trait ListenerId {
    /// Returns the token of this listener in events.
    fn token(&self) -> CmToken;

    /// Returns the name of the bound device; `None` for a listener on all addresses.
    fn device_name(&self) -> Option<String>;

    /// Listens on the bound address.
    fn listen(&self) -> Result<(), VerbsError>;
}

impl ListenerId for CmId {
    fn token(&self) -> CmToken {
        CmId::token(self)
    }

    fn device_name(&self) -> Option<String> {
        CmId::device_name(self)
    }

    fn listen(&self) -> Result<(), VerbsError> {
        CmId::listen(self, BACKLOG)
    }
}

/// Reason for the suspension of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SuspendReason {
    /// The configuration has added the listener, and no bind was tried yet.
    New,
    /// The listener's device was removed.
    Device,
    /// The listener's address has moved to another port or device.
    Moved,
    /// Bind or listen failed.
    Refused,
}

/// A configured address that is not listened on now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SuspendedListener {
    pub(super) address: SocketAddr,
    index: usize,
    pub(super) reason: SuspendReason,
}

pub(super) struct Listening<L = CmId> {
    pub(super) id: L,
    address: SocketAddr,
    /// Index of the listener in the configuration.
    pub(super) index: usize,
    /// True once `listen` was called; before, the identifier is only bound.
    is_open: bool,
}

impl<L> Listening<L> {
    fn suspended(&self, reason: SuspendReason) -> SuspendedListener {
        SuspendedListener { address: self.address, index: self.index, reason }
    }
}

/// Listening and suspended listeners; each configured address is in one of the lists.
pub(super) struct Listeners<L = CmId> {
    listening: Vec<Listening<L>>,
    suspended: Vec<SuspendedListener>,
}

impl<L> Default for Listeners<L> {
    fn default() -> Self {
        Listeners { listening: Vec::new(), suspended: Vec::new() }
    }
}

impl<L: ListenerId> Listeners<L> {
    /// Adds a bound identifier. [`Listeners::start`] listens on it.
    pub(super) fn add(&mut self, id: L, address: SocketAddr, index: usize) {
        self.listening.push(Listening { id, address, index, is_open: false });
    }

    /// Listens on all bound addresses and returns the result of each. Failed listeners become suspended.
    pub(super) fn start(&mut self) -> Vec<(SocketAddr, Result<(), VerbsError>)> {
        let mut opened = Vec::new();
        for listening in self.listening.iter_mut().filter(|listening| !listening.is_open) {
            listening.is_open = true;
            let result = listening.id.listen();
            if result.is_err() {
                self.suspended.push(listening.suspended(SuspendReason::Refused));
            }
            opened.push((listening.address, result));
        }
        let is_suspended =
            |it: &Listening<L>| self.suspended.iter().any(|suspended| suspended.address == it.address);
        self.listening.retain(|listening| !is_suspended(listening));
        opened
    }

    pub(super) fn find(&self, token: CmToken) -> Option<&Listening<L>> {
        self.listening.iter().find(|it| it.id.token() == token)
    }

    pub(super) fn has_suspended(&self) -> bool {
        !self.suspended.is_empty()
    }

    /// Returns true if a listener, suspended or not, is on all addresses (0.0.0.0 or ::).
    pub(super) fn is_on_all(&self) -> bool {
        let listening = self.listening.iter().map(|it| it.address);
        listening.chain(self.suspended.iter().map(|it| it.address)).any(|it| it.ip().is_unspecified())
    }

    /// Replaces the listeners by `wanted`: address, and index in the configuration. New listeners are
    /// suspended until the next [`Listeners::retry`].
    pub(super) fn set(&mut self, wanted: &[(SocketAddr, usize)]) {
        self.listening.retain(|it| wanted.contains(&(it.address, it.index)));
        self.suspended.retain(|it| wanted.contains(&(it.address, it.index)));
        for (address, index) in wanted {
            let of_listening = self.listening.iter().map(|it| it.index);
            if !of_listening.chain(self.suspended.iter().map(|it| it.index)).any(|known| known == *index) {
                self.suspended.push(SuspendedListener {
                    address: *address,
                    index: *index,
                    reason: SuspendReason::New,
                });
            }
        }
    }

    /// Suspends the listeners on the removed device with the name `device`.
    pub(super) fn suspend_on(&mut self, device: &str) {
        let is_on = |it: &mut Listening<L>| it.id.device_name().is_some_and(|name| name == device);
        self.suspended
            .extend(self.listening.extract_if(.., is_on).map(|it| it.suspended(SuspendReason::Device)));
    }

    /// Suspends the listener with `token`, whose address has moved to another port or device, and returns the
    /// address. `None`: there is no such listener. Drops the listener's identifier, so that the address is
    /// free for the retry.
    pub(super) fn suspend(&mut self, token: CmToken) -> Option<SocketAddr> {
        let place = self.listening.iter().position(|it| it.id.token() == token)?;
        let suspended = self.listening.swap_remove(place).suspended(SuspendReason::Moved);
        self.suspended.push(suspended);
        Some(suspended.address)
    }

    /// Retries suspended listeners. `bind` returns a listening identifier, or `None` if no open device has
    /// the address. Returns the listeners that listen again.
    pub(super) fn retry(
        &mut self,
        mut bind: impl FnMut(SocketAddr, SuspendReason) -> Option<L>,
    ) -> Vec<SuspendedListener> {
        let mut back = Vec::new();
        for suspended in std::mem::take(&mut self.suspended) {
            let SuspendedListener { address, index, reason } = suspended;
            match bind(address, reason) {
                Some(id) => {
                    self.listening.push(Listening { id, address, index, is_open: true });
                    back.push(suspended);
                }
                None if reason == SuspendReason::New => {
                    self.suspended.push(SuspendedListener { reason: SuspendReason::Refused, ..suspended })
                }
                None => self.suspended.push(suspended),
            }
        }
        back
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    /// Bound addresses.
    type Taken = Rc<RefCell<Vec<SocketAddr>>>;

    struct Fake {
        token: CmToken,
        device: &'static str,
        address: SocketAddr,
        is_refused: bool,
        taken: Taken,
    }

    impl ListenerId for Fake {
        fn token(&self) -> CmToken {
            self.token
        }
        fn device_name(&self) -> Option<String> {
            (!self.device.is_empty()).then(|| self.device.to_owned())
        }
        fn listen(&self) -> Result<(), VerbsError> {
            if self.is_refused { Err(VerbsError { verb: "rdma_listen", errno: 1 }) } else { Ok(()) }
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            self.taken.borrow_mut().retain(|it| *it != self.address);
        }
    }

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], port))
    }

    fn bind(taken: &Taken, address: SocketAddr, device: &'static str) -> Option<Fake> {
        if taken.borrow().contains(&address) {
            return None;
        }
        taken.borrow_mut().push(address);
        let taken = Rc::clone(taken);
        Some(Fake { token: CmToken::next(), device, address, is_refused: false, taken })
    }

    /// Two listeners on device "a" and one on "b"; returns their tokens.
    fn listeners(taken: &Taken) -> (Listeners<Fake>, Vec<CmToken>) {
        let mut listeners = Listeners::default();
        let mut tokens = Vec::new();
        for (index, device) in ["a", "a", "b"].into_iter().enumerate() {
            let address = address(4420 + u16::try_from(index).expect("small"));
            let id = bind(taken, address, device).expect("free");
            tokens.push(id.token);
            listeners.add(id, address, index);
        }
        assert!(listeners.start().iter().all(|(_, result)| result.is_ok()) && !listeners.has_suspended());
        (listeners, tokens)
    }

    #[test]
    fn a_listener_whose_address_moves_is_dropped_and_listens_anew_until_a_device_hears_it() {
        let taken = Taken::default();
        let (mut listeners, tokens) = listeners(&taken);
        assert_eq!(listeners.suspend(CmToken::next()), None);
        assert_eq!(listeners.suspend(tokens[1]), Some(address(4421)));
        assert!(listeners.find(tokens[1]).is_none() && listeners.has_suspended());
        let mut tries = 0;
        // Its new device is not ready at first.
        assert_eq!(listeners.retry(|_, _| None), []);
        assert!(listeners.has_suspended());
        let back = listeners.retry(|address, _| {
            tries += 1;
            bind(&taken, address, "b")
        });
        assert_eq!(
            back,
            [SuspendedListener { address: address(4421), index: 1, reason: SuspendReason::Moved }]
        );
        assert!(tries == 1 && !listeners.has_suspended(), "the address was free, and is heard");
        listeners.suspend_on("b");
        let back = listeners.retry(|address, _| bind(&taken, address, "a"));
        assert_eq!(back.iter().map(|it| it.index).collect::<Vec<_>>(), [2, 1], "it is on b now");
    }

    #[test]
    fn listeners_of_a_device_that_is_gone_listen_again_and_others_go_on() {
        let taken = Taken::default();
        let (mut listeners, tokens) = listeners(&taken);
        listeners.suspend_on("a");
        assert_eq!(
            tokens.iter().filter_map(|it| listeners.find(*it)).map(|it| it.index).collect::<Vec<_>>(),
            [2]
        );
        assert_eq!(*taken.borrow(), [address(4422)], "their addresses are free");
        let back = listeners.retry(|address, _| bind(&taken, address, "a"));
        assert_eq!(
            back.iter().map(|it| (it.index, it.reason)).collect::<Vec<_>>(),
            [(0, SuspendReason::Device), (1, SuspendReason::Device)]
        );
    }

    #[test]
    fn other_addresses_are_listened_on_once_those_that_are_not_wanted_are_free() {
        let taken = Taken::default();
        let (mut listeners, tokens) = listeners(&taken);
        listeners.suspend_on("b");
        listeners.set(&[(address(4421), 1), (address(4430), 3)]);
        assert_eq!(*taken.borrow(), [address(4421)], "the others are free, and are not tried again");
        assert!(listeners.find(tokens[1]).is_some() && listeners.has_suspended());
        let tried = |listeners: &mut Listeners<Fake>, device: Option<&'static str>| {
            let mut tried = Vec::new();
            let back = listeners.retry(|address, reason| {
                tried.push((address, reason));
                device.and_then(|device| bind(&taken, address, device))
            });
            (tried, back.iter().map(|it| (it.index, it.reason)).collect::<Vec<_>>())
        };
        assert_eq!(tried(&mut listeners, None), (vec![(address(4430), SuspendReason::New)], vec![]));
        let back = tried(&mut listeners, Some("a"));
        assert_eq!(back, (vec![(address(4430), SuspendReason::Refused)], vec![(3, SuspendReason::Refused)]));
        listeners.set(&[]);
        assert!(taken.borrow().is_empty() && !listeners.has_suspended());
        listeners.set(&[(address(4430), 3)]);
        assert_eq!(
            tried(&mut listeners, Some("a")).1,
            [(3, SuspendReason::New)],
            "it is back in its old place"
        );
    }

    #[test]
    fn a_listener_that_is_refused_at_the_start_is_tried_again() {
        let taken = Taken::default();
        let mut listeners = Listeners::default();
        let everywhere = SocketAddr::from(([0, 0, 0, 0], 4420));
        let mut id = bind(&taken, everywhere, "").expect("free");
        id.is_refused = true;
        listeners.add(id, everywhere, 7);
        assert!(listeners.start()[0].1.is_err());
        assert!(taken.borrow().is_empty() && listeners.is_on_all() && listeners.start().is_empty());
        let back = listeners.retry(|address, _| bind(&taken, address, ""));
        assert_eq!(
            back,
            [SuspendedListener { address: everywhere, index: 7, reason: SuspendReason::Refused }]
        );
        assert!(listeners.is_on_all() && !listeners.has_suspended());
    }
}
