//! What keeping registrations of memory is worth: commands of 64 KiB through the initiator's pin-down cache,
//! on a real device, with the cache off, on, and giving up in batches (as PVFS 6.7 measures its own).
//!
//! ```text
//! cargo build --release -p spindle-initiator --example registration-bench
//! scripts/compare/registration
//! ```
//! Both ends are in this process, one command at a time. A command is what an NVMe/RDMA command does to its
//! buffer: the host registers it, the controller WRITEs or READs it with the key, the host tidies up
//! meanwhile and gives the key back. "none" leaves the transfer out. Its buffer is one of a few that are used
//! over and over, with the probability called reuse, or else the one of many that was used longest ago: those
//! are more than the cache may keep, so none of them is found there. Each mode has the same buffers in the
//! same order.
#![forbid(unsafe_code)]

use std::net::IpAddr;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use spindle_rdma::registration::{Limits, Mode};
use spindle_rdma_verbs::{Access, Device, Road};
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};

/// Fails the run with a reason.
macro_rules! ensure {
    ($is_so:expr, $($why:tt)*) => {
        if !$is_so {
            return Err(format!($($why)*).into());
        }
    };
}

#[path = "../src/link/rdma/memory.rs"]
mod memory;
#[path = "../../rdma/verbs/examples/verbs-check/pair.rs"]
#[expect(dead_code, reason = "the checks of verbs need more of it")]
mod pair;

use memory::Registrations;
use pair::{BUFFER, Lab, Outcome, Pair, Shape, connect};

/// Buffers that are used over and over.
const HOT: usize = 16;
/// Buffers that the cache may keep.
const KEPT: usize = 128;
/// All other buffers.
const COLD: usize = 512;
/// A command without transfer takes far less time: so many for each.
const NONE_EACH: usize = 20;
/// Chances of a hot buffer, in percent.
const REUSES: [u64; 2] = [20, 80];
const MODES: [Mode; 3] = [Mode::Off, Mode::PinDown, Mode::Batched];
const MOVES: [Move; 3] = [Move::None, Move::Write, Move::Read];

/// What the controller does with the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Move {
    None,
    /// The host's read.
    Write,
    /// The host's write.
    Read,
}

/// Which buffer is next: by xorshift64.
struct Choice {
    state: u64,
    reuse: u64,
    cold: usize,
}

impl Choice {
    fn next(&mut self) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let number = self.state >> 16;
        if number % 100 < self.reuse {
            return usize::try_from(number / 100).unwrap_or(0) % HOT;
        }
        self.cold = (self.cold + 1) % COLD;
        HOT + self.cold
    }
}

struct Bench {
    lab: Lab,
    pair: Pair,
    buffers: Vec<Buf>,
    /// The key that each buffer had last: the same again is a registration that was kept.
    keys: Vec<u32>,
}

/// Of one mode in one round.
#[derive(Debug, Clone, Copy)]
struct Run {
    rate: f64,
    /// Commands whose registration was there.
    kept: f64,
}

