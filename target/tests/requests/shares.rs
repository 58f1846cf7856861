//! Shares of memory: what a connection may hold, who waits because of whom, and data that does not come.

use std::sync::Arc;

use nvme_spec::Sqe;
use nvme_spec::fabrics::ConnectData;
use nvme_spec::feature::FeatureId;
use nvme_spec::identify::Cns;
use nvme_spec::log::LogId;
use nvme_spec::nqn::Nqn;
use nvme_spec::zerocopy::IntoBytes;
use spindle_nvme_transport::{CloseReason, DataPointer};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Holder, Pages};
use spindle_target::notice::Notice;
use spindle_target::qpair::REPLY_TIMEOUT_SHORT;
use spindle_target::qpair::request::RequestState;
use spindle_target_disk::Disk;
use spindle_target_disk::ram::{RamDisk, RamSpec};
use spindle_tests::script::{CC_ENABLED, HOST, Queue, Rig, Setup, Want, connect_data, connect_sqe};

use crate::{assert_ok, pattern, pool_disk, ram_disk};

/// So many hosts with an I/O queue each, on a pool with these zones.
fn queues(zones: &[(u32, u32)], count: u16) -> (Rig, Vec<Queue>) {
    let setup = Setup { connections: 32, ..Setup::small(vec![pool_disk(512)]) };
    let mut rig = Rig::new(Setup { zones: zones.to_vec(), ..setup });
    let queue = |rig: &mut Rig, number| {
        rig.host_nqn = format!("{HOST}-{number}");
        let (_, cntlid) = rig.admin(0, 0);
        rig.io(0, Want { entries: 100, ..Want::io(cntlid, 1) })
    };
    let queues = (1..=count).map(|number| queue(&mut rig, number)).collect();
    (rig, queues)
}

fn write(cid: u16) -> Sqe {
    Sqe::write(cid, 1, u64::from(cid), 1, false)
}

#[test]
fn who_is_above_its_share_waits_alone_and_the_core_may_sleep() {
    let (mut rig, queues) = queues(&[(4096, 8)], 3);
    let [greedy, second, third] = &queues[..] else { panic!("three queues") };
    for cid in 0..20 {
        rig.send(greedy, write(cid), 512);
    }
    assert_eq!(rig.states(greedy), [(RequestState::NeedBuffer, 16), (RequestState::Fetching, 4)]);
    rig.turn();
    assert!(rig.cores[0].is_quiet(), "only the greedy one's own buffers would help it");
    // No other queue lines up behind it.
    for cid in 0..4 {
        rig.send(second, write(cid), 512);
    }
    assert_eq!(rig.states(second), [(RequestState::NeedBuffer, 2), (RequestState::Fetching, 2)]);
    rig.send(third, write(1), 512);
    assert_eq!(third.line.fetching(), [1], "one that has none finds one");
    // What comes back goes to the one that has less.
    rig.bring(greedy, 0, &pattern(0, 512));
    rig.turn();
    assert_eq!((greedy.line.fetching().len(), second.line.fetching().len()), (3, 2));
    rig.bring(third, 1, &pattern(1, 512));
    rig.turn();
    assert_eq!((greedy.line.fetching().len(), second.line.fetching().len()), (3, 3));
    assert_eq!((rig.held(greedy), rig.held(second)), (3 * 4096, 3 * 4096));
    rig.finish();
}

#[test]
fn a_share_of_the_pool_keeps_nobody_from_the_memory_of_a_disk() {
    let disks = vec![pool_disk(512), ram_disk(512)];
    let mut rig = Rig::new(Setup { zones: vec![(4096, 4)], ..Setup::small(disks) });
    let (_, cntlid) = rig.admin(0, 0);
    let [greedy, other] = [1, 2].map(|qid| rig.io(0, Want::io(cntlid, qid)));
    for cid in 0..6 {
        rig.send(&greedy, write(cid), 512);
    }
    assert_eq!(rig.states(&greedy), [(RequestState::NeedBuffer, 3), (RequestState::Fetching, 3)]);
    // At once, with its data from the capsule.
    other.line.set_in_capsule(&pattern(3, 512));
    rig.send_pointer(&other, Sqe::write(1, 2, 0, 1, false), Ok(DataPointer::InCapsule { bytes: 512 }));
    assert!(!other.line.has_in_capsule());
    assert_ok(&rig.answer(&other).expect("an answer at once"));
    rig.finish();
}

