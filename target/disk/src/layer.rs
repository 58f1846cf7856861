//! Shared code of the layers: commands for the inner disk, and their tokens.

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

use crate::{BlockRange, DiskChannel, Done, IoRequest, Owner, Token, Waited};

/// A command with the arguments of the [`DiskChannel`] method that submits it.
pub(crate) enum Call {
    Op(IoRequest, Option<Buf>),
    CompareAndWrite { range: BlockRange, expected: Buf, data: Buf },
    Copy { from: BlockRange, to: u64, fua: bool },
}

impl Call {
    #[inline]
    pub(crate) fn submit(self, disk: &mut dyn DiskChannel, token: Token) -> Option<Done> {
        match self {
            Call::Op(request, buf) => disk.submit(token, &request, buf),
            Call::CompareAndWrite { range, expected, data } => {
                disk.compare_and_write(token, range, expected, data)
            }
            Call::Copy { from, to, fua } => disk.copy(token, from, to, fua),
        }
    }

    /// Adds the time from `since` to `now` to [`IoRequest::waited`]. Copy and compare-and-write have none.
    pub(crate) fn add_wait(&mut self, since: Nanos, now: Nanos) {
        if let Call::Op(request, _) = self {
            request.waited = Waited::of(request.waited.time() + between(since, now));
        }
    }

    /// Returns the buffer for [`Done::buf`] of a command that is not submitted.
    pub(crate) fn into_buf(self) -> Option<Buf> {
        match self {
            Call::Op(_, buf) => buf,
            Call::CompareAndWrite { data, .. } => Some(data),
            Call::Copy { .. } => None,
        }
    }
}

/// Returns the time from `since` to `now`; 0 if `since` is 0: the core had not been polled yet.
pub(crate) fn between(since: Nanos, now: Nanos) -> Nanos {
    if since == Nanos::ZERO { Nanos::ZERO } else { Nanos(now.0.saturating_sub(since.0)) }
}

/// A layer's commands in flight, by command index. The index is the lower half of the inner disk's token.
pub(crate) struct Commands<T> {
    entries: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Commands<T> {
    pub(crate) fn with_capacity(depth: usize) -> Commands<T> {
        Commands { entries: Vec::with_capacity(depth), free: Vec::with_capacity(depth) }
    }

    /// Adds a command; returns its index, which is reused after [`Commands::remove`].
    #[inline]
    pub(crate) fn insert(&mut self, entry: T) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            // The length is at most the highest number of commands in flight, below 2^32.
            u32::try_from(self.entries.len() - 1).unwrap_or(u32::MAX)
        });
        self.entries[number as usize] = Some(entry);
        number
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.entries.get_mut(number as usize)?.as_mut()
    }

    #[inline]
    pub(crate) fn remove(&mut self, number: u32) -> Option<T> {
        self.remove_if(number, |_| true)
    }

    pub(crate) fn remove_if(&mut self, number: u32, is_over: impl FnOnce(&mut T) -> bool) -> Option<T> {
        let entry = self.entries.get_mut(number as usize)?.take_if(is_over)?;
        self.free.push(number);
        Some(entry)
    }

    /// Returns all indices ever used, including free ones.
    pub(crate) fn numbers(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.entries.len()).unwrap_or(u32::MAX)
    }

    #[cfg(any(test, feature = "faults"))]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().flatten()
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }
}

/// Returns the token of a command for the inner disk. Its owner is unchanged, for a cancel by owner.
#[inline]
pub(crate) fn inner_token(owner: Owner, number: u32) -> Token {
    Token(u64::from(owner.0) << 32 | u64::from(number))
}

/// Returns the command index in a token of [`inner_token`] or [`own_token`].
#[inline]
pub(crate) fn number_of(token: Token) -> u32 {
    u32::try_from(token.0 & u64::from(!OWN)).unwrap_or(u32::MAX)
}

/// Bit of the tokens of a layer's own commands, in a layer that also passes on commands with their tokens.
/// No submitter sets it ([`Token`]).
const OWN: u32 = 1 << 31;

/// As [`inner_token`], of a token that differs from each of the submitter's.
#[inline]
pub(crate) fn own_token(owner: Owner, number: u32) -> Token {
    inner_token(owner, number | OWN)
}

/// Returns true for a token of [`own_token`].
#[inline]
pub(crate) fn is_own(token: Token) -> bool {
    token.0 & u64::from(OWN) != 0
}
