//! What follows when a device tells of something outside of completions.
//!
//! ```text
//!   device ──> told (core that listens) ─┬─ what may be another core's ──> tell_others ──> failed (there)
//!                                        └─ failed (here)
//! ```

use spindle_rdma_verbs::AsyncEvent;
use spindle_reactor::slab::Slot;

use super::ending::{End, Tells};

/// One core's part of the device that tells; in tests another than the shell's.
pub(super) trait Part {
    /// Of the device.
    fn name(&self) -> &str;

    /// The device is gone.
    fn lose(&mut self);

    /// Every other core hears it by [`failed`].
    fn tell_others(&mut self, event: AsyncEvent);

    /// End the connection on this queue pair, if it is this core's.
    fn end_queue_pair(&mut self, number: u32);

    /// End the connections on this completion queue, if it is this core's.
    fn end_completions(&mut self, queue: usize);

    /// The connection on this queue pair, if it is this core's.
    fn connection(&self, number: u32) -> Option<Slot>;

    /// Whether the device tells of last receives.
    fn tells(&mut self) -> Option<&mut Tells>;

    /// The end of a connection's queue pair.
    fn end_of(&mut self, id: Slot) -> Option<&mut End>;

    /// See to the end of a connection.
    fn pump(&mut self, id: Slot);
}

/// The device has told this, on the core that listens.
pub(super) fn told(part: &mut impl Part, event: AsyncEvent) {
    match event {
        AsyncEvent::PortDown { port } => tracing::warn!(
            device = part.name(),
            port,
            "RDMA port down: its connections end unless it comes back soon"
        ),
        AsyncEvent::PortUp { port } => tracing::info!(device = part.name(), port, "RDMA port up"),
        AsyncEvent::DeviceFatal => part.lose(),
        AsyncEvent::CompletionQueueError { .. } => {
            let device = part.name();
            tracing::error!(device, "RDMA completion queue failed: its connections end");
            part.tell_others(event);
            failed(part, event);
        }
        AsyncEvent::QueuePairFatal { number } => {
            // A host can bring it about as often as it likes.
            tracing::debug!(device = part.name(), number, "RDMA queue pair failed");
            part.tell_others(event);
            failed(part, event);
        }
        AsyncEvent::QueuePairDrained { number } => {
            if part.connection(number).is_none() {
                part.tell_others(event);
            }
            failed(part, event);
        }
        AsyncEvent::Other(_) => {}
    }
}

/// Something of the device has failed or ended, maybe not this core's.
pub(super) fn failed(part: &mut impl Part, event: AsyncEvent) {
    match event {
        AsyncEvent::CompletionQueueError { queue } => part.end_completions(queue),
        AsyncEvent::QueuePairFatal { number } => part.end_queue_pair(number),
        AsyncEvent::QueuePairDrained { number } => drained(part, number),
        AsyncEvent::PortDown { .. }
        | AsyncEvent::PortUp { .. }
        | AsyncEvent::DeviceFatal
        | AsyncEvent::Other(_) => {}
    }
}

/// A queue pair has taken its last shared receive. It may have come to its error state by itself, and its
/// connection end later.
fn drained(part: &mut impl Part, number: u32) {
    if let Some(tells) = part.tells() {
        tells.on_told();
    }
    let Some(id) = part.connection(number) else { return };
    if part.end_of(id).is_some_and(End::drain) {
        part.pump(id);
    }
}

#[cfg(test)]
mod tests {
    use spindle_reactor::clock::Nanos;
    use spindle_reactor::slab::Slab;

    use super::*;
    use crate::shell::ending::Ending;

    /// A core with one connection.
    struct Core {
        number: u32,
        id: Slot,
        tells: Tells,
        end: End,
        sent: Vec<AsyncEvent>,
        done: Vec<&'static str>,
    }

    impl Core {
        fn new(number: u32) -> Core {
            let id = Slab::with_capacity(1).insert(()).expect("a slot");
            let (tells, end) = (Tells::default(), End::default());
            Core { number, id, tells, end, sent: Vec::new(), done: Vec::new() }
        }

        fn ending(number: u32) -> Core {
            let mut core = Core::new(number);
            core.end.ending = Some(Ending::begin(Nanos::ZERO, core.tells));
            core
        }
    }

    impl Part for Core {
        fn name(&self) -> &str {
            "fake"
        }
        fn lose(&mut self) {
            self.done.push("lose");
        }
        fn tell_others(&mut self, event: AsyncEvent) {
            self.sent.push(event);
        }
        fn end_queue_pair(&mut self, number: u32) {
            if number == self.number {
                self.done.push("end");
            }
        }
        fn end_completions(&mut self, _queue: usize) {
            self.done.push("end all");
        }
        fn connection(&self, number: u32) -> Option<Slot> {
            (number == self.number).then_some(self.id)
        }
        fn tells(&mut self) -> Option<&mut Tells> {
            Some(&mut self.tells)
        }
        fn end_of(&mut self, id: Slot) -> Option<&mut End> {
            (id == self.id).then_some(&mut self.end)
        }
        fn pump(&mut self, id: Slot) {
            assert_eq!(id, self.id);
            self.done.push("pump");
        }
    }

    /// The device tells core 0, and the other core hears what that passes on.
    fn tell(event: AsyncEvent, first: &mut Core, other: &mut Core) {
        told(first, event);
        first.sent.iter().for_each(|event| failed(other, *event));
    }

    #[test]
    fn the_last_receive_of_another_cores_queue_pair_is_told_to_that_core_and_ends_its_wait() {
        let (mut first, mut other) = (Core::ending(1), Core::ending(2));
        tell(AsyncEvent::QueuePairDrained { number: 2 }, &mut first, &mut other);
        assert!(other.end.is_drained && other.done == ["pump"]);
        assert!(!first.end.is_drained && first.done.is_empty());
        assert_eq!((first.tells, other.tells), (Tells::Yes, Tells::Yes), "both know that the device tells");
    }

    #[test]
    fn the_last_receive_of_the_listening_cores_own_queue_pair_is_nobody_elses() {
        let (mut first, mut other) = (Core::ending(1), Core::ending(2));
        tell(AsyncEvent::QueuePairDrained { number: 1 }, &mut first, &mut other);
        assert!(first.end.is_drained && first.done == ["pump"] && first.sent.is_empty());
        assert!(!other.end.is_drained);
    }

    #[test]
    fn the_last_receive_of_a_queue_pair_that_is_not_ended_yet_is_noted_for_then() {
        let (mut first, mut other) = (Core::new(1), Core::new(2));
        tell(AsyncEvent::QueuePairDrained { number: 2 }, &mut first, &mut other);
        assert!(other.end.is_drained && other.done.is_empty());
    }

    #[test]
    fn failures_reach_all_cores_and_each_ends_what_is_its_own() {
        let (mut first, mut other) = (Core::new(1), Core::new(2));
        tell(AsyncEvent::QueuePairFatal { number: 2 }, &mut first, &mut other);
        assert!(first.done.is_empty() && other.done == ["end"]);
        let (mut first, mut other) = (Core::new(1), Core::new(2));
        tell(AsyncEvent::CompletionQueueError { queue: 5 }, &mut first, &mut other);
        assert!(first.done == ["end all"] && other.done == ["end all"]);
        let (mut first, mut other) = (Core::new(1), Core::new(2));
        tell(AsyncEvent::DeviceFatal, &mut first, &mut other);
        assert!(first.done == ["lose"] && other.done.is_empty(), "losing it tells the others");
    }
}
