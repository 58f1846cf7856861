//! [`Syncs`]: serializes the syncs of one core through the page cache.
//!
//! The kernel reports a writeback error once per open file description, to the sync that ends first. A
//! concurrent second sync would succeed although data of its host may be lost. So one sync runs at a time,
//! and requests that arrive meanwhile share the next sync. An error fails running and waiting ones.

/// Tokens of the running and waiting sync requests.
#[derive(Debug)]
pub(super) struct Syncs {
    /// Requests of the running sync. The first token identifies the sync in the ring.
    running: Vec<u64>,
    /// Requests that arrived after the running sync began.
    waiting: Vec<u64>,
}

impl Syncs {
    pub(super) fn new(requests: usize) -> Syncs {
        Syncs { running: Vec::with_capacity(requests), waiting: Vec::with_capacity(requests) }
    }

    /// Adds a request. `Some`: no sync is running, and the caller starts a sync with this token.
    pub(super) fn ask(&mut self, token: u64) -> Option<u64> {
        if self.running.is_empty() {
            self.running.push(token);
            return Some(token);
        }
        self.waiting.push(token);
        None
    }

    /// Returns true if `token` identifies the running sync.
    pub(super) fn is_running(&self, token: u64) -> bool {
        self.running.first() == Some(&token)
    }

    /// Ends the running sync: calls `each` for its requests, and after an error also for the waiting
    /// requests. `Some`: the caller starts the next sync with this token.
    pub(super) fn end(&mut self, is_ok: bool, mut each: impl FnMut(u64)) -> Option<u64> {
        self.running.drain(..).for_each(&mut each);
        if !is_ok {
            self.waiting.drain(..).for_each(each);
        }
        std::mem::swap(&mut self.running, &mut self.waiting);
        self.running.first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(syncs: &mut Syncs, is_ok: bool) -> (Vec<u64>, Option<u64>) {
        let mut ended = Vec::new();
        let next = syncs.end(is_ok, |token| ended.push(token));
        (ended, next)
    }

    #[test]
    fn those_that_come_while_one_runs_share_the_next_one() {
        let mut syncs = Syncs::new(4);
        assert_eq!([7, 8, 9].map(|token| syncs.ask(token)), [Some(7), None, None]);
        assert!(syncs.is_running(7) && !syncs.is_running(8));
        assert_eq!(end(&mut syncs, true), (vec![7], Some(8)));
        assert_eq!(syncs.ask(10), None);
        assert!(syncs.is_running(8) && !syncs.is_running(9));
        assert_eq!(end(&mut syncs, true), (vec![8, 9], Some(10)));
        assert_eq!(end(&mut syncs, true), (vec![10], None));
        assert_eq!(syncs.ask(11), Some(11));
    }

    #[test]
    fn an_error_is_that_of_all_who_wait() {
        let mut syncs = Syncs::new(4);
        assert_eq!([7, 8, 9].map(|token| syncs.ask(token)), [Some(7), None, None]);
        assert_eq!(end(&mut syncs, false), (vec![7, 8, 9], None));
        assert_eq!(syncs.ask(8), Some(8));
    }
}
