//! [`Streams`]: detects sequential and strided reads of a host and decides which pages to read ahead. Works
//! on page indices only and does no I/O.
//!
//! - *Sequential*: each read begins within `NEAR` pages of the end of an earlier read of the same host,
//!   because queues reorder reads. The third read of such a stream fetches a window of pages. Whenever half
//!   of a window is used, a window of twice the size is fetched, up to the maximum.
//! - *Strided*: three reads at equal distances that continue no sequential stream. The next 1, 2, 4, up to
//!   `STRIDES_MAX` reads at that distance are fetched, in total at most a window.
//!
//! Pages that are evicted unread show that the window is too large. The window is then halved; a stream with
//! the first window or less is reset.
//!
//! A fetch from an inner disk that executes reads on this core, such as a file in the page cache, delays the
//! reads that arrive meanwhile: its window stays the first one.
//!
//! A host may mark a read as its own read-ahead (Access Frequency 7). For such a read the window is at most
//! as long as the read, and strides are not fetched.

/// Most pages between the start of a read and the expected start, in either direction.
const NEAR: u64 = 8;
/// Pages of the first window: 64 KiB. For a longer read, the first window is as long as the read.
const FIRST_WINDOW: u32 = 16;
/// Most reads of a strided stream that are fetched ahead.
const STRIDES_MAX: u32 = 8;
/// Sequential streams tracked per host.
const STREAMS: usize = 16;
/// Hosts tracked per core.
const CLIENTS: usize = 64;

/// A read-ahead: `count` pieces of `pages` pages, whose first pages are `step` pages apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fetch {
    /// First page of the first piece.
    pub first: u64,
    /// Pages of a piece.
    pub pages: u32,
    /// Number of pieces.
    pub count: u32,
    /// Pages from the start of one piece to the start of the next; negative for descending reads. 0 for a
    /// sequential stream, which has one piece.
    pub step: i64,
}

/// A read of a host, as input of [`Streams::on_read`].
#[derive(Debug, Clone, Copy)]
pub struct ReadInfo {
    /// Index of the host ([`IoRequest::client`](crate::IoRequest::client)).
    pub client: u16,
    /// First page of the read.
    pub first: u64,
    /// Length in pages.
    pub pages: u32,
    /// The read is the host's own read-ahead (Access Frequency 7).
    pub is_speculative: bool,
    /// A large read that was submitted while other commands were in flight, or to an inner disk that
    /// executes reads on this core. Its transfer takes as long as a fetch, so a fetch would only take time
    /// from others. Nothing is fetched for a stream of such reads.
    pub is_beside: bool,
    /// The inner disk executes reads on this core. A fetch then delays what arrives meanwhile, and is short.
    pub is_inline: bool,
    /// Number of pages that this core has evicted unread after a read-ahead, in total for all hosts.
    pub wasted: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// End of the pages that were read or fetched. The next fetch begins here.
    edge: u64,
    /// Pages of the last fetch, or fewer after waste; 0 before the first fetch.
    window: u32,
    /// Number of reads that continued this stream.
    follows: u32,
    /// [`ReadInfo::wasted`] at the last comparison.
    wasted: u64,
    /// Page at which the next read is expected.
    next: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Strides {
    last: u64,
    step: i64,
    /// Number of consecutive reads at the distance `step`, without the first one.
    same: u32,
    /// Number of predicted reads after the last read that are fetched already.
    ahead: u32,
}

struct Client {
    number: u16,
    used: u64,
    /// By stream: the lower half of [`Stream::next`]. Apart from `streams`: each read compares all.
    nexts: [u32; STREAMS],
    streams: [Stream; STREAMS],
    /// By stream, one bit: it was continued since `hand` was there.
    continued: u16,
    /// Stream that the next new one replaces, unless it was continued.
    hand: usize,
    strides: Strides,
}

/// A page that is near no page of a disk.
const NO_PAGE: u64 = 1 << 62 | 1 << 31;

impl Client {
    fn new(number: u16) -> Client {
        Client {
            number,
            used: 0,
            nexts: [lower_half(NO_PAGE); STREAMS],
            streams: [Stream { next: NO_PAGE, ..Stream::default() }; STREAMS],
            continued: 0,
            hand: 0,
            strides: Strides::default(),
        }
    }

    /// Returns the stream that a read at `first` continues.
    fn continued(&self, first: u64) -> Option<usize> {
        // The difference is at most `NEAR` in either direction.
        let low = first.wrapping_sub(NEAR);
        // Without a branch for each stream: most random reads continue none.
        let may_be = |next: &u32| u64::from(next.wrapping_sub(lower_half(low))) <= 2 * NEAR;
        if !self.nexts.iter().fold(false, |has_one, next| has_one | may_be(next)) {
            return None;
        }
        self.streams.iter().position(|stream| stream.next.wrapping_sub(low) <= 2 * NEAR)
    }

