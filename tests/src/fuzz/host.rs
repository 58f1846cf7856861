//! What a target sends, into the host's [`Conn`], which has commands of every kind outstanding.

use std::io::IoSlice;

use arrayvec::ArrayVec;
use nvme_spec::Sqe;
use nvme_spec::tcp::{DigestBits, IcReq, IcResp};
use nvme_spec::zerocopy::IntoBytes;
use spindle_nvme_tcp::RxBatch;
use spindle_nvme_tcp::host::{Conn, HostConfig, HostData, HostEvent};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};

use super::bytes::Bytes;
use crate::sim::Rng;

/// Commands outstanding: CID n is of kind n modulo 4.
pub const COMMANDS: u16 = 8;
/// Bytes of a command's data.
pub const DATA_BYTES: u32 = 8192;

/// ICReq without digests.
#[must_use]
pub fn icreq() -> Vec<u8> {
    IcReq::new(0, DigestBits::new(), 0).as_bytes().to_vec()
}

/// ICResp without digests.
#[must_use]
pub fn icresp() -> Vec<u8> {
    IcResp::new(0, DigestBits::new(), 4096).as_bytes().to_vec()
}

/// The command with this identifier and its data: read, small write, large write, flush.
#[must_use]
pub fn command(cid: u16, pool: &Pool) -> (Sqe, HostData) {
    let buf = |bytes| pool.take(bytes).expect("there is enough");
    let blocks = DATA_BYTES / 512;
    match cid % 4 {
        0 => (Sqe::read(cid, 1, 0, blocks), HostData::FromController(buf(DATA_BYTES))),
        1 => (Sqe::write(cid, 1, 0, 1, false), HostData::ToController(buf(512))),
        2 => (Sqe::write(cid, 1, 0, blocks, false), HostData::ToController(buf(DATA_BYTES))),
        _ => (Sqe::flush(cid, 1), HostData::None),
    }
}

/// A host's connection, its commands and how often each ended.
struct Scene {
    conn: Conn,
    pool: Pool,
    ended: [u32; COMMANDS as usize],
    submitted: [u32; COMMANDS as usize],
    is_closed: bool,
}

impl Scene {
    fn new() -> Scene {
        let config = HostConfig { in_capsule_bytes: 4096, queue_entries: COMMANDS, ..HostConfig::default() };
        let conn = Conn::new(config, Nanos::ZERO);
        let zone = ZoneSpec { buffer_bytes: DATA_BYTES, count: u32::from(COMMANDS) };
        let pool = Pool::new(&[zone], Pages::Base).expect("a pool");
        Scene {
            conn,
            pool,
            ended: [0; COMMANDS as usize],
            submitted: [0; COMMANDS as usize],
            is_closed: false,
        }
    }

    fn submit_all(&mut self) {
        for cid in 0..COMMANDS {
            let index = usize::from(cid);
            if self.submitted[index] == self.ended[index] {
                let (sqe, data) = command(cid, &self.pool);
                self.submitted[index] += u32::from(self.conn.submit(sqe, data).is_ok());
            }
        }
    }

    fn events(&mut self) {
        while let Some(event) = self.conn.next_event() {
            assert!(!self.is_closed, "an event after the last: {event:?}");
            match event {
                HostEvent::Ready => self.submit_all(),
                HostEvent::Completed { cid, buf, result, .. } => {
                    let index = usize::from(cid);
                    assert!(cid < COMMANDS, "a completion of a command that was not submitted");
                    assert_eq!(self.ended[index] + 1, self.submitted[index], "command {cid} ended twice");
                    let expected = [DATA_BYTES, 512, DATA_BYTES, 0][index % 4] as usize;
                    assert_eq!(buf.as_ref().map_or(0, spindle_reactor::mem::Buf::len), expected);
                    let _ = result;
                    self.ended[index] += 1;
                }
                HostEvent::Closed { .. } => self.is_closed = true,
            }
        }
    }

    fn send(&mut self, rng: &mut Rng) {
        let total = {
            let mut pieces = ArrayVec::<IoSlice<'_>, 64>::new();
            self.conn.send_pieces(&mut pieces)
        };
        let count = if rng.permille(300) { rng.size(0, total) } else { total };
        self.conn.sent(count);
    }
}

/// The body. The first byte seeds how the rest is cut; its lowest bit puts an ICResp before it.
///
/// # Panics
/// When a promise is broken.
pub fn run(bytes: &[u8]) {
    let mut bytes = Bytes::new(bytes);
    let seed = bytes.byte();
    let mut rng = Rng::new(u64::from(seed));
    let mut scene = Scene::new();
    let mut stream = if seed & 1 == 1 { icresp() } else { Vec::new() };
    stream.extend(bytes.rest());
    let mut left = &stream[..];
    while !left.is_empty() {
        let (chunk, rest) = left.split_at(rng.size(1, 3000).min(left.len()));
        left = rest;
        let mut batch = RxBatch::new(chunk.len());
        batch.extend(chunk);
        scene.conn.load(batch);
        scene.events();
        scene.conn.unload();
        scene.send(&mut rng);
        scene.events();
        if rng.permille(200) {
            scene.submit_all();
        }
    }
    match rng.below(3) {
        0 => scene.conn.on_reset(),
        1 => scene.conn.on_peer_closed(),
        _ => scene.conn.close(),
    }
    scene.events();
    scene.conn.on_reset();
    scene.events();
    assert!(scene.is_closed, "the connection is gone, and says so");
    assert_eq!(scene.ended, scene.submitted, "each command ends");
    assert_eq!(
        scene.pool.free_bytes(),
        u64::from(DATA_BYTES) * u64::from(COMMANDS),
        "buffers did not come home"
    );
}