/// Random numbers (PCG-like; the same for the same seed).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// A queue of the contest: what it has sent and when.
struct Player {
    queue: Queue,
    sent: Vec<(u16, usize, u32)>,
    next: u16,
    served: u32,
    longest: u32,
    held: u64,
}

impl Player {
    fn send(&mut self, rig: &mut Rig, blocks: u32, turn: u32) {
        self.next = (self.next + 1) % 1000;
        let bytes = blocks as usize * 512;
        rig.send(&self.queue, Sqe::write(self.next, 1, 0, blocks, false), bytes);
        self.sent.push((self.next, bytes, turn));
    }

    /// The data of one of the commands that were asked for comes, and its answer is read.
    fn bring(&mut self, rig: &mut Rig, which: usize, turn: u32) {
        let asked = self.queue.line.fetching();
        let Some(cid) = asked.get(which % asked.len().max(1)).copied() else { return };
        let at = self.sent.iter().position(|(sent, ..)| *sent == cid).expect("it was sent");
        let (_, bytes, since) = self.sent.remove(at);
        rig.bring(&self.queue, cid, &vec![0; bytes]);
        rig.turn();
        assert!(rig.answers(&self.queue).iter().any(|answer| answer.cid == cid));
        self.served += 1;
        self.longest = self.longest.max(turn - since);
    }
}

#[test]
fn two_greedy_connections_leave_ten_modest_ones_their_share() {
    const TURNS: u32 = 1500;
    for seed in 0..6 {
        let mut random = Random(seed);
        let (mut rig, queues) = queues(&[(4096, 24), (16 << 10, 8), (64 << 10, 4)], 12);
        let player = |queue| Player { queue, sent: Vec::new(), next: 0, served: 0, longest: 0, held: 0 };
        let mut players: Vec<Player> = queues.into_iter().map(player).collect();
        for turn in 0..TURNS {
            for (index, player) in players.iter_mut().enumerate() {
                let is_greedy = index < 2;
                let most = if is_greedy { 60 } else { 1 };
                while player.sent.len() < most && (is_greedy || random.below(4) == 0) {
                    // Some of them large, of both kinds.
                    let blocks = if random.below(8) == 0 { 128 } else { 1 + random.below(16) };
                    player.send(&mut rig, u32::try_from(blocks).expect("small"), turn);
                    if !is_greedy {
                        break;
                    }
                }
                // The greedy are slow to bring what they are asked for, and in any order.
                if !is_greedy || random.below(3) == 0 {
                    let which = usize::try_from(random.below(64)).expect("small");
                    player.bring(&mut rig, which, turn);
                }
                player.held += rig.held(&player.queue);
            }
            rig.turn();
        }
        let (greedy, modest) = players.split_at(2);
        let longest = modest.iter().map(|player| player.longest).max().expect("ten");
        assert!(longest <= 64, "seed {seed}: a modest one's command took {longest} turns");
        assert!(modest.iter().all(|player| player.served > TURNS / 16), "seed {seed}");
        let (a, b) = (greedy[0].held / u64::from(TURNS), greedy[1].held / u64::from(TURNS));
        assert!(a.max(b) <= 2 * a.min(b), "seed {seed}: they held {a} and {b} bytes");
        let (s, t) = (greedy[0].served, greedy[1].served);
        assert!(s.max(t) <= 2 * s.min(t), "seed {seed}: {s} and {t} of their commands were served");
        rig.finish();
    }
}

