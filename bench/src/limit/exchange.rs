//! Both ends put together: sockets, memory, two pinned threads, and the progress that is shown meanwhile.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Instant;

use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size, set_tcp_congestion};
use spindle_reactor::mem::{Pages, Region};

use super::end::End;
use super::requester::{Outcome, Requester};
use super::server::Server;
use super::{LimitError, Plan, pin};
use crate::report::{PROGRESS_PERIOD, Progress};

/// Run the exchange that `plan` asks for.
///
/// # Errors
/// [`LimitError`]; where one end ended because of the other, the other's.
pub(super) fn run(plan: &Plan, mut progress: Progress) -> Result<Outcome, LimitError> {
    let (serving, requesting) = connect(plan)?;
    let done = AtomicU64::new(0);
    let outcome = thread::scope(|scope| {
        let (ready, is_ready) = mpsc::channel();
        let server = scope.spawn(move || serve(plan, serving, &ready));
        let mut outcome = Ok(None);
        if is_ready.recv().is_ok() {
            let (end, ended) = mpsc::channel();
            let done = &done;
            let started = Instant::now();
            // The channel's end falls with the thread, also when that panics.
            scope.spawn(move || {
                // It fails only when the caller has panicked.
                let _ = end.send(request(plan, requesting, done));
            });
            outcome = loop {
                match ended.recv_timeout(if progress.is_hidden() { plan.patience() } else { PROGRESS_PERIOD })
                {
                    Ok(outcome) => break outcome,
                    Err(RecvTimeoutError::Timeout) => {
                        progress.set(started.elapsed(), done.load(Ordering::Relaxed))
                    }
                    Err(RecvTimeoutError::Disconnected) => break Err(LimitError::Panicked("requesting")),
                }
            };
        }
        // The server's reason comes first: if it failed, the requester only saw its connections close.
        server.join().unwrap_or(Err(LimitError::Panicked("serving")))?;
        outcome
    });
    progress.finish();
    outcome?.ok_or_else(|| LimitError::Socket {
        what: "the exchange",
        source: std::io::ErrorKind::ConnectionReset.into(),
    })
}

/// The serving thread.
fn serve(plan: &Plan, sockets: Vec<TcpStream>, ready: &mpsc::Sender<()>) -> Result<(), LimitError> {
    if let Some(cores) = plan.cores {
        pin(cores.0);
    }
    let mut region = Region::map(plan.span_bytes, Pages::Transparent)?;
    let span = &mut region.as_mut_slice()[..plan.span_bytes];
    // Written, not only read: untouched pages would all be the same page of zeroes.
    span.fill(0xa5);
    let server = Server::new(plan, span);
    let end = End::new(server, sockets, plan.block_bytes)?;
    // It fails only when the caller has panicked.
    let _ = ready.send(());
    end.run().map(drop)
}

/// The requesting thread.
fn request(plan: &Plan, sockets: Vec<TcpStream>, done: &AtomicU64) -> Result<Option<Outcome>, LimitError> {
    if let Some(cores) = plan.cores {
        pin(cores.1);
    }
    Ok(End::new(Requester::new(plan, done), sockets, plan.block_bytes)?.run()?.outcome())
}

/// The connections, their serving and their requesting ends in the same order.
pub(super) fn connect(plan: &Plan) -> Result<(Vec<TcpStream>, Vec<TcpStream>), LimitError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .map_err(LimitError::socket("cannot listen on 127.0.0.1"))?;
    let (mut serving, mut requesting) = (Vec::new(), Vec::new());
    for _ in 0..plan.connections {
        let (theirs, ours) = connect_pair(&listener, plan.congestion.as_deref())?;
        set_buffers(&theirs, plan.socket_buffer_bytes)?;
        serving.push(theirs);
        requesting.push(ours);
    }
    Ok((serving, requesting))
}

/// A connection: its serving and its requesting end.
pub(super) fn connect_pair(
    listener: &TcpListener,
    congestion: Option<&str>,
) -> Result<(TcpStream, TcpStream), LimitError> {
    let address = listener.local_addr().map_err(LimitError::socket("cannot listen on 127.0.0.1"))?;
    let ours = TcpStream::connect(address).map_err(LimitError::socket("cannot connect to 127.0.0.1"))?;
    // Somebody else on this machine may connect too; wait for the one that we know.
    let name = ours.local_addr().map_err(LimitError::socket("cannot connect to 127.0.0.1"))?;
    let theirs = loop {
        let (socket, peer) = listener.accept().map_err(LimitError::socket("cannot accept on 127.0.0.1"))?;
        if peer == name {
            break socket;
        }
    };
    for socket in [&ours, &theirs] {
        prepare(socket, congestion)?;
    }
    Ok((theirs, ours))
}

