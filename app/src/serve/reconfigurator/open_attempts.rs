//! [`OpenAttempts`]: drives and other targets that are opened in the background, each on a thread of its own,
//! as often as it takes.
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

/// All attempts.
pub struct OpenAttempts {
    origins: Origins,
    attempts: Vec<OpenAttempt>,
}

/// Something absent that was there when it was looked for.
struct OpenAttempt {
    origin: Origin,
    /// Until it is known what came of it.
    thread: Option<JoinHandle<Result<Found, SnapshotError>>>,
    /// It failed: not again before this.
    next: Instant,
    /// Why, as it was told: not told again.
    told: Vec<String>,
}

impl OpenAttempt {
    fn new(origin: Origin, now: Instant) -> OpenAttempt {
        OpenAttempt { origin, thread: None, next: now, told: Vec::new() }
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
                "NVMe drive {address}: open failed ({why}); its namespaces are offline, next attempt in 60 s"
            ),
            Origin::Remote(plan) => tracing::error!(
                "remote disk {}: open failed ({why}); its namespaces are offline, next attempt in 2 s",
                plan.name
            ),
        }
    }
}

fn is_drive(origin: &Origin) -> bool {
    matches!(origin, Origin::Drive(_))
}

impl OpenAttempts {
    /// None yet.
    pub fn new(origins: Origins) -> OpenAttempts {
        OpenAttempts { origins, attempts: Vec::new() }
    }

    /// What is opened.
    pub fn origins(&self) -> &Origins {
        &self.origins
    }

    /// Open all of these, also what does not seem to be there: so it is known why it is not.
    pub fn open_all(&mut self, absent: Vec<Origin>, now: Instant) {
        self.attempts = absent.into_iter().map(|origin| OpenAttempt::new(origin, now)).collect();
        self.open_due(now);
    }

    /// Open what is absent and there, unless that has failed a moment ago. What is not absent any more is
    /// forgotten.
    pub fn open(&mut self, absent: Vec<Origin>, now: Instant) {
        let OpenAttempts { origins, attempts } = self;
        let is_wanted = |origin: &Origin| absent.contains(origin) && origins.is_there(origin);
        attempts.retain(|attempt| attempt.thread.is_some() || is_wanted(&attempt.origin));
        let is_new = |origin: &Origin| attempts.iter().all(|attempt| attempt.origin != *origin);
        let new: Vec<_> = absent.iter().filter(|origin| is_new(origin) && is_wanted(origin)).collect();
        attempts.extend(new.into_iter().map(|origin| OpenAttempt::new(origin.clone(), now)));
        self.open_due(now);
    }

    fn open_due(&mut self, now: Instant) {
        for attempt in
            self.attempts.iter_mut().filter(|attempt| attempt.thread.is_none() && now >= attempt.next)
        {
            let (origins, origin) = (self.origins.clone(), attempt.origin.clone());
            let thread = std::thread::Builder::new().name(format!("open-{origin}"));
            match thread.spawn(move || origins.open(&origin)) {
                Ok(thread) => attempt.thread = Some(thread),
                Err(error) => {
                    attempt.next = now + again(&attempt.origin);
                    attempt.tell(&format!("no thread to open it: {error}"));
                }
            }
        }
    }

    /// One that has come to its end, if there is any, and what came of it. Those that fail are due again some
    /// time from `now`.
    pub fn take(&mut self, now: Instant) -> Option<(Origin, Result<Found, SnapshotError>)> {
        let is_finished =
            |attempt: &&mut OpenAttempt| attempt.thread.as_ref().is_some_and(JoinHandle::is_finished);
        let attempt = self.attempts.iter_mut().find(is_finished)?;
        let thread = attempt.thread.take()?;
        attempt.next = now + again(&attempt.origin);
        let panicked = |_| Err(attempt.origin.failed("opening it has panicked"));
        Some((attempt.origin.clone(), thread.join().unwrap_or_else(panicked)))
    }

    /// Tell why what is at an origin is left out, unless it was told.
    pub fn tell(&mut self, origin: &Origin, why: &str) {
        let known = self.attempts.iter_mut().find(|attempt| attempt.origin == *origin);
        known.into_iter().for_each(|attempt| attempt.tell(why));
    }

    /// What has failed is due at once: the user may have repaired something.
    pub fn again(&mut self, now: Instant) {
        self.attempts.iter_mut().for_each(|attempt| attempt.next = now);
    }

    /// How long there is nothing to look at.
    pub fn pause(&self) -> Duration {
        if self.opening().next().is_some() {
            OPENING_PERIOD
        } else if self.attempts.iter().all(|attempt| is_drive(&attempt.origin)) {
            LOOK_PERIOD
        } else {
            REMOTE_AGAIN
        }
    }

    /// Drives are being opened.
    pub fn is_opening_drives(&self) -> bool {
        self.attempts.iter().any(|attempt| is_drive(&attempt.origin) && attempt.is_opening())
    }

    /// What is being opened, or has been and was not taken.
    pub fn opening(&self) -> impl Iterator<Item = &Origin> {
        self.attempts.iter().filter(|attempt| attempt.thread.is_some()).map(|attempt| &attempt.origin)
    }

    /// What was told.
    #[cfg(test)]
    pub fn told(&self) -> Vec<&str> {
        self.attempts.iter().flat_map(|attempt| &attempt.told).map(String::as_str).collect()
    }
}

fn again(origin: &Origin) -> Duration {
    if is_drive(origin) { DRIVE_AGAIN } else { REMOTE_AGAIN }
}
