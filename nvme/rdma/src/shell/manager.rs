//! [`Manager`]: a core's event channel of the connection manager, which may come after the start.

use spindle_rdma::{CmChannel, VerbsError};

/// The event channel of one core. `None`: the machine had no RDMA device or no connection manager (the module
/// `rdma_ucm`) at the last attempt.
pub(super) struct Manager<C = CmChannel> {
    channel: Option<C>,
    is_watched: bool,
}

impl<C> Manager<C> {
    /// Takes the result of the first attempt. Returns the error too if the machine has no RDMA yet.
    ///
    /// # Errors
    /// The attempt has failed for another reason.
    pub(super) fn new(opened: Result<C, VerbsError>) -> Result<(Manager<C>, Option<VerbsError>), VerbsError> {
        match opened {
            Ok(channel) => Ok((Manager { channel: Some(channel), is_watched: false }, None)),
            Err(error) if error.is_no_rdma() => {
                Ok((Manager { channel: None, is_watched: false }, Some(error)))
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the channel, opened with `open` if it is not open yet.
    pub(super) fn get_or_open(
        &mut self,
        open: impl FnOnce() -> Result<C, VerbsError>,
    ) -> Result<&C, VerbsError> {
        let channel = match self.channel.take() {
            Some(channel) => channel,
            None => open()?,
        };
        Ok(self.channel.insert(channel))
    }

    /// Returns the channel; `None`: it is not open yet.
    pub(super) fn channel(&self) -> Option<&C> {
        self.channel.as_ref()
    }

    /// Returns true if [`Manager::take_new`] would return the channel.
    #[inline]
    pub(super) fn is_new(&self) -> bool {
        !self.is_watched && self.channel.is_some()
    }

    /// Returns the open channel on the first call only, to be watched.
    pub(super) fn take_new(&mut self) -> Option<&C> {
        let is_new = self.is_new();
        self.is_watched |= is_new;
        self.channel.as_ref().filter(|_| is_new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_RDMA: VerbsError = VerbsError { verb: "rdma_create_event_channel", errno: 19 };
    const TOO_MANY: VerbsError = VerbsError { verb: "rdma_create_event_channel", errno: 24 };

    #[test]
    fn a_channel_that_is_absent_at_the_start_is_opened_once_and_watched_once() {
        let (mut manager, error) = Manager::<u8>::new(Err(NO_RDMA)).expect("it is waited for");
        assert_eq!((error, manager.channel(), manager.is_new()), (Some(NO_RDMA), None, false));
        assert_eq!(manager.take_new(), None);
        assert_eq!(manager.get_or_open(|| Err(TOO_MANY)), Err(TOO_MANY));
        assert_eq!(manager.get_or_open(|| Ok(1)), Ok(&1));
        assert_eq!(manager.get_or_open(|| Ok(2)), Ok(&1));
        assert!(manager.is_new());
        assert_eq!(manager.take_new(), Some(&1));
        assert_eq!(manager.take_new(), None);
        assert_eq!((manager.channel(), manager.is_new()), (Some(&1), false));
    }

    #[test]
    fn the_start_fails_where_the_channel_is_not_absent_and_cannot_be_opened() {
        assert_eq!(Manager::<u8>::new(Err(TOO_MANY)).err(), Some(TOO_MANY));
        let (mut manager, error) = Manager::new(Ok(1)).expect("open");
        assert_eq!((error, manager.take_new()), (None, Some(&1)));
    }
}
