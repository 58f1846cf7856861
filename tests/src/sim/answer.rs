//! What an answer means: which may come, and what it says of the blocks.

use nvme_spec::optimistic::Attachment;
use nvme_spec::status::Status;
use nvme_spec::zerocopy::FromBytes;
use spindle_reactor::mem::Buf;

use super::carrier::Carrier;
use super::history::{Fate, NEVER, Time, What};
use super::host::{Asked, Issue, Queue, Want};
use super::optimistic::{Client, Denial};

impl<W: Carrier> Queue<W> {
    /// The connection is gone, or may be: whether the command had an effect is not known.
    pub(super) fn on_lost(&mut self, issue: &mut Issue<'_>, asked: Asked) {
        let Asked { want, place, begin, .. } = asked;
        let fate = Fate::Open(self.association);
        match want {
            Want::Write { first, tags, .. } => note_writes(issue, place, first, &tags, (begin, NEVER), fate),
            Want::Copy { source, first, count, .. } => {
                note_copies(issue, place, (source, first, count), false, (begin, NEVER), fate);
            }
            Want::Pair { index, half } => {
                self.pairs[index].results[half] = Some(Err(()));
                self.end_pair(issue, index);
            }
            Want::Abort { qid, cid } => issue.aborts_over.push((qid, cid)),
            Want::Attach => issue.client.is_attaching = false,
            Want::Read { .. }
            | Want::Compare { .. }
            | Want::Verify
            | Want::Flush { .. }
            | Want::Setup
            | Want::Other
            | Want::Refused(_)
            | Want::References(_)
            | Want::AsyncEvent
            | Want::Leave => {}
        }
        issue.counts.hit("lost");
    }

    /// `answer`: status, and dwords 0 and 1.
    pub(super) fn judge(
        &mut self,
        issue: &mut Issue<'_>,
        asked: Asked,
        (status, result): (Status, u64),
        buf: Option<Buf>,
    ) {
        let end = issue.tick();
        let Asked { want, place, begin, may_abort, .. } = asked;
        let is_ok = status.is_success();
        let is_aborted = status.code() == Status::ABORTED_BY_REQUEST;
        assert!(!is_aborted || may_abort, "aborted, but not asked to");
        let is_refused = begin <= issue.places[place].changed_until && is_change(status);
        let is_excused = is_aborted || is_refused || (issue.has_faults && is_disk_error(status));
        if !is_ok && is_excused {
            issue.counts.hit(if is_aborted { "aborted" } else { "failed" });
        }
        // Without effect for certain.
        let is_nothing = is_aborted || is_refused && status.code() != Status::INTERNAL_ERROR;
        let fate = if is_ok { Fate::Done } else { Fate::Perhaps };
        let verdict = Verdict { status, is_ok, is_excused, is_nothing, fate, time: (begin, end) };
        match want {
            Want::Read { first, count } => {
                assert!(is_ok || is_excused, "read: {status}");
                if is_ok {
                    learn(issue, place, first, result, buf.as_ref());
                    note_read(issue, place, (first, count), buf, (begin, end));
                }
            }
            Want::Write { first, tags, is_durable } => verdict.write(issue, place, first, &tags, is_durable),
            Want::Compare { first, tags } => verdict.compare(issue, place, first, &tags),
            Want::Copy { source, first, count, is_durable } => {
                verdict.copy(issue, place, (source, first, count), is_durable);
            }
            Want::Flush { is_all } => {
                assert!(is_ok || is_excused || is_all && is_change(status), "flush: {status}");
                if is_ok {
                    note_flush(issue, place, is_all, begin);
                }
            }
            Want::Pair { index, half } => {
                let pair = &mut self.pairs[index];
                pair.results[half] = Some(Ok(status));
                pair.end.get_or_insert(end);
                self.end_pair(issue, index);
            }
            Want::Attach => {
                judge_attach(issue, status, begin, is_excused);
                attach(issue, place, buf.filter(|_| is_ok).as_ref());
            }
            Want::References(pages) => {
                assert!(is_ok || is_excused, "references: {status}");
                Client::learn_entries(issue, place, pages, buf.filter(|_| is_ok).as_ref());
            }
            Want::Verify | Want::Other => assert!(is_ok || is_excused, "{status}"),
            Want::Refused(expected) => {
                let is_it = status.code() == expected;
                assert!(is_it || is_aborted || is_refused, "refusal: {status}, not {expected}");
                assert!(status.is_dnr() || !is_it, "a permanent refusal has DNR: {status}");
            }
            Want::Abort { qid, cid } => {
                assert!(is_ok, "abort: {status}");
                issue.aborts_over.push((qid, cid));
            }
            Want::AsyncEvent => assert!(is_ok || is_aborted, "event request: {status}"),
            Want::Leave => assert!(is_ok, "leaving: {status}"),
            Want::Setup => {}
        }
    }

