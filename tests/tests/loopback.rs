//! Initiator against target in two processes on loopback.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;
use spindle_initiator::{
    BlockRange, Buf, Controller, IoQueue, Namespace, Options, Pages, Pool, Ticket, ZoneSpec,
};
use spindle_tests::loopback::{LONG, Served, config, free_port, target};

const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const RAM: &str = "kind = \"ram\"\nsize = \"16MiB\"";

fn file(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("spindle-loopback-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder.join(name)
}

fn serve(name: &str, text: &str) -> Served {
    let path = file(name);
    std::fs::write(&path, text).expect("written");
    Served::start(&path)
}

fn pool() -> Pool {
    Pool::new(&[ZoneSpec { buffer_bytes: 1 << 20, count: 8 }], Pages::Base).expect("a pool")
}

fn buf(pool: &Pool, bytes: u32, seed: u8) -> Buf {
    let mut buf = pool.take(bytes).expect("a buffer");
    for (at, byte) in (seed..=255).cycle().zip(buf.as_mut_slice().expect("one piece")) {
        *byte = at;
    }
    buf
}

fn done(queue: &mut IoQueue, ticket: Ticket) -> Option<Buf> {
    let completion = queue.wait(ticket, LONG).expect("an answer");
    completion.result.expect("a success");
    completion.buf
}

fn bytes(buf: &Buf) -> Vec<u8> {
    buf.as_slice().expect("one piece").to_vec()
}

fn matrix(queue: &mut IoQueue, namespace: &Namespace, keeps: bool) {
    let pool = pool();
    let block = namespace.block_bytes();
    for size in [block, 4096, 8192, 65_536, 1 << 20] {
        let ticket = queue.write(namespace, 8, buf(&pool, size, 3), size == 8192).expect("taken");
        done(queue, ticket);
        let ticket = queue.flush(namespace).expect("taken");
        done(queue, ticket);
        let ticket = queue.read(namespace, 8, buf(&pool, size, 9)).expect("taken");
        let read = done(queue, ticket).expect("its buffer");
        assert!(!keeps || bytes(&read) == bytes(&buf(&pool, size, 3)), "{size} bytes");
    }
    let ticket = queue.verify(namespace, BlockRange { lba: 8, blocks: 4 }).expect("taken");
    done(queue, ticket);
    if !keeps {
        return;
    }
    let ticket = queue.compare(namespace, 8, buf(&pool, block, 3)).expect("taken");
    done(queue, ticket);
    let ticket = queue.compare(namespace, 8, buf(&pool, block, 4)).expect("taken");
    assert!(queue.wait(ticket, LONG).expect("an answer").result.is_err(), "a difference is found");
    let both =
        queue.compare_and_write(namespace, 8, buf(&pool, block, 3), buf(&pool, block, 5)).expect("taken");
    for ticket in both {
        done(queue, ticket);
    }
    let ticket =
        queue.copy(namespace, &[BlockRange { lba: 8, blocks: 1 }], 0, buf(&pool, 4096, 0)).expect("taken");
    done(queue, ticket);
    let ticket = queue.compare(namespace, 0, buf(&pool, block, 5)).expect("taken");
    done(queue, ticket);
    let ticket = queue.write_zeroes(namespace, BlockRange { lba: 0, blocks: 1 }, false).expect("taken");
    done(queue, ticket);
    let ticket =
        queue.deallocate(namespace, &[BlockRange { lba: 8, blocks: 1 }], buf(&pool, 4096, 0)).expect("taken");
    done(queue, ticket);
    let ticket = queue.read(namespace, 0, buf(&pool, block, 9)).expect("taken");
    assert!(bytes(&done(queue, ticket).expect("its buffer")).iter().all(|byte| *byte == 0));
}

fn good_client(address: SocketAddr, options: &Options, disks: u32) {
    let mut controller = Controller::connect(&target(address), options).expect("connects");
    let mut queue = controller.connect_queue(1).expect("a queue");
    for nsid in 1..=disks {
        let namespace = controller.namespace(nsid).expect("a namespace");
        matrix(&mut queue, &namespace, nsid != 4);
    }
    drop(queue);
    controller.shutdown().expect("ends in order");
}

#[test]
fn every_command_works_on_every_disk_with_and_without_digests_on_one_and_two_cores() {
    for (cores, ip) in [(1, V4), (2, IpAddr::V6(Ipv6Addr::LOCALHOST))] {
        let disk = |block: u32| {
            let path = file(&format!("disk-{cores}-{block}"));
            format!(
                "kind = \"file\"\npath = {path:?}\nsize = \"16MiB\"\nblock_bytes = {block}\ncreate = true"
            )
        };
        let address = free_port(ip);
        let disks = [RAM.to_owned(), disk(512), disk(4096), "kind = \"null\"\nsize = \"16MiB\"".to_owned()];
        let _served = serve(&format!("matrix-{cores}.toml"), &config(cores, address, &disks));
        for digests in [false, true] {
            good_client(
                address,
                &Options { header_digest: digests, data_digest: digests, ..Options::default() },
                4,
            );
        }
    }
}

#[test]
fn three_hundred_connections_that_all_vanish_leave_a_target_that_serves() {
    let address = free_port(V4);
    let mut served = serve("many.toml", &config(2, address, &[RAM.to_owned()]));
    let pool = pool();
    let options = Options { io_queues: 30, ..Options::default() };
    let mut all = Vec::new();
    for _ in 0..10 {
        let mut controller = Controller::connect(&target(address), &options).expect("connects");
        let namespace = controller.namespace(1).expect("a namespace");
        for qid in 1..=30 {
            let mut queue = controller.connect_queue_of(qid, 8).expect("a queue");
            let ticket = queue.read(&namespace, u64::from(qid), buf(&pool, 4096, 0)).expect("taken");
            done(&mut queue, ticket);
            all.push(queue);
        }
        controller.abandon();
    }
    drop(all);
    good_client(address, &Options::default(), 1);
    served.signal(Signal::TERM);
    assert!(served.end().success(), "{:?}", served.log.last());
    assert!(!served.log.iter().any(|line| line.contains("panic")), "{}", served.log.join("\n"));
}

#[test]
fn a_connection_that_is_cut_or_talks_nonsense_ends_alone() {
    let address = free_port(V4);
    let _served = serve("cut.toml", &config(1, address, &[RAM.to_owned()]));
    let mut request = vec![0u8; 128];
    request[2] = 128;
    request[4] = 128;
    let mut wrong = request.clone();
    wrong[2] = 9;
    for is_reset in [false, true] {
        for sent in [&[][..], &request[..4], &request[..60], &request[..], &wrong[..], &[0xff; 300][..]] {
            let mut socket = TcpStream::connect(address).expect("connects");
            socket.write_all(sent).expect("sent");
            if is_reset {
                rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO)).expect("set");
            }
        }
    }
    good_client(address, &Options::default(), 1);
}

