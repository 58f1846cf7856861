//! Two queue pairs without devices: carries out what both ends of NVMe/RDMA ask for, by copying.
//!
//! ```text
//!   host::Conn ── Work ──> send queue ──┬─ SEND ──> wire ──> receive ──┬──> controller::Conn ── TargetCore
//!       ^  ^                            └─ in order, acknowledged late │         │
//!       │  └──────── receive <── wire <── SEND ──┬── send queue <── Work ────────┘
//!       └─ the host's buffers, by key <── WRITE, READ              completions: late, queues in any order
//! ```
//! What a reliable connection promises holds: one queue's work is carried out and completes in order, what
//! is sent arrives once and in order. What it does not promise is drawn: how long anything takes, which
//! queue's completion is seen first, when the link is lost and who notices ([`Weather`]).
//!
//! What no device would let pass is asserted: more work requests than the queue holds, more READs than
//! agreed, a SEND that finds no receive, memory that changes or goes while it is in use; of an honest host
//! also every key, address and length.
//!
//! | file | what |
//! |---|---|
//! | `queue` | a send queue |
//! | `memory` | the host's keys |
//! | `host`, `target` | the two ends |
//! | [`direct`] | a target core with a host, without chance |

pub mod direct;
pub mod host;
mod memory;
mod queue;
mod target;

use spindle_nvme_transport::ConnectionId;
use std::collections::VecDeque;

use nvme_spec::Sqe;
use spindle_nvme_rdma::controller::{CAPSULE_BYTES, Conn, ConnConfig};
use spindle_nvme_rdma::host::{Conn as HostConn, HostConfig};
use spindle_nvme_transport::{Connections, Peer, TransportKind};
use spindle_reactor::mem::{Buf, Pool};
use spindle_target::core::TargetCore;

use crate::sim::Rng;
use memory::Memory;
use queue::{Message, SendQueue};

/// What chance does to a connection.
#[derive(Debug, Clone, Copy, Default)]
pub struct Weather {
    /// The link is lost, in a million steps.
    pub loss: u64,
    /// A work request fails, in a million.
    pub failure: u64,
    /// Commands that ask for their key to be invalidated, in a thousand.
    pub invalidate: u64,
    /// Most pieces, each with a key, that a buffer of the host is cut in.
    pub pieces: usize,
    /// What is copied is looked at again when it is acknowledged, in a thousand.
    pub looks: u64,
}

/// What a connection is made with.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// The controller's end.
    pub target: ConnConfig,
    /// The host's end.
    pub host: HostConfig,
    /// Capsules that the host may have on their way: receives of the target.
    pub receives: u16,
    /// Chance.
    pub weather: Weather,
    /// The host keeps to the rules; otherwise what it asks for in vain is refused.
    pub is_honest: bool,
}

/// What became of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pair {
    Works,
    /// In its error state.
    Broken,
    Destroyed,
}

/// A capsule that a receive holds, and whose completion is not taken.
struct Capsule {
    bytes: u32,
    sqe: Sqe,
    buf: Buf,
}

/// A connection: both queue pairs, and the host's end of the protocol.
pub struct Link {
    /// The host's end.
    pub host: HostConn,
    /// The core that has the other end.
    pub core: usize,
    /// Its name there; `None` once its queue pair is destroyed.
    pub id: Option<ConnectionId>,
    setting: Setting,
    memory: Memory,
    /// By CID: the key that its command wants to be invalidated.
    asked: Vec<Option<u32>>,
    /// The host's send queue, and the target's.
    up: SendQueue,
    down: SendQueue,
    to_target: VecDeque<Message>,
    to_host: VecDeque<Message>,
    /// Receives of the target that are posted, and that hold something; how many there are.
    receives: Vec<Buf>,
    arrived: VecDeque<Capsule>,
    receives_max: usize,
    /// The same of the host.
    host_receives: usize,
    host_arrived: VecDeque<Message>,
    host_pair: Pair,
    pair: Pair,
    is_connected: bool,
    /// The host has gone without a word: only what is posted ever fails.
    is_silent: bool,
    /// The target has been told that the host is there.
    is_established: bool,
    /// A completion or an event came since the target's last turn; or the core has said that there may be
    /// something to post.
    has_come: bool,
    is_touched: bool,
    /// Something outside of both ends' control has ended it.
    is_excused: bool,
    /// Messages to be used again.
    spare: Vec<Message>,
    /// The target closed it for something that the host did.
    has_violation: bool,
}

impl Link {
    /// A connection whose request was accepted; neither end has seen more.
    ///
    /// # Panics
    /// When the core has no room.
    #[must_use]
    pub fn new(setting: Setting, core: &mut TargetCore<Conn>, index: usize) -> Link {
        let peer = Peer {
            transport: TransportKind::Rdma,
            listener: 0,
            remote: "127.0.0.1:9".parse().expect("an address"),
            local: "127.0.0.1:4420".parse().expect("an address"),
        };
        let id = core.accept(Conn::new(setting.target), peer).unwrap_or_else(|_| panic!("room"));
        let buffer_bytes = (CAPSULE_BYTES + setting.target.in_capsule_bytes).next_multiple_of(64);
        let receives_max = usize::from(setting.receives);
        let pool = Pool::of_strides(buffer_bytes, u32::from(setting.receives)).expect("memory");
        let entries = usize::from(setting.host.entries);
        Link {
            host: HostConn::new(setting.host),
            core: index,
            id: Some(id),
            memory: Memory::default(),
            asked: vec![None; entries],
            up: SendQueue::new(setting.host.send_wr, 0),
            down: SendQueue::new(setting.target.send_queue, setting.target.reads_max),
            to_target: VecDeque::with_capacity(entries),
            to_host: VecDeque::with_capacity(entries),
            receives: (0..receives_max).map(|_| pool.take(buffer_bytes).expect("as many")).collect(),
            arrived: VecDeque::with_capacity(receives_max),
            receives_max,
            host_receives: entries,
            host_arrived: VecDeque::with_capacity(entries),
            host_pair: Pair::Works,
            pair: Pair::Works,
            is_connected: true,
            is_silent: false,
            is_established: false,
            has_come: false,
            is_touched: false,
            is_excused: false,
            spare: Vec::with_capacity(2 * entries),
            has_violation: false,
            setting,
        }
    }