#[test]
fn a_large_command_is_not_starved_by_small_ones_that_come_and_go() {
    let (mut rig, queues) = queues(&[(4096, 2), (64 << 10, 2)], 8);
    let (large, small) = queues.split_last().expect("queues");
    // More small ones than there are small buffers, so that some are in large ones at any time.
    for queue in small {
        rig.send(queue, write(1), 512);
    }
    // It needs both of the large at once.
    rig.send(large, Sqe::compare(7, 1, 0, 128), 64 << 10);
    let mut turns = 0;
    while large.line.fetching().is_empty() {
        turns += 1;
        assert!(turns < 16, "it is starved");
        let mut asked = small.iter().filter(|queue| !queue.line.fetching().is_empty());
        let queue =
            asked.nth(turns % 4).or_else(|| small.iter().find(|queue| !queue.line.fetching().is_empty()));
        let queue = queue.expect("small ones go on").clone();
        rig.bring(&queue, 1, &[0; 512]);
        rig.turn();
        assert_ok(&rig.answer(&queue).expect("an answer"));
        rig.send(&queue, write(1), 512);
        rig.turn();
    }
    rig.bring(large, 7, &[0; 64 << 10]);
    rig.turn();
    rig.turn();
    assert_ok(&rig.answer(large).expect("an answer"));
    // Nothing is kept for anybody any more.
    let asked: usize = small.iter().map(|queue| queue.line.fetching().len()).sum();
    assert_eq!(asked, 4);
    rig.finish();
}

/// Connect with its data in the capsule, all of it there.
fn connect_in_capsule(rig: &mut Rig) -> Queue {
    let queue = rig.accept(0);
    queue.line.set_in_capsule(&connect_data(Want::admin(), HOST));
    rig.send_pointer(&queue, connect_sqe(Want::admin()), Ok(DataPointer::InCapsule { bytes: 1024 }));
    queue
}

#[test]
fn connects_that_keep_their_data_back_keep_nobody_out() {
    let setup = Setup { admin_buffers: 4, ..Setup::small(vec![pool_disk(512)]) };
    let mut rig = Rig::new(setup);
    let (admin, _) = rig.admin(0, 0);
    let silent: Vec<Queue> = (0..9).map(|_| rig.accept(0)).collect();
    for queue in &silent {
        rig.send(queue, connect_sqe(Want::admin()), 1024);
    }
    let asked = |queues: &[Queue]| queues.iter().filter(|queue| !queue.line.fetching().is_empty()).count();
    assert_eq!(asked(&silent), 3, "about half of the reserve is for data that is to come");
    // The other half serves who keeps nothing back, at once.
    let quick = connect_in_capsule(&mut rig);
    assert_ok(&rig.answer(&quick).expect("an answer at once"));
    rig.send(&admin, Sqe::identify(1, Cns::CONTROLLER, 0, 0), 4096);
    assert_ok(&rig.answer(&admin).expect("an answer at once"));
    // Who has to wait makes the silent ones hurry.
    let patient = rig.accept(0);
    rig.send(&patient, connect_sqe(Want::admin()), 1024);
    for _ in 0..100 {
        if !patient.line.fetching().is_empty() {
            break;
        }
        rig.pass(Nanos::from_ms(50));
    }
    assert!(rig.now.as_ms() < 4500, "{} ms", rig.now.as_ms());
    rig.bring(&patient, 0, &connect_data(Want::admin(), HOST));
    assert_ok(&rig.answer(&patient).expect("an answer"));
    assert!(silent.iter().filter(|queue| queue.line.closed() == Some(CloseReason::HostError)).count() >= 7);
    rig.finish();
}

#[test]
fn a_host_that_keeps_its_data_back_for_ever_is_closed_and_a_slow_one_is_not() {
    let (mut rig, queues) = queues(&[(4096, 16)], 3);
    let [silent, slow, idle] = &queues[..] else { panic!("three queues") };
    for cid in 0..4 {
        rig.send(silent, write(cid), 512);
        rig.send(slow, write(cid), 512);
    }
    rig.pass(Nanos::from_secs(18));
    rig.bring(slow, 0, &pattern(0, 512));
    assert_ok(&rig.answer(slow).expect("an answer"));
    rig.pass(Nanos::from_secs(11));
    assert_eq!((silent.line.closed(), silent.line.fetching().len()), (None, 4), "not before 30 s");
    rig.pass(Nanos::from_secs(2));
    assert_eq!(silent.line.closed(), Some(CloseReason::HostError));
    for cid in 1..4 {
        rig.pass(Nanos::from_secs(14));
        rig.bring(slow, cid, &pattern(0, 512));
        assert_ok(&rig.answer(slow).expect("an answer"));
    }
    rig.pass(Nanos::from_secs(60));
    assert_eq!((slow.line.closed(), idle.line.closed()), (None, None));
    let lines = rig.notices.iter().filter(|notice| matches!(notice, Notice::HostError { .. })).count();
    assert_eq!(lines, 1);
    assert_eq!(rig.cores[0].pools().0.free_bytes(), 16 * 4096);
    rig.finish();
}

