//! Receiving side of the I/O queue of `--bare`: finds the PDUs in received bytes and checks their headers.
//!
//! ```text
//!   bytes of a receive ── Stream::next ──> Event::Ended      CapsuleResp, or the end of data with SUCCESS
//!                              │      └──> Event::Requested  R2T
//!                          Commands        what is in flight, by CID
//! ```
//! Padding and data are skipped. A header that is split between two receives is put together in [`Stream`].
//! There are no digests, so every header has [`HEAD`] bytes.

use initiator::nvme_spec::status::Status;
use initiator::nvme_spec::tcp::{
    C2hData, CapsuleResp, CommonHeader, DDGSTF, HDGSTF, LAST_PDU, PduType, R2t, SUCCESS, TermReq,
};
use initiator::nvme_spec::zerocopy;
use initiator::{Nanos, Violation};
use spindle_nvme_initiator as initiator;

use super::super::job::Command;

/// Bytes of the header of every PDU that a controller sends after ICResp.
pub(super) const HEAD: usize = 24;
/// The same in the types of HLEN and PLEN.
const HLEN: u8 = 24;
const PLEN: u32 = 24;

/// Use of a CID: by which kind of command, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamState {
    Free,
    Read,
    Write,
}

/// Command of a CID; the last one if the CID is free.
#[derive(Debug, Clone, Copy)]
struct Entry {
    state: StreamState,
    /// Bytes of the data that were announced by C2HData, requested by R2T, or sent in the capsule.
    moved: u32,
    sent: Nanos,
    command: Command,
}

/// The commands of a queue, by CID. All move the same number of bytes.
#[derive(Debug)]
pub(super) struct Commands {
    entries: Box<[Entry]>,
    bytes: u32,
    outstanding: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub(super) cid: u16,
    pub(super) status: Status,
    pub(super) sent: Nanos,
    pub(super) command: Command,
}

/// An R2T: `bytes` bytes of the data of a write, from `offset` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) cid: u16,
    pub(super) ttag: u16,
    pub(super) offset: u32,
    pub(super) bytes: u32,
}

/// What the queue has to act on.
#[derive(Debug, Clone, Copy)]
pub(super) enum Event {
    Ended(Ended),
    Requested(Request),
}

impl Commands {
    /// Creates the table for CIDs below `depth`; each command moves `bytes` bytes.
    pub(super) fn new(depth: u16, bytes: u32) -> Commands {
        let free =
            Entry { state: StreamState::Free, moved: 0, sent: Nanos::ZERO, command: Command::default() };
        Commands { entries: vec![free; depth.into()].into_boxed_slice(), bytes, outstanding: 0 }
    }

    #[inline]
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Marks a free CID as in flight since `now`.
    #[inline]
    pub(super) fn begin(&mut self, cid: u16, command: Command, is_in_capsule: bool, now: Nanos) {
        let state = if command.is_read { StreamState::Read } else { StreamState::Write };
        let moved = if is_in_capsule { self.bytes } else { 0 };
        self.entries[usize::from(cid)] = Entry { state, moved, sent: now, command };
        self.outstanding += 1;
    }

    #[inline]
    fn in_state(&mut self, cid: u16, state: StreamState) -> Option<&mut Entry> {
        self.entries.get_mut(usize::from(cid)).filter(|entry| entry.state == state)
    }

    /// Adds a part of the data of a command, which must be the next one. Returns the end of the part.
    #[inline]
    fn add_part(&mut self, part: &Part) -> Result<u32, Violation> {
        let Part { pdu_type, state, cid, offset, bytes } = *part;
        let total = self.bytes;
        let Some(entry) = self.in_state(cid, state) else {
            let expected = "no command in flight moves data in this direction";
            return Err(Violation::Cccid { pdu_type, cccid: cid, expected });
        };
        if offset != entry.moved {
            return Err(Violation::DataOffset { pdu_type, offset, expected: entry.moved });
        }
        let Some(end) = offset.checked_add(bytes).filter(|end| *end <= total) else {
            return Err(Violation::DataRange { pdu_type, offset, bytes, allowed: total });
        };
        entry.moved = end;
        Ok(end)
    }

    #[inline]
    fn end(&mut self, cid: u16, status: Status) -> Result<Event, Violation> {
        let expected = self.bytes;
        let entry = self.entries.get_mut(usize::from(cid)).filter(|entry| entry.state != StreamState::Free);
        let Some(entry) = entry else { return Err(Violation::CompletionCid(cid)) };
        if status.is_success() && entry.moved != expected {
            return Err(Violation::DataShort { cid, received: entry.moved, expected });
        }
        entry.state = StreamState::Free;
        self.outstanding -= 1;
        Ok(Event::Ended(Ended { cid, status, sent: entry.sent, command: entry.command }))
    }
}

