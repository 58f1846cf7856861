//! Which connect requests are refused, and which connections ended. No verbs: tests need no device.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use nvme_spec::optimistic::{OptimisticRequest, OptimisticStatus};
use spindle_rdma::VerbsError;
use spindle_reactor::mem::SealedFrames;

use super::grants::{Grant, Grants, Owner};

/// Most optimistic queue pairs of the process.
pub const CONNECTIONS_MAX: usize = 1024;
/// Most optimistic queue pairs of one controller: as many as it has I/O queues.
pub(crate) const CONTROLLER_CONNECTIONS_MAX: usize = 128;

/// Returns true while a connection may exist: its controller, its namespace and this cache do.
pub type IsValid<O> = dyn Fn(&O, &Arc<dyn SealedFrames>) -> bool + Send;

/// A connection, or a request that waits for the registration of its cache.
pub(crate) trait Granted<O> {
    fn grant(&self) -> &Grant<O>;
}

/// Returns the grant of a request to connect with `private_data`. `held`: the grants of the connections that
/// there are, and of requests that wait.
///
/// # Errors
/// The private data is not valid, its token is not or not any more, or there are too many connections.
pub(crate) fn admit<'a, O: Owner>(
    private_data: &[u8],
    tokens: &Grants<O>,
    is_valid: &IsValid<O>,
    held: impl Iterator<Item = &'a Grant<O>>,
    now: Instant,
) -> Result<Grant<O>, Refusal> {
    let refuse = |status, why: &str| Refusal { status, why: why.to_owned() };
    let token = OptimisticRequest::parse(private_data)
        .map_err(|status| refuse(status, "its private data is not of this protocol and version"))?;
    let grant = tokens
        .redeem(&token, now)
        .filter(|grant| is_valid(&grant.owner, &grant.frames))
        .ok_or_else(|| refuse(OptimisticStatus::INVALID_TOKEN, "its token is unknown, used or expired"))?;
    let controller = grant.owner.controller();
    let (mut all, mut own) = (0, 0);
    for grant in held {
        all += 1;
        own += usize::from(grant.owner.controller() == controller);
    }
    if all >= CONNECTIONS_MAX || own >= CONTROLLER_CONNECTIONS_MAX {
        let why = "there are 1024 optimistic connections, or 128 of its controller";
        return Err(refuse(OptimisticStatus::TOO_MANY, why));
    }
    Ok(grant)
}

/// Takes the connections whose grant is not valid any more, and ends each with `end`.
pub(crate) fn end_revoked<K: Eq + Hash, O, C: Granted<O>>(
    connections: &mut HashMap<K, C>,
    is_valid: &IsValid<O>,
    mut end: impl FnMut(&mut C),
) -> Vec<C> {
    let is_over = |_: &K, it: &mut C| !is_valid(&it.grant().owner, &it.grant().frames);
    let mut ended: Vec<_> = connections.extract_if(is_over).map(|(_, it)| it).collect();
    ended.iter_mut().for_each(&mut end);
    ended
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: OptimisticStatus,
    pub(crate) why: String,
}

impl From<VerbsError> for Refusal {
    fn from(error: VerbsError) -> Refusal {
        Refusal { status: OptimisticStatus::NO_MEMORY, why: error.to_string() }
    }
}

/// Logs refused connections, at most one line per second.
#[derive(Default)]
pub(crate) struct Refusals {
    count: u64,
    last: Option<(Option<SocketAddr>, String)>,
}

impl Refusals {
    pub(crate) fn add(&mut self, peer: Option<SocketAddr>, refusal: &Refusal) {
        self.count += 1;
        self.last = Some((peer, refusal.why.clone()));
    }

