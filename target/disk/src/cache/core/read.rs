//! [`Read`]: a read of a core's handle that is in flight.

use spindle_reactor::clock::Nanos;

use super::super::plan::ReadPlan;
use crate::layer::between;
use crate::{DiskError, IoRequest, Token, Waited};

pub(super) struct Read {
    /// `None`: a read-ahead, or a cancelled read whose [`Done`](crate::Done) was returned already.
    pub(super) token: Option<Token>,
    pub(super) request: IoRequest,
    pub(super) plan: ReadPlan,
    /// Number of pieces at the inner disk.
    pub(super) at_disk: u32,
    /// The whole read is passed to the inner disk once its pieces have completed.
    pub(super) passes_around: bool,
    /// A piece has failed: the read ends so once its pieces have completed.
    pub(super) failed: Option<DiskError>,
    /// Time of the submission to this layer.
    pub(super) since: Nanos,
}

impl Read {
    pub(super) fn new(token: Option<Token>, request: &IoRequest, plan: ReadPlan, since: Nanos) -> Read {
        Read { token, request: *request, plan, at_disk: 0, passes_around: false, failed: None, since }
    }

    /// Returns the request with the time that it has waited until `now`.
    pub(super) fn request_at(&self, now: Nanos) -> IoRequest {
        let waited = Waited::of(self.request.waited.time() + between(self.since, now));
        IoRequest { waited, ..self.request }
    }
}
