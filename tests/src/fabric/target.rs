//! The target's end: its device, and a shell in small.

use nvme_spec::Sqe;
use nvme_spec::zerocopy::FromBytes;
use spindle_nvme_rdma::controller::{CAPSULE_BYTES, Capsule, Conn, Phase};
use spindle_nvme_rdma::work::{Op, Span, Work};
use spindle_nvme_transport::Connections;
use spindle_target::core::TargetCore;

use super::memory::{Access, buffer, copy, put, sum};
use super::queue::Carried;
use super::{Capsule as Held, Link, Pair};
use crate::sim::Rng;

impl Link {
    /// The next SEND of the host takes a receive.
    pub(super) fn arrives_at_target(&mut self) -> bool {
        if !self.is_connected || self.pair != Pair::Works {
            return false;
        }
        let Some(message) = self.to_target.front() else { return false };
        let bytes = message.bytes.len();
        let Some(mut buf) = self.receives.pop() else {
            assert!(!self.setting.is_honest, "the target has no receive for a capsule");
            return false;
        };
        if bytes > buf.len() {
            // Longer than the receive: both ends fail.
            assert!(!self.setting.is_honest, "a capsule of {bytes} bytes");
            self.receives.push(buf);
            self.lose(true);
            return true;
        }
        put(&mut buf, 0, &message.bytes);
        let sqe = buf.as_slice().and_then(|all| Sqe::read_from_prefix(all).ok());
        let sqe = sqe.map(|(sqe, _)| sqe).unwrap_or_default();
        self.arrived.push_back(Held { bytes: u32::try_from(bytes).expect("short"), sqe, buf });
        self.spare.extend(self.to_target.pop_front());
        true
    }

    /// The completion of a receive.
    pub(super) fn target_receives(&mut self, core: &mut TargetCore<Conn>) -> bool {
        let Some(conn) = self.id.and_then(|id| core.transport(id)) else { return false };
        let Some(Held { bytes, sqe, buf }) = self.arrived.pop_front() else { return false };
        let has_data = bytes > CAPSULE_BYTES;
        let mut buf = Some(buf);
        if !has_data {
            self.receives.extend(buf.take());
        }
        conn.received(Capsule { bytes, sqe, buf });
        self.has_come = true;
        true
    }

    /// The completion of a work request.
    pub(super) fn target_completes(&mut self, core: &mut TargetCore<Conn>) -> bool {
        let Some(conn) = self.id.and_then(|id| core.transport(id)) else { return false };
        let Some(completion) = self.down.take() else { return false };
        conn.completed(completion);
        self.has_come = true;
        self.check(conn);
        true
    }

    fn check(&self, conn: &Conn) {
        let config = &self.setting.target;
        let posted = conn.posted();
        assert!(posted <= config.send_queue, "places: {posted} of {}", config.send_queue);
        assert!(conn.reads_free() <= config.reads_max, "credits: {}", conn.reads_free());
        assert!(
            u64::from(posted) >= self.down.held(),
            "{posted} places taken, the queue has {}",
            self.down.held()
        );
    }

    /// What a shell does in its turn for a connection where there is something to do, and only there: step,
    /// receives, work, end.
    pub(super) fn target_turn(&mut self, core: &mut TargetCore<Conn>, rng: &mut Rng) {
        let Some(id) = self.id else { return };
        let Some(conn) = core.transport(id) else { return };
        let (has_come, is_touched) =
            (std::mem::take(&mut self.has_come), std::mem::take(&mut self.is_touched));
        let is_ending = matches!(conn.phase(), Phase::Ending | Phase::Closed);
        if has_come || is_touched && conn.has_events() {
            core.step(id);
        }
        if has_come || is_touched || is_ending {
            self.pump(core, rng);
        }
        let Some(conn) = core.transport(id) else { return };
        if !matches!(conn.phase(), Phase::Ending | Phase::Closed) {
            return;
        }
        self.is_connected = false;
        self.break_target();
        if let Some(violation) = conn.take_violation() {
            assert!(!self.setting.is_honest, "of an honest host: {violation}");
            self.has_violation = true;
        }
        let conn = core.transport(id).expect("as before");
        let is_drained = self.down.is_idle() && self.arrived.is_empty();
        assert!(!is_drained || conn.posted() == 0, "{} places are not given back", conn.posted());
        // It is not waited for without end.
        if conn.posted() == 0 || rng.permille(20) {
            self.destroy_target(core);
        }
    }

    /// Receives that are free again, then all work, with one doorbell.
    pub(super) fn pump(&mut self, core: &mut TargetCore<Conn>, rng: &mut Rng) -> bool {
        let Some(conn) = self.id.and_then(|id| core.transport(id)) else { return false };
        while let Some(buf) = conn.next_buffer() {
            self.receives.push(buf);
        }
        let mut has_worked = false;
        while let Some(Work { chain, is_signalled, op }) = conn.next_work() {
            has_worked = true;
            let carried = match op {
                Op::Read { local, remote } => Carried::Read { local, remote },
                Op::Write { local, remote } => {
                    let has_look = self.setting.weather.looks > 0 && rng.permille(self.setting.weather.looks);
                    let look = |buf| sum(buf, local.offset as usize, local.bytes as usize);
                    let sum = conn.buffer(chain).filter(|_| has_look).map(look);
                    Carried::Write { local, remote, sum, is_refused: false }
                }
                Op::Send { head, head_bytes, local, invalidate } => {
                    assert_eq!(local.bytes, 0, "a completion has no data behind it");
                    let mut message = self.spare.pop().unwrap_or_default();
                    message.bytes.clear();
                    message.bytes.extend_from_slice(&head[..usize::from(head_bytes)]);
                    message.invalidate = invalidate;
                    Carried::Send { message: Some(message), data: 0 }
                }
            };
            if let Carried::Read { local, .. } | Carried::Write { local, .. } = &carried
                && local.bytes > 0
            {
                let buf = conn.buffer(chain).expect("the chain owns it");
                let segments = segments(buf, local.offset as usize, local.bytes as usize);
                assert!(segments <= self.setting.target.segments_max, "{segments} segments at once");
            }
            self.down.post(chain, is_signalled, carried);
        }
        let conn = self.id.and_then(|id| core.transport(id));
        if let Some(conn) = conn {
            self.check(conn);
        }
        has_worked
    }

