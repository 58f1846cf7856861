//! Handling of a device's asynchronous events.
//!
//! ```text
//!   device ──> on_async_event (listening core) ─┬─ may concern others ──> forward ──> on_failure (there)
//!                                               └─ on_failure (here)
//! ```

use spindle_nvme_transport::ConnectionId;
use spindle_rdma::AsyncEvent;

use super::ending::{DrainReporting, End};

/// One core's state of the device that reported an event; tests implement it without a shell.
pub(super) trait CoreDevice {
    /// Returns the name of the device, for the log.
    fn name(&self) -> &str;

    /// Handles the loss of the device.
    fn on_device_lost(&mut self);

    /// Forwards the event to all other cores, which call [`on_failure`].
    fn forward(&mut self, event: AsyncEvent);

    /// Ends the connection on the queue pair with this serial, if this core has the queue pair.
    fn end_queue_pair(&mut self, serial: usize);

    /// Ends the connections on the completion queue `queue`, if this core has the queue.
    fn end_completions(&mut self, queue: usize);

    /// Returns the connection on the queue pair `number`; `None` if this core lacks it, or has another
    /// queue pair under that number.
    fn connection(&self, number: u32, serial: usize) -> Option<ConnectionId>;

    /// Returns the record of the device's reports of IBV_EVENT_QP_LAST_WQE_REACHED; `None` if the device was
    /// released.
    fn drain_reporting(&mut self) -> Option<&mut DrainReporting>;

    /// Returns the progress of the end of a connection's queue pair; `None` if the connection has no queue
    /// pair.
    fn queue_pair_end(&mut self, id: ConnectionId) -> Option<&mut End>;

    /// Continues the end of a connection.
    fn pump(&mut self, id: ConnectionId);
}

/// Handles an event of a device, on the listening core.
pub(super) fn on_async_event(part: &mut impl CoreDevice, event: AsyncEvent) {
    match event {
        AsyncEvent::PortDown { port } => tracing::warn!(
            device = part.name(),
            port,
            "RDMA port down: its connections end unless it is up again soon"
        ),
        AsyncEvent::PortUp { port } => tracing::info!(device = part.name(), port, "RDMA port up"),
        AsyncEvent::DeviceFatal => part.on_device_lost(),
        AsyncEvent::CompletionQueueError { .. } => {
            let device = part.name();
            tracing::error!(device, "RDMA completion queue failed: its connections end");
            part.forward(event);
            on_failure(part, event);
        }
        AsyncEvent::QueuePairFatal { number, .. } => {
            // Logged at debug level only: hosts can cause this failure at will.
            tracing::debug!(device = part.name(), number, "RDMA queue pair failed");
            part.forward(event);
            on_failure(part, event);
        }
        AsyncEvent::QueuePairDrained { number, serial } => {
            if part.connection(number, serial).is_none() {
                part.forward(event);
            }
            on_failure(part, event);
        }
        AsyncEvent::Other(_) => {}
    }
}

/// Handles the failure or drain of a queue pair, or the failure of a completion queue. No effect if another
/// core has the queue.
pub(super) fn on_failure(part: &mut impl CoreDevice, event: AsyncEvent) {
    match event {
        AsyncEvent::CompletionQueueError { queue } => part.end_completions(queue),
        AsyncEvent::QueuePairFatal { serial, .. } => part.end_queue_pair(serial),
        AsyncEvent::QueuePairDrained { number, serial } => on_drained(part, number, serial),
        AsyncEvent::PortDown { .. }
        | AsyncEvent::PortUp { .. }
        | AsyncEvent::DeviceFatal
        | AsyncEvent::Other(_) => {}
    }
}

