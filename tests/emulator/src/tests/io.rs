//! I/O commands.

use nvme_spec::identify::{Dlfeat, Oncs};
use nvme_spec::io::{CopyCdw12, CopyRangeFormat0, DsmRange, ReadWriteCdw12};
use nvme_spec::sqe::{Fuse, NSID_ALL, Psdt};
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sqe, Status};

use super::Host;
use crate::{EmulatorSpec, NamespaceSpec, SglSupport};

/// Bytes that differ from each other and from those of another seed.
pub fn pattern(seed: u8, count: usize) -> Vec<u8> {
    (0..count)
        .map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8).wrapping_add(seed))
        .collect()
}

/// A drive with this namespace.
fn one(namespace: NamespaceSpec) -> EmulatorSpec {
    EmulatorSpec { namespaces: vec![namespace], ..EmulatorSpec::default() }
}

fn small(blocks: u64) -> EmulatorSpec {
    one(NamespaceSpec { blocks, block_bytes: 512, ..NamespaceSpec::default() })
}

#[test]
fn what_is_written_is_read() {
    let mut host = Host::with_io(EmulatorSpec::default());
    let data = pattern(1, 8192);
    host.put(0, &data);
    let write = Sqe::write(0, 1, 5, 2, false).with_prp(host.at(0), host.at(4096));
    assert_eq!(host.io(write), Status::SUCCESS);
    assert_eq!(host.emulator.read_medium(1, 5, 2), data);
    let read = Sqe::read(0, 1, 5, 2).with_prp(host.at(0x1_0000), host.at(0x2_0000));
    assert_eq!(host.io(read), Status::SUCCESS);
    assert_eq!([host.get(0x1_0000, 4096), host.get(0x2_0000, 4096)].concat(), data);
    assert_eq!(host.emulator.read_medium(1, 4, 1), vec![0; 4096], "nothing beside it");
    assert_eq!(host.emulator.read_medium(1, 7, 1), vec![0; 4096]);
    let health = host.emulator.health();
    assert_eq!((health.host_writes, health.bytes_written, health.host_reads), (1, 8192, 1));
    host.assert_clean();
}

#[test]
fn a_completion_is_these_bytes() {
    let mut host = Host::with_io(small(16));
    let mut sqe = Sqe::read(0, 1, 16, 1).with_prp(host.at(0), 0);
    host.submit(1, sqe);
    sqe.set_lba(15);
    host.submit(1, sqe);
    host.emulator.step();
    let at = (host.cq_iova(1) - host.queues.iova().0) as usize;
    let mut bytes = [0; 48];
    host.queues.copy_out(at, &mut bytes);
    // LBA Out of Range with DNR, phase 1; then success. SQHD 1 and 2, SQID 1, CIDs 2 and 3.
    assert_eq!(bytes[..16], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 2, 0, 0x01, 0x81]);
    assert_eq!(bytes[16..32], [0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1, 0, 3, 0, 0x01, 0x00]);
    assert_eq!(bytes[32..], [0; 16]);
}

trait SetLba {
    fn set_lba(&mut self, lba: u64);
}

impl SetLba for Sqe {
    fn set_lba(&mut self, lba: u64) {
        self.cdw10 = (lba as u32).into();
        self.cdw11 = ((lba >> 32) as u32).into();
    }
}

#[test]
fn ranges_end_with_the_namespace() {
    let mut host = Host::with_io(small(100));
    let prp = |host: &Host, sqe: Sqe| sqe.with_prp(host.at(0), 0);
    let all = [
        Sqe::read(0, 1, 0, 1),
        Sqe::write(0, 1, 0, 1, false),
        Sqe::compare(0, 1, 0, 1),
        Sqe::verify(0, 1, 0, 1),
        Sqe::write_zeroes(0, 1, 0, 1, false),
    ];
    for sqe in all {
        for (lba, blocks, is_inside) in [
            (99, 1, true),
            (100, 1, false),
            (99, 2, false),
            (96, 4, true),
            (u64::MAX, 1, false),
            (u64::MAX - 1, 4, false),
        ] {
            let mut sqe = prp(&host, sqe);
            sqe.set_lba(lba);
            sqe.cdw12 = ReadWriteCdw12::new().with_nlb_z(blocks - 1).into();
            let found = host.io(sqe);
            let wanted = if is_inside { Status::SUCCESS } else { Status::LBA_OUT_OF_RANGE.dnr() };
            assert_eq!(found, wanted, "{:?} {lba} {blocks}", sqe.io_opcode());
        }
    }
    host.assert_clean();
}

