//! [`Acceptor`]: the TCP listeners, on the core that accepts for all.

use std::fs::File;
use std::io;

use spindle_reactor::clock::Nanos;
use spindle_reactor::net::{Interest, Watcher};
use spindle_reactor::rate::RateLimit;
use spindle_reactor::run::{Poller, Turn};
use spindle_target::snapshot::{Listener, Snapshot};

use super::arrivals::ACCEPTS_PER_TURN;
use super::shared::Core;
use super::{AdmittedTcp, CoreMessage, Handover, Listening};

/// A core without listeners has one too: it may be told of some.
pub struct Acceptor {
    watcher: Watcher,
    /// With their index in the snapshot.
    listeners: Vec<Listening>,
    /// With the generation that has them: a connection is placed on any core, so all have to know them first.
    new: Vec<(u64, Listening)>,
    /// The generation that the listeners are of.
    as_of: u64,
    /// The listener that is accepted from first in the next turn.
    first: usize,
    is_ready: bool,
    /// A descriptor to be given up where there are no others; only where there are listeners.
    spare: Option<File>,
    log: RateLimit,
}

impl Acceptor {
    /// Of the listeners of the configuration with this generation.
    pub fn new(listeners: Vec<Listening>, generation: u64, watcher: Watcher) -> io::Result<Acceptor> {
        for (listener, index) in &listeners {
            watcher.add(listener, key(*index), Interest::READ)?;
        }
        Ok(Acceptor {
            watcher,
            spare: if listeners.is_empty() { None } else { spare() },
            listeners,
            new: Vec::new(),
            as_of: generation,
            first: 0,
            is_ready: false,
            log: RateLimit::new(1, 5),
        })
    }

    /// All cores have another configuration: accept from the listeners that it has, and from no other.
    #[cold]
    fn change(&mut self, shown: &Snapshot) {
        self.as_of = shown.generation;
        let is_open = |index: usize| shown.listeners.get(index).filter(|listener| listener.is_open);
        let Acceptor { listeners, watcher, new, .. } = self;
        listeners.retain(|(listener, index)| {
            let is_kept = is_open(*index).is_some();
            if !is_kept {
                let _ = watcher.remove(listener);
            }
            is_kept
        });
        for (listener, index) in new.extract_if(.., |new| new.0 <= shown.generation).map(|new| new.1) {
            // Else it was taken away again meanwhile.
            let Some(Listener { address, port_id, .. }) = is_open(index) else { continue };
            match watcher.add(&listener, key(index), Interest::READ) {
                Ok(()) => {
                    tracing::info!(%address, port_id, "listening (NVMe/TCP, discovery included)");
                    listeners.push((listener, index));
                }
                Err(error) => {
                    tracing::error!(%address, %error, "cannot listen, the socket cannot be watched; restart")
                }
            }
        }
        if !self.listeners.is_empty() && self.spare.is_none() {
            self.spare = spare();
        }
        // What came before they were watched.
        self.is_ready = true;
    }

    /// Accept a few connections. The listener stays readable while there are more.
    fn accept(&mut self, core: &mut Core, turn: &mut Turn<'_, CoreMessage>) {
        let listeners = self.listeners.len();
        let mut left = ACCEPTS_PER_TURN;
        for at in 0..listeners {
            // Each is the first in its turn: none is accepted from only while another has none.
            let place = (self.first + at) % listeners;
            while left > 0 {
                let (listener, index) = &self.listeners[place];
                let index = *index;
                left -= 1;
                match listener.accept() {
                    // One that has no place is closed.
                    Ok(Some(accepted)) => {
                        if let Some(admitted) = core.admit(accepted.peer, turn.now) {
                            hand_over(core, turn, (accepted, admitted, index));
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        self.tell(&error, turn.now);
                        if !self.turn_away(place) {
                            break;
                        }
                    }
                }
            }
        }
        self.first = (self.first + 1) % listeners.max(1);
    }

    fn tell(&mut self, error: &io::Error, now: Nanos) {
        if let Some(allowed) = self.log.allow(now) {
            tracing::warn!(%error, untold = allowed.suppressed, "cannot accept a connection; trying again");
        }
    }

    /// Descriptors have run out. A connection that is not taken would wait without an answer, and keep this
    /// core awake: take it with the descriptor that was kept for that, and close it. False: there was none.
    fn turn_away(&mut self, listener: usize) -> bool {
        drop(self.spare.take());
        let is_closed = matches!(self.listeners[listener].0.accept(), Ok(Some(_)));
        self.spare = spare();
        is_closed
    }
}

impl Poller<Core, CoreMessage> for Acceptor {
    fn name(&self) -> &'static str {
        "acceptor"
    }

    fn poll(&mut self, core: &mut Core, turn: &mut Turn<'_, CoreMessage>) -> bool {
        // Hosts are told at the same time.
        if core.target.advertised_snapshot().generation != self.as_of {
            let shown = std::sync::Arc::clone(core.target.advertised_snapshot());
            self.change(&shown);
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
        let CoreMessage::Listen(handover) = message else { return Some(message) };
        let (generation, listeners) = handover.take().unwrap_or_default();
        self.new.extend(listeners.into_iter().map(|listener| (generation, listener)));
        None
    }
}

/// To the core with the fewest connections.
fn hand_over(core: &mut Core, turn: &mut Turn<'_, CoreMessage>, accepted: AdmittedTcp) {
    let least = core.least_loaded();
    if least == turn.core() {
        core.arrivals.tcp.push(accepted);
    } else {
        turn.send(least, CoreMessage::Accept(Handover::new(accepted)));
    }
}

fn key(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// A descriptor that costs nothing.
fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}
