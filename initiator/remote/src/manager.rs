//! The thread of a remote disk: its association, from connect to loss, and the next one.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use nvme_spec::admin::{AsyncEvent, AsyncNotice};
use nvme_spec::identify::{IdentifyController, IdentifyNamespace, Nsattr, Oncs, Vwc};
use nvme_spec::log::LogId;
use nvme_spec::sqe::NSID_ALL;
use spindle_disk::{Geometry, OpenError, medium_id};
use spindle_initiator::{Backoff, Clock, Controller, ControllerEvent, Error, Namespace, Options, Target};

use crate::{PATIENCE, RemoteFacts, RemoteSpec, Shared};

/// How often the controller is looked at: often enough for its keep alive.
const PERIOD: Duration = Duration::from_millis(50);
/// Keep-alive time-out. A far target that stops answering is given up after one to one and a half of it;
/// commands wait for [`PATIENCE`] from then on.
const KEEP_ALIVE_MS: u32 = 5000;
/// Time for each step of connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Waits between attempts: the first, for a target that was restarted, and the longest.
const WAITS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Bytes of the Changed Namespace List.
const CHANGED_BYTES: u32 = 4096;
/// So many different reasons are told while associations do not last.
const REASONS_MAX: usize = 16;

/// A controller, and the namespace that is meant.
struct Connected {
    controller: Controller,
    namespace: Namespace,
    identify: Box<IdentifyNamespace>,
}

type Opened = Result<(Arc<Shared>, RemoteFacts), OpenError>;

/// See [`RemoteDisk::new`](crate::RemoteDisk::new). A controller stays on the thread that connected it.
pub(crate) fn open(name: &str, spec: &RemoteSpec) -> Opened {
    let system = |verb: &str, source| {
        let (disk, verb) = (name.to_owned(), verb.to_owned());
        OpenError::System { disk, verb, source }
    };
    let (tell, told) = mpsc::channel();
    let (disk, spec) = (name.to_owned(), spec.clone());
    let thread = std::thread::Builder::new()
        .name(format!("remote {name}"))
        .spawn(move || manage(&disk, &spec, &tell))
        .map_err(|source| system("start a thread", source))?;
    let ended = |_| Err(system("connect", std::io::Error::other("its thread has ended")));
    let (shared, facts) = told.recv().unwrap_or_else(ended)?;
    *shared.manager.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread.thread().clone());
    Ok((shared, facts))
}

/// The thread, until the disk is dropped.
fn manage(name: &str, spec: &RemoteSpec, tell: &mpsc::Sender<Opened>) {
    match first(name, spec) {
        Ok((shared, facts, controller)) => {
            // Who asked is waiting.
            let _ = tell.send(Ok((Arc::clone(&shared), facts)));
            stay(&shared, controller);
        }
        Err(error) => drop(tell.send(Err(error))),
    }
}

/// The first attempt: what it finds is what the disk is from then on.
fn first(name: &str, spec: &RemoteSpec) -> Result<(Arc<Shared>, RemoteFacts, Controller), OpenError> {
    let Connected { controller, namespace, identify } = connect(spec).map_err(|error| OpenError::System {
        disk: name.to_owned(),
        verb: format!("use {}", place(&spec.target, spec.nsid)),
        source: std::io::Error::other(error.to_string()),
    })?;
    let facts = facts(controller.identify(), controller.transfer_bytes_max(), &namespace, &identify);
    let shared = Arc::new(Shared {
        name: name.to_owned(),
        spec: spec.clone(),
        namespace,
        geometry: geometry(name, controller.identify(), &namespace, &identify)?,
        abilities: Oncs::from_bits(controller.identify().oncs.get()),
        current: AtomicU64::new(0),
        association: Mutex::new(None),
        lost: AtomicU64::new(0),
        unverified: AtomicU64::new(0),
        is_stopped: AtomicBool::new(false),
        manager: Mutex::new(None),
    });
    shared.set(1, Some(controller.association()));
    Ok((shared, facts, controller))
}

