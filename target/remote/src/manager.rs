//! The manager thread of a remote disk: connects associations, supervises them, and reconnects after a loss.
//! Also checks the far namespace and limits the log.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use nvme_spec::admin::{AsyncEvent, AsyncNotice};
use nvme_spec::identify::{IdentifyController, IdentifyNamespace, Nsattr, Oncs, Vwc};
use nvme_spec::log::LogId;
use nvme_spec::sqe::NSID_ALL;
use spindle_nvme_initiator::{
    Association, Backoff, Clock, Controller, ControllerEvent, Error, Former, Namespace, Options, Target,
};
use spindle_reactor::clock::Nanos;
use spindle_reactor::net::Waker;
use spindle_target_card::Agent;
use spindle_target_disk::{Geometry, OpenError, medium_id};

use crate::claim::Claim;
use crate::cluster::ClusterClient;
use crate::shared::{Control, RemoteShared, Shape};
use crate::{RemoteFacts, RemoteSpec};

/// Poll period of the controller; short compared to its keep-alive timeout.
const POLL_PERIOD: Duration = Duration::from_millis(50);
/// Keep-alive timeout. The loss of a far target that stops answering is detected after 1 to 1.5 times this.
const KEEP_ALIVE_MS: u32 = 5000;
/// Timeout of each step of connecting except the answer to Connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest delay of the answer to Connect by a Spindle target. It waits up to 40 s for commands of the host's
/// former queue pairs that are at a disk.
const CONNECT_DELAY_MAX: Duration = Duration::from_secs(40);
/// Timeout of the answer to Connect; longer than [`CONNECT_DELAY_MAX`].
const ANSWER_TIMEOUT: Duration = Duration::from_secs(45);
/// Time after which an association counts as stable.
const STABLE_TIME: Nanos = Nanos::from_secs(10);
/// First and longest wait between connection attempts. The first is short, for a target that restarts.
const BACKOFF_WAITS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Largest disk in bytes: file offsets are signed.
const BYTES_MAX: u64 = i64::MAX as u64;
/// Bytes of the Changed Namespace List.
const CHANGED_BYTES: u32 = 4096;
/// Most consecutive checks of the namespace, each after a further change event.
const CHECKS_MAX: u32 = 16;
/// Most distinct reasons that are logged before an association is stable.
const REASONS_MAX: usize = 16;

/// A connected controller and the namespace of the disk.
struct Connected {
    controller: Controller,
    namespace: Namespace,
    identify: Box<IdentifyNamespace>,
}

type Opened = Result<(Arc<RemoteShared<Association>>, Claim, RemoteFacts), OpenError>;

/// Starts the manager thread and waits for the result of its first connection attempt. The thread itself
/// connects, because a controller must stay on the thread that connected it.
pub(crate) fn open(name: &str, spec: &RemoteSpec) -> Opened {
    let (sender, receiver) = mpsc::channel();
    let (disk, spec) = (name.to_owned(), spec.clone());
    std::thread::Builder::new()
        .name(format!("remote {name}"))
        .spawn(move || manage(&disk, &spec, &sender))
        .map_err(|source| OpenError::system(name, "start a thread", source))?;
    let ended = |_| Err(OpenError::system(name, "connect", std::io::Error::other("its thread has ended")));
    receiver.recv().unwrap_or_else(ended)
}

/// Main function of the thread. Returns when the first connect fails or the disk is dropped.
fn manage(name: &str, spec: &RemoteSpec, sender: &mpsc::Sender<Opened>) {
    match connect_first(name, spec) {
        Ok((manager, claim, facts, controller)) => {
            // Cannot fail: the receiver waits in `open`.
            let _ = sender.send(Ok((Arc::clone(&manager.control.0), claim, facts)));
            manager.run(controller);
        }
        Err(error) => drop(sender.send(Err(error))),
    }
}