/// Handles IBV_EVENT_QP_LAST_WQE_REACHED. If the connection is not ending yet, the queue pair has entered the
/// error state by itself: the event is only recorded.
fn on_drained(part: &mut impl CoreDevice, number: u32, serial: usize) {
    if let Some(reporting) = part.drain_reporting() {
        reporting.on_report();
    }
    let Some(id) = part.connection(number, serial) else { return };
    if part.queue_pair_end(id).is_some_and(End::drain) {
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
        serial: usize,
        id: ConnectionId,
        reporting: DrainReporting,
        end: End,
        sent: Vec<AsyncEvent>,
        done: Vec<&'static str>,
    }

    impl Core {
        fn new(number: u32) -> Core {
            let id = Slab::with_capacity(1).insert(()).expect("a slot");
            let (reporting, end) = (DrainReporting::default(), End::default());
            Core {
                number,
                serial: 10,
                id: ConnectionId(id),
                reporting,
                end,
                sent: Vec::new(),
                done: Vec::new(),
            }
        }

        fn ending(number: u32) -> Core {
            let mut core = Core::new(number);
            core.end.ending = Some(Ending::begin(Nanos::ZERO, core.reporting));
            core
        }
    }

    impl CoreDevice for Core {
        fn name(&self) -> &str {
            "fake"
        }
        fn on_device_lost(&mut self) {
            self.done.push("lose");
        }
        fn forward(&mut self, event: AsyncEvent) {
            self.sent.push(event);
        }
        fn end_queue_pair(&mut self, serial: usize) {
            if serial == self.serial {
                self.done.push("end");
            }
        }
        fn end_completions(&mut self, _queue: usize) {
            self.done.push("end all");
        }
        fn connection(&self, number: u32, serial: usize) -> Option<ConnectionId> {
            ((number, serial) == (self.number, self.serial)).then_some(self.id)
        }
        fn drain_reporting(&mut self) -> Option<&mut DrainReporting> {
            Some(&mut self.reporting)
        }
        fn queue_pair_end(&mut self, id: ConnectionId) -> Option<&mut End> {
            (id == self.id).then_some(&mut self.end)
        }
        fn pump(&mut self, id: ConnectionId) {
            assert_eq!(id, self.id);
            self.done.push("pump");
        }
    }

    /// Delivers an event to core 0, and what core 0 forwards to the other core.
    fn tell(event: AsyncEvent, first: &mut Core, other: &mut Core) {
        on_async_event(first, event);
        first.sent.iter().for_each(|event| on_failure(other, *event));
    }

    #[test]
    fn last_wqe_reached_is_passed_to_the_core_of_its_queue_pair_and_ends_its_wait() {
        let (mut first, mut other) = (Core::ending(1), Core::ending(2));
        tell(AsyncEvent::QueuePairDrained { number: 2, serial: 10 }, &mut first, &mut other);
        assert!(other.end.is_drained && other.done == ["pump"]);
        assert!(!first.end.is_drained && first.done.is_empty());
        assert_eq!(
            (first.reporting, other.reporting),
            (DrainReporting::Yes, DrainReporting::Yes),
            "both know that the device tells"
        );
    }

    #[test]
    fn the_last_receive_of_the_listening_cores_own_queue_pair_is_nobody_elses() {
        let (mut first, mut other) = (Core::ending(1), Core::ending(2));
        tell(AsyncEvent::QueuePairDrained { number: 1, serial: 10 }, &mut first, &mut other);
        assert!(first.end.is_drained && first.done == ["pump"] && first.sent.is_empty());
        assert!(!other.end.is_drained);
    }

    #[test]
    fn the_last_receive_of_a_queue_pair_that_is_not_ended_yet_is_noted_for_then() {
        let (mut first, mut other) = (Core::new(1), Core::new(2));
        tell(AsyncEvent::QueuePairDrained { number: 2, serial: 10 }, &mut first, &mut other);
        assert!(other.end.is_drained && other.done.is_empty());
    }

    #[test]
    fn events_of_a_queue_pair_that_is_gone_are_nothing_to_the_one_that_has_its_number() {
        let (mut first, mut other) = (Core::ending(1), Core::ending(2));
        for event in [
            AsyncEvent::QueuePairDrained { number: 2, serial: 9 },
            AsyncEvent::QueuePairFatal { number: 2, serial: 9 },
        ] {
            tell(event, &mut first, &mut other);
        }
        assert!(!other.end.is_drained && other.done.is_empty() && first.done.is_empty());
    }

    #[test]
    fn failures_reach_all_cores_and_each_ends_what_is_its_own() {
        let (mut first, mut other) = (Core::new(1), Core { serial: 11, ..Core::new(2) });
        tell(AsyncEvent::QueuePairFatal { number: 2, serial: 11 }, &mut first, &mut other);
        assert!(first.done.is_empty() && other.done == ["end"]);
        let (mut first, mut other) = (Core::new(1), Core::new(2));
        tell(AsyncEvent::CompletionQueueError { queue: 5 }, &mut first, &mut other);
        assert!(first.done == ["end all"] && other.done == ["end all"]);
        let (mut first, mut other) = (Core::new(1), Core::new(2));
        tell(AsyncEvent::DeviceFatal, &mut first, &mut other);
        assert!(first.done == ["lose"] && other.done.is_empty(), "losing it tells the others");
    }
}
