//! Scratch.
use std::io::IoSlice;
use std::time::Instant;
use arrayvec::ArrayVec;
use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe, Sgl};
use nvme_spec::tcp::*;
use nvme_spec::zerocopy::IntoBytes;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_reactor::slab::Slot;
use spindle_target::transport::{Event, Reply, Transport};
use spindle_tcp::RxBatch;
use spindle_tcp::controller::{self, ConnConfig};

#[inline(never)]
fn turn(conn: &mut controller::Conn, batch: RxBatch, pool: &Pool, n: usize, t: &mut [u64; 6]) -> RxBatch {
    let t0 = Instant::now();
    conn.load(batch);
    let mut cids = ArrayVec::<u16, 256>::new();
    while let Some(event) = conn.next_event() {
        if let Event::Command { sqe, data: Ok(_) } = event { cids.push(sqe.cid()); }
    }
    let batch = conn.unload();
    let t1 = Instant::now();
    assert_eq!(cids.len(), n);
    let mut bufs = ArrayVec::<_, 256>::new();
    for _ in 0..n { bufs.push(pool.take(4096).expect("free")); }
    let t2 = Instant::now();
    for (cid, buf) in cids.iter().zip(bufs.drain(..)) {
        conn.reply(Reply { slot: Slot::from_wire(u32::from(*cid)), cqe: Cqe::new(*cid, Status::SUCCESS), data: Some(buf), may_omit_cqe: true });
    }
    let t3 = Instant::now();
    let bytes = {
        let mut pieces = ArrayVec::<IoSlice, 512>::new();
        let b = conn.send_pieces(&mut pieces);
        std::hint::black_box(&pieces);
        b
    };
    let t4 = Instant::now();
    conn.sent(bytes);
    let t5 = Instant::now();
    let mut sent = 0;
    while let Some(event) = conn.next_event() { if let Event::Sent { .. } = event { sent += 1; } }
    let t6 = Instant::now();
    assert_eq!(sent, n);
    for (i, d) in [t1 - t0, t2 - t1, t3 - t2, t4 - t3, t5 - t4, t6 - t5].iter().enumerate() { t[i] += d.as_nanos() as u64; }
    batch
}

fn main() {
    for n in [128_u16] {
        let mut conn = controller::Conn::new(ConnConfig::default(), Nanos::ZERO);
        conn.set_queue_entries(128);
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 512 }], Pages::Base).expect("pool");
        let mut batch = RxBatch::new(256 << 10);
        batch.extend(IcReq::new(0, DigestBits::new(), 0).as_bytes());
        conn.load(batch);
        assert!(conn.next_event().is_none());
        batch = conn.unload();
        conn.sent(128);
        let mut bytes = Vec::new();
        for cid in 0..n {
            let sqe = Sqe::new(2, cid, 1).with_sgl(Sgl::transport(4096));
            bytes.extend_from_slice(CapsuleCmd::new(sqe, 0, Extent::new(72, 0, false, false, 0)).as_bytes());
        }
        let mut best = [u64::MAX; 6];
        let rounds = 1000000 / usize::from(n) + 100;
        for _ in 0..20 {
            let mut t = [0; 6];
            for _ in 0..rounds {
                batch.extend(&bytes);
                batch = turn(&mut conn, batch, &pool, usize::from(n), &mut t);
            }
            for i in 0..6 { best[i] = best[i].min(t[i]); }
        }
        let per: Vec<f64> = best.iter().map(|b| (*b as f64 / rounds as f64 - 24.0) / f64::from(n)).collect();
        println!("depth {n}: parse {:.1} take {:.1} reply {:.1} pieces {:.1} sent+drop {:.1} Sent {:.1} sum {:.1}", per[0], per[1], per[2], per[3], per[4], per[5], per.iter().sum::<f64>());
    }
}