/// Connects for the first time. The namespace found defines geometry and identity of the disk.
fn connect_first(
    name: &str,
    spec: &RemoteSpec,
) -> Result<(Manager, Claim, RemoteFacts, Controller), OpenError> {
    let failed = |why: String| {
        let verb = format!("use {}", namespace_label(&spec.target, spec.nsid));
        OpenError::system(name, verb, std::io::Error::other(why))
    };
    let (token, waker) = (token(), Waker::new().map_err(|error| failed(error.to_string()))?);
    let Connected { controller, namespace, identify } =
        connect(spec, token).map_err(|error| failed(error.to_string()))?;
    let facts = facts(controller.identify(), controller.transfer_bytes_max(), &namespace, &identify);
    let geometry = geometry(name, controller.identify(), &namespace, &identify)?;
    let shape = Shape { geometry, must_fua: false };
    let claim = Claim::new(name, spec.target.address, &namespace).map_err(failed)?;
    if !controller.tells_of_namespaces() {
        let place = namespace_label(&spec.target, spec.nsid);
        let what = "does not report namespace changes: a replaced disk is detected at the next connect";
        tracing::warn!(disk = name, "{place}: the far target {what}");
    }
    let abilities = Oncs::from_bits(controller.identify().oncs.get());
    let agent = spec.is_clustered.then(|| Agent::new(geometry.bytes(), Box::new(Clock::boot)));
    let cluster = agent.clone().map(|agent| ClusterClient::new(name, spec.nsid, agent));
    let shared = RemoteShared::new(name, spec, abilities, shape, (Some(waker.clone()), agent));
    let control = Control(Arc::new(shared));
    control.set_fence_timeout(fence_timeout(spec, &controller));
    control.up(1, controller.association(), shape);
    let mut manager = Manager {
        control,
        namespace,
        token,
        log_filter: LogFilter::default(),
        is_unsupported_logged: false,
        cluster,
        waker,
    };
    manager.check_optimistic(&controller);
    Ok((manager, claim, facts, controller))
}

/// Returns a random nonzero token. It identifies the associations of one disk of this process.
fn token() -> u64 {
    RandomState::new().hash_one(std::process::id()) | 1
}

/// Makes one connection attempt. The far target answers the commands that follow End Former Associations only
/// after it has received that command. On success it therefore has the token of the new association. So the
/// next association's End Former Associations ends the new association too.
fn connect(spec: &RemoteSpec, token: u64) -> Result<Connected, Error> {
    let default = Options::default();
    let options = Options {
        io_queues: spec.cores,
        depth: spec.depth,
        keep_alive_ms: KEEP_ALIVE_MS,
        connect_timeout: CONNECT_TIMEOUT,
        connect_answer_timeout: ANSWER_TIMEOUT,
        // Cores check the deadline of each command themselves.
        command_timeout: None,
        // Time is left for the ordinary read that follows.
        optimistic_silence: default.optimistic_silence.min(spec.command_timeout / 4),
        ..default
    };
    let mut controller = Controller::connect(&spec.target, &options)?;
    if controller.queues_granted() < spec.cores {
        let value = u64::from(spec.cores);
        let high = u64::from(controller.queues_granted());
        return Err(Error::Range { field: "I/O queues (one for each core)", value, low: 1, high });
    }
    controller.begin_end_former_associations(token);
    let identify = controller.identify_namespace(spec.nsid)?;
    let namespace = controller.namespace_of(spec.nsid, &identify)?;
    Ok(Connected { controller, namespace, identify })
}

/// Returns the time for which a far target may execute commands of a lost association, unless it confirms
/// their end. A far target ends an association without keep alive within two timeouts, and its commands end
/// within `quiesce`. A target with End Former Associations (Spindle) may need [`CONNECT_DELAY_MAX`] longer.
fn fence_timeout(spec: &RemoteSpec, controller: &Controller) -> Nanos {
    let quiet = Nanos::from_ms(2 * u64::from(KEEP_ALIVE_MS)) + spec.quiesce.into();
    if controller.ends_former_associations() { quiet + CONNECT_DELAY_MAX.into() } else { quiet }
}

