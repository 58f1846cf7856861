//! [`OpenAttempts`]: opens drives, far targets and files in the background, each on a separate thread, and
//! retries those that fail.
//!
//! A broken drive takes minutes to fail. Neither other attempts nor a reload wait for that.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::config::{OpenedOrigin, Origin, Origins, SnapshotError};

/// Time from a failed attempt to open a drive to the next attempt.
pub const DRIVE_RETRY_PERIOD: Duration = Duration::from_secs(60);
/// Time from a failed attempt to open another origin to the next attempt; shorter, since an attempt is cheap.
pub const REMOTE_RETRY_PERIOD: Duration = Duration::from_secs(2);
/// Longest time between two checks for absent drives and for new sizes of namespaces.
pub const CHECK_PERIOD: Duration = Duration::from_secs(5);
/// Period at which the results of running attempts are checked.
pub const OPENING_CHECK_PERIOD: Duration = Duration::from_millis(100);
/// Most different reasons that are logged for one origin.
const REASONS_MAX: usize = 16;

pub struct OpenAttempts {
    origins: Origins,
    attempts: Vec<OpenAttempt>,
}

/// The attempts to open one origin, past and running.
struct OpenAttempt {
    origin: Origin,
    /// The running attempt, or an ended attempt whose result was not taken.
    thread: Option<JoinHandle<Result<OpenedOrigin, SnapshotError>>>,
    /// Earliest time of the next attempt.
    next: Instant,
    /// Reasons of failures that were logged; each is logged once.
    logged: Vec<String>,
}

impl OpenAttempt {
    fn new(origin: Origin, now: Instant) -> OpenAttempt {
        OpenAttempt { origin, thread: None, next: now, logged: Vec::new() }
    }

    fn is_opening(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    fn log_failure(&mut self, why: &str) {
        if self.logged.len() >= REASONS_MAX || self.logged.iter().any(|logged| logged == why) {
            return;
        }
        self.logged.push(why.to_owned());
        match &self.origin {
            Origin::Drive(address) => tracing::error!(
                "NVMe drive {address}: open failed ({why}); its namespaces are offline, next attempt in 60 s"
            ),
            Origin::Remote(plan) => tracing::error!(
                "remote disk {}: open failed ({why}); its namespaces are offline, next attempt in 2 s",
                plan.name
            ),
            Origin::Path(plan) => tracing::error!(
                "disk {}: open failed ({why}); its namespaces are offline, next attempt in 2 s",
                plan.name
            ),
        }
    }
}

fn is_drive(origin: &Origin) -> bool {
    matches!(origin, Origin::Drive(_))
}

impl OpenAttempts {
    pub fn new(origins: Origins) -> OpenAttempts {
        OpenAttempts { origins, attempts: Vec::new() }
    }

    pub fn origins(&self) -> &Origins {
        &self.origins
    }

    /// Starts an attempt for each of `absent`, also for a drive that [`Origins::is_present`] does not find,
    /// so that the reason is logged.
    pub fn open_all(&mut self, absent: Vec<Origin>, now: Instant) {
        self.attempts = absent.into_iter().map(|origin| OpenAttempt::new(origin, now)).collect();
        self.open_due(now);
    }

    /// Starts the attempts that are due for the origins in `absent` that are present now. Removes the
    /// attempts of other origins, unless they are running or their result was not taken.
    pub fn open(&mut self, absent: Vec<Origin>, now: Instant) {
        let OpenAttempts { origins, attempts } = self;
        let is_wanted = |origin: &Origin| absent.contains(origin) && origins.is_present(origin);
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
                    attempt.next = now + retry_period(&attempt.origin);
                    attempt.log_failure(&format!("cannot start a thread for the open: {error}"));
                }
            }
        }
    }

    /// Returns the origin and result of a finished attempt; `None`: no attempt has finished. The next attempt
    /// for this origin is due a retry period after `now`.
    pub fn take_finished(&mut self, now: Instant) -> Option<(Origin, Result<OpenedOrigin, SnapshotError>)> {
        let is_finished =
            |attempt: &&mut OpenAttempt| attempt.thread.as_ref().is_some_and(JoinHandle::is_finished);
        let attempt = self.attempts.iter_mut().find(is_finished)?;
        let thread = attempt.thread.take()?;
        attempt.next = now + retry_period(&attempt.origin);
        let panicked = |_| Err(attempt.origin.failed("the thread of the open panicked"));
        Some((attempt.origin.clone(), thread.join().unwrap_or_else(panicked)))
    }

    /// Logs why an origin cannot be opened, once for each reason and at most [`REASONS_MAX`] reasons.
    pub fn log_failure(&mut self, origin: &Origin, why: &str) {
        let known = self.attempts.iter_mut().find(|attempt| attempt.origin == *origin);
        known.into_iter().for_each(|attempt| attempt.log_failure(why));
    }

    /// Makes the next attempt of each origin due at `now`, without waiting for its retry period.
    pub fn retry_now(&mut self, now: Instant) {
        self.attempts.iter_mut().for_each(|attempt| attempt.next = now);
    }

    /// Returns why the last attempts for `origin` failed.
    pub fn reason(&self, origin: &Origin) -> Option<&str> {
        let attempt = self.attempts.iter().find(|attempt| attempt.origin == *origin)?;
        attempt.logged.last().map(String::as_str)
    }

    /// Returns the time until attempts or absent origins should be checked again.
    pub fn pause(&self) -> Duration {
        if self.opening().next().is_some() {
            OPENING_CHECK_PERIOD
        } else if self.attempts.iter().all(|attempt| is_drive(&attempt.origin)) {
            CHECK_PERIOD
        } else {
            REMOTE_RETRY_PERIOD
        }
    }

    pub fn is_opening_drives(&self) -> bool {
        self.attempts.iter().any(|attempt| is_drive(&attempt.origin) && attempt.is_opening())
    }

    /// Returns the origins with an attempt that is running or whose result was not taken.
    pub fn opening(&self) -> impl Iterator<Item = &Origin> {
        self.attempts.iter().filter(|attempt| attempt.thread.is_some()).map(|attempt| &attempt.origin)
    }

    /// Logged reasons of all origins.
    #[cfg(test)]
    pub fn logged(&self) -> Vec<&str> {
        self.attempts.iter().flat_map(|attempt| &attempt.logged).map(String::as_str).collect()
    }
}

fn retry_period(origin: &Origin) -> Duration {
    if is_drive(origin) { DRIVE_RETRY_PERIOD } else { REMOTE_RETRY_PERIOD }
}