    fn end_pair(&mut self, issue: &mut Issue<'_>, index: usize) {
        let pair = &self.pairs[index];
        let [Some(compare), Some(write)] = pair.results else { return };
        let now = issue.tick();
        let (block, begin, end) = (pair.block, pair.begin, pair.end.unwrap_or(now));
        let swapped = What::Swapped { expected: pair.expected, tag: pair.tag };
        let place = &mut issue.places[pair.place];
        let mut note = |what, end, fate| place.history.note(block, what, begin, end, fate);
        match (compare, write) {
            (Ok(compare), Ok(write)) => {
                assert_eq!(compare.is_success(), write.is_success(), "{compare} and {write}");
                if compare.is_success() {
                    note(swapped, end, Fate::Done);
                    place.guess[block] = pair.tag;
                    issue.counts.hit("swapped");
                } else if compare.code() == Status::COMPARE_FAILURE {
                    assert_eq!(write.code(), Status::ABORTED_FAILED_FUSED);
                    note(What::SawOther(pair.expected), end, Fate::Done);
                    issue.counts.hit("not swapped");
                } else {
                    let is_known =
                        [compare, write].iter().any(|status| is_change(*status) || is_disk_error(*status));
                    let is_aborted =
                        [compare, write].iter().any(|status| status.code() == Status::ABORTED_BY_REQUEST);
                    assert!(is_known || is_aborted, "pair: {compare} and {write}");
                    note(swapped, now, Fate::Perhaps);
                }
            }
            _ => note(swapped, NEVER, Fate::Open(self.association)),
        }
    }
}

/// What the answer to a command may say.
struct Verdict {
    status: Status,
    is_ok: bool,
    is_excused: bool,
    /// Without effect for certain.
    is_nothing: bool,
    fate: Fate,
    time: (Time, Time),
}

impl Verdict {
    fn write(&self, issue: &mut Issue<'_>, place: usize, first: usize, tags: &[u64], is_durable: bool) {
        assert!(self.is_ok || self.is_excused, "write: {}", self.status);
        let is_durable = is_durable && self.is_ok;
        issue.counts.add("durable", u64::from(is_durable));
        if !self.is_nothing {
            note_durable(issue, place, first, tags, is_durable, self.time, self.fate);
        }
    }

    fn compare(&self, issue: &mut Issue<'_>, place: usize, first: usize, tags: &[u64]) {
        let is_difference = self.status.code() == Status::COMPARE_FAILURE;
        assert!(self.is_ok || is_difference || self.is_excused, "compare: {}", self.status);
        if self.is_ok || is_difference {
            note_compare(issue, place, first, tags, self.is_ok, self.time);
        }
    }

    fn copy(&self, issue: &mut Issue<'_>, place: usize, blocks: (usize, usize, usize), is_durable: bool) {
        assert!(self.is_ok || self.is_excused, "copy: {}", self.status);
        issue.counts.add("copied", u64::from(self.is_ok));
        if !self.is_nothing {
            note_copies(issue, place, blocks, is_durable && self.is_ok, self.time, self.fate);
        }
    }
}

/// An Attach that was sent at `begin`: only a host that is revoked is denied, and it always is.
fn judge_attach(issue: &mut Issue<'_>, status: Status, begin: Time, is_excused: bool) {
    let Denial { since, until, .. } = issue.client.denial;
    if status.code() == Status::OPERATION_DENIED {
        assert!(begin < until, "attach: denied, but the host is allowed");
        return issue.counts.hit("denied attaches");
    }
    let is_ok = status.is_success();
    assert!(is_ok || is_excused || is_change(status), "attach: {status}");
    let is_late = is_ok && since.is_some_and(|since| begin > since);
    assert!(!is_late, "attach: granted to a host that was revoked before");
}