#[test]
fn what_is_not_there_is_refused() {
    let spec = EmulatorSpec { mdts: 1, sgl: SglSupport::None, wzsl: 1, oncs: Oncs::new(), ..small(100) };
    let mut host = Host::with_io(spec);
    let read = Sqe::read(0, 1, 0, 1).with_prp(host.at(0), host.at(4096));
    let nsid = |nsid: u32| Sqe { nsid: nsid.into(), ..read };
    let blocks = |nlb_z| Sqe { cdw12: ReadWriteCdw12::new().with_nlb_z(nlb_z).into(), ..read };
    let protected = ReadWriteCdw12::new().with_prinfo(8);
    let opcode = |opcode| Sqe { opcode, ..read };
    let (invalid, namespace) = (Status::INVALID_FIELD.dnr(), Status::INVALID_NAMESPACE_OR_FORMAT.dnr());
    let table = [
        (nsid(0), namespace),
        (nsid(2), namespace),
        (nsid(NSID_ALL), namespace),
        (blocks(15), Status::SUCCESS),
        (blocks(16), invalid),
        (Sqe { cdw12: protected.into(), ..read }, invalid),
        (read.with_fuse(Fuse::FIRST), invalid),
        (read.with_psdt(Psdt::SGL), invalid),
        (read.with_psdt(Psdt::SGL_METADATA_SGL), invalid),
        (read.with_psdt(Psdt(3)), invalid),
    ];
    for (sqe, wanted) in table {
        assert_eq!(host.io(sqe), wanted, "{sqe:?}");
    }
    for code in (0..=255).filter(|code| ![0, 1, 2].contains(code)) {
        assert_eq!(host.io(opcode(code)), Status::INVALID_OPCODE.dnr(), "{code:#x}");
    }
    let spec = one(NamespaceSpec { metadata_bytes: 8, ..NamespaceSpec::default() });
    let mut host = Host::with_io(spec);
    assert_eq!(host.io(Sqe::read(0, 1, 0, 1).with_prp(host.at(0), 0)), invalid);
    host.assert_clean();
}

#[test]
fn flush_takes_one_namespace_or_all() {
    let namespaces = vec![NamespaceSpec::default(); 2];
    let spec = EmulatorSpec { namespaces, has_write_cache: true, ..EmulatorSpec::default() };
    for (nsid, is_all) in [(1, false), (NSID_ALL, true)] {
        let mut host = Host::with_io(spec.clone());
        host.put(0, &pattern(1, 4096));
        for lba in 0..64 {
            for nsid in [1, 2] {
                let write = Sqe::write(0, nsid, lba, 1, false).with_prp(host.at(0), 0);
                assert_eq!(host.io(write), Status::SUCCESS);
            }
        }
        assert_eq!(host.io(Sqe::flush(0, nsid).with_prp(0, 0)), Status::SUCCESS);
        host.emulator.power_cut(99);
        let is_kept = |nsid| (0..64).all(|lba| host.emulator.read_medium(nsid, lba, 1) == pattern(1, 4096));
        assert_eq!((is_kept(1), is_kept(2)), (true, is_all));
    }
    let mut host = Host::with_io(spec);
    assert_eq!(host.io(Sqe::flush(0, 3).with_prp(0, 0)), Status::INVALID_NAMESPACE_OR_FORMAT.dnr());
}

/// How many of 64 written blocks a loss of power takes, when `harden` was done after they were written.
fn lost(spec: EmulatorSpec, fua: bool, harden: impl Fn(&mut Host)) -> usize {
    let mut host = Host::with_io(spec);
    host.put(0, &pattern(1, 4096));
    for lba in 0..64 {
        let write = Sqe::write(0, 1, lba, 1, fua).with_prp(host.at(0), 0);
        assert_eq!(host.io(write), Status::SUCCESS);
    }
    harden(&mut host);
    host.emulator.power_cut(7);
    assert!(!host.csts().rdy(), "the controller is as after a reset");
    (0..64).filter(|lba| host.emulator.read_medium(1, *lba, 1) != pattern(1, 4096)).count()
}