/// Returns the text for the namespace in messages: NSID, NQN, transport and address.
fn namespace_label(target: &Target, nsid: u32) -> String {
    format!("namespace {nsid} of {} at {}:{}", target.nqn, target.transport, target.address)
}

/// Returns field, value and allowed values of the first property that makes a namespace unusable as a disk;
/// `None` for a usable namespace.
fn unusable(
    namespace: &Namespace,
    identify: &IdentifyNamespace,
) -> Option<(&'static str, String, &'static str)> {
    let (block_bytes, metadata) = (namespace.block_bytes(), identify.format().ms.get());
    if ![512, 4096].contains(&block_bytes) {
        return Some(("block_bytes", block_bytes.to_string(), "the far namespace must have 512 or 4096"));
    }
    if metadata != 0 {
        let allowed = "the far namespace must have blocks without metadata";
        return Some(("metadata bytes", metadata.to_string(), allowed));
    }
    if namespace.blocks == 0 {
        return Some(("size", "0".to_owned(), "the far namespace must have at least one block"));
    }
    if namespace.bytes() > BYTES_MAX {
        let (blocks, allowed) = (namespace.blocks, "the far namespace must have less than 2^63 bytes");
        return Some(("size", format!("{blocks} blocks of {block_bytes} bytes"), allowed));
    }
    if !namespace.identity.is_given() {
        let allowed = "the far target must report one of them, which identifies the disk after a reconnect";
        return Some(("NGUID, EUI-64, UUID and serial number", "none".to_owned(), allowed));
    }
    None
}

fn geometry(
    disk: &str,
    controller: &IdentifyController,
    namespace: &Namespace,
    identify: &IdentifyNamespace,
) -> Result<Geometry, OpenError> {
    if let Some((field, value, allowed)) = unusable(namespace, identify) {
        return Err(OpenError::setting(disk, field, value, allowed));
    }
    Ok(Geometry {
        block_bytes: namespace.block_bytes(),
        block_count: namespace.blocks,
        is_read_only: Nsattr::from_bits(identify.nsattr).write_protected(),
        has_volatile_cache: Vwc::from_bits(controller.vwc).present(),
        can_deallocate: Oncs::from_bits(controller.oncs.get()).dataset_management(),
        atomic_blocks: 1,
        can_compare_and_write: false,
    })
}

fn facts(
    controller: &IdentifyController,
    transfer_bytes_max: u32,
    namespace: &Namespace,
    identify: &IdentifyNamespace,
) -> RemoteFacts {
    let serial = controller.serial().to_owned();
    RemoteFacts {
        model: controller.model().to_owned(),
        transfer_bytes_max,
        medium_ids: medium_id::of_nvme(&serial, namespace.nsid, identify.nguid, identify.eui64),
        serial,
        identity: namespace.identity,
    }
}

/// Log filter: each reason is logged once until an association has lasted for [`STABLE_TIME`]. So a far
/// target that is lost again and again does not flood the log.
#[derive(Default)]
struct LogFilter {
    reasons: Vec<String>,
    /// The message about a loss was suppressed; the message about the reconnect is suppressed too.
    is_quiet: bool,
}

impl LogFilter {
    /// Returns true if the loss is to be logged; false for a known reason, or after [`REASONS_MAX`] reasons.
    fn on_loss(&mut self, reason: &str) -> bool {
        let is_new = self.is_new(reason);
        self.is_quiet |= !is_new;
        is_new
    }

    fn is_new(&mut self, reason: &str) -> bool {
        if self.reasons.len() >= REASONS_MAX || self.reasons.iter().any(|known| known == reason) {
            return false;
        }
        self.reasons.push(reason.to_owned());
        true
    }

    /// Resets the filter once an association is stable. Returns true if a loss was suppressed.
    fn on_lasted(&mut self) -> bool {
        std::mem::take(self).is_quiet
    }
}

