//! The listeners of a shell. Suspended listeners are retried (`device_events`) until a device has their
//! address.

use std::net::SocketAddr;

use spindle_rdma::{CmChannel, CmId, CmToken, VerbsError};

use super::Shell;

/// Backlog of `rdma_listen`: pending connection requests.
pub(super) const BACKLOG: u32 = 1024;
const ENODEV: i32 = 19;
/// No device that can be used has the address.
pub(super) const NO_DEVICE: VerbsError = VerbsError { verb: "rdma_bind_addr", errno: ENODEV };
const EADDRNOTAVAIL: i32 = 99;

/// Tests whether an address can be bound, and releases the address.
///
/// # Errors
/// The address is in use, no RDMA device has it, or there is no connection manager.
pub fn check_address(address: SocketAddr) -> Result<(), VerbsError> {
    CmId::new(&CmChannel::new()?)?.bind(address)
}

/// Returns true if the failed bind of `address` says that no RDMA device of this machine has the address now,
/// or that the machine has no RDMA, and not that the address is in use.
#[must_use]
pub fn is_absent(address: SocketAddr, error: &VerbsError) -> bool {
    // EADDRNOTAVAIL is also the error for an address in use, if one of the two listeners has the wildcard
    // address. A bind with port 0 then succeeds.
    error.is_no_rdma()
        || (error.errno == EADDRNOTAVAIL && check_address(SocketAddr::new(address.ip(), 0)).is_err())
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
    /// No device had the address at the start.
    Absent,
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
    /// Error of the last bind or listen; `None`: none was tried since the suspension.
    pub(super) error: Option<VerbsError>,
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
        SuspendedListener { address: self.address, index: self.index, reason, error: None }
    }
}

/// Listening and suspended listeners; each configured address is in one of the lists.
pub(super) struct Listeners<L = CmId> {
    listening: Vec<Listening<L>>,
    suspended: Vec<SuspendedListener>,
    /// [`Listeners::start`] was called. Before that, no listener is opened.
    is_started: bool,
    /// The configured addresses or the suspended listeners have changed since
    /// [`Listeners::take_changed`].
    is_changed: bool,
}

impl<L> Default for Listeners<L> {
    fn default() -> Self {
        Listeners { listening: Vec::new(), suspended: Vec::new(), is_started: false, is_changed: false }
    }
}

impl<L: ListenerId> Listeners<L> {
    /// Adds a bound identifier. [`Listeners::start`] listens on it.
    pub(super) fn add(&mut self, id: L, address: SocketAddr, index: usize) {
        self.listening.push(Listening { id, address, index, is_open: false });
    }

    /// Adds a suspended listener, whose bind has failed with `error` as no device has the address.
    pub(super) fn add_absent(&mut self, address: SocketAddr, index: usize, error: VerbsError) {
        let (reason, error) = (SuspendReason::Absent, Some(error));
        self.suspended.push(SuspendedListener { address, index, reason, error });
        self.is_changed = true;
    }