#[test]
fn only_what_was_flushed_or_forced_survives_a_loss_of_power() {
    let cached = EmulatorSpec { has_write_cache: true, ..EmulatorSpec::default() };
    let count = lost(cached.clone(), false, |_| {});
    assert!((10..54).contains(&count), "{count} of 64");
    assert_eq!(lost(EmulatorSpec::default(), false, |_| {}), 0, "no cache");
    assert_eq!(lost(cached.clone(), true, |_| {}), 0, "FUA");
    let flush = |host: &mut Host| assert_eq!(host.io(Sqe::flush(0, 1).with_prp(0, 0)), Status::SUCCESS);
    assert_eq!(lost(cached.clone(), false, flush), 0, "flushed");
    let read = |host: &mut Host| {
        for lba in 0..64 {
            let mut read = Sqe::read(0, 1, lba, 1).with_prp(host.at(4096), 0);
            read.cdw12 = ReadWriteCdw12::new().with_fua(true).into();
            assert_eq!(host.io(read), Status::SUCCESS);
        }
    };
    assert_eq!(lost(cached.clone(), false, read), 0, "read with FUA");
    let off = |host: &mut Host| {
        let fid = nvme_spec::feature::FeatureId::VOLATILE_WRITE_CACHE;
        assert_eq!(host.admin(Sqe::set_features(0, fid, 0, 0)).status(), Status::SUCCESS);
    };
    assert_eq!(lost(cached.clone(), false, off), 0, "cache switched off");
    for (fua, least, most) in [(true, 64, 64), (false, 10, 54)] {
        let zeroes = |host: &mut Host| {
            assert_eq!(host.io(Sqe::flush(0, 1).with_prp(0, 0)), Status::SUCCESS);
            let mut sqe = Sqe::write_zeroes(0, 1, 0, 64, false).with_prp(0, 0);
            sqe.cdw12 = ReadWriteCdw12::new().with_nlb_z(63).with_fua(fua).into();
            assert_eq!(host.io(sqe), Status::SUCCESS);
        };
        let count = lost(cached.clone(), false, zeroes);
        assert!((least..=most).contains(&count), "{count} of 64 are zeroes, FUA {fua}");
    }
}

#[test]
fn zeroes_are_written_with_and_without_deallocation() {
    for read_behavior in [0, 1, 2] {
        let dlfeat = Dlfeat::new().with_read_behavior(read_behavior).with_deallocate_in_write_zeroes(true);
        let mut host = Host::with_io(one(NamespaceSpec { dlfeat, ..NamespaceSpec::default() }));
        for deallocate in [false, true] {
            host.emulator.write_medium(1, 0, &pattern(1, 4 * 4096));
            let sqe = Sqe::write_zeroes(0, 1, 1, 2, deallocate).with_prp(0, 0);
            assert_eq!(host.io(sqe), Status::SUCCESS);
            let data = host.emulator.read_medium(1, 0, 4);
            assert!(data[4096..12288].iter().all(|byte| *byte == 0), "{read_behavior} {deallocate}");
            assert_eq!(
                (&data[..4096], &data[12288..]),
                (&pattern(1, 16384)[..4096], &pattern(1, 16384)[12288..])
            );
        }
    }
    let mut host = Host::with_io(EmulatorSpec { wzsl: 1, ..EmulatorSpec::default() });
    assert_eq!(host.io(Sqe::write_zeroes(0, 1, 0, 2, false).with_prp(0, 0)), Status::SUCCESS);
    let long = Sqe::write_zeroes(0, 1, 0, 3, false).with_prp(0, 0);
    assert_eq!(host.io(long), Status::INVALID_FIELD.dnr());
    let mut all = Sqe::write_zeroes(0, 1, 0, 1, false).with_prp(0, 0);
    all.cdw12 = ReadWriteCdw12::new().with_whole_namespace(true).into();
    assert_eq!(host.io(all), Status::INVALID_FIELD.dnr());
}