#[test]
fn hosts_that_keep_what_another_waits_for_are_closed_before_its_time_is_over() {
    let (mut rig, queues) = queues(&[(4096, 2)], 3);
    let [first, second, third] = &queues[..] else { panic!("three queues") };
    rig.send(first, write(1), 512);
    rig.send(first, write(2), 512);
    rig.send(second, write(1), 512);
    rig.send(third, write(1), 512);
    assert_eq!(rig.states(third), [(RequestState::NeedBuffer, 1)]);
    (0..9).for_each(|_| rig.pass(Nanos::from_secs(1)));
    assert_eq!((first.line.closed(), second.line.closed()), (None, None));
    (0..3).for_each(|_| rig.pass(Nanos::from_secs(1)));
    let ended = Some(CloseReason::HostError);
    assert_eq!((first.line.closed(), second.line.closed(), third.line.closed()), (ended, ended, None));
    rig.hang_up(first);
    rig.hang_up(second);
    rig.turn();
    assert_eq!(third.line.fetching(), [1]);
    let stalled = |notice: &&Notice| matches!(notice, Notice::Stalled { bytes: 4096, .. });
    assert_eq!(rig.notices.iter().filter(stalled).count(), 2, "once for each host: {:?}", rig.notices);
    assert_eq!(rig.registry.stalled_hosts(), 2);
    rig.finish();
}

/// Two hosts on a RAM disk of 1 MiB that is full, with so much slack beside; block size 4 KiB.
fn two_hosts_on_ram(slack: u64, cores: usize) -> (Rig, Queue, Queue) {
    let spec = RamSpec { bytes: 1 << 20, block_bytes: 4096, pages: Pages::Base, has_seals: false };
    let disk: Arc<dyn Disk> = Arc::new(RamDisk::with_slack("ram", spec, slack).expect("a disk"));
    let mut rig = Rig::new(Setup { cores, ..Setup::small(vec![disk]) });
    let queue = |rig: &mut Rig, core| {
        rig.host_nqn.push('x');
        let (_, cntlid) = rig.admin(core, 0);
        rig.io(core, Want { entries: 128, ..Want::io(cntlid, 1) })
    };
    let (bad, good) = (queue(&mut rig, 0), queue(&mut rig, cores - 1));
    for lba in (0..256).step_by(32) {
        assert_ok(&rig.run(&good, Sqe::write(1, 1, lba, 32, false), &pattern(3, 128 << 10)));
    }
    (rig, bad, good)
}

/// A write of 128 KiB.
fn large(cid: u16) -> Sqe {
    Sqe::write(cid, 1, u64::from(cid % 8) * 32, 32, false)
}

#[test]
fn a_host_that_withholds_write_data_leaves_others_a_share_of_ram_disk_memory() {
    // It took all of the slack once, and every other writer of every core waited for it.
    for cores in [1, 2] {
        let (mut rig, bad, good) = two_hosts_on_ram(4 << 20, cores);
        for cid in 0..120 {
            rig.send(&bad, large(cid), 128 << 10);
        }
        let held = bad.line.fetching().len();
        assert!((8..100).contains(&held), "about half of what there is: {held}");
        for round in 0..200 {
            for cid in 0..4 {
                rig.send(&good, large(cid), 128 << 10);
            }
            rig.turn();
            for cid in 0..4 {
                assert!(good.line.fetching().contains(&cid), "round {round}: command {cid} waits");
                rig.bring(&good, cid, &pattern(usize::from(cid), 128 << 10));
                assert_ok(&rig.answer(&good).expect("an answer"));
            }
            rig.pass(Nanos::from_ms(100));
        }
        assert_eq!(bad.line.closed(), None, "not before its time");
        // One now and then does not make it live on.
        rig.bring(&bad, 0, &pattern(0, 128 << 10));
        rig.pass(Nanos::from_secs(11));
        assert_eq!(bad.line.closed(), Some(CloseReason::HostError));
        rig.finish();
    }
}

