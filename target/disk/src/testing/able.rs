//! [`Able`]: a layer that implements Compare, Verify and Copy over a disk that ends commands in `submit`.

use std::sync::Arc;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

use crate::{
    Abilities, BlockRange, ChannelContext, Disk, DiskChannel, DiskError, Done, Geometry, IoRequest, Op,
    OpenError, Owner, Prepared, ResizeError, Token,
};

/// The layer. The inner disk must provide the memory of reads and writes, as a RAM disk does.
pub(crate) struct Able(pub(crate) Arc<dyn Disk>);

impl Disk for Able {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn kind(&self) -> &'static str {
        "able"
    }

    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        Ok(Box::new(AbleChannel(self.0.open(context)?)))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.0.resize(bytes)
    }
}

struct AbleChannel(Box<dyn DiskChannel>);

impl AbleChannel {
    fn read(&mut self, token: Token, range: BlockRange) -> Result<Buf, DiskError> {
        let done = self.0.submit(token, &IoRequest::new(Op::Read, range), None).expect("at once");
        done.result.map(|()| done.buf.expect("a read has a buffer"))
    }
}

impl DiskChannel for AbleChannel {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        self.0.prepare(request, next)
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        let IoRequest { op, range, .. } = *request;
        let result = match op {
            Op::Compare => self.read(token, range).and_then(|there| {
                let expected = buf.as_ref().expect("a compare has a buffer");
                let (mut at, mut is_same) = (0, expected.len() == there.len());
                for piece in expected.segments() {
                    is_same = is_same && there.equals_at(at, piece);
                    at += piece.len();
                }
                if is_same { Ok(()) } else { Err(DiskError::CompareDiffers) }
            }),
            Op::Verify => self.read(token, range).map(drop),
            Op::Read | Op::Write { .. } | Op::Flush | Op::WriteZeroes { .. } | Op::Deallocate => {
                return self.0.submit(token, request, buf);
            }
        };
        Some(Done { token, result, buf })
    }

    fn compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        self.0.compare_and_write(token, range, expected, data)
    }

    fn abilities(&self) -> Abilities {
        Abilities { compare: true, verify: true, copy: true, ..self.0.abilities() }
    }

    fn copy(&mut self, token: Token, from: BlockRange, to: u64, fua: bool) -> Option<Done> {
        let read = match self.read(token, from) {
            Ok(read) => read,
            Err(error) => return Some(Done { token, result: Err(error), buf: None }),
        };
        let range = BlockRange { lba: to, blocks: from.blocks };
        let request = IoRequest::new(Op::Write { fua }, range);
        let Prepared::Fill(mut data) = self.0.prepare(&request, None) else { panic!("a buffer is free") };
        let mut at = 0;
        for piece in read.segments() {
            data.copy_in(at, piece);
            at += piece.len();
        }
        let done = self.0.submit(token, &request, Some(data))?;
        Some(Done { buf: None, ..done })
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        self.0.poll(now, done)
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        self.0.cancel_owner(owner)
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }
}
