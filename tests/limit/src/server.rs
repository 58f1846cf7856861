//! The serving end: sends blocks of the span for reads, and receives data into the span for writes.

use crate::LoadSpec;
use crate::message::{Kind, Piece};
use crate::outbox::{Outbox, PreparedMessages};
use crate::poll_loop::Role;
use spindle_app_bench::random::Random;

/// Number of prepared messages of each kind. Messages of a turn that wrap past the last one need a further
/// slice.
const PREPARED_SLOTS: usize = 512;

/// [`Role`] of the serving end.
#[derive(Debug)]
pub(super) struct Server<'span> {
    span: &'span mut [u8],
    picker: Picker,
    block_bytes: usize,
    prepared: PreparedMessages,
    /// By connection: offset in the span of the block that is being received.
    offsets: Vec<usize>,
}

impl<'span> Server<'span> {
    pub(super) fn new(spec: &LoadSpec, span: &'span mut [u8]) -> Server<'span> {
        let blocks = span.len() / spec.block_bytes;
        Server {
            span,
            picker: Picker::new(spec.access.is_random(), blocks),
            block_bytes: spec.block_bytes,
            prepared: PreparedMessages::new(
                &[Kind::ReadyToTransfer, Kind::Done],
                PREPARED_SLOTS,
                spec.block_bytes,
            ),
            offsets: vec![0; spec.connections],
        }
    }
}

impl Role for Server<'_> {
    const RECEIVES_WHILE_BLOCKED: bool = false;

    #[inline]
    fn is_over(&self) -> bool {
        false
    }

    /// Copies the payload in `piece` to the span. The first piece of a message selects the block.
    #[inline]
    fn on_piece(&mut self, link: usize, piece: &Piece<'_>) {
        if piece.offset == 0 {
            self.offsets[link] = self.picker.pick() * self.block_bytes;
        }
        let head = piece.kind.head_bytes();
        let payload = &piece.bytes[head.saturating_sub(piece.offset).min(piece.bytes.len())..];
        let at = self.offsets[link] + piece.offset.saturating_sub(head);
        self.span[at..at + payload.len()].copy_from_slice(payload);
    }

    #[inline]
    fn payload_memory(&mut self, link: usize, left: usize) -> &mut [u8] {
        let end = self.offsets[link] + self.block_bytes;
        &mut self.span[end - left..end]
    }

    #[inline]
    fn on_message(&mut self, _link: usize, kind: Kind, outbox: &mut Outbox) {
        match kind {
            Kind::Read => outbox.push_block(self.picker.pick() * self.block_bytes),
            Kind::WriteAnnounced => outbox.push(Kind::ReadyToTransfer, 1, &self.prepared),
            Kind::WriteInline | Kind::WriteData => outbox.push(Kind::Done, 1, &self.prepared),
            // Only a server sends these messages.
            Kind::ReadyToTransfer | Kind::ReadReply | Kind::Done => {}
        }
    }

    #[inline]
    fn on_received(&mut self, _link: usize, _outbox: &mut Outbox) {}

    #[inline]
    fn prepared(&self) -> &PreparedMessages {
        &self.prepared
    }

    #[inline]
    fn span(&self) -> &[u8] {
        self.span
    }
}

/// Selects blocks of the span, at random or in sequence.
#[derive(Debug)]
struct Picker {
    is_random: bool,
    random: Random,
    next: usize,
    blocks: usize,
}

impl Picker {
    fn new(is_random: bool, blocks: usize) -> Picker {
        Picker { is_random, random: Random::new(1), next: 0, blocks }
    }

    #[inline]
    fn pick(&mut self) -> usize {
        if self.is_random {
            return usize::try_from(self.random.below(self.blocks as u64)).unwrap_or(0);
        }
        let block = self.next;
        self.next = if block + 1 == self.blocks { 0 } else { block + 1 };
        block
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpStream};
    use std::thread;

    use super::*;
    use crate::exchange::{connect, small_spec};
    use crate::message::{HEAD_BYTES, REQUEST_BYTES};
    use crate::poll_loop::PollLoop;
    use spindle_app_bench::access::Access;

    /// Sends `bytes` in parts of `step` to a server whose span has block n filled with n. Returns the answer
    /// of `expected` bytes, and the span after it.
    fn answers(spec: &LoadSpec, bytes: &[u8], step: usize, expected: usize) -> (Vec<u8>, Vec<u8>) {
        let mut span: Vec<u8> = (0..8u8).flat_map(|block| vec![block; spec.block_bytes]).collect();
        let (serving, mut requesting) = connect(spec).expect("connects");
        let mut answer = vec![0; expected];
        thread::scope(|scope| {
            let server = Server::new(spec, &mut span);
            let block_bytes = spec.block_bytes;
            scope.spawn(move || {
                PollLoop::new(server, serving, block_bytes).and_then(PollLoop::run).map(drop).expect("serves")
            });
            let mut client: TcpStream = requesting.remove(0);
            client.set_nonblocking(false).expect("blocks");
            for part in bytes.chunks(step) {
                client.write_all(part).expect("sends");
            }
            client.read_exact(&mut answer).expect("answers");
            client.shutdown(Shutdown::Write).expect("ends");
            assert_eq!(client.read(&mut [0]).expect("ends"), 0, "no byte more than expected");
        });
        (answer, span)
    }

