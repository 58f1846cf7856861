//! PRPs and SGLs.

use nvme_spec::sqe::Psdt;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sgl, SglKind, Sqe, Status};
use proptest::prelude::*;

use super::Host;
use super::io::pattern;
use crate::{EmulatorSpec, NamespaceSpec, SglSupport};

const PAGE: usize = 4096;

/// 512 bytes a block, 8 MiB, transfers up to 2 MiB.
fn spec() -> EmulatorSpec {
    let namespaces = vec![NamespaceSpec { block_bytes: 512, ..NamespaceSpec::default() }];
    EmulatorSpec { namespaces, mdts: 9, ..EmulatorSpec::default() }
}

fn sgl(kind: SglKind, address: u64, bytes: u32) -> Sgl {
    Sgl { address: address.into(), length: bytes.into(), reserved: [0; 3], identifier: kind.0 }
}

fn block(address: u64, bytes: u32) -> Sgl {
    sgl(SglKind::DATA_BLOCK_ADDRESS, address, bytes)
}

/// Where data lies: offsets and lengths in the host's data.
type Places = Vec<(usize, usize)>;

/// PRPs of `bytes` that begin `first` bytes into a page, in pages taken from the end of `pages`; lists begin
/// at `list` and go on at `next_lists`.
fn prps(
    host: &Host,
    first: usize,
    bytes: usize,
    pages: &mut Vec<usize>,
    list: usize,
    next_lists: &mut Vec<usize>,
) -> (u64, u64, Places) {
    let mut places = Vec::new();
    let mut rest = bytes;
    let mut take = |offset: usize, rest: &mut usize| {
        let place = pages.pop().expect("enough pages") * PAGE + offset;
        let here = (PAGE - offset).min(*rest);
        places.push((place, here));
        *rest -= here;
        host.at(place as u64)
    };
    let prp1 = take(first, &mut rest);
    if rest == 0 {
        return (prp1, 0x1234_5678, places);
    }
    if rest <= PAGE {
        let prp2 = take(0, &mut rest);
        return (prp1, prp2, places);
    }
    let mut at = list;
    while rest != 0 {
        if at % PAGE == PAGE - 8 && rest > PAGE {
            let next = next_lists.pop().expect("enough lists");
            host.put(at, &host.at(next as u64).to_le_bytes());
            at = next;
            continue;
        }
        host.put(at, &take(0, &mut rest).to_le_bytes());
        at += 8;
    }
    (prp1, host.at(list as u64), places)
}

fn put_all(host: &Host, places: &Places, data: &[u8]) {
    let mut rest = data;
    for (offset, bytes) in places {
        let (here, after) = rest.split_at(*bytes);
        host.put(*offset, here);
        rest = after;
    }
    assert!(rest.is_empty());
}

fn get_all(host: &Host, places: &Places) -> Vec<u8> {
    places.iter().flat_map(|(offset, bytes)| host.get(*offset, *bytes)).collect()
}

#[test]
fn prps_take_one_page_two_pages_and_a_list() {
    let mut host = Host::with_io(spec());
    for (first, blocks) in
        [(0, 1), (0, 8), (4, 8), (4092, 1), (3584, 1), (0, 9), (512, 16), (4, 16), (4092, 17)]
    {
        let mut pages = vec![9, 3, 8, 2, 7, 1];
        let bytes = blocks as usize * 512;
        let (prp1, prp2, places) = prps(&host, first, bytes, &mut pages, 100 * PAGE + 8, &mut Vec::new());
        let data = pattern(blocks as u8, bytes);
        put_all(&host, &places, &data);
        let lba = 1000 + first as u64;
        assert_eq!(host.io(Sqe::write(0, 1, lba, blocks, false).with_prp(prp1, prp2)), Status::SUCCESS);
        assert!(host.emulator.read_medium(1, lba, u64::from(blocks)) == data, "{first} {blocks}");
    }
    host.assert_clean();
}

