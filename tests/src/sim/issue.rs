//! The commands of a host: any, anywhere, whatever others do there at the same time.

use nvme_spec::Sqe;
use nvme_spec::optimistic::PAGE_ENTRY_BYTES;
use nvme_spec::register::CC;
use nvme_spec::sqe::Fuse;
use nvme_spec::status::Status;
use spindle_nvme_optimistic::client::PageRange;
use spindle_nvme_transport::host::HostData;
use spindle_reactor::mem::Buf;

use super::carrier::Carrier;
use super::host::{Issue, Pair, Queue, Stage, Want};
use super::model::fill;
use super::optimistic::{Client, PAGE_BYTES};

/// Where a command goes.
#[derive(Clone, Copy)]
struct At {
    cid: u16,
    /// Index of the namespace, and its number.
    place: usize,
    nsid: u32,
    first: usize,
    count: usize,
}

impl<W: Carrier> Queue<W> {
    /// Issue a command, or two, of a random kind if the queue has room.
    pub fn issue(&mut self, issue: &mut Issue<'_>) {
        if self.stage != Stage::Live || self.count() + 2 > usize::from(self.entries) - 1 {
            return;
        }
        if issue.leaves_permille > 0 && issue.rng.permille(issue.leaves_permille) {
            self.leave(issue);
            return;
        }
        if self.qid == 0 {
            self.issue_admin(issue);
            return;
        }
        let Some(cid) = self.free_cid(issue.rng) else { return };
        if let Some((place, pages)) = Client::next_references(issue) {
            return self.references(issue, cid, place, pages);
        }
        let place = issue.rng.size(0, issue.places.len() - 1);
        let (first, count) = issue.places[place].pick(issue.rng, issue.blocks_max);
        let at = At { cid, place, nsid: issue.places[place].nsid, first, count };
        match issue.rng.below(100) {
            0..35 => self.read(issue, at),
            35..63 => self.write(issue, at),
            63..68 => self.zero(issue, at),
            68..74 => self.compare(issue, at),
            74..81 => self.pair(issue, at),
            81..84 => {
                let sqe = Sqe::verify(cid, at.nsid, first as u64, blocks(count));
                self.submit(issue, sqe, HostData::None, place, Want::Verify);
            }
            84..89 => self.copy(issue, at),
            89..92 => {
                let is_all = issue.rng.permille(500);
                let sqe = Sqe::flush(cid, if is_all { 0xffff_ffff } else { at.nsid });
                self.submit(issue, sqe, HostData::None, place, Want::Flush { is_all });
            }
            _ => self.wrong(issue, at),
        }
    }

    /// Disconnect an I/O queue, or reset the controller, with commands outstanding: the target ends the
    /// connections.
    fn leave(&mut self, issue: &mut Issue<'_>) {
        let Some(cid) = self.free_cid(issue.rng) else { return };
        let sqe = match self.qid {
            0 => Sqe::property_set(cid, false, CC, 6 << 16 | 4 << 20),
            _ => Sqe::disconnect(cid),
        };
        issue.counts.hit(if self.qid == 0 { "resets" } else { "disconnects" });
        self.stage = Stage::Leaving;
        self.wire.excuse();
        self.submit(issue, sqe, HostData::None, 0, Want::Leave);
    }

    fn read(&mut self, issue: &mut Issue<'_>, at: At) {
        // Often a whole page, where there is a cache. Not drawn, so that what follows stays what it was.
        let place = &issue.places[at.place];
        let page = 4096 / place.block_bytes();
        let is_cached = place.source.sealed_frames().is_some();
        let is_page = is_cached && at.count >= page && at.first % 4 != 3;
        let at = if is_page { At { first: at.first / page * page, count: page, ..at } } else { at };
        let buf = take(issue, at.count);
        let sqe = Sqe::read(at.cid, at.nsid, at.first as u64, blocks(at.count));
        let want = Want::Read { first: at.first, count: at.count };
        self.submit(issue, sqe, HostData::FromController(buf), at.place, want);
    }

    fn references(&mut self, issue: &mut Issue<'_>, cid: u16, place: usize, pages: PageRange) {
        let per_page = PAGE_BYTES / issue.places[place].block_bytes();
        let (lba, count) = (pages.first * per_page as u64, blocks(pages.count * per_page));
        let sqe = Sqe::get_references(cid, issue.places[place].nsid, lba, count);
        let bytes = u32::try_from(pages.count).expect("few") * PAGE_ENTRY_BYTES;
        let buf = issue.pool.take(bytes).expect("the hosts' pool is large");
        self.submit(issue, sqe, HostData::FromController(buf), place, Want::References(pages));
    }

    fn write(&mut self, issue: &mut Issue<'_>, at: At) {
        let tags: Vec<u64> =
            (at.first..at.first + at.count).map(|block| issue.places[at.place].fresh_tag(block)).collect();
        let buf = filled(issue, &tags);
        let is_durable = issue.rng.permille(200);
        let sqe = Sqe::write(at.cid, at.nsid, at.first as u64, blocks(at.count), is_durable);
        let want = Want::Write { first: at.first, tags, is_durable };
        self.submit(issue, sqe, HostData::ToController(buf), at.place, want);
    }

