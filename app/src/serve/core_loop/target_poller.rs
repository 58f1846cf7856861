//! [`TargetPoller`]: polls the [`TargetCore`](spindle_target::core::TargetCore) (disks, requests that wait
//! for memory, time-outs), exchanges its messages with other cores, and logs its notices.

use spindle_reactor::clock::Nanos;
use spindle_reactor::rate::RateLimit;
use spindle_reactor::run::{Poller, Turn};
use spindle_target::notice::Notice;

use super::CoreMessage;
use super::shared::Core;

/// Burst of log lines that hosts may cause, as seconds of the configured rate.
const LOG_BURST_SECONDS: u32 = 5;

/// The last poller of a turn.
pub struct TargetPoller {
    core: usize,
    log: RateLimit,
}

impl TargetPoller {
    /// `lines_per_s`: most log lines per second that hosts may cause (`log.peer_lines_per_s`).
    pub fn new(core: usize, lines_per_s: u32) -> TargetPoller {
        let log = RateLimit::new(lines_per_s, lines_per_s.saturating_mul(LOG_BURST_SECONDS));
        TargetPoller { core, log }
    }

    fn log_notices(&mut self, core: &mut Core, now: Nanos) {
        while let Some(notice) = core.target.notices().pop() {
            if let Some(allowed) = self.log.allow(now) {
                if allowed.suppressed > 0 {
                    tracing::warn!(
                        core = self.core,
                        lines = allowed.suppressed,
                        "log lines dropped (log.peer_lines_per_s)"
                    );
                }
                log(self.core, &notice);
            }
        }
        self.log.add_suppressed(core.target.notices().take_dropped());
    }
}

impl Poller<Core, CoreMessage> for TargetPoller {
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
        core.publish_advertised();
        None
    }

    fn flush(&mut self, core: &mut Core, turn: &mut Turn<'_, CoreMessage>) {
        // A message for a full mailbox stays in the target's queue. The target limits the messages that hosts
        // can cause by the length of that queue.
        while turn.has_room()
            && let Some((to, message)) = core.target.next_message()
        {
            turn.send(to, CoreMessage::Target(message));
        }
        core.publish_load();
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
        | Notice::Stalled { .. }
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
