//! A hostile host: whatever it writes to queues, registers and lists, the emulator goes on.

use std::sync::atomic::Ordering;

use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use nvme_spec::{SQE_BYTES, Sqe};

use super::{Host, pair};
use crate::faults::Random;
use crate::{EmulatorSpec, Faults, NamespaceSpec, SglSupport};

fn spec() -> EmulatorSpec {
    EmulatorSpec {
        namespaces: vec![NamespaceSpec { blocks: 512, ..NamespaceSpec::default() }; 2],
        sgl: SglSupport::Bytes,
        has_write_cache: true,
        has_doorbell_buffer: true,
        queue_pairs: 4,
        mdts: 4,
        ready_steps: 1,
        ..EmulatorSpec::default()
    }
}

/// Random bytes, of which much is nearly right: known opcodes, addresses that are mapped, small numbers.
fn random_command(host: &Host, random: &mut Random, admin: bool) -> Sqe {
    let mut bytes = [0; SQE_BYTES];
    bytes.iter_mut().for_each(|byte| *byte = random.next() as u8);
    let mut sqe = Sqe::read_from_bytes(&bytes).expect("64 bytes");
    let some = |random: &mut Random, of: &[u8]| of[random.below(of.len() as u64) as usize];
    if random.below(8) != 0 {
        let known: &[u8] =
            if admin { &[0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 0x7c] } else { &[0, 1, 2, 5, 8, 9, 0xc, 0x19] };
        sqe.opcode = some(random, known);
        sqe.flags = some(random, &[0, 0, 0, 0x40]);
        sqe.nsid = (random.below(4) as u32).into();
    }
    let place = |random: &mut Random| match random.below(4) {
        0 => host.at(random.below(super::host::DATA_BYTES as u64) & !7),
        1 => host.queues.iova().0 + (random.below(0x8_0000) & !7),
        _ => host.at(random.below(2048) * 4096),
    };
    if random.below(8) != 0 {
        sqe = match sqe.flags & 0x40 {
            0 => sqe.with_prp(place(random), place(random)),
            _ => {
                let mut sgl = sqe.sgl;
                sgl.address = place(random).into();
                sgl.length = (random.below(64) as u32 * 512).into();
                let any = random.next() as u8;
                sgl.identifier = some(random, &[0, 0, 0x20, 0x30, any]);
                sqe.with_sgl(sgl)
            }
        };
    }
    if random.below(4) != 0 {
        sqe.cdw10 = (random.below(1024) as u32 | (random.below(64) as u32) << 16).into();
        sqe.cdw11 = (random.below(4) as u32).into();
        sqe.cdw12 = (random.below(64) as u32).into();
    }
    sqe
}

/// Lists that point to mapped memory, mostly.
fn fill_lists(host: &Host, random: &mut Random) {
    for word in host.data.words() {
        let value = match random.below(8) {
            0 => random.next(),
            1 => host.at(random.below(1 << 22)),
            _ => host.at(random.below(2048) * 4096),
        };
        word.store(value, Ordering::Relaxed);
    }
}

/// The queues of a host that is up again.
fn bring_up(host: &mut Host) {
    host.function.reset().expect("resets");
    host.emulator.set_faults(Faults::default());
    host.enable();
    host.make_pair(1, 64);
    host.make_pair(2, 3);
    host.pairs[2] = Some(pair(2, 2, 3, 3));
}

/// Random commands in all queues; doorbells and registers now and then.
fn attack(seed: u64, commands: u64, faults: &Faults) {
    let mut random = Random::new(seed);
    let mut host = Host::new(spec());
    fill_lists(&host, &mut random);
    let (mut given, mut alive) = (0, 0);
    while given < commands {
        bring_up(&mut host);
        host.emulator.set_faults(Faults { seed: random.next(), ..faults.clone() });
        for _ in 0..50 {
            for qid in [0, 1, 1, 1, 2] {
                for _ in 0..random.below(12) {
                    let sqe = random_command(&host, &mut random, qid == 0);
                    host.put_entry(qid, &sqe);
                    given += 1;
                }
                let tail = host.pair(qid).tail;
                host.ring_tail(qid, tail);
            }
            host.emulator.steps(1 + random.below(3));
            for qid in [0, 1, 2] {
                while host.poll(qid).is_some() {
                    alive += 1;
                }
            }
            if random.below(16) == 0 {
                let offset = 0x1000 + random.below(12) * 4;
                host.bar.write32(offset, random.below(80) as u32);
                let from = host.at(random.below(1 << 20));
                // Whether it does is not asked here: that it answers is.
                let _ = host.emulator.holds(&(from..from + 4096));
            }
            if random.below(200) == 0 {
                host.bar.write32(random.below(32) * 4, random.next() as u32);
            }
        }
    }
    // It was alive all the time: a good part of what was given was completed.
    assert!(alive * 4 > given, "{alive} of {given}");
    assert!(host.emulator.violations() > 0, "and it was attacked");
    bring_up(&mut host);
    let identify = Sqe::identify(0, nvme_spec::identify::Cns::CONTROLLER, 0, 0).with_prp(host.at(0), 0);
    assert!(host.admin(identify).status().is_success());
}

#[test]
fn random_commands_never_panic() {
    attack(1, 150_000, &Faults::default());
}

#[test]
fn random_commands_with_faults_never_panic() {
    let rate = 1000;
    let faults = Faults {
        swallow: rate,
        drop: rate,
        delay: 3 * rate,
        delay_steps_max: 9,
        double: rate,
        wrong_cid: rate,
        wrong_status: rate,
        error: rate,
        fatal: 20,
        freeze: 20,
        admin_swallow: rate,
        ..Faults::default()
    };
    attack(2, 150_000, &faults);
}

#[test]
fn random_registers_never_panic() {
    let mut random = Random::new(3);
    let mut host = Host::new(spec());
    for round in 0..20_000_u32 {
        let offset =
            if random.below(2) == 0 { random.below(0x18) * 4 } else { 0x1000 + random.below(32) * 4 };
        let value = match random.below(3) {
            0 => random.next() as u32,
            1 => 0x0046_0000 | random.below(2) as u32,
            _ => host.at(random.below(16) * 4096) as u32,
        };
        host.bar.write32(offset, value);
        host.emulator.step();
        if round % 1000 == 999 {
            host.function.reset().expect("resets");
        }
    }
    host.function.reset().expect("resets");
    host.enable();
    host.make_pair(1, 4);
    let sqe = Sqe::flush(0, 1).with_prp(0, 0);
    assert_eq!(host.run(1, sqe).as_bytes()[14..], [1, 0]);
}