    /// Listens on all bound addresses and returns the result of each. Failed listeners become suspended.
    pub(super) fn start(&mut self) -> Vec<(SocketAddr, Result<(), VerbsError>)> {
        let mut opened = Vec::new();
        self.is_started = true;
        for listening in self.listening.iter_mut().filter(|listening| !listening.is_open) {
            listening.is_open = true;
            let result = listening.id.listen();
            if let Err(error) = result {
                let suspended = listening.suspended(SuspendReason::Refused);
                self.suspended.push(SuspendedListener { error: Some(error), ..suspended });
                self.is_changed = true;
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

    /// Returns true if the listener `index` of the configuration is not suspended.
    pub(super) fn is_listening(&self, index: usize) -> bool {
        self.listening.iter().any(|it| it.index == index)
    }

    pub(super) fn has_suspended(&self) -> bool {
        !self.suspended.is_empty()
    }

    /// Returns the suspended listeners if they or the configured addresses have changed since the last call.
    pub(super) fn take_changed(&mut self) -> Option<&[SuspendedListener]> {
        std::mem::take(&mut self.is_changed).then_some(&self.suspended)
    }

    /// Replaces the listeners by `wanted`: address, and index in the configuration. New listeners are
    /// suspended until the next [`Listeners::retry`].
    pub(super) fn set(&mut self, wanted: &[(SocketAddr, usize)]) {
        self.is_changed = true;
        self.listening.retain(|it| wanted.contains(&(it.address, it.index)));
        self.suspended.retain(|it| wanted.contains(&(it.address, it.index)));
        for (address, index) in wanted {
            let of_listening = self.listening.iter().map(|it| it.index);
            if !of_listening.chain(self.suspended.iter().map(|it| it.index)).any(|known| known == *index) {
                self.suspended.push(SuspendedListener {
                    address: *address,
                    index: *index,
                    reason: SuspendReason::New,
                    error: None,
                });
            }
        }
    }

    /// Suspends the listeners on the removed device with the name `device`.
    pub(super) fn suspend_on(&mut self, device: &str) {
        let is_on = |it: &mut Listening<L>| it.id.device_name().is_some_and(|name| name == device);
        let count = self.suspended.len();
        self.suspended
            .extend(self.listening.extract_if(.., is_on).map(|it| it.suspended(SuspendReason::Device)));
        self.is_changed |= self.suspended.len() > count;
    }

    /// Suspends the listener with `token`, whose address has moved to another port or device, and returns the
    /// address. `None`: there is no such listener. Drops the listener's identifier, so that the address is
    /// free for the retry.
    pub(super) fn suspend(&mut self, token: CmToken) -> Option<SocketAddr> {
        let place = self.listening.iter().position(|it| it.id.token() == token)?;
        let suspended = self.listening.swap_remove(place).suspended(SuspendReason::Moved);
        self.suspended.push(suspended);
        self.is_changed = true;
        Some(suspended.address)
    }

    /// Retries suspended listeners. `bind` returns a listening identifier, or an error if it cannot listen or
    /// no open device has the address. Returns the listeners that listen again.
    pub(super) fn retry(
        &mut self,
        mut bind: impl FnMut(SocketAddr, SuspendReason) -> Result<L, VerbsError>,
    ) -> Vec<SuspendedListener> {
        let mut back = Vec::new();
        if !self.is_started {
            return back;
        }
        for suspended in std::mem::take(&mut self.suspended) {
            let SuspendedListener { address, index, reason, error } = suspended;
            match bind(address, reason) {
                Ok(id) => {
                    self.listening.push(Listening { id, address, index, is_open: true });
                    self.is_changed = true;
                    back.push(suspended);
                }
                Err(why) => {
                    let reason = if reason == SuspendReason::New { SuspendReason::Refused } else { reason };
                    self.is_changed |= error != Some(why);
                    self.suspended.push(SuspendedListener { reason, error: Some(why), ..suspended });
                }
            }
        }
        back
    }
}

impl Shell {
    /// Binds `address`, of the listener `index` of the configuration. [`Shell::start_listening`] listens
    /// there.
    ///
    /// # Errors
    /// The address is in use, no usable RDMA device has it, or there is no connection manager yet.
    pub fn bind(&mut self, address: SocketAddr, index: usize) -> Result<(), VerbsError> {
        let id = CmId::new(self.manager.get_or_open(CmChannel::if_listed)?)?;
        id.bind(address)?;
        if id.device_name().is_some() && !self.known.use_device_of(&id) {
            return Err(NO_DEVICE);
        }
        self.listeners.add(id, address, index);
        self.listens = true;
        Ok(())
    }

    /// Returns true if the connection manager is open on this core.
    #[must_use]
    pub fn has_manager(&self) -> bool {
        self.manager.channel().is_some()
    }

    /// Adds the listener `index` of the configuration, whose bind has failed with `error` as no device has
    /// `address`. Once [`Shell::start_listening`] was called, the shell retries it every second.
    pub fn add_absent(&mut self, address: SocketAddr, index: usize, error: VerbsError) {
        self.listeners.add_absent(address, index, error);
        self.listens = true;
    }

    /// Returns true if the listener `index` of the configuration is bound.
    #[must_use]
    pub fn is_listening(&self, index: usize) -> bool {
        self.listeners.is_listening(index)
    }

    /// Returns the addresses that are not listened on, each with the reason, if these or the configured
    /// addresses have changed since the last call.
    #[inline]
    pub fn take_changed_listeners(&mut self) -> Option<Vec<(SocketAddr, String)>> {
        let why = |error: Option<VerbsError>| match error {
            Some(error) => format!("cannot listen over RDMA: {error}"),
            None => "not listened on over RDMA yet".to_owned(),
        };
        let suspended = self.listeners.take_changed()?;
        Some(suspended.iter().map(|it| (it.address, why(it.error))).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    const IN_USE: VerbsError = VerbsError { verb: "rdma_bind_addr", errno: 98 };

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

    fn bind(taken: &Taken, address: SocketAddr, device: &'static str) -> Result<Fake, VerbsError> {
        if taken.borrow().contains(&address) {
            return Err(IN_USE);
        }
        taken.borrow_mut().push(address);
        let taken = Rc::clone(taken);
        Ok(Fake { token: CmToken::next(), device, address, is_refused: false, taken })
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
    fn a_listener_whose_address_moves_is_suspended_and_retried_until_a_device_has_it() {
        let taken = Taken::default();
        let (mut listeners, tokens) = listeners(&taken);
        assert_eq!(listeners.suspend(CmToken::next()), None);
        assert_eq!(listeners.suspend(tokens[1]), Some(address(4421)));
        assert!(listeners.find(tokens[1]).is_none() && listeners.has_suspended());
        let mut tries = 0;
        // Its new device is not ready at first.
        assert_eq!(listeners.retry(|_, _| Err(NO_DEVICE)), []);
        assert!(listeners.has_suspended());
        let back = listeners.retry(|address, _| {
            tries += 1;
            bind(&taken, address, "b")
        });
        assert_eq!(
            back,
            [SuspendedListener {
                address: address(4421),
                index: 1,
                reason: SuspendReason::Moved,
                error: Some(NO_DEVICE)
            }]
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
                device.map_or(Err(NO_DEVICE), |device| bind(&taken, address, device))
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
        assert!(taken.borrow().is_empty() && listeners.start().is_empty());
        let back = listeners.retry(|address, _| bind(&taken, address, ""));
        assert_eq!(
            back.iter().map(|it| (it.index, it.reason)).collect::<Vec<_>>(),
            [(7, SuspendReason::Refused)]
        );
        assert!(!listeners.has_suspended());
    }

    #[test]
    fn an_address_absent_at_start_is_reported_and_retried_once_other_listeners_listen() {
        let taken = Taken::default();
        let mut listeners = Listeners::default();
        let tell = |listeners: &mut Listeners<Fake>| {
            let suspended = listeners.take_changed()?;
            Some(suspended.iter().map(|it| (it.index, it.error)).collect::<Vec<_>>())
        };
        listeners.add(bind(&taken, address(4420), "a").expect("free"), address(4420), 0);
        listeners.add_absent(address(4421), 1, NO_DEVICE);
        assert_eq!(tell(&mut listeners), Some(vec![(1, Some(NO_DEVICE))]));
        assert_eq!(tell(&mut listeners), None, "once");
        // The memory of the disks is not registered yet.
        assert_eq!(listeners.retry(|address, _| bind(&taken, address, "a")), []);
        assert!(listeners.start().iter().all(|(_, result)| result.is_ok()));
        assert_eq!(listeners.retry(|_, _| Err(NO_DEVICE)), []);
        assert_eq!(tell(&mut listeners), None, "it is as before");
        assert_eq!(listeners.retry(|_, _| Err(IN_USE)), []);
        assert_eq!(tell(&mut listeners), Some(vec![(1, Some(IN_USE))]));
        assert!(listeners.is_listening(0) && !listeners.is_listening(1));
        let back = listeners.retry(|address, _| bind(&taken, address, "a"));
        assert_eq!(back.iter().map(|it| it.reason).collect::<Vec<_>>(), [SuspendReason::Absent]);
        assert_eq!(tell(&mut listeners), Some(Vec::new()));
        assert!(listeners.is_listening(1) && !listeners.has_suspended());
        // A change is told also if all of it is listened on: whoever waits for it sees its generation.
        listeners.set(&[(address(4420), 0), (address(4421), 1)]);
        assert_eq!(tell(&mut listeners), Some(Vec::new()));
        listeners.suspend_on("a");
        assert_eq!(tell(&mut listeners), Some(vec![(0, None), (1, None)]));
    }
}