#[test]
fn deallocated_blocks_read_as_the_namespace_says() {
    for (read_behavior, byte) in [(0, None), (1, Some(0)), (2, Some(0xff))] {
        let dlfeat = Dlfeat::new().with_read_behavior(read_behavior);
        let namespace = NamespaceSpec { dlfeat, blocks: 1000, ..NamespaceSpec::default() };
        let mut host = Host::with_io(one(namespace));
        let never_written = if read_behavior == 2 { 0xff } else { 0 };
        assert_eq!(host.emulator.read_medium(1, 999, 1), vec![never_written; 4096]);
        let before = pattern(1, 40 * 4096);
        host.emulator.write_medium(1, 0, &before);
        let ranges = [DsmRange::new(2, 3), DsmRange::new(30, 970), DsmRange::new(7, 0)];
        host.put(8, ranges.as_bytes());
        let sqe = Sqe::dsm(0, 1, 3).with_prp(host.at(8), 0);
        assert_eq!(host.io(sqe), Status::SUCCESS);
        let mut wanted = before.clone();
        if let Some(byte) = byte {
            wanted[2 * 4096..5 * 4096].fill(byte);
            wanted[30 * 4096..].fill(byte);
        }
        assert!(host.emulator.read_medium(1, 0, 40) == wanted, "{read_behavior}");
        // A hint only, and a range beyond the end.
        host.emulator.write_medium(1, 0, &before);
        assert_eq!(host.io(Sqe { cdw11: 3.into(), ..sqe }), Status::SUCCESS);
        host.put(8, [DsmRange::new(2, 3), DsmRange::new(999, 2)].as_bytes());
        let sqe = Sqe::dsm(0, 1, 2).with_prp(host.at(8), 0);
        assert_eq!(host.io(sqe), Status::LBA_OUT_OF_RANGE.dnr());
        assert!(host.emulator.read_medium(1, 0, 40) == before, "nothing of it is done");
        host.assert_clean();
    }
}

#[test]
fn compare_finds_any_byte_that_differs() {
    let mut host = Host::with_io(small(1000));
    let data = pattern(3, 16 * 512);
    host.emulator.write_medium(1, 120, &data);
    host.put(4, &data);
    let compare = Sqe::compare(0, 1, 120, 16).with_prp(host.at(4), host.at(8192));
    host.put(8192, &data[4092..4092 + 4096]);
    // 4092 bytes in the first page, 4096 in the second, and 4 more: a list.
    let list = [host.at(8192), host.at(0x3000)];
    host.put(0x4000, list.as_bytes());
    host.put(0x3000, &data[4092 + 4096..]);
    let compare = compare.with_prp(host.at(4), host.at(0x4000));
    assert_eq!(host.io(compare), Status::SUCCESS);
    for at in [4, 600, 4095, 8192, 8192 + 4095, 0x3003] {
        let byte = host.get(at, 1)[0];
        host.put(at, &[byte ^ 0x10]);
        assert_eq!(host.io(compare), Status::COMPARE_FAILURE.dnr(), "{at}");
        host.put(at, &[byte]);
    }
    assert_eq!(host.io(compare), Status::SUCCESS);
    assert_eq!(host.emulator.read_medium(1, 120, 16), data);
    host.assert_clean();
}

