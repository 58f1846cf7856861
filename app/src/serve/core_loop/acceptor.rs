//! [`Acceptor`]: the poller of the TCP listeners; it accepts the connections of all cores.

use std::fs::File;
use std::io;

use rustix::io::Errno;
use spindle_reactor::clock::Nanos;
use spindle_reactor::net::{Interest, Watcher};
use spindle_reactor::rate::RateLimit;
use spindle_reactor::run::{Poller, Turn};
use spindle_target::snapshot::{Listener, Snapshot};

use super::arrivals::ACCEPTS_PER_TURN;
use super::shared::Core;
use super::{AdmittedTcp, CoreMessage, Listening};

/// Each core has an acceptor; only the acceptor of core `ACCEPTOR` has listeners.
pub struct Acceptor {
    watcher: Watcher,
    listeners: Vec<Listening>,
    /// Listeners of a newer generation. They are opened once that generation is advertised: then every core
    /// has the snapshot, and a connection may be assigned to any core.
    pending: Vec<(u64, Listening)>,
    /// Snapshot generation of `listeners`.
    generation: u64,
    /// Index in `listeners` of the listener that the next turn accepts from first (round-robin).
    first: usize,
    is_ready: bool,
    /// Descriptor of /dev/null. When descriptors run out (EMFILE), it is closed to accept and close a
    /// connection.
    spare: Option<File>,
    log: RateLimit,
}

impl Acceptor {
    /// Watches `listeners`, which are those of the snapshot with `generation`.
    pub fn new(listeners: Vec<Listening>, generation: u64, watcher: Watcher) -> io::Result<Acceptor> {
        for (listener, index) in &listeners {
            watcher.add(listener, key(*index), Interest::READ)?;
        }
        Ok(Acceptor {
            watcher,
            spare: if listeners.is_empty() { None } else { open_spare() },
            listeners,
            pending: Vec::new(),
            generation,
            first: 0,
            is_ready: false,
            log: RateLimit::new(1, 5),
        })
    }

    /// Opens the pending listeners of a newly advertised snapshot, and closes the listeners that the snapshot
    /// lacks.
    #[cold]
    fn change_listeners(&mut self, advertised: &Snapshot) {
        self.generation = advertised.generation;
        let is_open = |index: usize| advertised.listeners.get(index).filter(|listener| listener.is_open);
        let Acceptor { listeners, watcher, pending, .. } = self;
        listeners.retain(|(listener, index)| {
            let is_kept = is_open(*index).is_some();
            if !is_kept {
                let _ = watcher.remove(listener);
            }
            is_kept
        });
        let new = pending.extract_if(.., |new| new.0 <= advertised.generation).map(|new| new.1);
        for (listener, index) in new {
            // A later reload removed this listener.
            let Some(Listener { address, port_id, .. }) = is_open(index) else { continue };
            match watcher.add(&listener, key(index), Interest::READ) {
                Ok(()) => {
                    tracing::info!(%address, port_id, "listening (NVMe/TCP, discovery included)");
                    listeners.push((listener, index));
                }
                Err(error) => {
                    tracing::error!(
                        %address,
                        %error,
                        "cannot add the listening socket to epoll, no connection is accepted; restart"
                    )
                }
            }
        }
        if !self.listeners.is_empty() && self.spare.is_none() {
            self.spare = open_spare();
        }
        // Connections may have arrived before the listeners were watched.
        self.is_ready = true;
    }

    /// Accepts up to [`ACCEPTS_PER_TURN`] connections. Epoll is level-triggered: it reports a listener with
    /// more connections again.
    fn accept(&mut self, core: &mut Core, turn: &mut Turn<'_, CoreMessage>) {
        let listeners = self.listeners.len();
        let mut budget = ACCEPTS_PER_TURN;
        for offset in 0..listeners {
            // Round-robin, so that a busy listener does not starve the others.
            let at = (self.first + offset) % listeners;
            while budget > 0 {
                if !self.has_spare() {
                    break;
                }
                let (listener, index) = &self.listeners[at];
                let index = *index;
                budget -= 1;
                match listener.accept() {
                    // Dropping a connection that is not admitted closes it.
                    Ok(Some(accepted)) => {
                        if let Some(admitted) = core.admit(accepted.peer, turn.now) {
                            hand_over(core, turn, (accepted, admitted, index));
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        self.log_error(&error, turn.now);
                        if !self.accept_and_close(at) {
                            break;
                        }
                    }
                }
            }
        }
        self.first = (self.first + 1) % listeners.max(1);
    }

    fn log_error(&mut self, error: &io::Error, now: Nanos) {
        if let Some(allowed) = self.log.allow(now) {
            tracing::warn!(%error, untold = allowed.suppressed, "cannot accept a connection; trying again");
        }
    }

    /// Opens the spare descriptor if there is none: another thread may have taken the last one while it was
    /// closed. False: there is no descriptor for it. A connection that took the next free one would leave
    /// those behind it to wait.
    fn has_spare(&mut self) -> bool {
        if self.spare.is_some() {
            return true;
        }
        match File::open(NULL) {
            Ok(spare) => self.spare = Some(spare),
            Err(error) => {
                let is_out = matches!(Errno::from_io_error(&error), Some(Errno::MFILE | Errno::NFILE));
                return !is_out; // without a /dev/null connections are accepted all the same
            }
        }
        true
    }

    /// Accepts the next waiting connection with the spare descriptor and closes it. Called after a failed
    /// accept, in case descriptors have run out. In the backlog the connection would get no answer and keep
    /// the listener readable. False: no connection was closed.
    fn accept_and_close(&mut self, listener: usize) -> bool {
        drop(self.spare.take());
        let is_closed = matches!(self.listeners[listener].0.accept(), Ok(Some(_)));
        self.spare = open_spare();
        is_closed
    }
}

impl Poller<Core, CoreMessage> for Acceptor {
    fn name(&self) -> &'static str {
        "acceptor"
    }

    fn poll(&mut self, core: &mut Core, turn: &mut Turn<'_, CoreMessage>) -> bool {
        // Listeners change once the new snapshot is advertised.
        if core.target.advertised_snapshot().generation != self.generation {
            let advertised = std::sync::Arc::clone(core.target.advertised_snapshot());
            self.change_listeners(&advertised);
        }
        let is_ready = std::mem::take(&mut self.is_ready);
        if is_ready {
            self.accept(core, turn);
        }
        is_ready
    }

    fn on_ready(&mut self, _core: &mut Core, _turn: &mut Turn<'_, CoreMessage>, _key: u32) {
        self.is_ready = true;
    }

    fn on_message(
        &mut self,
        _core: &mut Core,
        _turn: &mut Turn<'_, CoreMessage>,
        message: CoreMessage,
    ) -> Option<CoreMessage> {
        let CoreMessage::Listen((generation, listeners)) = message else { return Some(message) };
        self.pending.extend(listeners.into_iter().map(|listener| (generation, listener)));
        None
    }
}

/// Assigns a connection to the core with the fewest connections: queues it for this core, or sends it to
/// another.
fn hand_over(core: &mut Core, turn: &mut Turn<'_, CoreMessage>, accepted: AdmittedTcp) {
    let owner = core.assign_core();
    if owner == turn.core() {
        core.arrivals.tcp.push(accepted);
    } else {
        turn.send(owner, CoreMessage::Accept(Box::new(accepted)));
    }
}

fn key(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

const NULL: &str = "/dev/null";

fn open_spare() -> Option<File> {
    File::open(NULL).ok()
}