fn file_disk(name: &str, size: &str) -> String {
    let path = file(name);
    format!("kind = \"file\"\npath = {path:?}\nsize = \"{size}\"\ncreate = true")
}

#[test]
fn what_was_acknowledged_survives_kill_9_and_the_disk_is_the_same_one() {
    let address = free_port(V4);
    let text = config(1, address, &[file_disk("killed", "16MiB")]);
    let mut served = serve("killed.toml", &text);
    let mut acknowledged = [0u8; 64];
    let mut identity = None;
    for round in 1..=4u8 {
        let mut controller = Controller::connect(&target(address), &Options::default()).expect("connects");
        let mut queue = controller.connect_queue(1).expect("a queue");
        let namespace = controller.namespace(1).expect("a namespace");
        let identify = controller.identify_namespace(1).expect("identified");
        let ids = format!("{:?} {:?}", controller.identify().sn, identify.nguid);
        assert_eq!(identity.get_or_insert(ids.clone()), &ids, "the same disk after a restart");
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: 8192, count: 80 }], Pages::Base).expect("a pool");
        for (at, round) in (0u64..).zip(acknowledged) {
            let ticket = queue.read(&namespace, at * 16, pool.take(8192).expect("a buffer")).expect("taken");
            let read = bytes(&done(&mut queue, ticket).expect("its buffer"));
            let found = read[0];
            assert!(found >= round, "block {at}: round {round} was acknowledged, round {found} is there");
            assert!(read.chunks(512).all(|block| block.iter().all(|byte| *byte == block[0])), "torn");
        }
        // Half of the writes are waited for; the target dies with the others in flight.
        let tickets: Vec<Ticket> = (0..64u64)
            .map(|at| {
                let mut buf = pool.take(8192).expect("a buffer");
                buf.as_mut_slice().expect("one piece").fill(round);
                queue.write(&namespace, at * 16, buf, true).expect("taken")
            })
            .collect();
        for (ticket, acknowledged) in tickets.into_iter().zip(&mut acknowledged).take(32) {
            done(&mut queue, ticket);
            *acknowledged = round;
        }
        served.signal(Signal::KILL);
        served.end();
        served = serve("killed.toml", &text);
    }
    served.signal(Signal::TERM);
    assert!(served.end().success(), "{}", served.log.join("\n"));
}

#[test]
fn a_reload_grows_a_disk_under_a_live_host_and_a_wrong_one_changes_nothing() {
    let address = free_port(V4);
    let text = |size| config(1, address, &[file_disk("grown", size)]);
    let mut served = serve("grown.toml", &text("16MiB"));
    let mut controller = Controller::connect(&target(address), &Options::default()).expect("connects");
    let before = controller.namespace(1).expect("a namespace").bytes();
    std::fs::write(file("grown.toml"), text("seventeen")).expect("written");
    served.signal(Signal::HUP);
    assert!(served.wait_for("size").contains("seventeen"));
    served.wait_for("all stays as it was");
    std::fs::write(file("grown.toml"), text("32MiB")).expect("written");
    served.signal(Signal::HUP);
    served.wait_for("configuration read again");
    assert_eq!(controller.namespace(1).expect("a namespace").bytes(), 2 * before);
    controller.shutdown().expect("ends in order");
    served.signal(Signal::TERM);
    assert!(served.end().success());
}