#[test]
fn a_host_that_reads_no_replies_is_closed_when_others_wait_for_memory_it_pins() {
    for cores in [1, 2] {
        let (mut rig, bad, good) = two_hosts_on_ram(256 << 10, cores);
        let is_starved = |rig: &mut Rig, good: &Queue, cid: u16| {
            rig.send(good, large(cid), 128 << 10);
            rig.turn();
            good.line.fetching().is_empty()
        };
        // All of the disk, several times over, by small reads: each overwrite leaves its old page pinned.
        let mut waited = None;
        for round in 0..3_u16 {
            for cid in 0..32 {
                rig.send(&bad, Sqe::read(cid + round * 32, 1, u64::from(cid) * 8, 8), 32 << 10);
            }
            for area in 0..8 {
                let cid = 1000 + round * 8 + area;
                if is_starved(&mut rig, &good, cid) {
                    waited = Some(cid);
                    break;
                }
                rig.bring(&good, cid, &pattern(usize::from(round), 128 << 10));
                assert_ok(&rig.answer(&good).expect("an answer"));
            }
            if waited.is_some() || bad.line.closed().is_some() {
                break;
            }
        }
        if let Some(cid) = waited {
            rig.pass(Nanos::from_ms(REPLY_TIMEOUT_SHORT.as_ms() + 200));
            assert_eq!(bad.line.closed(), Some(CloseReason::HostError));
            rig.hang_up(&bad);
            rig.turn();
            assert_eq!(good.line.fetching(), [cid], "it goes on");
            rig.bring(&good, cid, &pattern(1, 128 << 10));
            assert_ok(&rig.answer(&good).expect("an answer"));
        }
        let states = rig.states(&bad);
        assert!(waited.is_some(), "the memory is never short: {states:?} {:?}", bad.line.closed());
        rig.finish();
    }
}

#[test]
fn a_host_that_reads_no_large_replies_leaves_others_a_share_of_ram_disk_memory() {
    for cores in [1, 2] {
        let (mut rig, bad, good) = two_hosts_on_ram(4 << 20, cores);
        for round in 0..100_u16 {
            // As many as its queue takes: those beyond its share wait.
            if round < 15 {
                (0..8).for_each(|cid| {
                    rig.send(&bad, Sqe::read(cid + round * 8, 1, u64::from(cid) * 32, 32), 128 << 10)
                });
            }
            for area in 0..8 {
                let cid = 1000 + round * 8 + area;
                rig.send(&good, large(cid), 128 << 10);
                rig.turn();
                assert_eq!(good.line.fetching(), [cid], "round {round}");
                rig.bring(&good, cid, &pattern(usize::from(round), 128 << 10));
                assert_ok(&rig.answer(&good).expect("an answer"));
            }
        }
        assert!(rig.states(&bad).iter().any(|(state, _)| *state == RequestState::NeedBuffer));
        // What it takes makes room for what waits.
        let mut answers = 0;
        while let Some(answer) = rig.answer(&bad) {
            assert_eq!(answer.data.len(), 128 << 10);
            answers += 1;
            rig.turn();
        }
        assert_eq!(answers, 120);
        rig.finish();
    }
}

#[test]
fn answers_that_are_not_read_have_an_end_and_slow_readers_live_on() {
    let (mut rig, queues) = queues(&[(4096, 32)], 3);
    let [silent, slow, idle] = &queues[..] else { panic!("three queues") };
    for cid in 0..4 {
        rig.send(silent, Sqe::read(cid, 1, 0, 1), 512);
        rig.send(slow, Sqe::read(cid, 1, 0, 1), 512);
    }
    for _ in 0..4 {
        rig.pass(Nanos::from_secs(14));
        assert_ok(&rig.answer(slow).expect("an answer"));
    }
    assert_eq!(silent.line.closed(), Some(CloseReason::HostError));
    rig.pass(Nanos::from_secs(60));
    assert_eq!((slow.line.closed(), idle.line.closed()), (None, None));
    rig.finish();
}

/// A discovery controller, whose host may be anybody.
fn discovery(rig: &mut Rig) -> Queue {
    let (queue, want) = (rig.accept(0), Want::admin());
    let host = Nqn::new(HOST).expect("well formed");
    let data = ConnectData::new([7; 16], want.cntlid, &Nqn::discovery(), &host);
    assert!(rig.run(&queue, connect_sqe(want), data.as_bytes()).status.is_success());
    rig.set_cc(&queue, CC_ENABLED);
    queue
}