impl Bench {
    fn new(address: IpAddr) -> Outcome<Bench> {
        let devices = Device::all()?;
        let device = Arc::clone(devices.first().ok_or("no RDMA device")?);
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: BUFFER, count: 2 }], Pages::Base)?;
        let region = Arc::new(device.register(pool.area(), Access::LOCAL_WRITE)?);
        let lab = Lab { devices, device, pool, region, address, netdev: None };
        let pair = connect(&lab, Shape::new(Road::Best))?;
        let count = HOT + COLD;
        let pool =
            Pool::new(&[ZoneSpec { buffer_bytes: BUFFER, count: u32::try_from(count)? }], Pages::Base)?;
        let mut buffers: Vec<Buf> = (0..count).map_while(|_| pool.take(BUFFER)).collect();
        ensure!(buffers.len() == count, "no memory");
        // Its pages are there before a device asks for them.
        buffers.iter_mut().for_each(|buffer| buffer.copy_in(0, &[1; BUFFER as usize]));
        Ok(Bench { lab, pair, buffers, keys: vec![0; count] })
    }

    /// One command with this buffer. True when its registration was there.
    fn command(&mut self, registrations: &Registrations, index: usize, what: Move) -> Outcome<bool> {
        let keys = registrations.acquire(&self.buffers[index])?;
        let piece = keys.pieces()[0];
        let server = &mut self.pair.server;
        let local = server.sge(0, BUFFER);
        let mut batch = server.queue.batch();
        match what {
            Move::None => (),
            Move::Write => batch.write(1, true, &[local], piece.address, piece.remote_key)?,
            Move::Read => batch.read(1, true, &[local], piece.address, piece.remote_key)?,
        }
        batch.submit()?;
        registrations.tidy();
        if what != Move::None {
            server.completed_well(&[1])?;
        }
        registrations.release(&keys);
        Ok(std::mem::replace(&mut self.keys[index], piece.remote_key) == piece.remote_key)
    }

    fn run(&mut self, mode: Mode, reuse: u64, what: Move, commands: usize, seed: u64) -> Outcome<Run> {
        let limits = Limits { mode, bytes: KEPT * BUFFER as usize, ..Limits::default() };
        let registrations: Rc<Registrations> = Registrations::of(&self.lab.device, limits);
        let mut choice = Choice { state: seed, reuse, cold: 0 };
        // A cache that is full, with the hot ones in it and none that is soon to come.
        for index in (HOT..HOT + COLD).chain(0..HOT) {
            self.command(&registrations, index, Move::None)?;
        }
        let begin = Instant::now();
        let mut kept = 0.0;
        for _ in 0..commands {
            kept += f64::from(u8::from(self.command(&registrations, choice.next(), what)?));
        }
        let rate = commands as f64 / begin.elapsed().as_secs_f64();
        Ok(Run { rate, kept: kept / commands as f64 })
    }

    /// A row of the table: the modes in turn, each round from another one on.
    fn row(&mut self, reuse: u64, what: Move, commands: usize, rounds: usize) -> Outcome {
        let mut runs = [const { Vec::new() }; MODES.len()];
        let commands = if what == Move::None { commands * NONE_EACH } else { commands };
        for round in 0..rounds {
            let seed = 0x9E37_79B9_7F4A_7C15 ^ (round as u64 + 1);
            for turn in 0..MODES.len() {
                let at = (round + turn) % MODES.len();
                runs[at].push(self.run(MODES[at], reuse, what, commands, seed)?);
            }
        }
        let name = match what {
            Move::None => "none",
            Move::Write => "WRITE",
            Move::Read => "READ",
        };
        print!("| {name} | {reuse} % |");
        for (at, of_mode) in runs.iter().enumerate() {
            let rate = median(of_mode.iter().map(|run| run.rate).collect());
            print!(" {rate:.0} |");
            if at > 0 {
                let ratios = of_mode.iter().zip(&runs[0]).map(|(run, off)| run.rate / off.rate);
                let kept = median(of_mode.iter().map(|run| run.kept).collect());
                print!(" **{:.2}** | {:.0} % |", median(ratios.collect()), kept * 100.0);
            }
        }
        println!();
        let kept = runs[0].iter().map(|run| run.kept).fold(0.0, f64::max);
        ensure!(kept == 0.0, "{kept} of the registrations were there with the cache off");
        Ok(())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn all(address: IpAddr, commands: usize, rounds: usize) -> Outcome {
    let mut bench = Bench::new(address)?;
    let name = bench.lab.device.name();
    println!(
        "{name}; {rounds} rounds of {commands} commands of {BUFFER} B, {NONE_EACH} times as many of none"
    );
    println!("\n| transfer | reuse | Off /s | PinDown /s | of Off's | kept | Batched /s | of Off's | kept |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for what in MOVES {
        for reuse in REUSES {
            bench.row(reuse, what, commands, rounds)?;
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let parsed = match &arguments[..] {
        [address, commands, rounds] => match (address.parse(), commands.parse(), rounds.parse()) {
            (Ok(address), Ok(commands), Ok(rounds)) => Some((address, commands, rounds)),
            _ => None,
        },
        _ => None,
    };
    let Some((address, commands, rounds)) = parsed else {
        eprintln!("usage: registration-bench ADDRESS COMMANDS ROUNDS");
        return ExitCode::from(2);
    };
    match all(address, commands, rounds) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("registration-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