struct Manager {
    control: Control<Association>,
    /// The namespace at the first connect.
    namespace: Namespace,
    /// Identifies this disk's associations in End Former Associations.
    token: u64,
    log_filter: LogFilter,
    /// The missing support of optimistic reads was logged.
    is_unsupported_logged: bool,
    /// `None`: not configured.
    cluster: Option<ClusterClient>,
    /// Woken by a core that has lost, failed to connect or wants to attach its queue, and by the disk's drop.
    waker: Waker,
}

impl Manager {
    /// Supervises associations and reconnects until the disk is dropped.
    fn run(mut self, controller: Controller) {
        let (first, longest) = BACKOFF_WAITS;
        let mut backoff = Backoff::new(first, longest, u64::from(std::process::id()));
        let mut controller = Some(controller);
        let mut number = 1;
        while let Some(mut up) = controller.take() {
            let since = Clock::now();
            let why = self.supervise(&mut up, number);
            if let Some(cluster) = &mut self.cluster {
                cluster.on_down();
            }
            self.control.down();
            let Some(why) = why else {
                // Cores close their queues. A far target that does not answer detects the end by keep alive.
                let _ = up.shutdown();
                return;
            };
            up.abandon();
            // The connection is closed before the next Connect, so that a reachable far target ends the old
            // association first.
            drop(up);
            if self.log_filter.on_loss(&why) {
                tracing::warn!(disk = self.control.0.name, "lost {}: {why}", self.namespace_label());
            }
            backoff.lasted((Clock::now() - since).as_duration());
            number += 1;
            controller = self.reconnect(&mut backoff, number);
        }
    }

    fn spec(&self) -> &RemoteSpec {
        &self.control.0.spec
    }

    fn namespace_label(&self) -> String {
        namespace_label(&self.spec().target, self.spec().nsid)
    }

    /// Supervises an association until it ends. Returns the reason of its end; `None`: the disk was dropped.
    fn supervise(&mut self, controller: &mut Controller, number: u64) -> Option<String> {
        let lasted = Clock::now() + STABLE_TIME;
        // Handle of the core whose Attach is outstanding.
        let mut attaching = None;
        if let Some(cluster) = &mut self.cluster {
            cluster.on_up();
        }
        loop {
            if Clock::now() >= lasted && self.log_filter.on_lasted() {
                tracing::info!(disk = self.control.0.name, "{} stays", self.namespace_label());
            }
            if self.control.is_stopped() {
                return None;
            }
            match controller.poll(Clock::now()) {
                Some(ControllerEvent::Lost(loss)) => return Some(loss.to_string()),
                Some(ControllerEvent::Async(event)) => {
                    if let Err(error) = self.verify(controller, event) {
                        return Some(error.to_string());
                    }
                }
                Some(ControllerEvent::Former(former)) => self.on_former(former, number),
                // An event ends the wait at once: until it is handled, cores may write to another disk.
                None if self.attach_cores(controller, number, &mut attaching) => {}
                None => {
                    if let Err(why) = self.step_cluster(controller) {
                        return Some(why.to_owned());
                    }
                }
            }
            if self.control.lost() >= number {
                return Some("an I/O queue was lost".to_owned());
            }
        }
    }