#[test]
fn copy_reads_all_of_its_ranges_before_it_writes() {
    let mut host = Host::with_io(small(4096));
    let data = pattern(5, 64 * 512);
    host.emulator.write_medium(1, 0, &data);
    let copy = |host: &mut Host, ranges: &[(u64, u32)], to: u64| {
        let ranges: Vec<_> =
            ranges.iter().map(|(lba, blocks)| CopyRangeFormat0::new(*lba, *blocks)).collect();
        host.put(0, ranges.as_bytes());
        Sqe::copy(0, 1, to, ranges.len() as u16).with_prp(host.at(0), 0)
    };
    let sqe = copy(&mut host, &[(10, 2), (0, 5), (60, 1)], 3);
    assert_eq!(host.io(sqe), Status::SUCCESS);
    let wanted = [&data[10 * 512..12 * 512], &data[..5 * 512], &data[60 * 512..61 * 512]].concat();
    assert_eq!(host.emulator.read_medium(1, 3, 8), wanted);
    let too_long = Status::COMMAND_SIZE_LIMIT_EXCEEDED.dnr();
    let outside = Status::LBA_OUT_OF_RANGE.dnr();
    type Case = (&'static [(u64, u32)], u64, Status);
    let table: [Case; 7] = [
        (&[(0, 128)], 0, Status::SUCCESS),
        (&[(0, 129)], 0, too_long),
        (&[(0, 128); 8], 1000, Status::SUCCESS),
        (&[(0, 128); 9], 1000, too_long),
        (&[(0, 1); 17], 1000, too_long),
        (&[(4095, 2)], 0, outside),
        (&[(0, 2)], 4095, outside),
    ];
    for (ranges, to, wanted) in table {
        let sqe = copy(&mut host, ranges, to);
        assert_eq!(host.io(sqe), wanted, "{ranges:?} {to}");
    }
    let mut sqe = copy(&mut host, &[(0, 1)], 0);
    sqe.cdw12 = CopyCdw12::new().with_format(2).into();
    assert_eq!(host.io(sqe), Status::INVALID_FIELD.dnr());
    host.assert_clean();
}

#[test]
fn verify_and_copy_have_the_limits_that_the_drive_was_given() {
    let namespace = NamespaceSpec {
        blocks: 4096,
        block_bytes: 512,
        mssrl: 3,
        mcl: 5,
        msrc_z: 1,
        ..NamespaceSpec::default()
    };
    let mut host = Host::with_io(EmulatorSpec { vsl: 1, ..one(namespace) });
    let verify = |lba, blocks| Sqe::verify(0, 1, lba, blocks).with_prp(0, 0);
    assert_eq!(host.io(verify(0, 16)), Status::SUCCESS);
    assert_eq!(host.io(verify(0, 17)), Status::INVALID_FIELD.dnr());
    assert_eq!(host.io(verify(4095, 2)), Status::LBA_OUT_OF_RANGE.dnr());
    let copy = |host: &mut Host, ranges: &[(u64, u32)]| {
        let ranges: Vec<_> =
            ranges.iter().map(|(lba, blocks)| CopyRangeFormat0::new(*lba, *blocks)).collect();
        host.put(0, ranges.as_bytes());
        host.io(Sqe::copy(0, 1, 100, ranges.len() as u16).with_prp(host.at(0), 0))
    };
    assert_eq!(copy(&mut host, &[(0, 3), (9, 2)]), Status::SUCCESS);
    let too_large = Status::COMMAND_SIZE_LIMIT_EXCEEDED.dnr();
    for ranges in [&[(0, 4)][..], &[(0, 3), (9, 3)], &[(0, 1), (1, 1), (2, 1)]] {
        assert_eq!(copy(&mut host, ranges), too_large, "{ranges:?}");
    }
    assert_eq!((host.emulator.counters().verifies, host.emulator.counters().copies), (1, 1));
    host.assert_clean();
    // A reserved field of a source range.
    let range = CopyRangeFormat0 { snsid: 1.into(), ..CopyRangeFormat0::new(0, 1) };
    host.put(0, range.as_bytes());
    assert_eq!(host.io(Sqe::copy(0, 1, 100, 1).with_prp(host.at(0), 0)), Status::SUCCESS);
    assert_eq!(host.emulator.violations(), 1);
}

#[test]
fn blocks_of_all_sizes_work() {
    for block_bytes in [512, 1024, 4096, 65_536] {
        let blocks = 100;
        let spec = one(NamespaceSpec { block_bytes, blocks, ..NamespaceSpec::default() });
        let mut host = Host::with_io(EmulatorSpec { has_write_cache: true, ..spec });
        let (bytes, pages) =
            (block_bytes as usize, (0..16).map(|page| host.at(page * 4096)).collect::<Vec<_>>());
        host.put(0x10_0000, pages.as_bytes());
        host.put(0, &pattern(9, bytes));
        let second = if bytes <= 8192 { host.at(4096) } else { host.at(0x10_0008) };
        let write = Sqe::write(0, 1, 99, 1, false).with_prp(host.at(0), second);
        assert_eq!(host.io(write), Status::SUCCESS, "{block_bytes}");
        assert_eq!(host.emulator.read_medium(1, 99, 1), pattern(9, bytes), "{block_bytes}");
        assert_eq!(host.io(Sqe::flush(0, 1).with_prp(0, 0)), Status::SUCCESS);
        host.emulator.power_cut(3);
        assert_eq!(host.emulator.read_medium(1, 99, 1), pattern(9, bytes), "{block_bytes}");
        host.assert_clean();
    }
}