    fn zero(&mut self, issue: &mut Issue<'_>, at: At) {
        let At { cid, place, nsid, first, count } = at;
        let want = |is_durable| Want::Write { first, tags: vec![0; count], is_durable };
        if issue.rng.permille(500) {
            let is_durable = issue.rng.permille(300);
            let mut sqe = Sqe::write_zeroes(cid, nsid, first as u64, blocks(count), issue.rng.permille(500));
            if is_durable {
                sqe.cdw12.set(sqe.cdw12.get() | 1 << 30);
            }
            self.submit(issue, sqe, HostData::None, place, want(is_durable));
            return;
        }
        // Two adjacent ranges, of which the first may be empty.
        let split = issue.rng.size(0, count);
        let mut buf = issue.pool.take(32).expect("the hosts' pool is large");
        for (index, (at, blocks)) in [(first, split), (first + split, count - split)].into_iter().enumerate()
        {
            let mut range = [0; 16];
            range[4..8].copy_from_slice(&u32::try_from(blocks).expect("few").to_le_bytes());
            range[8..].copy_from_slice(&(at as u64).to_le_bytes());
            buf.copy_in(index * 16, &range);
        }
        let mut sqe = Sqe::dsm(cid, nsid, 2);
        sqe.cdw11.set(4);
        self.submit(issue, sqe, HostData::ToController(buf), place, want(false));
    }

    /// What is expected of a block: what was seen there last, or what is never written.
    fn expected(issue: &mut Issue<'_>, place: usize, block: usize) -> u64 {
        let place = &mut issue.places[place];
        if issue.rng.permille(900) { place.guess[block] } else { place.fresh_tag(block) }
    }

    fn compare(&mut self, issue: &mut Issue<'_>, at: At) {
        // One block more often than not: of several, a difference says little.
        let count = if issue.rng.permille(600) { 1 } else { at.count };
        let blocks_of = at.first..at.first + count;
        let tags: Vec<u64> = blocks_of.map(|block| Self::expected(issue, at.place, block)).collect();
        let buf = filled(issue, &tags);
        let sqe = Sqe::compare(at.cid, at.nsid, at.first as u64, blocks(count));
        self.submit(
            issue,
            sqe,
            HostData::ToController(buf),
            at.place,
            Want::Compare { first: at.first, tags },
        );
    }

    fn pair(&mut self, issue: &mut Issue<'_>, at: At) {
        let At { cid, place, nsid, first: block, .. } = at;
        let expected = Self::expected(issue, place, block);
        let tag = issue.places[place].fresh_tag(block);
        let index = self.pairs.len();
        let compare = Sqe::compare(cid, nsid, block as u64, 1).with_fuse(Fuse::FIRST);
        let buf = filled(issue, &[expected]);
        self.submit(issue, compare, HostData::ToController(buf), place, Want::Pair { index, half: 0 });
        let second = self.free_cid(issue.rng).expect("room for two was checked");
        let write = Sqe::write(second, nsid, block as u64, 1, false).with_fuse(Fuse::SECOND);
        let buf = filled(issue, &[tag]);
        self.submit(issue, write, HostData::ToController(buf), place, Want::Pair { index, half: 1 });
        let begin = *issue.clock;
        self.pairs.push(Pair { place, block, expected, tag, begin, end: None, results: [None, None] });
    }

