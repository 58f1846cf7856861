//! [`Patience`]: how long a script waits for what a disk does.

use std::time::{Duration, Instant};

/// What takes longer hangs. No test passes or fails by it otherwise.
const TIME_MAX: Duration = Duration::from_secs(30);

/// Turns that a script gives. Scripted disks need so many at most; what the kernel does for a file takes as
/// long as it takes, so after those turns the script waits on by the clock.
#[derive(Debug)]
pub struct Patience {
    turns_left: u32,
    since: Option<Instant>,
}

impl Patience {
    /// At least so many turns.
    #[must_use]
    pub fn for_turns(turns: u32) -> Patience {
        Patience { turns_left: turns, since: None }
    }

    /// Another turn is to be given.
    pub fn is_left(&mut self) -> bool {
        if self.turns_left > 0 {
            self.turns_left -= 1;
            return true;
        }
        std::thread::yield_now();
        self.since.get_or_insert_with(Instant::now).elapsed() < TIME_MAX
    }
}
