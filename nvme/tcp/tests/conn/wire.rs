//! PDUs as a careful peer would write them, and as a careless one would: built here byte by byte, with a
//! digest of the tests' own, so that the crate is not its own judge.

/// CRC32C, one bit at a time.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !crc
}

/// What a connection agreed on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Digests {
    pub header: bool,
    pub data: bool,
}

pub const NONE: Digests = Digests { header: false, data: false };
pub const BOTH: Digests = Digests { header: true, data: true };

/// All four combinations.
pub const ALL: [Digests; 4] =
    [NONE, Digests { header: true, data: false }, Digests { header: false, data: true }, BOTH];

impl Digests {
    pub fn bits(self) -> u8 {
        u8::from(self.header) | u8::from(self.data) << 1
    }
}

/// A PDU: type, flags beyond the digests', the bytes of the header from 8 on, and data aligned to `unit`.
pub fn pdu(pdu_type: u8, flags: u8, rest: &[u8], data: &[u8], digests: Digests, unit: usize) -> Vec<u8> {
    let hlen = 8 + rest.len();
    let mut pdo = (hlen + if digests.header { 4 } else { 0 }).next_multiple_of(unit);
    let mut plen = pdo + data.len() + if digests.data { 4 } else { 0 };
    let mut flags = flags | u8::from(digests.header) | u8::from(digests.data) << 1;
    if data.is_empty() {
        (pdo, plen) = (0, hlen + if digests.header { 4 } else { 0 });
        flags &= !2;
    }
    let mut bytes = vec![pdu_type, flags, u8::try_from(hlen).unwrap(), u8::try_from(pdo).unwrap()];
    bytes.extend(u32::try_from(plen).unwrap().to_le_bytes());
    bytes.extend(rest);
    if digests.header {
        bytes.extend(crc32c(&bytes).to_le_bytes());
    }
    if !data.is_empty() {
        bytes.resize(pdo, 0);
        bytes.extend(data);
        if digests.data {
            bytes.extend(crc32c(data).to_le_bytes());
        }
    }
    bytes
}

/// Fields of the second half of a 24-byte header: two of 16 bits, two of 32, four bytes reserved.
fn fields(a: u16, b: u16, c: u32, d: u32) -> [u8; 16] {
    let mut rest = [0; 16];
    rest[0..2].copy_from_slice(&a.to_le_bytes());
    rest[2..4].copy_from_slice(&b.to_le_bytes());
    rest[4..8].copy_from_slice(&c.to_le_bytes());
    rest[8..12].copy_from_slice(&d.to_le_bytes());
    rest
}

fn initialize(pdu_type: u8, pda: u8, digests: Digests, number: u32) -> Vec<u8> {
    let mut rest = [0; 120];
    rest[2] = pda;
    rest[3] = digests.bits();
    rest[4..8].copy_from_slice(&number.to_le_bytes());
    pdu(pdu_type, 0, &rest, &[], NONE, 4)
}

pub fn icreq(hpda: u8, digests: Digests) -> Vec<u8> {
    initialize(0, hpda, digests, 0)
}

pub fn icresp(cpda: u8, digests: Digests, maxh2cdata: u32) -> Vec<u8> {
    initialize(1, cpda, digests, maxh2cdata)
}

/// A submission queue entry: opcode, CID and the data pointer.
pub fn sqe(opcode: u8, cid: u16, identifier: u8, bytes: u32) -> [u8; 64] {
    let mut sqe = [0; 64];
    sqe[0] = opcode;
    sqe[1] = 0x40;
    sqe[2..4].copy_from_slice(&cid.to_le_bytes());
    sqe[4] = 1;
    sqe[32..36].copy_from_slice(&bytes.to_le_bytes());
    sqe[39] = identifier;
    sqe
}

/// Transport SGL: data moves in PDUs of its own.
pub const TRANSPORT: u8 = 0x5a;
/// Offset SGL: data is in the capsule.
pub const OFFSET: u8 = 0x01;
pub const WRITE: u8 = 1;
pub const READ: u8 = 2;
pub const FLUSH: u8 = 0;

pub fn capsule(sqe: [u8; 64], data: &[u8], digests: Digests) -> Vec<u8> {
    pdu(4, 0, &sqe, data, digests, 4)
}

/// A Connect of this queue, with its 1024 bytes of data.
pub fn connect(cid: u16, qid: u16, digests: Digests) -> Vec<u8> {
    let mut entry = sqe(0x7f, cid, OFFSET, 1024);
    entry[4] = 1;
    entry[42..44].copy_from_slice(&qid.to_le_bytes());
    capsule(entry, &[0xc0; 1024], digests)
}

pub fn h2c_data(cid: u16, ttag: u16, offset: u32, data: &[u8], is_last: bool, digests: Digests) -> Vec<u8> {
    let datal = u32::try_from(data.len()).unwrap();
    pdu(6, u8::from(is_last) << 2, &fields(cid, ttag, offset, datal), data, digests, 4)
}

/// C2HData; `flags` are 4 for LAST_PDU, 8 for SUCCESS.
pub fn c2h_data(cid: u16, offset: u32, data: &[u8], flags: u8, digests: Digests, unit: usize) -> Vec<u8> {
    pdu(7, flags, &fields(cid, 0, offset, u32::try_from(data.len()).unwrap()), data, digests, unit)
}

pub fn r2t(cid: u16, ttag: u16, offset: u32, bytes: u32, digests: Digests) -> Vec<u8> {
    pdu(9, 0, &fields(cid, ttag, offset, bytes), &[], digests, 4)
}

/// A completion: result, SQHD 0, status field with its phase tag 0.
pub fn capsule_resp(cid: u16, status: u16, result: u64, digests: Digests) -> Vec<u8> {
    let mut cqe = [0; 16];
    cqe[0..8].copy_from_slice(&result.to_le_bytes());
    cqe[12..14].copy_from_slice(&cid.to_le_bytes());
    cqe[14..16].copy_from_slice(&(status << 1).to_le_bytes());
    pdu(5, 0, &cqe, &[], digests, 4)
}

/// A terminate request with what follows it.
pub fn term_req(pdu_type: u8, fes: u16, fei: u32, wrong: &[u8]) -> Vec<u8> {
    let plen = 24 + u32::try_from(wrong.len()).unwrap();
    let mut bytes = vec![pdu_type, 0, 24, 0];
    bytes.extend(plen.to_le_bytes());
    bytes.extend(fes.to_le_bytes());
    bytes.extend(fei.to_le_bytes());
    bytes.extend([0; 10]);
    bytes.extend(wrong);
    bytes
}

/// Bytes that differ along the way and by seed.
pub fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut data = Vec::with_capacity(bytes + 8);
    while data.len() < bytes {
        data.extend(rng.next().to_le_bytes());
    }
    data.truncate(bytes);
    data
}

/// xorshift64*: repeatable, and enough for choices.
#[derive(Debug, Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number in `0 .. end`.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from((self.next() >> 16) % end as u64).unwrap()
    }

    /// True in one of `n` cases.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

#[test]
fn the_judge_knows_the_check_value() {
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
}
