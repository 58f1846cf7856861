//! [`Grants`]: tokens that were issued to hosts and not used yet.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme_spec::optimistic::Token;
use spindle_reactor::lock::Lock;
use spindle_reactor::mem::SealedFrames;

/// Time in which a token must be used.
pub const TOKEN_TTL: Duration = Duration::from_secs(10);
/// Most unused tokens; a token beyond is refused until others were used or are too old.
pub const TOKENS_MAX: usize = 4096;
/// Most unused tokens of one controller: one for each of its I/O queues.
pub const CONTROLLER_TOKENS_MAX: usize = 128;

/// Whose grant it is.
pub trait Owner: Send + 'static {
    /// Identifies the controller among those that exist.
    fn controller(&self) -> usize;

    /// The connection was accepted; the owner is dropped with it.
    fn on_connected(&mut self) {}
}

/// The right of one connection to read a cache. `O` names the host's controller and namespace.
pub(crate) struct Grant<O> {
    pub(crate) owner: O,
    pub(crate) frames: Arc<dyn SealedFrames>,
    issued: Instant,
}

/// Unused tokens. Shared by the reactor cores, which issue tokens, and the service's thread. Locked at an
/// Attach and at a connection request, never by I/O commands.
pub struct Grants<O> {
    tokens: Lock<HashMap<Token, Grant<O>>>,
}

impl<O> Default for Grants<O> {
    fn default() -> Self {
        Grants { tokens: Lock::new(HashMap::new()) }
    }
}

impl<O: Owner> Grants<O> {
    /// A new token that admits one connection to `frames`. `None`: there are [`TOKENS_MAX`] unused tokens, or
    /// [`CONTROLLER_TOKENS_MAX`] of the same controller.
    pub fn issue(&self, owner: O, frames: Arc<dyn SealedFrames>) -> Option<Token> {
        let now = Instant::now();
        let token = uuid::Uuid::new_v4().into_bytes();
        let mut tokens = self.tokens.lock();
        tokens.retain(|_, grant| !grant.is_expired(now));
        let controller = owner.controller();
        let own = tokens.values().filter(|grant| grant.owner.controller() == controller).count();
        if tokens.len() >= TOKENS_MAX || own >= CONTROLLER_TOKENS_MAX {
            return None;
        }
        tokens.insert(token, Grant { owner, frames, issued: now });
        Some(token)
    }

    /// Uses a token. `None`: it is unknown, was used, or is older than [`TOKEN_TTL`].
    pub(crate) fn redeem(&self, token: &Token, now: Instant) -> Option<Grant<O>> {
        self.tokens.lock().remove(token).filter(|grant| !grant.is_expired(now))
    }

    /// Removes tokens that are too old, and those of caches that are removed: they keep the cache's memory.
    pub(crate) fn expire(&self, now: Instant) {
        self.tokens.lock().retain(|_, grant| !grant.is_expired(now) && grant.frames.is_open());
    }
}

impl<O> Grant<O> {
    fn is_expired(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.issued) > TOKEN_TTL
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use spindle_reactor::mem::{CacheFrames, Pages};

    use super::*;

    impl Owner for usize {
        fn controller(&self) -> usize {
            *self
        }
    }

    pub(crate) fn frames() -> Arc<dyn SealedFrames> {
        CacheFrames::new(1, 1, Pages::Base, true).expect("memory").0 as Arc<dyn SealedFrames>
    }

    #[test]
    fn a_token_is_used_once_and_in_time() {
        let (grants, frames) = (Grants::default(), frames());
        let tokens: Vec<Token> =
            (0..3).map(|owner| grants.issue(owner, Arc::clone(&frames)).expect("room")).collect();
        let now = Instant::now();
        assert_eq!(grants.redeem(&tokens[1], now).map(|grant| grant.owner), Some(1));
        assert!(grants.redeem(&tokens[1], now).is_none(), "it was used");
        assert!(grants.redeem(&[0; 16], now).is_none(), "it was never issued");
        let late = now + TOKEN_TTL + Duration::from_millis(1);
        assert!(grants.redeem(&tokens[0], late).is_none(), "it is too old");
        grants.expire(late);
        assert!(grants.redeem(&tokens[2], now).is_none(), "it was removed");
        assert_eq!(Arc::strong_count(&frames), 1, "no token keeps the memory");
    }

    #[test]
    fn a_token_does_not_keep_the_memory_of_a_removed_cache() {
        let (grants, stays, goes) = (Grants::default(), frames(), frames());
        for frames in [&stays, &goes] {
            assert!(grants.issue(0, Arc::clone(frames)).is_some());
        }
        goes.close();
        grants.expire(Instant::now());
        assert_eq!((Arc::strong_count(&stays), Arc::strong_count(&goes)), (2, 1));
    }

    #[test]
    fn unused_tokens_are_bounded() {
        let (grants, frames) = (Grants::default(), frames());
        for _ in 0..CONTROLLER_TOKENS_MAX {
            assert!(grants.issue(0, Arc::clone(&frames)).is_some());
        }
        assert!(grants.issue(0, Arc::clone(&frames)).is_none(), "one controller has its share");
        for owner in CONTROLLER_TOKENS_MAX..TOKENS_MAX {
            assert!(grants.issue(owner, Arc::clone(&frames)).is_some());
        }
        assert!(grants.issue(TOKENS_MAX, Arc::clone(&frames)).is_none());
        grants.expire(Instant::now() + 2 * TOKEN_TTL);
        assert!(grants.issue(0, frames).is_some());
    }
}