#[test]
fn a_list_goes_on_in_another_page_where_its_page_ends() {
    let mut host = Host::with_io(spec());
    // 2 MiB: 512 pages, 511 of them in lists. The first list has room for 3 entries, then 1, then a page.
    for list in [100 * PAGE, 101 * PAGE - 24, 101 * PAGE - 16, 101 * PAGE - 8] {
        let mut pages: Vec<usize> = (200..712).collect();
        let mut next = vec![110 * PAGE, 105 * PAGE, 107 * PAGE];
        let (prp1, prp2, places) = prps(&host, 0, 512 * PAGE, &mut pages, list, &mut next);
        let data = pattern(list as u8, 512 * PAGE);
        put_all(&host, &places, &data);
        assert_eq!(host.io(Sqe::write(0, 1, 7, 4096, false).with_prp(prp1, prp2)), Status::SUCCESS);
        assert!(host.emulator.read_medium(1, 7, 4096) == data, "{list:#x}");
        put_all(&host, &places, &vec![0; data.len()]);
        assert_eq!(host.io(Sqe::read(0, 1, 7, 4096).with_prp(prp1, prp2)), Status::SUCCESS);
        assert!(get_all(&host, &places) == data, "{list:#x}");
    }
    // The last place of a page is an entry where it is the last of the list.
    let mut pages: Vec<usize> = (200..712).collect();
    let (prp1, prp2, places) = prps(&host, 0, 3 * PAGE, &mut pages, 101 * PAGE - 16, &mut Vec::new());
    let data = pattern(2, 3 * PAGE);
    put_all(&host, &places, &data);
    assert_eq!(host.io(Sqe::write(0, 1, 9, 24, false).with_prp(prp1, prp2)), Status::SUCCESS);
    assert!(host.emulator.read_medium(1, 9, 24) == data);
    // 511 pages behind the first exactly fill a list of 511 entries, the 512th place is unused; with 512
    // behind the first the last place of the page is an entry, not a pointer.
    let mut pages: Vec<usize> = (200..712).collect();
    let (prp1, prp2, places) = prps(&host, 4, 511 * PAGE, &mut pages, 100 * PAGE, &mut Vec::new());
    let data = pattern(1, 511 * PAGE);
    put_all(&host, &places, &data);
    assert_eq!(places.len(), 512);
    assert_eq!(host.io(Sqe::write(0, 1, 0, 4088, false).with_prp(prp1, prp2)), Status::SUCCESS);
    assert!(host.emulator.read_medium(1, 0, 4088) == data);
    host.assert_clean();
}

#[test]
fn prps_with_wrong_offsets_are_refused() {
    let mut host = Host::with_io(spec());
    let (page, list) = (host.at(0), host.at(0x1_0000));
    let invalid = Status::PRP_OFFSET_INVALID.dnr();
    let write = |blocks, prp1, prp2| Sqe::write(0, 1, 0, blocks, false).with_prp(prp1, prp2);
    host.put(0x1_0000, [page, page + 4096, page + 512, page].as_bytes());
    let table = [
        (write(1, page + 4, 0), Status::SUCCESS),
        (write(1, page + 2, 0), invalid),
        (write(1, page + 1, 0), invalid),
        (write(16, page, page + 4), invalid),
        (write(16, page, page + 4096), Status::SUCCESS),
        (write(24, page, list), Status::SUCCESS),
        (write(24, page, list + 4), invalid),
        (write(24, page, list + 8), invalid),
        (write(32, page, list), invalid),
    ];
    for (sqe, wanted) in table {
        assert_eq!(host.io(sqe), wanted, "{sqe:?}");
    }
    host.assert_clean();
    assert_eq!(host.io(write(24, page, 0x1000)), Status::DATA_TRANSFER_ERROR);
    assert!(host.emulator.first_violation().is_some_and(|what| what.contains("PRP list")));
}

/// An SGL of data blocks in segments of `sizes` descriptors, written to the pages from `at` on.
fn segments(host: &Host, blocks: &[Sgl], sizes: &[usize], at: usize) -> Sgl {
    let mut parts: Vec<&[Sgl]> = Vec::new();
    let mut rest = blocks;
    for size in sizes {
        let (here, after) = rest.split_at((*size).min(rest.len()));
        parts.push(here);
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(rest);
    }
    let mut next: Option<Sgl> = None;
    for (index, part) in parts.into_iter().enumerate().rev() {
        let mut descriptors = part.to_vec();
        let kind = if next.is_some() { SglKind::SEGMENT_ADDRESS } else { SglKind::LAST_SEGMENT_ADDRESS };
        descriptors.extend(next);
        let place = at + index * 2 * PAGE + 8;
        host.put(place, descriptors.as_bytes());
        next = Some(sgl(kind, host.at(place as u64), descriptors.len() as u32 * 16));
    }
    next.expect("at least one segment")
}