    pub(super) fn target_starts(&mut self, core: &mut TargetCore<Conn>) -> bool {
        let Some(conn) = self.id.and_then(|id| core.transport(id)) else { return false };
        if !self.is_connected || self.pair != Pair::Works {
            return false;
        }
        let Some(posted) = self.down.start() else { return false };
        match &mut posted.carried {
            Carried::Send { message, .. } => self.to_host.push_back(message.take().expect("once")),
            Carried::Read { .. } => assert!(conn.buffer(posted.chain).is_some(), "the chain owns it"),
            // Nothing is moved, and the key is not looked at.
            Carried::Write { local: Span { bytes: 0, .. }, .. } => {}
            Carried::Write { local, remote, is_refused, .. } => {
                let from = conn.buffer(posted.chain).expect("the chain owns it");
                if !self.setting.is_honest && remote.key % 2 == 1 {
                    return true; // memory that is not looked at
                }
                let Some((chain, at)) = self.memory.look_up(*remote, local.bytes, Access::Write) else {
                    assert!(!self.setting.is_honest, "access is refused: {remote:?} {local:?}");
                    *is_refused = true;
                    return true;
                };
                let to = buffer(&mut self.host, chain);
                copy(from, local.offset as usize, local.bytes as usize, to, at);
            }
        }
        true
    }

    pub(super) fn target_acknowledged(&mut self, core: &mut TargetCore<Conn>, rng: &mut Rng) -> bool {
        let Some(conn) = self.id.and_then(|id| core.transport(id)) else { return false };
        if !self.is_connected || self.pair != Pair::Works {
            return false;
        }
        let Some(posted) = self.down.front() else { return false };
        let is_allowed = match &posted.carried {
            Carried::Send { .. } | Carried::Write { local: Span { bytes: 0, .. }, .. } => true,
            Carried::Write { local, sum: before, is_refused, .. } => {
                let buf = conn.buffer(posted.chain).expect("it may have to be sent again");
                if let Some(before) = before {
                    let now = sum(buf, local.offset as usize, local.bytes as usize);
                    assert_eq!(now, *before, "what is sent has changed");
                }
                !is_refused
            }
            Carried::Read { local, remote } if !self.setting.is_honest && remote.key % 2 == 1 => {
                let to = conn.buffer_mut(posted.chain).expect("the chain owns it");
                assert!(local.offset as usize + local.bytes as usize <= to.len(), "a READ past the buffer");
                true
            }
            Carried::Read { local, remote } => {
                let from = self.memory.look_up(*remote, local.bytes, Access::Read);
                if let Some((chain, at)) = from {
                    let to = conn.buffer_mut(posted.chain).expect("the chain owns it");
                    let from = self.host.buffer(chain).expect("a key outlives its command");
                    copy(from, at, local.bytes as usize, to, local.offset as usize);
                }
                from.is_some()
            }
        };
        assert!(is_allowed || !self.setting.is_honest, "access is refused: {:?}", posted.carried);
        let is_ok = is_allowed && rng.below(1_000_000) >= self.setting.weather.failure;
        self.down.acknowledge(is_ok);
        if !is_ok {
            // What the host may not see is a remote access error: both ends fail.
            self.lose(!is_allowed);
            self.break_target();
        }
        true
    }

    /// The queue pair is destroyed, after its receives were given back.
    pub(super) fn destroy_target(&mut self, core: &mut TargetCore<Conn>) {
        let Some(id) = self.id.take() else { return };
        self.pair = Pair::Destroyed;
        self.is_connected = false;
        self.receives.extend(self.arrived.drain(..).map(|held| held.buf));
        let conn = core.transport(id).expect("a queue pair");
        while let Some(buf) = conn.next_buffer() {
            self.receives.push(buf);
        }
        assert_eq!(conn.buffers_held(), 0, "buffers of capsules are not given back");
        assert_eq!(self.receives.len(), self.receives_max, "receives are lost");
        conn.on_destroyed();
        core.step(id);
    }

    /// The host is gone with all that it had: the target is told or has to find out, and its end goes on by
    /// itself.
    pub fn cut(&mut self, core: &mut TargetCore<Conn>, rng: &mut Rng) {
        if rng.permille(250) {
            self.destroy_host();
            self.vanish();
            return;
        }
        self.lose(rng.permille(500));
        if self.host_pair != Pair::Destroyed {
            self.destroy_host();
        }
        if rng.permille(500) {
            self.target_disconnected(core);
        }
    }
}

/// In how many pieces this part of a buffer lies.
fn segments(buf: &spindle_reactor::mem::Buf, offset: usize, bytes: usize) -> usize {
    let mut count = 0;
    buf.visit(offset, bytes, |_| count += 1);
    count
}
