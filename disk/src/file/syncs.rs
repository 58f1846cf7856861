//! [`Syncs`]: the syncs of one core through the page cache, one after the other.
//!
//! The kernel tells each open file of an error of writing back once: to the sync that ends first. Of two at
//! the same time the other ends well, although what its host had written may be lost. So one runs at a time,
//! and those that were asked for meanwhile share the next one; an error is that of all of them.

/// See the module. Its requests are known by their tokens.
#[derive(Debug)]
pub(super) struct Syncs {
    /// What the sync that runs is for; the kernel knows it by the first.
    running: Vec<u64>,
    /// Asked for since it was begun.
    waiting: Vec<u64>,
}

impl Syncs {
    /// Of at most so many requests.
    pub(super) fn new(requests: usize) -> Syncs {
        Syncs { running: Vec::with_capacity(requests), waiting: Vec::with_capacity(requests) }
    }

    /// A request wants one. `Some`: it is to be begun, by this token.
    pub(super) fn ask(&mut self, token: u64) -> Option<u64> {
        if self.running.is_empty() {
            self.running.push(token);
            return Some(token);
        }
        self.waiting.push(token);
        None
    }

    /// The sync that runs has this token.
    pub(super) fn is_running(&self, token: u64) -> bool {
        self.running.first() == Some(&token)
    }

    /// The one that runs has ended: each of its requests is told, and with an error those that wait as well.
    /// `Some`: the next one is to be begun, by this token.
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