fn prepare(socket: &TcpStream, congestion: Option<&str>) -> Result<(), LimitError> {
    socket.set_nodelay(true).map_err(LimitError::socket("cannot set TCP_NODELAY"))?;
    socket.set_nonblocking(true).map_err(LimitError::socket("cannot make a socket non-blocking"))?;
    if let Some(name) = congestion {
        set_tcp_congestion(socket, name).map_err(|error| {
            LimitError::socket("cannot set the congestion control (--congestion)")(error.into())
        })?;
    }
    Ok(())
}

/// The serving end's buffers, as a target sets those of a connection that it has accepted.
fn set_buffers(socket: &TcpStream, bytes: usize) -> Result<(), LimitError> {
    if bytes == 0 {
        return Ok(());
    }
    set_socket_send_buffer_size(socket, bytes)
        .and_then(|()| set_socket_recv_buffer_size(socket, bytes))
        .map_err(|error| LimitError::socket("cannot set the buffers (--socket-buffer)")(error.into()))
}

/// A plan for tests: small, short, on whatever cores there are.
#[cfg(test)]
pub(super) fn small_plan(access: crate::access::Access) -> Plan {
    use std::time::Duration;
    Plan {
        access,
        reads_percent: access.reads_percent(50),
        block_bytes: 4096,
        depth: 8,
        connections: 1,
        span_bytes: 1 << 20,
        inline_bytes_max: 4096,
        congestion: None,
        socket_buffer_bytes: 0,
        cores: None,
        warm_up: Duration::from_millis(2),
        measured: Duration::from_millis(20),
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;
    use crate::access::Access;

    fn run_hidden(plan: &Plan) -> Result<Outcome, LimitError> {
        run(plan, Progress::new("test", plan.measured, 4096, true))
    }

    #[test]
    fn every_access_runs_and_measures_each_request_once() {
        for access in Access::value_variants() {
            let plan = small_plan(*access);
            for plan in [
                plan.clone(),
                Plan { depth: 1, ..plan.clone() },
                Plan { depth: 40, connections: 5, ..plan.clone() },
                Plan { inline_bytes_max: 0, ..plan.clone() },
                Plan { socket_buffer_bytes: 64 << 10, block_bytes: 1 << 20, ..plan.clone() },
                Plan { block_bytes: 128 << 10, ..plan.clone() },
                Plan { block_bytes: 777, depth: 1500, ..plan },
            ] {
                let outcome = run_hidden(&plan).expect("runs");
                assert!(outcome.operations > 0, "{plan:?}");
                assert_eq!(outcome.latency.count(), outcome.operations, "{plan:?}");
                assert!(outcome.elapsed >= plan.measured, "{plan:?}");
            }
        }
    }

    #[test]
    fn the_serving_end_alone_has_the_buffers_that_were_asked_for() {
        use rustix::net::sockopt::socket_send_buffer_size;
        let connect = |socket_buffer_bytes| {
            let plan = Plan { socket_buffer_bytes, ..small_plan(Access::Read) };
            let (serving, requesting) = connect(&plan).expect("connects");
            [&serving[0], &requesting[0]].map(|socket| socket_send_buffer_size(socket).expect("its size"))
        };
        let (own, set) = (connect(0), connect(20 << 10));
        // The kernel doubles what it is given.
        assert_eq!(set, [40 << 10, own[1]]);
    }

    #[test]
    fn a_congestion_control_that_there_is_not_is_refused() {
        let plan = Plan { congestion: Some("pigeon".to_owned()), ..small_plan(Access::Read) };
        let error = run_hidden(&plan).expect_err("no such control").to_string();
        assert!(error.contains("--congestion"), "{error}");
    }

    #[test]
    fn a_span_that_no_machine_has_is_an_error_and_no_hang() {
        let plan = Plan { span_bytes: 1 << 60, ..small_plan(Access::RandRead) };
        assert!(matches!(run_hidden(&plan), Err(LimitError::Span(_))));
    }
}
