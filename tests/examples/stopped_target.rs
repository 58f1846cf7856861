//! Stops and continues the binary (SIGSTOP, SIGCONT) under hosts with a keep-alive time-out of 2 s, whose
//! Keep Alives are less than that apart, and counts the controllers that the target has ended. None is
//! right. Run: `cargo run --release --example stopped_target`, with `SPINDLE` as the path of the binary.
//! Exit code 1: a controller was ended.
#![forbid(unsafe_code)]

use std::net::{IpAddr, Ipv4Addr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nvme_spec::Sqe;
use rustix::process::Signal;
use spindle_tests::loopback::raw::{RawHost, capsule};
use spindle_tests::loopback::{Folder, SpindleProcess, config, free_port};

const KATO: Duration = Duration::from_secs(2);
/// Of each host.
const KEEP_ALIVE_PERIOD: Duration = Duration::from_millis(1800);
/// Hosts, and I/O queues of each.
const CASES: [(usize, u16); 3] = [(900, 0), (200, 0), (20, 40)];
/// Thousandths of the time-out for which the target is stopped, one after the other.
const STOPS: [u32; 6] = [700, 800, 900, 1500, 200, 900];

struct Host {
    admin: RawHost,
    /// Kept open.
    _io: Vec<RawHost>,
    next: Instant,
}

/// Hosts send their Keep Alives for so long.
fn live(hosts: &mut [Host], time: Duration) {
    let end = Instant::now() + time;
    loop {
        for host in hosts.iter_mut().filter(|host| host.next <= Instant::now()) {
            host.next += KEEP_ALIVE_PERIOD;
            // A connection that has ended is counted later.
            if host.admin.is_open() {
                host.admin.send(&capsule(Sqe::keep_alive(1), &[]));
            }
        }
        if Instant::now() >= end {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

fn ended(served: &SpindleProcess, hosts: &mut [Host]) -> usize {
    for stop in STOPS {
        // Not in step with the Keep Alives.
        live(hosts, Duration::from_millis(1130));
        served.stop();
        live(hosts, KATO * stop / 1000);
        served.signal(Signal::CONT);
    }
    live(hosts, 2 * KATO);
    hosts.iter_mut().map(|host| usize::from(!host.admin.is_open())).sum()
}

pub(crate) fn main() -> ExitCode {
    let mut total = 0;
    for (hosts, queues) in CASES {
        let address = free_port(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let folder = Folder::new("stopped");
        let disk = "kind = \"null\"\nsize = \"1MiB\"".to_owned();
        let served = folder.serve(&config(2, address, &[disk]));
        let kato_ms = u32::try_from(KATO.as_millis()).expect("small");
        let mut all = Vec::new();
        for at in 0..hosts {
            let (admin, cntlid) = RawHost::admin_with(address, kato_ms);
            let io = (1..=queues).map(|qid| RawHost::io(address, qid, cntlid)).collect();
            // Spread over the period.
            let first = KEEP_ALIVE_PERIOD * u32::try_from(at % 16).expect("small") / 16;
            all.push(Host { admin, _io: io, next: Instant::now() + first });
            live(&mut all, Duration::ZERO);
        }
        let ended = ended(&served, &mut all);
        println!("{hosts} hosts with {queues} I/O queues each: {ended} controllers ended");
        total += ended;
        drop(all);
        served.terminate();
    }
    ExitCode::from(u8::from(total > 0))
}