    pub(crate) fn log(&mut self) {
        if let Some((peer, why)) = self.last.take() {
            let count = std::mem::take(&mut self.count);
            let peer = peer.map(tracing::field::display);
            tracing::warn!(
                peer,
                count,
                %why,
                "optimistic connections refused; peer and why are those of the last one"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use nvme_spec::optimistic::Token;
    use nvme_spec::zerocopy::IntoBytes;

    use super::*;
    use crate::service::grants::tests::frames;

    /// A host's controller, which may be revoked.
    #[derive(Clone)]
    struct Host {
        controller: usize,
        is_allowed: Arc<AtomicBool>,
    }

    impl Owner for Host {
        fn controller(&self) -> usize {
            self.controller
        }
    }

    impl Host {
        fn new(controller: usize) -> Host {
            Host { controller, is_allowed: Arc::new(AtomicBool::new(true)) }
        }
    }

    fn is_valid(host: &Host, frames: &Arc<dyn SealedFrames>) -> bool {
        host.is_allowed.load(Ordering::Relaxed) && frames.is_open()
    }

    struct Link(Grant<Host>, bool);

    impl Granted<Host> for Link {
        fn grant(&self) -> &Grant<Host> {
            &self.0
        }
    }

    /// Tokens that were issued, and the connections that there are.
    struct World {
        tokens: Grants<Host>,
        links: HashMap<usize, Link>,
        frames: Arc<dyn SealedFrames>,
    }

    impl World {
        fn new() -> World {
            World { tokens: Grants::default(), links: HashMap::new(), frames: frames() }
        }

        fn token(&self, host: &Host) -> Token {
            self.tokens.issue(host.clone(), Arc::clone(&self.frames)).expect("few tokens")
        }

        fn connect(&mut self, private_data: &[u8]) -> OptimisticStatus {
            let held = self.links.values().map(|link| &link.0);
            match admit(private_data, &self.tokens, &is_valid, held, Instant::now()) {
                Ok(grant) => {
                    self.links.insert(self.links.len(), Link(grant, false));
                    OptimisticStatus(0)
                }
                Err(refusal) => refusal.status,
            }
        }

        fn connect_with(&mut self, token: Token) -> OptimisticStatus {
            self.connect(OptimisticRequest::new(token).as_bytes())
        }
    }

    #[test]
    fn a_request_needs_a_token_of_its_own_and_the_protocol() {
        let (mut world, host) = (World::new(), Host::new(1));
        let token = world.token(&host);
        let request = OptimisticRequest::new(token);
        for cut in 0..request.as_bytes().len() {
            assert_eq!(world.connect(&request.as_bytes()[..cut]), OptimisticStatus::INVALID_FORMAT);
        }
        let mut newer = request.as_bytes().to_vec();
        newer[0] += 1;
        assert_eq!(world.connect(&newer), OptimisticStatus::INVALID_FORMAT);
        assert_eq!(world.connect_with([7; 16]), OptimisticStatus::INVALID_TOKEN);
        assert_eq!(world.connect_with(token), OptimisticStatus(0), "no refusal has used it");
        assert_eq!(world.connect_with(token), OptimisticStatus::INVALID_TOKEN, "it was used");
    }

    #[test]
    fn connections_are_bounded_by_controller_and_in_all() {
        let mut world = World::new();
        for controller in 0..CONNECTIONS_MAX / CONTROLLER_CONNECTIONS_MAX {
            let host = Host::new(controller);
            for _ in 0..CONTROLLER_CONNECTIONS_MAX {
                let token = world.token(&host);
                assert_eq!(world.connect_with(token), OptimisticStatus(0));
            }
            let token = world.token(&host);
            assert_eq!(world.connect_with(token), OptimisticStatus::TOO_MANY);
        }
        let token = world.token(&Host::new(99));
        assert_eq!(world.connect_with(token), OptimisticStatus::TOO_MANY, "{} in all", world.links.len());
        world.links.remove(&0);
        let token = world.token(&Host::new(99));
        assert_eq!(world.connect_with(token), OptimisticStatus(0), "one has ended");
    }

    #[test]
    fn a_revoked_host_loses_its_connections_and_tokens_and_others_keep_theirs() {
        let (mut world, stays, goes) = (World::new(), Host::new(1), Host::new(2));
        let hosts = [&stays, &goes, &goes, &stays];
        for token in hosts.map(|host| world.token(host)) {
            assert_eq!(world.connect_with(token), OptimisticStatus(0));
        }
        let unused = world.token(&goes);
        goes.is_allowed.store(false, Ordering::Relaxed);
        let ended = end_revoked(&mut world.links, &is_valid, |link| link.1 = true);
        let controllers: Vec<_> = ended.iter().map(|link| (link.0.owner.controller, link.1)).collect();
        assert_eq!(controllers, [(2, true), (2, true)], "ended before they are told to be over");
        let left: Vec<_> = world.links.values().map(|link| (link.0.owner.controller, link.1)).collect();
        assert_eq!(left, [(1, false), (1, false)]);
        assert_eq!(world.connect_with(unused), OptimisticStatus::INVALID_TOKEN);
        // The same of a cache that is gone.
        world.frames.close();
        assert_eq!(end_revoked(&mut world.links, &is_valid, |link| link.1 = true).len(), 2);
    }
}