/// A host has attached to a namespace if there is `data`.
fn attach(issue: &mut Issue<'_>, place: usize, data: Option<&Buf>) {
    issue.client.is_attaching = false;
    if let Some(data) = data.and_then(Buf::as_slice) {
        let attachment = Attachment::read_from_bytes(data).expect("64 bytes");
        issue.client.attach(place, &attachment);
    }
}

/// The host's optimistic reads learn the reference of a read.
fn learn(issue: &mut Issue<'_>, place: usize, first: usize, result: u64, buf: Option<&Buf>) {
    let offset = (first * issue.places[place].block_bytes()) as u64;
    if let Some(buf) = buf {
        issue.client.learn(place, offset, result, buf);
    }
}

/// What a read brought.
fn note_read(
    issue: &mut Issue<'_>,
    place: usize,
    (first, count): (usize, usize),
    buf: Option<Buf>,
    (begin, end): (Time, Time),
) {
    let bytes: Vec<u8> = buf.iter().flat_map(|buf| buf.segments().flatten().copied()).collect();
    let place = &mut issue.places[place];
    let block_bytes = place.block_bytes();
    assert_eq!(bytes.len(), count * block_bytes, "a read that succeeded is whole");
    for (at, content) in bytes.chunks_exact(block_bytes).enumerate() {
        place.saw(first + at, content, begin, end);
    }
}

/// What a compare found. Of several blocks, a difference says nothing of any one.
fn note_compare(
    issue: &mut Issue<'_>,
    place: usize,
    first: usize,
    tags: &[u64],
    is_same: bool,
    (begin, end): (Time, Time),
) {
    let history = &mut issue.places[place].history;
    match tags {
        [tag] if !is_same => history.note(first, What::SawOther(*tag), begin, end, Fate::Done),
        _ if !is_same => {}
        _ => tags
            .iter()
            .enumerate()
            .for_each(|(at, tag)| history.note(first + at, What::Saw(*tag), begin, end, Fate::Done)),
    }
    issue.counts.hit(if is_same { "compared equal" } else { "compared other" });
}

fn note_flush(issue: &mut Issue<'_>, place: usize, is_all: bool, begin: Time) {
    for (index, other) in issue.places.iter_mut().enumerate() {
        // Of all: one that was away for some time may have been left out.
        if if is_all { other.changed_until < begin } else { index == place } {
            other.history.note_flush(begin);
        }
    }
    issue.counts.hit("flushed");
}

/// What a write did to its blocks.
fn note_durable(
    issue: &mut Issue<'_>,
    place: usize,
    first: usize,
    tags: &[u64],
    is_durable: bool,
    (begin, end): (Time, Time),
    fate: Fate,
) {
    let place = &mut issue.places[place];
    for (at, tag) in tags.iter().enumerate() {
        place.history.note(first + at, What::Wrote { tag: *tag, is_durable }, begin, end, fate);
        if fate == Fate::Done {
            place.guess[first + at] = *tag;
        }
    }
}

fn note_writes(
    issue: &mut Issue<'_>,
    place: usize,
    first: usize,
    tags: &[u64],
    time: (Time, Time),
    fate: Fate,
) {
    note_durable(issue, place, first, tags, false, time, fate);
}

fn note_copies(
    issue: &mut Issue<'_>,
    place: usize,
    (source, first, count): (usize, usize, usize),
    is_durable: bool,
    (begin, end): (Time, Time),
    fate: Fate,
) {
    let place = &mut issue.places[place];
    for at in 0..count {
        let what = What::Copied { from: source + at, is_durable };
        place.history.note(first + at, what, begin, end, fate);
        place.guess[first + at] = place.guess[source + at];
    }
}

/// What a command may be told whose namespace goes, or shrinks.
fn is_change(status: Status) -> bool {
    [
        Status::INVALID_NAMESPACE_OR_FORMAT,
        Status::NAMESPACE_NOT_READY,
        Status::LBA_OUT_OF_RANGE,
        Status::INTERNAL_ERROR,
        Status::ABORTED_FAILED_FUSED,
        Status::ABORTED_MISSING_FUSED,
    ]
    .contains(&status.code())
}

fn is_disk_error(status: Status) -> bool {
    [
        Status::INTERNAL_ERROR,
        Status::UNRECOVERED_READ_ERROR,
        Status::WRITE_FAULT,
        Status::CAPACITY_EXCEEDED,
        Status::ABORTED_FAILED_FUSED,
    ]
    .contains(&status.code())
}
