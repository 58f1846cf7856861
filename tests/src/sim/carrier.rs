//! What the simulator needs of a transport: both ends of connections, and what is between them.

use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe};
use spindle_nvme_transport::ConnectionId;
use spindle_nvme_transport::host::HostData;
use spindle_nvme_transport::{Transport, TransportKind};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_target::core::TargetCore;

use super::rng::Rng;
use super::swarm::Swarm;

/// What happened at the host's end.
#[derive(Debug)]
pub enum Happened {
    /// Connect may be sent.
    Ready,
    /// A command is over.
    Completed {
        /// Its identifier.
        cid: u16,
        /// Its completion.
        cqe: Cqe,
        /// Its data.
        buf: Option<Buf>,
        /// `Ok` when it succeeded.
        result: Result<(), Status>,
    },
    /// The connection is gone. Comes once, last.
    Closed,
}

/// One connection: the host's end, and the way to the target's.
pub trait Carrier: Sized {
    /// The target's end.
    type Conn: Transport;
    /// As listeners are told.
    const KIND: TransportKind;

    /// A connection for queue `qid` to core `index`.
    fn open(
        swarm: &Swarm,
        qid: u16,
        core: &mut TargetCore<Self::Conn>,
        index: usize,
        now: Nanos,
        rng: &mut Rng,
    ) -> Self;

    /// The core that has the other end.
    fn core(&self) -> usize;

    /// Queue a command that fits.
    fn submit(&mut self, sqe: Sqe, data: HostData);

    /// The host's next event.
    fn next_event(&mut self) -> Option<Happened>;

    /// The host has pulled all events.
    fn received(&mut self) {}

    /// Something moves.
    fn shake(&mut self, core: &mut TargetCore<Self::Conn>, swarm: &Swarm, rng: &mut Rng, now: Nanos);

    /// The host's end is gone at once; so is what was on the way.
    fn cut(&mut self, core: &mut TargetCore<Self::Conn>, rng: &mut Rng);

    /// A core says that it has something for its connection `id`.
    fn touch(&mut self, id: ConnectionId) {
        let _ = id;
    }

    /// The target has let go of it.
    fn is_gone(&self) -> bool;

    /// Nothing of it is left.
    fn is_over(&self) -> bool {
        self.is_gone()
    }

    /// The target is to end it.
    fn excuse(&mut self) {}

    /// What fails now is not the target's fault.
    fn is_excused(&self) -> bool {
        false
    }
}
