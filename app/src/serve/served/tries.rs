//! [`Tries`]: drives and other targets that are opened in the background, each on a thread of its own, as
//! often as it takes.
//!
//! One that is broken takes minutes to say so. Nothing waits for it, neither the others nor a reload.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::config::{Found, Origin, Origins, SnapshotError};

/// From a try to open an absent drive that failed to the next.
pub const DRIVE_AGAIN: Duration = Duration::from_secs(60);
/// The same for another target: it is back when it is back, and a try costs it next to nothing.
pub const REMOTE_AGAIN: Duration = Duration::from_secs(2);
/// Between two looks at what is not there, and at sizes.
pub const LOOK_PERIOD: Duration = Duration::from_secs(5);
/// Between two looks at what is being opened.
pub const OPENING_PERIOD: Duration = Duration::from_millis(100);
/// So many different reasons are told of one origin.
const REASONS_MAX: usize = 16;

/// All tries.
pub struct Tries {
    origins: Origins,
    tries: Vec<Try>,
}

/// Something absent that was there when it was looked for.
struct Try {
    origin: Origin,
    /// Until it is known what came of it.
    thread: Option<JoinHandle<Result<Found, SnapshotError>>>,
    /// It failed: not again before this.
    next: Instant,
    /// Why, as it was told: not told again.
    told: Vec<String>,
}

impl Try {
    fn new(origin: Origin, now: Instant) -> Try {
        Try { origin, thread: None, next: now, told: Vec::new() }
    }

    fn is_opening(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Tell why its disks are left out.
    fn tell(&mut self, why: &str) {
        if self.told.len() >= REASONS_MAX || self.told.iter().any(|told| told == why) {
            return;
        }
        self.told.push(why.to_owned());
        match &self.origin {
            Origin::Drive(address) => tracing::error!(
                %address,
                "its namespaces are left out until its drive is there (tried again each minute): {why}"
            ),
            Origin::Remote(plan) => tracing::error!(
                disk = plan.name,
                "its namespaces are left out until its far target is there (tried again every 2 s): {why}"
            ),
        }
    }
}

fn is_drive(origin: &Origin) -> bool {
    matches!(origin, Origin::Drive(_))
}

impl Tries {
    /// None yet.
    pub fn new(origins: Origins) -> Tries {
        Tries { origins, tries: Vec::new() }
    }

    /// What is tried.
    pub fn origins(&self) -> &Origins {
        &self.origins
    }

    /// Open all of these, also what does not seem to be there: so it is known why it is not.
    pub fn open_all(&mut self, absent: Vec<Origin>, now: Instant) {
        self.tries = absent.into_iter().map(|origin| Try::new(origin, now)).collect();
        self.open_due(now);
    }

    /// Open what is absent and there, unless that has failed a moment ago. What is not absent any more is
    /// forgotten.
    pub fn open(&mut self, absent: Vec<Origin>, now: Instant) {
        let Tries { origins, tries } = self;
        let is_wanted = |origin: &Origin| absent.contains(origin) && origins.is_there(origin);
        tries.retain(|tried| tried.thread.is_some() || is_wanted(&tried.origin));
        let is_new = |origin: &Origin| tries.iter().all(|tried| tried.origin != *origin);
        let new: Vec<_> = absent.iter().filter(|origin| is_new(origin) && is_wanted(origin)).collect();
        tries.extend(new.into_iter().map(|origin| Try::new(origin.clone(), now)));
        self.open_due(now);
    }

    fn open_due(&mut self, now: Instant) {
        for tried in self.tries.iter_mut().filter(|tried| tried.thread.is_none() && now >= tried.next) {
            let (origins, origin) = (self.origins.clone(), tried.origin.clone());
            let thread = std::thread::Builder::new().name(format!("open-{origin}"));
            match thread.spawn(move || origins.open(&origin)) {
                Ok(thread) => tried.thread = Some(thread),
                Err(error) => {
                    tried.next = now + again(&tried.origin);
                    tried.tell(&format!("no thread to open it: {error}"));
                }
            }
        }
    }

    /// One that has come to its end, if there is any, and what came of it. Those that fail are due again some
    /// time from `now`.
    pub fn take(&mut self, now: Instant) -> Option<(Origin, Result<Found, SnapshotError>)> {
        let is_finished = |tried: &&mut Try| tried.thread.as_ref().is_some_and(JoinHandle::is_finished);
        let tried = self.tries.iter_mut().find(is_finished)?;
        let thread = tried.thread.take()?;
        tried.next = now + again(&tried.origin);
        let panicked = |_| Err(tried.origin.failed("opening it has panicked"));
        Some((tried.origin.clone(), thread.join().unwrap_or_else(panicked)))
    }

    /// Tell why what is at an origin is left out, unless it was told.
    pub fn tell(&mut self, origin: &Origin, why: &str) {
        let known = self.tries.iter_mut().find(|tried| tried.origin == *origin);
        known.into_iter().for_each(|tried| tried.tell(why));
    }

    /// What has failed is due at once: whoever asks for it may have mended something.
    pub fn again(&mut self, now: Instant) {
        self.tries.iter_mut().for_each(|tried| tried.next = now);
    }

    /// How long there is nothing to look at.
    pub fn pause(&self) -> Duration {
        if self.opening().next().is_some() {
            OPENING_PERIOD
        } else if self.tries.iter().all(|tried| is_drive(&tried.origin)) {
            LOOK_PERIOD
        } else {
            REMOTE_AGAIN
        }
    }

    /// Drives are being opened.
    pub fn is_opening_drives(&self) -> bool {
        self.tries.iter().any(|tried| is_drive(&tried.origin) && tried.is_opening())
    }

    /// What is being opened, or has been and was not taken.
    pub fn opening(&self) -> impl Iterator<Item = &Origin> {
        self.tries.iter().filter(|tried| tried.thread.is_some()).map(|tried| &tried.origin)
    }

    /// What was told.
    #[cfg(test)]
    pub fn told(&self) -> Vec<&str> {
        self.tries.iter().flat_map(|tried| &tried.told).map(String::as_str).collect()
    }
}

fn again(origin: &Origin) -> Duration {
    if is_drive(origin) { DRIVE_AGAIN } else { REMOTE_AGAIN }
}
