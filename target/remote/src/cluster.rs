//! [`ClusterClient`]: the membership in the far target's cluster, on the manager's thread. It sends Join
//! and Next on the admin queue, and drops what the far target names from the cache in front of the disk.
//!
//! It waits for nothing but answers: other hosts' writes wait for this thread.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use nvme_spec::Sqe;
use nvme_spec::cluster::{JoinData, Joined, NEXT_BYTES, NextData};
use nvme_spec::status::Status;
use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use spindle_nvme_initiator::{CommandData, Completion, Controller, Failure, Ticket};
use spindle_reactor::clock::{Clock, Nanos};
use spindle_target_card::{Agent, Command, Session};

/// The thread polls for this long after an answer before it sleeps: another often follows, and a wake-up
/// takes as long.
const POLL_TIME: Nanos = Nanos::from_us(100);
/// [`NEXT_BYTES`] as `u32`.
const NEXT_DATA_BYTES: u32 = 4096;
const _: () = assert!(NEXT_BYTES == NEXT_DATA_BYTES as usize);

pub(crate) struct ClusterClient {
    disk: String,
    nsid: u32,
    agent: Arc<Agent>,
    session: Session,
    join: Option<Ticket>,
    /// Outstanding Next commands, with the times at which they were sent.
    nexts: VecDeque<(Ticket, Nanos)>,
    /// End of polling.
    poll_until: Nanos,
    /// What was logged last: the agent is a member, or why not. Logged again only when it changes.
    logged: String,
}

impl ClusterClient {
    pub(crate) fn new(disk: &str, nsid: u32, agent: Arc<Agent>) -> ClusterClient {
        ClusterClient {
            disk: disk.to_owned(),
            nsid,
            session: Session::new(Arc::clone(&agent)),
            agent,
            join: None,
            nexts: VecDeque::new(),
            poll_until: Nanos::ZERO,
            logged: String::new(),
        }
    }

    pub(crate) fn on_up(&mut self) {
        self.session.on_up(self.agent.now());
    }

    pub(crate) fn on_down(&mut self) {
        self.session.on_down();
        self.join = None;
        self.nexts.clear();
    }

    /// Handles answers and sends what is due. Returns the longest time to sleep; zero: another call is due.
    ///
    /// # Errors
    /// Why the membership has ended: the association has no other.
    pub(crate) fn step(
        &mut self,
        controller: &mut Controller,
        longest: Duration,
    ) -> Result<Duration, &'static str> {
        let mut has_worked = false;
        while let Some(completion) = controller.take_answer() {
            has_worked = true;
            self.on_answer(&completion)?;
        }
        let random = || RandomState::new().hash_one(std::process::id());
        while let Some(command) = self.session.next_command(self.agent.now(), random) {
            has_worked = true;
            if !self.send(controller, command) {
                break;
            }
        }
        let now = Clock::now();
        if has_worked {
            self.poll_until = now + POLL_TIME;
        }
        if now < self.poll_until {
            return Ok(Duration::ZERO);
        }
        let due = self.session.due().map(|due| (due - self.agent.now()).as_duration());
        Ok(due.unwrap_or(longest).min(longest))
    }

    /// Sends a command. Returns false if it cannot be sent: the association has ended, or will soon.
    fn send(&mut self, controller: &mut Controller, command: Command) -> bool {
        let now = self.agent.now();
        let sent = match command {
            Command::Join { incarnation, former } => {
                let data = JoinData::new(incarnation, former);
                let sqe = Sqe::join(0, self.nsid);
                let sent = controller.begin_command("Join", sqe, CommandData::ToController(data.as_bytes()));
                sent.map(|ticket| self.join = Some(ticket))
            }
            Command::Next { acknowledged } => {
                let sqe = Sqe::next_notices(0, acknowledged);
                let sent =
                    controller.begin_command("Next", sqe, CommandData::FromController(NEXT_DATA_BYTES));
                sent.map(|ticket| self.nexts.push_back((ticket, now)))
            }
        };
        if let Err(error) = &sent {
            self.session.on_unsent(command, now);
            tracing::debug!(disk = self.disk, "a command of the cluster was not sent: {error}");
        }
        sent.is_ok()
    }

    fn on_answer(&mut self, completion: &Completion) -> Result<(), &'static str> {
        if self.join.take_if(|ticket| *ticket == completion.ticket).is_some() {
            self.on_joined(completion, self.agent.now());
            return Ok(());
        }
        let at = self.nexts.iter().position(|(ticket, _)| *ticket == completion.ticket);
        let Some((_, sent)) = at.and_then(|at| self.nexts.remove(at)) else { return Ok(()) };
        let mut bytes = [0; NEXT_BYTES];
        if let Some(buf) = &completion.buf {
            buf.copy_out(0, &mut bytes);
        }
        let data = NextData::read_from_bytes(&bytes).ok().filter(|_| completion.result.is_ok());
        self.session.on_next(sent, data.as_ref()).inspect_err(|why| {
            self.log(&format!("no member of the far target's cluster any more: {why}"));
        })
    }

    fn on_joined(&mut self, completion: &Completion, now: Nanos) {
        let joined = completion.result.is_ok().then(|| Joined::from_bits(completion.cqe.result_u32()));
        let why = match (self.session.on_joined(joined, now), completion.result) {
            (Ok(()), Ok(())) => return self.log("a member of the far target's cluster: the cache is in use"),
            (Ok(()), Err(Failure::Lost)) => return,
            (Ok(()), Err(Failure::Status(status))) => reason(status),
            (Err(why), _) => why,
        };
        self.log(&format!("cannot join the far target's cluster, reads pass around the cache: {why}"));
    }

    /// Logs a change of the membership.
    fn log(&mut self, what: &str) {
        if self.logged != what {
            tracing::info!(disk = self.disk, "{what}");
            what.clone_into(&mut self.logged);
        }
    }
}

/// Returns the reason of a refused Join in words.
fn reason(status: Status) -> String {
    match status.code() {
        Status::OPERATION_DENIED => "this host is not in agents of its [disk.cluster]".to_owned(),
        Status::NAMESPACE_NOT_READY => "its disk has no [disk.cluster]".to_owned(),
        Status::COMMAND_INTERRUPTED => "it has 64 members".to_owned(),
        Status::INVALID_OPCODE => "it keeps no caches coherent".to_owned(),
        _ => format!("{status}"),
    }
}