    /// Returns the stream to replace: the oldest that was not continued since the last turn of `hand`.
    fn replaced(&mut self) -> usize {
        loop {
            let at = self.hand;
            self.hand = (at + 1) % STREAMS;
            if self.continued & 1 << at == 0 {
                return at;
            }
            self.continued &= !(1 << at);
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower 32 bits are wanted")]
fn lower_half(page: u64) -> u32 {
    page as u32
}

/// The sequential and strided streams of one core, by host. See the module.
pub struct Streams {
    clients: Vec<Client>,
    /// Largest window, in pages.
    window_max: u32,
    /// Number of reads recorded.
    clock: u64,
}

impl Streams {
    pub fn new(window_max: u32) -> Streams {
        Streams { clients: Vec::with_capacity(CLIENTS), window_max, clock: 0 }
    }

    /// Records a read. Returns the read-ahead to begin, if any.
    pub fn on_read(&mut self, read: &ReadInfo) -> Option<Fetch> {
        self.clock += 1;
        let inline_max = if read.is_inline { FIRST_WINDOW } else { u32::MAX };
        let (clock, window_max) = (self.clock, self.window_max.min(inline_max));
        let client = self.client(read.client);
        client.used = clock;
        let end = read.first + u64::from(read.pages);
        let continued = client.continued(read.first);
        if let Some(at) = continued {
            client.continued |= 1 << at;
            let stream = &mut client.streams[at];
            stream.next = end.max(stream.next);
            client.nexts[at] = lower_half(stream.next);
            if read.is_beside {
                stream.follows = 0;
                return None;
            }
            stream.follows += 1;
            return stream.fetch(read, window_max);
        }
        let at = client.replaced();
        client.nexts[at] = lower_half(end);
        client.streams[at] = Stream { edge: end, next: end, wasted: read.wasted, ..Stream::default() };
        if read.is_beside {
            client.strides = Strides { last: read.first, ..Strides::default() };
            return None;
        }
        client.strides.on_read(read, window_max)
    }

    fn client(&mut self, number: u16) -> &mut Client {
        let at = match self.clients.iter().position(|client| client.number == number) {
            Some(at) => at,
            None => {
                let new = Client::new(number);
                if self.clients.len() < CLIENTS {
                    self.clients.push(new);
                    self.clients.len() - 1
                } else {
                    let ages = self.clients.iter().enumerate().map(|(at, client)| (client.used, at));
                    let oldest = ages.min().map_or(0, |(_, at)| at);
                    self.clients[oldest] = new;
                    oldest
                }
            }
        };
        &mut self.clients[at]
    }
}

impl Stream {
    fn fetch(&mut self, read: &ReadInfo, window_max: u32) -> Option<Fetch> {
        let next = self.next;
        if self.follows < 2 || window_max == 0 {
            return None;
        }
        let is_wasted = std::mem::replace(&mut self.wasted, read.wasted) < read.wasted;
        if is_wasted && self.window <= FIRST_WINDOW {
            (self.follows, self.window, self.edge) = (0, 0, next);
            return None;
        }
        if is_wasted {
            // A quarter, because the window doubles again before the next fetch: half in effect.
            self.window /= 4;
        }
        self.edge = self.edge.max(next);
        if self.edge - next > u64::from(self.window) / 2 {
            return None;
        }
        self.window = match self.window {
            0 => FIRST_WINDOW.max(read.pages),
            window => (window * 2).max(FIRST_WINDOW),
        };
        if read.is_speculative {
            self.window = self.window.min(read.pages);
        }
        self.window = self.window.min(window_max);
        let fetch = Fetch { first: self.edge, pages: self.window, count: 1, step: 0 };
        self.edge += u64::from(self.window);
        Some(fetch)
    }
}

impl Strides {
    fn on_read(&mut self, read: &ReadInfo, window_max: u32) -> Option<Fetch> {
        // Pages are below 2^52.
        let step = read.first.cast_signed() - self.last.cast_signed();
        self.last = read.first;
        if step != self.step || step == 0 {
            (self.step, self.same, self.ahead) = (step, 0, 0);
            return None;
        }
        self.same += 1;
        self.ahead = self.ahead.saturating_sub(1);
        let most = STRIDES_MAX.min(window_max / read.pages.max(1));
        let want = most.min(1 << (self.same - 1).min(16));
        if read.is_speculative || self.ahead > want / 2 || want == 0 {
            return None;
        }
        let first = read.first.checked_add_signed(step.checked_mul(i64::from(self.ahead) + 1)?)?;
        let count = want - self.ahead;
        self.ahead = want;
        (count > 0).then_some(Fetch { first, pages: read.pages, count, step })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(first: u64, pages: u32) -> ReadInfo {
        ReadInfo {
            client: 1,
            first,
            pages,
            is_speculative: false,
            is_beside: false,
            is_inline: false,
            wasted: 0,
        }
    }

    /// First page and length of each fetch for reads of 4 pages at `reads`.
    fn fetched(streams: &mut Streams, reads: impl Iterator<Item = u64>) -> Vec<(u64, u32)> {
        reads.filter_map(|first| streams.on_read(&read(first, 4))).map(|it| (it.first, it.pages)).collect()
    }

    #[test]
    fn a_sequential_stream_is_fetched_in_windows_that_double_without_a_gap() {
        let mut streams = Streams::new(256);
        let fetches = fetched(&mut streams, (0..500).map(|at| at * 4));
        assert_eq!(fetches[..4], [(12, 16), (28, 32), (60, 64), (124, 128)]);
        let mut edge = 12;
        for (first, pages) in &fetches {
            assert!(*first == edge && *pages <= 256, "{fetches:?}");
            edge += u64::from(*pages);
        }
        assert!((2000..2600).contains(&edge), "{edge}");
    }

    #[test]
    fn reordered_and_interleaved_streams_are_told_apart_and_random_reads_fetch_nothing() {
        let mut streams = Streams::new(64);
        let two = (0..200).flat_map(|at| [at * 4, 1_000_000 + (at ^ 1) * 4]);
        let fetches = fetched(&mut streams, two);
        assert!(fetches.iter().any(|it| it.0 < 1000) && fetches.iter().any(|it| it.0 > 1_000_000));
        // Hosts are told apart, too.
        let mut streams = Streams::new(64);
        assert_eq!(fetched(&mut streams, (0..3).map(|at| at * 4)), [(12, 16)]);
        assert_eq!(streams.on_read(&ReadInfo { client: 2, ..read(20, 4) }), None);
        assert!(streams.on_read(&read(20, 4)).is_some());
        let mut random = crate::testing::Random(3);
        let mut streams = Streams::new(64);
        let reads: Vec<u64> = (0..5000).map(|_| random.below(1 << 40)).collect();
        assert_eq!(fetched(&mut streams, reads.into_iter()), []);
    }

    #[test]
    fn a_strided_stream_is_fetched_place_by_place_in_either_direction() {
        for step in [100_i64, -100] {
            let mut streams = Streams::new(64);
            let place = |at: u64| 1_000_000_u64.checked_add_signed(step * at.cast_signed()).expect("small");
            let mut fetched = std::collections::BTreeSet::new();
            for at in 0..100 {
                if let Some(fetch) = streams.on_read(&read(place(at), 4)) {
                    assert_eq!((fetch.step, fetch.pages), (step, 4));
                    assert!(fetch.count <= STRIDES_MAX);
                    for piece in 0..i64::from(fetch.count) {
                        let first = fetch.first.checked_add_signed(step * piece).expect("small");
                        assert!(fetched.insert(first), "fetched twice");
                    }
                }
                assert!(at < 3 || fetched.contains(&place(at)), "place {at} was not fetched");
            }
        }
        // Nothing is fetched before the start of the disk.
        let mut streams = Streams::new(64);
        for first in [300, 200, 100, 0] {
            if let Some(fetch) = streams.on_read(&read(first, 1)) {
                assert!(fetch.first < 300);
            }
        }
    }

    #[test]
    fn waste_halves_the_window_and_then_closes_the_stream() {
        let mut streams = Streams::new(1024);
        let (mut windows, mut wasted) = (Vec::new(), 0);
        for at in 0..4000 {
            if let Some(fetch) = streams.on_read(&ReadInfo { wasted, ..read(at * 4, 4) }) {
                // Pages of a fetch beyond 128 are evicted unread.
                wasted += u64::from(fetch.pages.saturating_sub(128));
                windows.push(fetch.pages);
            }
        }
        assert!(windows.iter().all(|window| *window <= 256), "{windows:?}");
        let large = windows.iter().filter(|window| **window > 128).count();
        assert!(large * 3 <= windows.len() * 2, "{windows:?}");
        let mut streams = Streams::new(1024);
        let count =
            (0..400).filter_map(|at| streams.on_read(&ReadInfo { wasted: at, ..read(at * 4, 4) })).count();
        assert_eq!(count, 0, "what is evicted at once is not fetched");
    }

    #[test]
    fn a_host_that_reads_ahead_itself_is_one_request_ahead() {
        let mut streams = Streams::new(1024);
        let ahead = |at: u64| ReadInfo { is_speculative: true, ..read(at * 32, 32) };
        let fetches: Vec<_> = (0..20).filter_map(|at| streams.on_read(&ahead(at))).collect();
        assert!(fetches.len() > 10 && fetches.iter().all(|fetch| fetch.pages <= 32), "{fetches:?}");
    }
}