    /// The link was lost, or somebody was told to end it: what fails now is not the target's fault.
    #[must_use]
    pub fn is_excused(&self) -> bool {
        self.is_excused
    }

    /// The core has something for this connection, as it says by `next_send_ready`.
    pub fn touch(&mut self) {
        self.is_touched = true;
    }

    /// From now on the host sends anything ([`Link::inject`]), and takes no answer.
    pub fn become_hostile(&mut self) {
        self.setting.is_honest = false;
        self.is_excused = true;
    }

    /// Any capsule, from a hostile host.
    ///
    /// # Panics
    /// When it is not.
    pub fn inject(&mut self, bytes: &[u8]) {
        assert!(!self.setting.is_honest, "become_hostile comes first");
        let mut message = self.message();
        message.bytes.extend_from_slice(bytes);
        self.to_target.push_back(message);
    }

    /// From now on the target may end it.
    pub fn excuse(&mut self) {
        self.is_excused = true;
    }

    /// The target has noticed that the host broke a rule.
    #[must_use]
    pub fn has_violation(&self) -> bool {
        self.has_violation
    }

    /// Both queue pairs are destroyed and the host has everything back.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.id.is_none() && self.host_pair == Pair::Destroyed
    }

    /// Something happens, up to `burst` times each.
    pub fn shake(&mut self, core: &mut TargetCore<Conn>, rng: &mut Rng, burst: usize) {
        if self.is_connected && rng.below(1_000_000) < self.setting.weather.loss {
            self.lose(rng.permille(500));
        }
        let count = rng.size(1, burst);
        match rng.below(12) {
            0 => _ = self.host_posts(rng),
            1 => (0..count).for_each(|_| _ = self.host_starts()),
            2 => (0..count).for_each(|_| _ = self.host_acknowledged(rng)),
            3 => (0..count).for_each(|_| _ = self.arrives_at_target()),
            4 => (0..count).for_each(|_| _ = self.target_receives(core)),
            5 => (0..count).for_each(|_| _ = self.target_completes(core)),
            6 => self.target_turn(core, rng),
            7 => (0..count).for_each(|_| _ = self.target_starts(core)),
            8 => (0..count).for_each(|_| _ = self.target_acknowledged(core, rng)),
            9 => (0..count).for_each(|_| _ = self.arrives_at_host()),
            10 => (0..count).for_each(|_| _ = self.host_takes(rng)),
            _ => self.manager_speaks(core, rng),
        }
    }

    /// The link is lost: both ends are told by what fails, or neither is told.
    pub fn lose(&mut self, is_told: bool) {
        self.is_connected = false;
        self.is_excused = true;
        self.to_target.clear();
        self.to_host.clear();
        if is_told {
            self.break_host();
            self.break_target();
        }
    }

    /// The host is gone, and no event ever says so: its machine has lost its power. A queue pair notices
    /// when what it has posted has been repeated in vain, and only then.
    pub fn vanish(&mut self) {
        self.lose(false);
        self.is_silent = true;
    }

    fn break_host(&mut self) {
        if self.host_pair == Pair::Works {
            self.host_pair = Pair::Broken;
            self.up.flush();
        }
    }

    fn break_target(&mut self) {
        if self.pair == Pair::Works {
            self.pair = Pair::Broken;
            self.down.flush();
        }
    }

    /// The connection manager's events: ESTABLISHED late, DISCONNECTED once or twice; a queue pair whose
    /// other side is gone fails.
    fn manager_speaks(&mut self, core: &mut TargetCore<Conn>, rng: &mut Rng) {
        let is_up = self.is_connected && !self.is_established;
        if is_up {
            self.establish(core);
            return;
        }
        if self.is_connected || !rng.permille(200) {
            return;
        }
        if self.is_silent {
            if self.down.has_posted() {
                self.break_target();
            }
            return;
        }
        match rng.below(4) {
            0 => self.break_host(),
            1 => self.break_target(),
            2 => self.host_disconnected(),
            _ => self.target_disconnected(core),
        }
    }

    fn establish(&mut self, core: &mut TargetCore<Conn>) {
        self.is_established = true;
        let Some(id) = self.id else { return };
        core.transport(id).expect("a queue pair").on_established();
        self.has_come = true;
    }

    /// DISCONNECTED at the target; it may come twice.
    pub fn target_disconnected(&mut self, core: &mut TargetCore<Conn>) {
        let Some(id) = self.id else { return };
        core.transport(id).expect("a queue pair").on_disconnected();
        self.has_come = true;
    }

    fn message(&mut self) -> Message {
        let mut message = self.spare.pop().unwrap_or_default();
        message.bytes.clear();
        message.invalidate = None;
        message
    }
}