#[test]
fn sgls_take_a_block_a_segment_and_segments_of_segments() {
    let mut host = Host::with_io(spec());
    let data = pattern(1, 8 * 512);
    host.put(3, &data);
    let write = Sqe::write(0, 1, 0, 8, false);
    assert_eq!(host.io(write.with_sgl(block(host.at(3), 4096))), Status::SUCCESS);
    assert_eq!(host.emulator.read_medium(1, 0, 8), data);
    // Pieces of odd lengths, one of them empty, out of order.
    let lengths = [1, 0, 1000, 7, 2048, 1040];
    let mut blocks = Vec::new();
    let mut rest = &data[..];
    for (index, bytes) in lengths.into_iter().enumerate() {
        let place = (20 - index) * 3000 + index;
        let (here, after) = rest.split_at(bytes);
        host.put(place, here);
        blocks.push(block(host.at(place as u64), bytes as u32));
        rest = after;
    }
    for (lba, sizes) in [(100, &[][..]), (200, &[2]), (300, &[1, 1, 1]), (400, &[3, 2]), (500, &[0, 3])] {
        let head = segments(&host, &blocks, sizes, 0x10_0000);
        let write = Sqe::write(0, 1, lba, 8, false).with_sgl(head);
        assert_eq!(host.io(write), Status::SUCCESS, "{sizes:?}");
        assert_eq!(host.emulator.read_medium(1, lba, 8), data, "{sizes:?}");
    }
    host.put(0, &[0; 0x1_0000]);
    let head = segments(&host, &blocks, &[3, 2], 0x10_0000);
    assert_eq!(host.io(Sqe::read(0, 1, 500, 8).with_sgl(head)), Status::SUCCESS);
    let places: Places =
        lengths.iter().enumerate().map(|(index, bytes)| ((20 - index) * 3000 + index, *bytes)).collect();
    assert_eq!(get_all(&host, &places), data);
    host.assert_clean();
}

#[test]
fn wrong_sgls_are_refused_each_with_its_status() {
    let mut host = Host::with_io(spec());
    let data = host.at(0);
    let at = host.at(0x1_0000);
    let (length, segment, kind) = (
        Status::DATA_SGL_LENGTH_INVALID.dnr(),
        Status::INVALID_SGL_SEGMENT_DESCRIPTOR.dnr(),
        Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr(),
    );
    let last = |bytes| sgl(SglKind::LAST_SEGMENT_ADDRESS, at, bytes);
    let next = |bytes| sgl(SglKind::SEGMENT_ADDRESS, at, bytes);
    let half = block(data, 256);
    let itself = sgl(SglKind::SEGMENT_ADDRESS, at, 16);
    let table = [
        (block(data, 511), vec![], length),
        (block(data, 513), vec![], length),
        (block(data, 0), vec![], length),
        (sgl(SglKind::BIT_BUCKET, data, 512), vec![], kind),
        (sgl(SglKind::DATA_BLOCK_OFFSET, 0, 512), vec![], kind),
        (sgl(SglKind::KEYED_DATA_BLOCK, data, 512), vec![], kind),
        (last(32), vec![half, half], Status::SUCCESS),
        (last(16), vec![half, half], length),
        (last(48), vec![half, half, half], length),
        (last(0), vec![], segment),
        (last(24), vec![half, half], segment),
        (sgl(SglKind::LAST_SEGMENT_ADDRESS, at + 4, 32), vec![half, half], segment),
        (last(32), vec![half, sgl(SglKind::LAST_SEGMENT_ADDRESS, at, 16)], segment),
        (next(32), vec![half, half], segment),
        (next(32), vec![itself, half], segment),
        (next(16), vec![itself], Status::INVALID_SGL_DESCRIPTOR_COUNT.dnr()),
        (last(32), vec![half, sgl(SglKind::BIT_BUCKET, data, 256)], kind),
        (block(u64::MAX - 8, 512), vec![], Status::DATA_TRANSFER_ERROR),
        (sgl(SglKind::LAST_SEGMENT_ADDRESS, u64::MAX - 7, 16), vec![], Status::DATA_TRANSFER_ERROR),
        (sgl(SglKind::LAST_SEGMENT_ADDRESS, 0x1000, 16), vec![], Status::DATA_TRANSFER_ERROR),
    ];
    for (head, entries, wanted) in table {
        host.put(0x1_0000, entries.as_bytes());
        let found = host.io(Sqe::write(0, 1, 0, 1, false).with_sgl(head));
        assert_eq!(found, wanted, "{head:?} {entries:?}");
    }
    assert_eq!(host.emulator.violations(), 3);
}

#[test]
fn an_access_may_reach_the_end_of_a_mapping_and_no_byte_further() {
    let mut host = Host::with_io(spec());
    let end = host.at(super::host::DATA_BYTES as u64);
    let write = |address| Sqe::write(0, 1, 0, 1, false).with_sgl(block(address, 512));
    assert_eq!(host.io(write(end - 512)), Status::SUCCESS);
    host.assert_clean();
    for address in [end - 511, end - 1, end, host.at(0) - 1, host.at(0) - 512] {
        assert_eq!(host.io(write(address)), Status::DATA_TRANSFER_ERROR);
    }
    assert_eq!(host.emulator.violations(), 5);
}

