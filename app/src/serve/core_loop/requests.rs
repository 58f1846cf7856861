//! [`Requests`]: the turn of the target's core: disks, time-outs, messages of other cores, and what the log
//! is to say.

use spindle_reactor::clock::Nanos;
use spindle_reactor::rate::RateLimit;
use spindle_reactor::run::{Poller, Turn};
use spindle_target::notice::Notice;

use super::CoreMessage;
use super::shared::Core;

/// Log lines that hosts can cause at once, in seconds of their rate.
const LOG_BURST_SECONDS: u32 = 5;

/// The last of a core's pollers.
pub struct Requests {
    core: usize,
    log: RateLimit,
}

impl Requests {
    /// Of core number `core`, whose hosts may cause so many log lines a second.
    pub fn new(core: usize, lines_per_s: u32) -> Requests {
        let log = RateLimit::new(lines_per_s, lines_per_s.saturating_mul(LOG_BURST_SECONDS));
        Requests { core, log }
    }

    fn log_notices(&mut self, core: &mut Core, now: Nanos) {
        while let Some(notice) = core.target.notices().pop() {
            if let Some(allowed) = self.log.allow(now) {
                if allowed.suppressed > 0 {
                    tracing::warn!(
                        core = self.core,
                        lines = allowed.suppressed,
                        "log lines were left out (log.peer_lines_per_s)"
                    );
                }
                log(self.core, &notice);
            }
        }
        self.log.add_suppressed(core.target.notices().take_dropped());
    }
}

impl Poller<Core, CoreMessage> for Requests {
    fn name(&self) -> &'static str {
        "requests"
    }

    fn poll(&mut self, core: &mut Core, _turn: &mut Turn<'_, CoreMessage>) -> bool {
        core.target.poll()
    }

    fn on_message(
        &mut self,
        core: &mut Core,
        _turn: &mut Turn<'_, CoreMessage>,
        message: CoreMessage,
    ) -> Option<CoreMessage> {
        let CoreMessage::Target(message) = message else { return Some(message) };
        core.target.on_message(message);
        core.tell_shown();
        None
    }

    fn flush(&mut self, core: &mut Core, turn: &mut Turn<'_, CoreMessage>) {
        // What finds no room stays in the target's own list: by its length it knows when to leave out what
        // hosts can cause without end.
        while turn.has_room()
            && let Some((to, message)) = core.target.next_message()
        {
            turn.send(to, CoreMessage::Target(message));
        }
        core.count_connections();
        self.log_notices(core, turn.now);
    }

    fn is_quiet(&self, core: &Core) -> bool {
        core.target.is_quiet()
    }
}

fn log(core: usize, notice: &Notice) {
    match notice {
        Notice::Connected { .. } | Notice::Disconnected { .. } => tracing::info!(core, "{notice}"),
        Notice::Refused { .. }
        | Notice::HostError { .. }
        | Notice::Violation { .. }
        | Notice::ConnectionRefused { .. }
        | Notice::OtherHostId { .. }
        | Notice::FormerEnded { .. }
        | Notice::KeepAliveExpired { .. } => tracing::warn!(core, "{notice}"),
        Notice::DiskOpen { .. } | Notice::DiskError { .. } | Notice::Orphan { .. } => {
            tracing::error!(core, "{notice}")
        }
    }
}