    fn copy(&mut self, issue: &mut Issue<'_>, at: At) {
        let At { cid, place, nsid, count, .. } = at;
        let (sources, len) = (issue.places[place].history.sources.clone(), issue.places[place].history.len());
        let others = if sources.start == 0 { sources.end..len } else { 0..sources.start };
        let count = count.min(sources.len()).min(others.len());
        // Near the middle, where the others are.
        let near = |issue: &mut Issue<'_>, range: &std::ops::Range<usize>| {
            let (low, high) = (range.start, range.end - count);
            let is_low = low == 0;
            match issue.rng.permille(500) {
                true if is_low => issue.rng.size(high.saturating_sub(4), high),
                true => issue.rng.size(low, (low + 4).min(high)),
                false => issue.rng.size(low, high),
            }
        };
        let (source, first) = (near(issue, &sources), near(issue, &others));
        let parts = if count > 1 { 2 } else { 1 };
        let split = if parts == 2 { issue.rng.size(1, count - 1) } else { count };
        let mut buf = issue.pool.take(32 * parts).expect("the hosts' pool is large");
        buf.clear();
        for (index, (at, blocks)) in
            [(source, split), (source + split, count - split)].into_iter().enumerate()
        {
            if blocks > 0 {
                buf.copy_in(index * 32 + 8, &(at as u64).to_le_bytes());
                buf.copy_in(index * 32 + 16, &u16::try_from(blocks - 1).expect("few").to_le_bytes());
            }
        }
        let mut sqe = Sqe::copy(cid, nsid, first as u64, u16::try_from(parts).expect("two"));
        let is_durable = issue.rng.permille(300);
        if is_durable {
            sqe.cdw12.set(sqe.cdw12.get() | 1 << 30);
        }
        let want = Want::Copy { source, first, count, is_durable };
        self.submit(issue, sqe, HostData::ToController(buf), place, want);
    }

    /// Commands that must be refused, each in its own way.
    fn wrong(&mut self, issue: &mut Issue<'_>, at: At) {
        let At { cid, place, nsid, .. } = at;
        let end = issue.places[place].history.len() as u64;
        let (sqe, data, status) = match issue.rng.below(7) {
            0 => (Sqe::read(cid, nsid, end, 1), 1, Status::LBA_OUT_OF_RANGE),
            1 => (Sqe::read(cid, nsid, u64::MAX, 2), 2, Status::LBA_OUT_OF_RANGE),
            2 => (Sqe::write_zeroes(cid, nsid, end - 1, 2, false), 0, Status::LBA_OUT_OF_RANGE),
            3 => (Sqe::read(cid, 7, 0, 1), 1, Status::INVALID_NAMESPACE_OR_FORMAT),
            4 => (Sqe::new(0x6e, cid, nsid), 0, Status::INVALID_OPCODE),
            5 => (Sqe::read(cid, nsid, 0, 2), 1, Status::DATA_SGL_LENGTH_INVALID),
            _ => (Sqe::read(cid, nsid, 0, 1).with_fuse(Fuse::FIRST), 1, Status::INVALID_FIELD),
        };
        let data = if data == 0 { HostData::None } else { HostData::FromController(take(issue, data)) };
        self.submit(issue, sqe, data, place, Want::Refused(status));
    }

    fn issue_admin(&mut self, issue: &mut Issue<'_>) {
        let Some(cid) = self.free_cid(issue.rng) else { return };
        let page = |issue: &Issue<'_>| {
            HostData::FromController(issue.pool.take(4096).expect("the hosts' pool is large"))
        };
        // As hosts do: whatever the others wait for, there is room for a Keep Alive.
        let has_room = self.count() + 3 < usize::from(self.entries);
        if has_room
            && let Some(place) = issue.client.wants()
            && issue.places[place].source.sealed_frames().is_some()
        {
            issue.client.is_attaching = true;
            let buf = issue.pool.take(64).expect("the hosts' pool is large");
            let sqe = Sqe::attach(cid, issue.places[place].nsid);
            return self.submit(issue, sqe, HostData::FromController(buf), place, Want::Attach);
        }
        match issue.rng.below(if has_room { 5 } else { 1 }) {
            0 => self.submit(issue, Sqe::keep_alive(cid), HostData::None, 0, Want::Other),
            1 => {
                let sqe = Sqe::identify(cid, nvme_spec::identify::Cns::CONTROLLER, 0, 0);
                let page = page(issue);
                self.submit(issue, sqe, page, 0, Want::Other);
            }
            2 => {
                let sqe = Sqe::get_log_page(cid, nvme_spec::log::LogId(1), 0xffff_ffff, 4096, 0, false);
                let page = page(issue);
                self.submit(issue, sqe, page, 0, Want::Other);
            }
            3 if !self.has_async_event() => {
                let sqe = Sqe::async_event_request(cid);
                self.submit(issue, sqe, HostData::None, 0, Want::AsyncEvent);
            }
            _ => {}
        }
    }

    fn has_async_event(&self) -> bool {
        self.outstanding.iter().flatten().any(|asked| matches!(asked.want, Want::AsyncEvent))
    }

    /// Ask on this (admin) queue for an abort of a command of `other`.
    pub fn abort(&mut self, issue: &mut Issue<'_>, other: &mut Queue<W>) {
        let is_room = self.stage == Stage::Live && self.count() + 2 < usize::from(self.entries);
        let wanted = self.outstanding.iter().flatten();
        let aborts = wanted.filter(|asked| matches!(asked.want, Want::Abort { .. })).count();
        let victim = other.outstanding.iter().position(Option::is_some);
        let (Some(cid), Some(victim), true) = (self.free_cid(issue.rng), victim, is_room && aborts < 2)
        else {
            return;
        };
        let victim = u16::try_from(victim).expect("a cid");
        other.begin_abort(victim);
        let want = Want::Abort { qid: other.qid, cid: victim };
        self.submit(issue, Sqe::abort(cid, other.qid, victim), HostData::None, 0, want);
    }
}

fn take(issue: &Issue<'_>, count: usize) -> Buf {
    let bytes = u32::try_from(count * issue.places[0].block_bytes()).expect("small");
    issue.pool.take(bytes).expect("the hosts' pool is large")
}

fn filled(issue: &Issue<'_>, tags: &[u64]) -> Buf {
    let mut buf = take(issue, tags.len());
    let block_bytes = issue.places[0].block_bytes();
    let mut block = vec![0; block_bytes];
    for (index, tag) in tags.iter().enumerate() {
        fill(*tag, &mut block);
        buf.copy_in(index * block_bytes, &block);
    }
    buf
}

fn blocks(count: usize) -> u32 {
    u32::try_from(count).expect("small")
}