    /// Advances the membership in the far target's cluster. Sleeps unless there is more to do soon. Fails
    /// when the membership has ended: the disk connects again.
    fn step_cluster(&mut self, controller: &mut Controller) -> Result<(), &'static str> {
        let mut wait = POLL_PERIOD;
        if let Some(cluster) = &mut self.cluster {
            wait = cluster.step(controller, POLL_PERIOD)?;
        }
        if wait > Duration::ZERO {
            controller.wait(wait, &self.waker);
        }
        Ok(())
    }

    /// Gets grants of optimistic connections for the cores that want one, with one Attach at a time, and does
    /// not wait for it. Returns true if a core was answered.
    fn attach_cores(&self, controller: &mut Controller, number: u64, attaching: &mut Option<usize>) -> bool {
        let Some(options) = &self.spec().optimistic else { return false };
        let answer = controller.take_grant();
        let is_answered = answer.is_some();
        if let (Some(answer), Some(handle)) = (answer, attaching.take_if(|_| is_answered)) {
            self.control.grant(handle, number, answer);
        }
        if !controller.is_attaching()
            && let Some(handle) = self.control.next_grant(number)
        {
            match controller.begin_attach(&self.namespace, options) {
                Ok(()) => *attaching = Some(handle),
                Err(error) => self.control.grant(handle, number, Err(error)),
            }
        }
        is_answered
    }

    /// Logs once that the far target has no optimistic reads although they are configured.
    fn check_optimistic(&mut self, controller: &Controller) {
        let is_missing = self.spec().optimistic.is_some() && !controller.has_optimistic_reads();
        if is_missing && !std::mem::replace(&mut self.is_unsupported_logged, true) {
            let what = "the far target has no optimistic reads (rdma.optimistic_port of a Spindle)";
            tracing::warn!(disk = self.control.0.name, "{}: {what}", self.namespace_label());
        }
    }

    fn on_former(&self, former: Former, number: u64) {
        match former {
            Former::Over { .. } => self.control.over(number - 1),
            Former::MayLand => {
                let place = self.namespace_label();
                let what = "the far target may still execute commands of an earlier association";
                tracing::error!(disk = self.control.0.name, "{place}: {what}");
            }
            Former::Unsupported => {}
        }
    }

    /// Handles an event of the controller. Only Namespace Attribute Changed has an effect: the cores send no
    /// commands until Identify has confirmed the identity of the namespace. Blocks. An error ends the
    /// association.
    fn verify(&self, up: &mut Controller, event: AsyncEvent) -> Result<(), Error> {
        if event.as_notice() != Some(AsyncNotice::NAMESPACE_CHANGED) {
            return Ok(());
        }
        self.control.hold();
        for _ in 0..CHECKS_MAX {
            // The log page is read before Identify, as the read re-enables the event for the next change. The
            // list itself is not used: a check of an unchanged namespace costs only four round trips.
            up.log_page(LogId::CHANGED_NAMESPACES, NSID_ALL, 0, CHANGED_BYTES, false)?;
            // Reads the serial number and the volatile write cache again.
            up.refresh_identify()?;
            let identify = up.identify_namespace(self.spec().nsid)?;
            let namespace = up.namespace_of(self.spec().nsid, &identify)?;
            let shape = self.shape(up, &namespace, &identify)?;
            // A change after these reads has caused an event, or will cause one.
            let mut has_changed = false;
            while let Some(event) = up.next_event(Clock::now()) {
                has_changed |= event.as_notice() == Some(AsyncNotice::NAMESPACE_CHANGED);
            }
            if !has_changed {
                self.control.checked(shape);
                return Ok(());
            }
        }
        Err(Error::Answer { step: "Changed Namespace List", what: "the namespaces keep changing" })
    }

    /// Returns the current shape of the namespace; an error if it is another disk or unusable. Logs a changed
    /// shape.
    fn shape(
        &self,
        controller: &Controller,
        namespace: &Namespace,
        identify: &IdentifyNamespace,
    ) -> Result<Shape, Error> {
        if !namespace.is_same_disk(&self.namespace) {
            return Err(Error::OtherDisk { nsid: self.spec().nsid });
        }
        let before = self.control.shape();
        let shape = reshape(before, Vwc::from_bits(controller.identify().vwc), namespace, identify);
        if let Some((_, _, what)) = unusable(namespace, identify) {
            return Err(Error::Answer { step: "Identify Namespace", what });
        }
        if shape != before {
            let (bytes, is_read_only) = (shape.geometry.bytes(), shape.geometry.is_read_only);
            let (disk, with_fua) = (&self.control.0.name, shape.must_fua);
            tracing::info!(disk, bytes, is_read_only, with_fua, "the far namespace has changed");
        }
        Ok(shape)
    }

    /// Retries, with backoff, until association `number` is up. `None`: the disk was dropped.
    fn reconnect(&mut self, backoff: &mut Backoff, number: u64) -> Option<Controller> {
        loop {
            let due = Clock::now() + backoff.next_wait().into();
            loop {
                if self.control.is_stopped() {
                    return None;
                }
                let now = Clock::now();
                if now >= due {
                    break;
                }
                self.waker.wait((due - now).as_duration());
            }
            let found =
                connect(self.spec(), self.token).and_then(|Connected { controller, namespace, identify }| {
                    let shape = self.shape(&controller, &namespace, &identify)?;
                    Ok((controller, shape))
                });
            match found {
                Ok((controller, shape)) => {
                    self.control.set_fence_timeout(fence_timeout(self.spec(), &controller));
                    self.check_optimistic(&controller);
                    self.control.up(number, controller.association(), shape);
                    if !self.log_filter.is_quiet {
                        tracing::info!(disk = self.control.0.name, "found {} again", self.namespace_label());
                    }
                    return Some(controller);
                }
                Err(error) => {
                    let error = error.to_string();
                    if self.log_filter.is_new(&error) {
                        tracing::warn!(
                            disk = self.control.0.name,
                            "cannot use {}: {error}",
                            self.namespace_label()
                        );
                    }
                }
            }
        }
    }
}