    fn request(kind: Kind, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![kind.first_byte()];
        bytes.resize(kind.head_bytes(), 0);
        bytes.extend_from_slice(payload);
        bytes
    }

    #[test]
    fn reads_are_answered_with_whole_blocks_of_the_span() {
        let block = small_spec(Access::Read).block_bytes;
        let requests = request(Kind::Read, &[]).repeat(10);
        for step in [1, 71, 72, 73, 200, usize::MAX] {
            let (answer, _) = answers(&small_spec(Access::Read), &requests, step, 10 * (HEAD_BYTES + block));
            for (index, reply) in answer.chunks(HEAD_BYTES + block).enumerate() {
                assert_eq!(reply[0], Kind::ReadReply.first_byte());
                let block_of_span = u8::try_from(index % 8).expect("small");
                assert!(
                    reply[HEAD_BYTES..].iter().all(|byte| *byte == block_of_span),
                    "reply {index}, parts {step}"
                );
            }
        }
    }

    #[test]
    fn writes_land_in_the_span_whole_and_in_order() {
        let block = small_spec(Access::Write).block_bytes;
        let payload = |value: u8| {
            (0..block).map(|at| u8::try_from(at % 7).expect("small") + value).collect::<Vec<u8>>()
        };
        let mut requests = request(Kind::WriteInline, &payload(100));
        requests.extend(request(Kind::WriteInline, &payload(120)));
        for step in [1, 71, 73, 4096, usize::MAX] {
            let (answer, span) = answers(&small_spec(Access::Write), &requests, step, 2 * HEAD_BYTES);
            assert!(answer.chunks(HEAD_BYTES).all(|reply| reply[0] == Kind::Done.first_byte()));
            assert!(span[..block] == payload(100) && span[block..2 * block] == payload(120), "parts {step}");
            assert!(
                span[2 * block..3 * block].iter().all(|byte| *byte == 2),
                "only its own block is written"
            );
        }
    }

    #[test]
    fn an_announced_write_is_asked_for_and_then_done() {
        let block = small_spec(Access::Write).block_bytes;
        let mut requests = request(Kind::WriteAnnounced, &[]);
        requests.extend(request(Kind::WriteData, &vec![99; block]));
        let (answer, span) = answers(&small_spec(Access::Write), &requests, REQUEST_BYTES, 2 * HEAD_BYTES);
        let kinds = [answer[0], answer[HEAD_BYTES]];
        assert_eq!(kinds, [Kind::ReadyToTransfer.first_byte(), Kind::Done.first_byte()]);
        assert!(span[..block].iter().all(|byte| *byte == 99));
    }

    #[test]
    fn large_writes_land_in_the_span_whole() {
        let spec = LoadSpec { block_bytes: 40_000, ..small_spec(Access::Write) };
        let payload = |value: usize| {
            (0..40_000).map(|at| u8::try_from((at + value) % 251).expect("small")).collect::<Vec<u8>>()
        };
        let mut requests = Vec::new();
        for value in 0..3 {
            requests.extend(request(Kind::WriteData, &payload(value)));
        }
        for step in [40_023, 40_024, 40_025, 4096, 33, usize::MAX] {
            let (answer, span) = answers(&spec, &requests, step, 3 * HEAD_BYTES);
            assert!(answer.chunks(HEAD_BYTES).all(|reply| reply[0] == Kind::Done.first_byte()));
            for value in 0..3 {
                assert!(span[value * 40_000..][..40_000] == payload(value), "block {value}, parts {step}");
            }
            assert!(span[3 * 40_000..][..40_000].iter().all(|byte| *byte == 3), "only those are written");
        }
    }

    #[test]
    fn random_blocks_reach_the_whole_span_and_nothing_beyond() {
        let mut picker = Picker::new(true, 100);
        let mut seen = [false; 100];
        for _ in 0..10_000 {
            seen[picker.pick()] = true;
        }
        assert!(seen.iter().all(|seen| *seen));
        let mut in_order = Picker::new(false, 3);
        let picked: Vec<usize> = (0..7).map(|_| in_order.pick()).collect();
        assert_eq!(picked, [0, 1, 2, 0, 1, 2, 0]);
    }
}