/// One attempt.
fn connect(spec: &RemoteSpec) -> Result<Connected, Error> {
    let options = Options {
        io_queues: spec.cores,
        depth: spec.depth,
        keep_alive_ms: KEEP_ALIVE_MS,
        connect_timeout: CONNECT_TIMEOUT,
        ..Options::default()
    };
    let mut controller = Controller::connect(&spec.target, &options)?;
    if controller.queues_granted() < spec.cores {
        let value = u64::from(spec.cores);
        let high = u64::from(controller.queues_granted());
        return Err(Error::Range { field: "I/O queues (one for each core)", value, low: 1, high });
    }
    let identify = controller.identify_namespace(spec.nsid)?;
    let namespace = controller.namespace_of(spec.nsid, &identify)?;
    Ok(Connected { controller, namespace, identify })
}

/// As operators write it.
fn place(target: &Target, nsid: u32) -> String {
    format!("namespace {nsid} of {} at {}:{}", target.nqn, target.transport, target.address)
}

fn geometry(
    disk: &str,
    controller: &IdentifyController,
    namespace: &Namespace,
    identify: &IdentifyNamespace,
) -> Result<Geometry, OpenError> {
    let (block_bytes, block_count) = (namespace.block_bytes(), namespace.blocks);
    let refuse = |field, value: String, allowed: &str| {
        Err(OpenError::Setting { disk: disk.to_owned(), field, value, allowed: allowed.to_owned() })
    };
    if ![512, 4096].contains(&block_bytes) {
        return refuse("block_bytes", block_bytes.to_string(), "the far namespace must have 512 or 4096");
    }
    if block_count == 0 {
        return refuse("size", "0".to_owned(), "the far namespace must have at least one block");
    }
    Ok(Geometry {
        block_bytes,
        block_count,
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
    }
}

/// What was told of losses: each reason once, until an association has lasted for
/// [`PATIENCE`]. A far target that comes and goes for years does not fill the log.
#[derive(Default)]
struct Told {
    reasons: Vec<String>,
    /// A loss was not told, nor that the far target was found again.
    is_quiet: bool,
}

impl Told {
    /// True where the loss is to be told.
    fn on_loss(&mut self, reason: &str) -> bool {
        let is_new = self.is_new(reason);
        self.is_quiet |= !is_new;
        is_new
    }

    fn is_new(&mut self, reason: &str) -> bool {
        if self.reasons.len() >= REASONS_MAX || self.reasons.iter().any(|told| told == reason) {
            return false;
        }
        self.reasons.push(reason.to_owned());
        true
    }

    /// An association has lasted. True where it is to be told that all is well.
    fn on_lasted(&mut self) -> bool {
        std::mem::take(self).is_quiet
    }
}

/// One association after the other.
fn stay(shared: &Shared, controller: Controller) {
    let (first, longest) = WAITS;
    let mut backoff = Backoff::new(first, longest, u32::MAX, u64::from(std::process::id()));
    let mut controller = Some(controller);
    let mut number = 1;
    let mut told = Told::default();
    while let Some(mut up) = controller.take() {
        let since = Clock::now();
        let why = supervise(shared, &mut up, number, &mut told);
        shared.set(0, None);
        let Some(why) = why else {
            // Its queues go with the cores' handles. Who does not answer learns of it by keep alive.
            let _ = up.shutdown();
            return;
        };
        up.abandon();
        // Closed before the next Connect, so that a far target that is there ends the old association first.
        drop(up);
        let place = place(&shared.spec.target, shared.spec.nsid);
        if told.on_loss(&why) {
            tracing::warn!(disk = shared.name, "lost {place}: {why}");
        }
        backoff.lasted((Clock::now() - since).as_duration());
        backoff.reset();
        number += 1;
        controller = reconnect(shared, &mut backoff, number, &mut told);
    }
}

/// While an association is up. Why it ended; `None`: the disk is gone.
fn supervise(shared: &Shared, controller: &mut Controller, number: u64, told: &mut Told) -> Option<String> {
    let lasted = Clock::now() + PATIENCE;
    loop {
        if Clock::now() >= lasted && told.on_lasted() {
            tracing::info!(disk = shared.name, "{} stays", place(&shared.spec.target, shared.spec.nsid));
        }
        if shared.is_stopped.load(Ordering::Acquire) {
            return None;
        }
        match controller.poll(Clock::now()) {
            Some(ControllerEvent::Lost(loss)) => return Some(loss.to_string()),
            Some(ControllerEvent::Async(event)) => match verify(shared, controller, number, event) {
                Ok(()) => continue,
                Err(error) => return Some(error.to_string()),
            },
            None => {}
        }
        if shared.lost.load(Ordering::Acquire) >= number {
            return Some("an I/O queue was lost".to_owned());
        }
        std::thread::park_timeout(PERIOD);
    }
}

/// Handles an event. If namespaces have changed, cores send nothing over association `number` until Identify
/// has said that this one is the same disk. Waits.
fn verify(shared: &Shared, up: &mut Controller, number: u64, event: AsyncEvent) -> Result<(), Error> {
    if event.as_notice() != Some(AsyncNotice::NAMESPACE_CHANGED) {
        return Ok(());
    }
    shared.unverified.store(number, Ordering::Release);
    // Read before Identify: from then on the next change is told. What the list says is of no use: a check
    // of a namespace that has not changed costs one round trip.
    up.log_page(LogId::CHANGED_NAMESPACES, NSID_ALL, 0, CHANGED_BYTES, false)?;
    let nsid = shared.spec.nsid;
    if !up.namespace(nsid)?.is_same_disk(&shared.namespace) {
        return Err(Error::OtherDisk { nsid });
    }
    shared.unverified.store(0, Ordering::Release);
    Ok(())
}

/// The next association, as long as it takes. `None`: the disk is gone.
fn reconnect(shared: &Shared, backoff: &mut Backoff, number: u64, told: &mut Told) -> Option<Controller> {
    let place = place(&shared.spec.target, shared.spec.nsid);
    loop {
        let due = Clock::now() + backoff.next_wait().unwrap_or(WAITS.1).into();
        loop {
            if shared.is_stopped.load(Ordering::Acquire) {
                return None;
            }
            let now = Clock::now();
            if now >= due {
                break;
            }
            std::thread::park_timeout((due - now).as_duration());
        }
        let error = match connect(&shared.spec) {
            Ok(connected) if connected.namespace.is_same_disk(&shared.namespace) => {
                if !told.is_quiet {
                    tracing::info!(disk = shared.name, "found {place} again");
                }
                shared.set(number, Some(connected.controller.association()));
                return Some(connected.controller);
            }
            Ok(_) => format!("{}", Error::OtherDisk { nsid: shared.spec.nsid }),
            Err(error) => error.to_string(),
        };
        if told.is_new(&error) {
            tracing::warn!(disk = shared.name, "cannot use {place}: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_told_once_until_an_association_has_lasted() {
        let mut told = Told::default();
        assert!(told.on_loss("an I/O queue was lost") && told.is_new("refused"));
        assert!(!told.is_new("refused"), "the same attempt again");
        assert!(!told.on_lasted(), "the loss was told");
        assert!(told.on_loss("an I/O queue was lost") && !told.on_loss("an I/O queue was lost"));
        assert!(told.on_lasted(), "the second was not");
        assert!(told.is_new("refused"));
    }

    #[test]
    fn a_far_target_that_finds_ever_new_reasons_does_not_fill_the_log() {
        let mut told = Told::default();
        let said = (0..1000).filter(|at| told.is_new(&at.to_string())).count();
        assert_eq!(said, REASONS_MAX);
    }
}
