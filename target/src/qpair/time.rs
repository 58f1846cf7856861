//! Time-outs of a queue pair, all of them of its host.

use spindle_nvme_transport::{CloseReason, Transport};
use spindle_reactor::clock::Nanos;

use super::{Qpair, Role};
use crate::controller::Expired;
use crate::env::Env;
use crate::notice::Notice;

/// Time without a check of the time-outs from which on that time does not count against the host. As long as
/// the shortest of them, [`FETCH_TIMEOUT_SHORT`](super::fetches::FETCH_TIMEOUT_SHORT); longer than any turn.
const STOPPED: Nanos = Nanos::from_secs(1);

impl<T: Transport> Qpair<T> {
    /// Checks the time-outs of fused pairs, host data, replies, Connect, keep alive and the association.
    /// Retries a blocked Connect, and polls End Former Associations and the health of drives. Called once per
    /// timer period.
    pub(crate) fn on_time(&mut self, env: &mut Env) {
        if env.late >= STOPPED {
            self.excuse(env.late);
        }
        self.expire_fused_first(env);
        if self.is_stalled(env) {
            return self.host_error(env, "it does not send the data of its commands");
        }
        if self.is_unread(env) {
            return self.host_error(env, "it does not receive the responses to its commands");
        }
        match &mut self.role {
            Role::Fresh if env.has_passed(self.connect_deadline) => {
                self.close(env, CloseReason::ConnectTimeout)
            }
            Role::Fresh => self.retry_connect(env),
            Role::Admin(controller) => {
                let (host, cntlid) = (controller.shared.host_nqn, controller.shared.cntlid);
                let (now, late) = (env.now, env.late);
                match controller.tick(now, late, |shared, at| env.has_passed_on_all(shared, at)) {
                    None => self.on_admin_time(env),
                    Some(Expired::KeepAlive { timeout_ms }) => {
                        env.notice(Notice::KeepAliveExpired { host, cntlid, timeout_ms });
                        self.close(env, CloseReason::KeepAliveExpired);
                    }
                    Some(Expired::NeverEnabled) => self.close(env, CloseReason::ConnectTimeout),
                }
            }
            Role::Io(_) | Role::Closing => {}
        }
    }

    /// Does not count `time`, in which this core did not run, against the host.
    fn excuse(&mut self, time: Nanos) {
        self.connect_deadline += time;
        self.fetches.excuse(time);
        self.reply_stalls.excuse(time);
        if let Some((_, until)) = &mut self.fused_first_deadline {
            *until += time;
        }
    }
}