/// The data that a C2HData or an R2T names.
struct Part {
    pdu_type: PduType,
    /// State that the command must have.
    state: StreamState,
    cid: u16,
    offset: u32,
    bytes: u32,
}

/// Position in the stream of PDUs.
#[derive(Debug, Default)]
pub(super) struct Stream {
    /// The first `carried` bytes of a header of which the rest has not arrived.
    head: [u8; HEAD],
    carried: usize,
    /// Bytes of padding and data of the current PDU that are still to come.
    left: usize,
    /// CID of the command that ends with the current data (SUCCESS).
    ends: Option<u16>,
}

impl Stream {
    /// Consumes `bytes` up to the next event; `None`: all are consumed. Must not be called after an error.
    #[inline]
    pub(super) fn next(
        &mut self,
        bytes: &mut &[u8],
        commands: &mut Commands,
    ) -> Result<Option<Event>, Violation> {
        loop {
            if self.left > 0 {
                let skipped = self.left.min(bytes.len());
                *bytes = &bytes[skipped..];
                self.left -= skipped;
                if self.left > 0 {
                    return Ok(None);
                }
                if let Some(cid) = self.ends.take() {
                    return commands.end(cid, Status::SUCCESS).map(Some);
                }
            }
            let Some(head) = self.head(bytes) else { return Ok(None) };
            if let Some(event) = self.on_header(head, commands)? {
                return Ok(Some(event));
            }
        }
    }

    /// Takes a header; `None`: it is incomplete.
    #[inline]
    fn head(&mut self, bytes: &mut &[u8]) -> Option<[u8; HEAD]> {
        if self.carried == 0
            && let Some((head, rest)) = bytes.split_first_chunk()
        {
            *bytes = rest;
            return Some(*head);
        }
        let count = bytes.len().min(HEAD - self.carried);
        let (more, rest) = bytes.split_at(count);
        self.head[self.carried..self.carried + count].copy_from_slice(more);
        *bytes = rest;
        self.carried += count;
        if self.carried < HEAD {
            return None;
        }
        self.carried = 0;
        Some(self.head)
    }

    #[inline]
    fn on_header(&mut self, head: [u8; HEAD], commands: &mut Commands) -> Result<Option<Event>, Violation> {
        let data: C2hData = zerocopy::transmute!(head);
        match data.header.pdu_type {
            PduType::C2H_DATA => self.on_data(&data, commands).map(|()| None),
            PduType::CAPSULE_RESP => {
                let CapsuleResp { header, cqe } = zerocopy::transmute!(head);
                check_without_data(&header)?;
                commands.end(cqe.cid(), cqe.status()).map(Some)
            }
            PduType::R2T => on_request(&zerocopy::transmute!(head), commands).map(Some),
            PduType::C2H_TERM_REQ => {
                let request: TermReq = zerocopy::transmute!(head);
                Err(Violation::TerminatedByPeer { fes: request.fes(), fei: request.fei() })
            }
            other => Err(Violation::PduType(other)),
        }
    }

    #[inline]
    fn on_data(&mut self, data: &C2hData, commands: &mut Commands) -> Result<(), Violation> {
        let (header, pdu_type) = (&data.header, PduType::C2H_DATA);
        check(header)?;
        let (cid, offset, bytes) = (data.cccid.get(), data.datao.get(), data.datal.get());
        if header.pdo < HLEN || !header.pdo.is_multiple_of(4) {
            return Err(Violation::Pdo { pdu_type, pdo: header.pdo, least: HLEN });
        }
        let allowed = header.plen().saturating_sub(header.pdo.into());
        if bytes == 0 || bytes != allowed {
            return Err(Violation::Datal { pdu_type, datal: bytes, allowed });
        }
        let end = commands.add_part(&Part { pdu_type, state: StreamState::Read, cid, offset, bytes })?;
        if header.has(SUCCESS) {
            if !header.has(LAST_PDU) {
                let expected = "SUCCESS only together with LAST_PDU";
                return Err(Violation::LastFlag { pdu_type, flags: header.flags, expected });
            }
            if end != commands.bytes {
                return Err(Violation::DataShort { cid, received: end, expected: commands.bytes });
            }
            self.ends = Some(cid);
        }
        self.left = (header.plen() - PLEN) as usize;
        Ok(())
    }
}

fn on_request(request: &R2t, commands: &mut Commands) -> Result<Event, Violation> {
    check_without_data(&request.header)?;
    let (cid, offset, bytes) = (request.cccid.get(), request.r2to.get(), request.r2tl.get());
    if bytes == 0 {
        return Err(Violation::R2tEmpty(cid));
    }
    commands.add_part(&Part { pdu_type: PduType::R2T, state: StreamState::Write, cid, offset, bytes })?;
    Ok(Event::Requested(Request { cid, ttag: request.ttag.get(), offset, bytes }))
}