/// Returns the new shape after `before`. Hosts read VWC once: if a volatile write cache appears later, all
/// writes use FUA instead.
fn reshape(before: Shape, vwc: Vwc, namespace: &Namespace, identify: &IdentifyNamespace) -> Shape {
    let geometry = Geometry {
        block_count: namespace.blocks,
        is_read_only: Nsattr::from_bits(identify.nsattr).write_protected(),
        ..before.geometry
    };
    Shape { geometry, must_fua: vwc.present() && !before.geometry.has_volatile_cache }
}

#[cfg(test)]
mod tests {
    use spindle_nvme_initiator::Identity;

    use super::*;

    #[test]
    fn a_namespace_that_cannot_be_a_disk_is_refused_by_its_field() {
        let field = |change: fn(&mut IdentifyNamespace), identity| {
            let mut identify = IdentifyNamespace::default();
            identify.nsze.set(8);
            identify.lbaf[0].lbads = 12;
            change(&mut identify);
            let namespace = Namespace::new(1, &identify, identity).expect("a block size");
            unusable(&namespace, &identify).map(|(field, _, _)| field)
        };
        let given = Identity { nguid: [1; 16], ..Identity::default() };
        assert_eq!(field(|_| {}, given), None);
        assert_eq!(field(|identify| identify.lbaf[0].lbads = 13, given), Some("block_bytes"));
        assert_eq!(field(|identify| identify.lbaf[0].ms.set(8), given), Some("metadata bytes"));
        assert_eq!(field(|identify| identify.nsze.set(0), given), Some("size"));
        assert_eq!(field(|identify| identify.nsze.set(1 << 51), given), Some("size"));
        assert_eq!(field(|identify| identify.nsze.set((1 << 51) - 1), given), None);
        let none = "NGUID, EUI-64, UUID and serial number";
        assert_eq!(field(|_| {}, Identity::default()), Some(none));
    }

    #[test]
    fn each_reason_is_told_once_until_an_association_has_lasted() {
        let mut log_filter = LogFilter::default();
        assert!(log_filter.on_loss("an I/O queue was lost") && log_filter.is_new("refused"));
        assert!(!log_filter.is_new("refused"), "the same attempt again");
        assert!(!log_filter.on_lasted(), "the loss was told");
        assert!(log_filter.on_loss("an I/O queue was lost") && !log_filter.on_loss("an I/O queue was lost"));
        assert!(log_filter.on_lasted(), "the second was not");
        assert!(log_filter.is_new("refused"));
    }

    #[test]
    fn a_far_target_that_finds_ever_new_reasons_does_not_fill_the_log() {
        let mut log_filter = LogFilter::default();
        let said = (0..1000).filter(|at| log_filter.is_new(&at.to_string())).count();
        assert_eq!(said, REASONS_MAX);
    }
}