fn discovery_log(cid: u16) -> Sqe {
    Sqe::get_log_page(cid, LogId::DISCOVERY, 0, 4096, 0, true)
}

#[test]
fn strangers_that_take_no_logs_leave_the_admin_buffers_to_others() {
    let mut rig = Rig::new(Setup { admin_buffers: 16, ..Setup::small(vec![pool_disk(512)]) });
    let strangers = [(); 5].map(|()| discovery(&mut rig));
    for stranger in &strangers {
        (0..20).for_each(|cid| rig.send(stranger, discovery_log(cid), 4096));
    }
    let held = rig.cores[0].pools().1.share(Holder::stranger(0)).held();
    assert_eq!(held, 0, "those of another address");
    // As many as are free, of a third each: they are of one address.
    assert_eq!(rig.cores[0].pools().1.free_bytes(), 10 * 8192);
    let (admin, cntlid) = rig.admin(0, 0);
    rig.send(&admin, Sqe::identify(1, Cns::CONTROLLER, 0, 0), 4096);
    assert!(rig.answer(&admin).expect("an answer").status.is_success());
    rig.io(0, Want::io(cntlid, 1));
    // The strangers wait for each other: those that take nothing go soon.
    rig.pass(Nanos::from_ms(REPLY_TIMEOUT_SHORT.as_ms() + 200));
    let gone = strangers.iter().filter(|stranger| stranger.line.closed().is_some()).count();
    assert!(gone > 0, "{gone} are closed");
    assert_eq!(admin.line.closed(), None);
    strangers.iter().filter(|it| it.line.closed().is_some()).for_each(|it| rig.hang_up(it));
    rig.finish();
}

#[test]
fn admin_commands_whose_data_does_not_come_take_a_share_of_their_host_only() {
    let mut rig = Rig::new(Setup { admin_buffers: 16, ..Setup::small(vec![pool_disk(512)]) });
    let set_timestamp = |cid| Sqe::set_features(cid, FeatureId::TIMESTAMP, 0, 0);
    let silent = [(); 4].map(|()| rig.admin(0, 0).0);
    for queue in &silent {
        (0..20).for_each(|cid| rig.send(queue, set_timestamp(cid), 8));
    }
    rig.host_nqn.push('x');
    let (admin, _) = rig.admin(0, 0);
    rig.send(&admin, set_timestamp(1), 8);
    assert_eq!(admin.line.fetching(), [1]);
    rig.bring(&admin, 1, &[1; 8]);
    assert!(rig.answer(&admin).expect("an answer").status.is_success());
    rig.finish();
}

#[test]
fn memory_of_one_disk_is_no_reason_to_wait_for_that_of_another() {
    let ram = |name, slack| -> Arc<dyn Disk> {
        let spec = RamSpec { bytes: 1 << 20, block_bytes: 4096, pages: Pages::Base, has_seals: false };
        Arc::new(RamDisk::with_slack(name, spec, slack).expect("a disk"))
    };
    let mut rig = Rig::new(Setup::small(vec![ram("a", 32 << 20), ram("b", 1 << 20)]));
    let queue = |rig: &mut Rig| {
        rig.host_nqn.push('x');
        let (_, cntlid) = rig.admin(0, 0);
        rig.io(0, Want { entries: 128, ..Want::io(cntlid, 1) })
    };
    let (silent, busy) = (queue(&mut rig), queue(&mut rig));
    let write = |cid: u16, nsid| Sqe::write(cid, nsid, u64::from(cid % 8) * 32, 32, false);
    (0..100).for_each(|cid| rig.send(&silent, write(cid, 2), 128 << 10));
    assert!(rig.states(&silent).contains(&(RequestState::NeedBuffer, 100 - silent.line.fetching().len())));
    // 12.5 MiB: more than the second disk has in all.
    (0..100).for_each(|cid| rig.send(&busy, write(cid, 1), 128 << 10));
    assert_eq!(busy.line.fetching().len(), 100);
    for cid in 100..104 {
        rig.send(&busy, write(cid, 2), 128 << 10);
        rig.turn();
        assert!(busy.line.fetching().contains(&cid), "command {cid}");
        rig.bring(&busy, cid, &pattern(1, 128 << 10));
        assert_ok(&rig.answer(&busy).expect("an answer"));
    }
    rig.finish();
}