#[test]
fn a_drive_with_sgls_of_dwords_takes_no_others() {
    let mut host = Host::with_io(EmulatorSpec { sgl: SglSupport::Dwords, ..spec() });
    let invalid = Status::SGL_DATA_BLOCK_GRANULARITY_INVALID.dnr();
    let write = |sgl| Sqe::write(0, 1, 0, 1, false).with_sgl(sgl);
    assert_eq!(host.io(write(block(host.at(4), 512))), Status::SUCCESS);
    assert_eq!(host.io(write(block(host.at(2), 512))), invalid);
    host.put(0x1_0000, [block(host.at(0), 510), block(host.at(512), 2)].as_bytes());
    let head = sgl(SglKind::LAST_SEGMENT_ADDRESS, host.at(0x1_0000), 32);
    assert_eq!(host.io(write(head)), invalid);
    let mut host = Host::with_io(EmulatorSpec { sgl: SglSupport::None, ..spec() });
    assert_eq!(host.io(write(block(host.at(4), 512))), Status::INVALID_FIELD.dnr());
    let admin =
        Sqe::identify(0, nvme_spec::identify::Cns::CONTROLLER, 0, 0).with_sgl(block(host.at(0), 4096));
    assert_eq!(host.run(0, admin.with_psdt(Psdt::SGL)).status(), Status::INVALID_FIELD.dnr());
    host.assert_clean();
}

#[derive(Debug, Clone)]
struct Shape {
    lba: u64,
    blocks: u32,
    /// Dwords into the first page.
    first: usize,
    /// Where in its page the list begins, in entries.
    list: usize,
    /// Which pages come first.
    turn: usize,
    is_sgl: bool,
    /// Lengths of the pieces of an SGL.
    cuts: Vec<usize>,
    seed: u8,
}

fn shape() -> impl Strategy<Value = Shape> {
    let size = prop_oneof![1_u32..20, 1_u32..200, 3000_u32..4096];
    let cuts = proptest::collection::vec(1_usize..9000, 1..30);
    (0_u64..8000, size, 0_usize..1024, 0_usize..512, 0_usize..600, any::<bool>(), cuts, any::<u8>()).prop_map(
        |(lba, blocks, first, list, turn, is_sgl, cuts, seed)| Shape {
            lba,
            blocks,
            first,
            list,
            turn,
            is_sgl,
            cuts,
            seed,
        },
    )
}

/// A data pointer of this shape, and where its data lies.
fn point(host: &Host, sqe: Sqe, shape: &Shape) -> (Sqe, Places) {
    let bytes = shape.blocks as usize * 512;
    let mut pages: Vec<usize> = (0..1000).filter(|page| page % 16 != 0).collect();
    pages.rotate_left(shape.turn);
    if !shape.is_sgl {
        let mut lists = vec![16 * PAGE, 32 * PAGE, 48 * PAGE];
        let list = 64 * PAGE + shape.list * 8;
        let (prp1, prp2, places) = prps(host, shape.first * 4, bytes, &mut pages, list, &mut lists);
        return (sqe.with_prp(prp1, prp2), places);
    }
    let (mut places, mut rest) = (Vec::new(), bytes);
    for cut in shape.cuts.iter().cycle() {
        if rest == 0 {
            break;
        }
        let offset = shape.first.min(PAGE - 1);
        let here = (*cut).min(rest).min(PAGE - offset);
        places.push((pages.pop().expect("enough") * PAGE + offset, here));
        rest -= here;
        if pages.len() < 10 {
            return point(host, sqe, &Shape { is_sgl: false, ..shape.clone() });
        }
    }
    let blocks: Vec<Sgl> =
        places.iter().map(|(at, bytes)| block(host.at(*at as u64), *bytes as u32)).collect();
    if let [only] = blocks[..] {
        return (sqe.with_sgl(only), places);
    }
    // Segments of 40 descriptors.
    let sizes = vec![40; blocks.len() / 40];
    let head = segments(host, &blocks, &sizes, 1001 * PAGE);
    (sqe.with_sgl(head), places)
}

#[test]
fn a_read_gives_what_the_last_write_gave_whatever_their_pointers() {
    let host = std::cell::RefCell::new(Host::with_io(spec()));
    let model = std::cell::RefCell::new(vec![0_u8; 16_384 * 512]);
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(write in shape(), read in shape())| {
        let (mut host, mut model) = (host.borrow_mut(), model.borrow_mut());
        let bytes = write.blocks as usize * 512;
        let (sqe, places) = point(&host, Sqe::write(0, 1, write.lba, write.blocks, false), &write);
        let data = pattern(write.seed, bytes);
        put_all(&host, &places, &data);
        prop_assert_eq!(host.io(sqe), Status::SUCCESS);
        model[write.lba as usize * 512..][..bytes].copy_from_slice(&data);
        let (sqe, places) = point(&host, Sqe::read(0, 1, read.lba, read.blocks), &read);
        prop_assert_eq!(host.io(sqe), Status::SUCCESS);
        let wanted = &model[read.lba as usize * 512..][..read.blocks as usize * 512];
        prop_assert!(get_all(&host, &places) == wanted);
        prop_assert_eq!(host.emulator.first_violation(), None);
    });
}