/// Checks HLEN and the digest flags.
#[inline]
fn check(header: &CommonHeader) -> Result<(), Violation> {
    let pdu_type = header.pdu_type;
    if header.hlen != HLEN {
        return Err(Violation::Hlen { pdu_type, hlen: header.hlen, allowed: HLEN });
    }
    if header.flags & (HDGSTF | DDGSTF) != 0 {
        return Err(Violation::DigestFlags { pdu_type, flags: header.flags, allowed: 0 });
    }
    Ok(())
}

#[inline]
fn check_without_data(header: &CommonHeader) -> Result<(), Violation> {
    check(header)?;
    if header.plen() != PLEN {
        let (pdu_type, plen) = (header.pdu_type, header.plen());
        return Err(Violation::Plen { pdu_type, plen, relation: "exactly", allowed: PLEN });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use initiator::nvme_spec::Cqe;
    use initiator::nvme_spec::tcp::{Extent, Fes};
    use initiator::nvme_spec::zerocopy::IntoBytes;

    use super::*;

    const BYTES: u32 = 64;

    /// CIDs 0 to 2 are reads, 3 and 4 writes, 5 is a write with in-capsule data, 6 is free.
    fn commands() -> Commands {
        let mut commands = Commands::new(7, BYTES);
        for cid in 0..6 {
            let command = Command { unit: cid.into(), is_read: cid < 3 };
            commands.begin(cid, command, cid == 5, Nanos::from_us(cid.into()));
        }
        commands
    }

    fn data(cid: u16, offset: u32, bytes: u32, flags: u8) -> Vec<u8> {
        let header = C2hData::new(cid, offset, bytes, flags, Extent::new(HLEN, bytes, false, false, 0));
        [header.as_bytes(), &vec![0x07; bytes as usize]].concat()
    }

    fn response(cid: u16, status: Status) -> Vec<u8> {
        CapsuleResp::new(Cqe::new(cid, status), false).as_bytes().to_vec()
    }

    fn request(cid: u16, offset: u32, bytes: u32) -> Vec<u8> {
        R2t::new(cid, 0x0100 + cid, offset, bytes, false).as_bytes().to_vec()
    }

    /// Events as text, from a stream that arrives in the given pieces.
    fn events<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Vec<String> {
        let (mut stream, mut commands, mut events) = (Stream::default(), commands(), Vec::new());
        for mut piece in pieces {
            while let Some(event) = stream.next(&mut piece, &mut commands).expect("a correct stream") {
                events.push(match event {
                    Event::Ended(Ended { cid, status, sent, command }) => {
                        assert_eq!((u64::from(cid), sent), (command.unit, Nanos::from_us(command.unit)));
                        format!("{cid} {status}")
                    }
                    Event::Requested(request) => format!("{request:?}"),
                });
            }
            assert!(piece.is_empty());
        }
        assert_eq!(commands.outstanding(), 0);
        events
    }

    fn correct_stream() -> Vec<u8> {
        [
            data(0, 0, BYTES, LAST_PDU | SUCCESS),
            request(3, 0, BYTES),
            // Two PDUs of one read, with those of another between them.
            data(1, 0, 40, 0),
            data(2, 0, BYTES, LAST_PDU),
            request(4, 0, 12),
            data(1, 40, BYTES - 40, LAST_PDU | SUCCESS),
            response(5, Status::SUCCESS),
            response(2, Status::SUCCESS),
            request(4, 12, BYTES - 12),
            response(4, Status::SUCCESS),
            response(3, Status::LBA_OUT_OF_RANGE),
        ]
        .concat()
    }

    #[test]
    fn every_split_of_a_stream_gives_the_same_events() {
        let bytes = correct_stream();
        let whole = events(std::iter::once(&bytes[..]));
        assert_eq!(whole.len(), 9, "{whole:?}");
        assert_eq!(whole[0], format!("0 {}", Status::SUCCESS));
        assert_eq!(whole[1], "Request { cid: 3, ttag: 259, offset: 0, bytes: 64 }");
        assert_eq!(whole[8], format!("3 {}", Status::LBA_OUT_OF_RANGE));
        for first in 0..=bytes.len() {
            let (a, b) = bytes.split_at(first);
            assert_eq!(events([a, b].into_iter()), whole, "split at {first}");
        }
        for size in 1..=bytes.len() {
            assert_eq!(events(bytes.chunks(size)), whole, "pieces of {size}");
        }
    }

    #[test]
    fn data_with_success_ends_its_command_with_the_last_byte() {
        let bytes = data(0, 0, BYTES, LAST_PDU | SUCCESS);
        let (mut stream, mut commands) = (Stream::default(), commands());
        let (mut most, mut last) = bytes.split_at(bytes.len() - 1);
        assert!(stream.next(&mut most, &mut commands).expect("correct").is_none());
        assert!(matches!(stream.next(&mut last, &mut commands), Ok(Some(Event::Ended(_)))));
    }

    #[test]
    fn padding_before_the_data_is_skipped() {
        let header = C2hData::new(0, 0, BYTES, LAST_PDU | SUCCESS, Extent { pdo: 32, plen: 32 + BYTES });
        let bytes = [header.as_bytes(), &[0; 8 + BYTES as usize], &data(1, 0, 4, 0)].concat();
        let (mut stream, mut commands, mut bytes) = (Stream::default(), commands(), &bytes[..]);
        assert!(matches!(stream.next(&mut bytes, &mut commands), Ok(Some(Event::Ended(_)))));
        assert_eq!(bytes.len(), HEAD + 4);
    }

    /// The violation at which a stream ends.
    fn violation(bytes: &[u8]) -> Violation {
        let (mut stream, mut commands, mut bytes) = (Stream::default(), commands(), bytes);
        loop {
            match stream.next(&mut bytes, &mut commands) {
                Ok(Some(_)) => {}
                Ok(None) => panic!("nothing was refused"),
                Err(violation) => return violation,
            }
        }
    }

    fn with_byte(mut bytes: Vec<u8>, at: usize, byte: u8) -> Vec<u8> {
        bytes[at] = byte;
        bytes
    }

    #[test]
    fn wrong_headers_are_refused() {
        let ends = LAST_PDU | SUCCESS;
        let (read, ok) = (data(0, 0, BYTES, ends), Status::SUCCESS);
        let again = [response(5, ok), response(5, ok)].concat();
        let term = TermReq::new(PduType::C2H_TERM_REQ, Fes::PDU_SEQUENCE_ERROR, 0, 0);
        for (bytes, part) in [
            (with_byte(read.clone(), 0, PduType::ICRESP.0), "ICRESP"),
            (with_byte(read.clone(), 0, 0x55), "0x55"),
            (with_byte(read.clone(), 1, ends | HDGSTF), "digest flags"),
            (with_byte(read.clone(), 1, ends | DDGSTF), "digest flags"),
            (with_byte(read.clone(), 1, SUCCESS), "together with LAST_PDU"),
            (with_byte(read.clone(), 2, 72), "HLEN 72"),
            (with_byte(read.clone(), 3, 20), "PDO 20"),
            (with_byte(read.clone(), 3, 26), "PDO 26"),
            (with_byte(read.clone(), 4, 25), "DATAL 64"),
            (with_byte(read.clone(), 4, 0), "DATAL 64"),
            (with_byte(read.clone(), 7, 0xff), "DATAL 64"),
            (with_byte(read, 16, 65), "DATAL 65"),
            (with_byte(data(0, 0, BYTES, ends), 16, 0), "DATAL 0"),
            (data(3, 0, BYTES, ends), "CCCID 0x0003"),
            (data(6, 0, BYTES, ends), "CCCID 0x0006"),
            (data(7, 0, BYTES, ends), "CCCID 0x0007"),
            (data(0xffff, 0, BYTES, ends), "CCCID 0xffff"),
            (data(0, 4, 4, 0), "offset 4"),
            (data(0, 0, BYTES + 4, ends), "68 bytes"),
            (data(0, 0, 4, ends), "4 of 64"),
            ([data(0, 0, BYTES, 0), data(0, BYTES, 4, 0)].concat(), "4 bytes at offset 64"),
            (response(6, ok), "CID 0x0006"),
            (response(0xffff, ok), "CID 0xffff"),
            (again, "CID 0x0005"),
            (response(0, ok), "0 of 64"),
            (response(3, ok), "0 of 64"),
            (with_byte(response(5, ok), 4, 28), "PLEN 28"),
            (request(0, 0, BYTES), "CCCID 0x0000"),
            (request(7, 0, BYTES), "CCCID 0x0007"),
            (request(3, 0, 0), "R2TL 0"),
            (request(3, 4, 4), "offset 4"),
            (request(3, 0, BYTES + 1), "65 bytes"),
            (request(5, 0, BYTES), "offset 0"),
            ([request(3, 0, 4), request(3, 4, u32::MAX)].concat(), "4294967295 bytes"),
            (with_byte(request(3, 0, 4), 2, 0), "HLEN 0"),
            (term.as_bytes().to_vec(), "terminated by the peer"),
        ] {
            let message = violation(&bytes).to_string();
            assert!(message.contains(part), "{part} in: {message}");
        }
    }
}
