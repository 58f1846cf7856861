//! [`Lists`]: doubly linked queues of frames. Each frame is in at most one queue.

/// Frame index that stands for no frame.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Link {
    newer: u32,
    older: u32,
}

#[derive(Clone, Copy)]
struct Ends {
    newest: u32,
    oldest: u32,
    len: u32,
}

/// `N` queues of frames. Queues are numbered from 1; 0 means no queue.
pub(super) struct Lists<const N: usize> {
    links: Box<[Link]>,
    /// By frame: its queue.
    queue: Box<[u8]>,
    ends: [Ends; N],
}

/// Bytes of memory per frame of a [`Lists`].
pub(super) const LIST_BYTES: u64 = size_of::<Link>() as u64 + 1;

impl<const N: usize> Lists<N> {
    pub(super) fn new(frames: u32) -> Lists<N> {
        let count = frames as usize;
        Lists {
            links: vec![Link { newer: NONE, older: NONE }; count].into(),
            queue: vec![0; count].into(),
            ends: [Ends { newest: NONE, oldest: NONE, len: 0 }; N],
        }
    }

    pub(super) fn len(&self, queue: u8) -> u32 {
        self.ends[usize::from(queue) - 1].len
    }

    /// Returns the queue of `frame`; 0 for none.
    pub(super) fn queue(&self, frame: u32) -> u8 {
        self.queue.get(frame as usize).copied().unwrap_or(0)
    }

    pub(super) fn is_linked(&self, frame: u32) -> bool {
        self.queue[frame as usize] != 0
    }

    /// Adds `frame`, which must be in no queue, to `queue` as its newest frame.
    pub(super) fn push_front(&mut self, queue: u8, frame: u32) {
        debug_assert_eq!(self.queue[frame as usize], 0, "a frame is in one queue at most");
        let ends = &mut self.ends[usize::from(queue) - 1];
        let older = std::mem::replace(&mut ends.newest, frame);
        ends.len += 1;
        if older == NONE {
            ends.oldest = frame;
        } else {
            self.links[older as usize].newer = frame;
        }
        self.links[frame as usize] = Link { newer: NONE, older };
        self.queue[frame as usize] = queue;
    }

    /// Removes and returns the oldest frame of `queue`; `None` for an empty queue.
    pub(super) fn pop_back(&mut self, queue: u8) -> Option<u32> {
        let frame = self.ends[usize::from(queue) - 1].oldest;
        if frame == NONE {
            return None;
        }
        self.unlink(frame);
        Some(frame)
    }

    /// Removes a frame from its queue. No effect on a frame in no queue.
    pub(super) fn unlink(&mut self, frame: u32) {
        let queue = std::mem::take(&mut self.queue[frame as usize]);
        let Some(at) = usize::from(queue).checked_sub(1) else { return };
        let Link { newer, older } = self.links[frame as usize];
        let ends = &mut self.ends[at];
        ends.len -= 1;
        if newer == NONE {
            ends.newest = older;
        } else {
            self.links[newer as usize].older = older;
        }
        if older == NONE {
            ends.oldest = newer;
        } else {
            self.links[older as usize].newer = newer;
        }
    }
}
