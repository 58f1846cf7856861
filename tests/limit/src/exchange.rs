//! Runs server and requester: sets up sockets and memory, starts the two pinned threads, and shows the
//! progress.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Instant;

use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size, set_tcp_congestion};
use spindle_reactor::mem::{Pages, Region};

use crate::poll_loop::PollLoop;
use crate::requester::{Outcome, Requester};
use crate::server::Server;
use crate::{LimitError, LoadSpec, pin};
use spindle_app_bench::report::{PROGRESS_PERIOD, Progress};

/// Runs the exchange. If both ends fail, the error is the server's.
pub(super) fn run(spec: &LoadSpec, mut progress: Progress) -> Result<Outcome, LimitError> {
    let (serving, requesting) = connect(spec)?;
    let done = AtomicU64::new(0);
    let outcome = thread::scope(|scope| {
        let (ready, is_ready) = mpsc::channel();
        let server = scope.spawn(move || serve(spec, serving, &ready));
        let mut outcome = Ok(None);
        if is_ready.recv().is_ok() {
            let (end, ended) = mpsc::channel();
            let done = &done;
            let started = Instant::now();
            // The thread owns the sender: if it panics, the channel disconnects.
            scope.spawn(move || {
                // Fails only after a panic of the main thread.
                let _ = end.send(request(spec, requesting, done));
            });
            outcome = loop {
                match ended.recv_timeout(if progress.is_hidden() {
                    spec.expected_duration()
                } else {
                    PROGRESS_PERIOD
                }) {
                    Ok(outcome) => break outcome,
                    Err(RecvTimeoutError::Timeout) => {
                        progress.set(started.elapsed(), done.load(Ordering::Relaxed))
                    }
                    Err(RecvTimeoutError::Disconnected) => break Err(LimitError::Panicked("requesting")),
                }
            };
        }
        // The server's error is returned first: its failure closes the connections of the requester.
        server.join().unwrap_or(Err(LimitError::Panicked("serving")))?;
        outcome
    });
    progress.finish();
    outcome?.ok_or_else(|| LimitError::Socket {
        what: "the exchange",
        source: std::io::ErrorKind::ConnectionReset.into(),
    })
}

fn serve(spec: &LoadSpec, sockets: Vec<TcpStream>, ready: &mpsc::Sender<()>) -> Result<(), LimitError> {
    if let Some(cores) = spec.cores {
        pin(cores.0);
    }
    let mut region = Region::map(spec.span_bytes, Pages::Transparent)?;
    let span = &mut region.as_mut_slice()[..spec.span_bytes];
    // The span is written, as untouched pages would all map the kernel's zero page.
    span.fill(0xa5);
    let server = Server::new(spec, span);
    let end = PollLoop::new(server, sockets, spec.block_bytes)?;
    // Fails only after a panic of the main thread.
    let _ = ready.send(());
    end.run().map(drop)
}

fn request(
    spec: &LoadSpec,
    sockets: Vec<TcpStream>,
    done: &AtomicU64,
) -> Result<Option<Outcome>, LimitError> {
    if let Some(cores) = spec.cores {
        pin(cores.1);
    }
    Ok(PollLoop::new(Requester::new(spec, done), sockets, spec.block_bytes)?.run()?.outcome())
}

/// Makes `spec.connections` loopback connections. Returns the server's and the requester's sockets, in the
/// same order.
pub(super) fn connect(spec: &LoadSpec) -> Result<(Vec<TcpStream>, Vec<TcpStream>), LimitError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .map_err(LimitError::socket("cannot listen on 127.0.0.1"))?;
    let (mut serving, mut requesting) = (Vec::new(), Vec::new());
    for _ in 0..spec.connections {
        let (server_socket, requester_socket) = connect_pair(&listener, spec.congestion.as_deref())?;
        set_buffers(&server_socket, spec.socket_buffer_bytes)?;
        serving.push(server_socket);
        requesting.push(requester_socket);
    }
    Ok((serving, requesting))
}

/// Makes one loopback connection. Returns the server's and the requester's socket, both non-blocking.
/// `congestion` is the TCP congestion control of both; `None` keeps the system's default.
pub(super) fn connect_pair(
    listener: &TcpListener,
    congestion: Option<&str>,
) -> Result<(TcpStream, TcpStream), LimitError> {
    let address = listener.local_addr().map_err(LimitError::socket("cannot listen on 127.0.0.1"))?;
    let requester_socket =
        TcpStream::connect(address).map_err(LimitError::socket("cannot connect to 127.0.0.1"))?;
    // Another process may connect to the port: accepts until the peer is the requester's socket.
    let requester_address =
        requester_socket.local_addr().map_err(LimitError::socket("cannot connect to 127.0.0.1"))?;
    let server_socket = loop {
        let (socket, peer) = listener.accept().map_err(LimitError::socket("cannot accept on 127.0.0.1"))?;
        if peer == requester_address {
            break socket;
        }
    };
    for socket in [&requester_socket, &server_socket] {
        set_socket_options(socket, congestion)?;
    }
    Ok((server_socket, requester_socket))
}

fn set_socket_options(socket: &TcpStream, congestion: Option<&str>) -> Result<(), LimitError> {
    socket.set_nodelay(true).map_err(LimitError::socket("cannot set TCP_NODELAY"))?;
    socket.set_nonblocking(true).map_err(LimitError::socket("cannot make a socket non-blocking"))?;
    if let Some(name) = congestion {
        set_tcp_congestion(socket, name).map_err(|error| {
            LimitError::socket("cannot set the congestion control (--congestion)")(error.into())
        })?;
    }
    Ok(())
}

/// Sets SO_SNDBUF and SO_RCVBUF, as the target does on accepted connections; 0 keeps the kernel's tuning.
fn set_buffers(socket: &TcpStream, bytes: usize) -> Result<(), LimitError> {
    if bytes == 0 {
        return Ok(());
    }
    set_socket_send_buffer_size(socket, bytes)
        .and_then(|()| set_socket_recv_buffer_size(socket, bytes))
        .map_err(|error| LimitError::socket("cannot set the buffers (--socket-buffer)")(error.into()))
}

/// A short run on unpinned threads.
#[cfg(test)]
pub(super) fn small_spec(access: spindle_app_bench::access::Access) -> LoadSpec {
    use std::time::Duration;
    LoadSpec {
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
    use std::time::Duration;

    use clap::ValueEnum;

    use super::*;
    use spindle_app_bench::access::Access;

    fn run_hidden(spec: &LoadSpec) -> Result<Outcome, LimitError> {
        run(spec, Progress::new("test", spec.measured, 4096, true))
    }

    #[test]
    fn every_access_runs_and_measures_each_request_once() {
        for access in Access::value_variants() {
            let spec = small_spec(*access);
            for spec in [
                spec.clone(),
                LoadSpec { depth: 1, ..spec.clone() },
                LoadSpec { depth: 40, connections: 5, ..spec.clone() },
                LoadSpec { inline_bytes_max: 0, ..spec.clone() },
                LoadSpec { socket_buffer_bytes: 64 << 10, block_bytes: 1 << 20, ..spec.clone() },
                LoadSpec { block_bytes: 128 << 10, ..spec.clone() },
                LoadSpec { block_bytes: 777, depth: 1500, ..spec },
            ] {
                // Longer where a busy machine has let no request end in the time.
                let has_ended = [20, 200, 2000].into_iter().any(|ms| {
                    let spec = LoadSpec { measured: Duration::from_millis(ms), ..spec.clone() };
                    let outcome = run_hidden(&spec).expect("runs");
                    assert_eq!(outcome.latency.count(), outcome.operations, "{spec:?}");
                    assert!(outcome.elapsed >= spec.measured, "{spec:?}");
                    outcome.operations > 0
                });
                assert!(has_ended, "{spec:?}");
            }
        }
    }

    #[test]
    fn the_serving_end_alone_has_the_buffers_that_were_asked_for() {
        use rustix::net::sockopt::socket_send_buffer_size;
        let connect = |socket_buffer_bytes| {
            let spec = LoadSpec { socket_buffer_bytes, ..small_spec(Access::Read) };
            let (serving, requesting) = connect(&spec).expect("connects");
            [&serving[0], &requesting[0]].map(|socket| socket_send_buffer_size(socket).expect("its size"))
        };
        let (own, set) = (connect(0), connect(20 << 10));
        // The kernel doubles the size that it is given.
        assert_eq!(set, [40 << 10, own[1]]);
    }

    #[test]
    fn a_congestion_control_that_there_is_not_is_refused() {
        let spec = LoadSpec { congestion: Some("pigeon".to_owned()), ..small_spec(Access::Read) };
        let error = run_hidden(&spec).expect_err("no such control").to_string();
        assert!(error.contains("--congestion"), "{error}");
    }

    #[test]
    fn a_span_that_no_machine_has_is_an_error_and_no_hang() {
        let spec = LoadSpec { span_bytes: 1 << 60, ..small_spec(Access::RandRead) };
        assert!(matches!(run_hidden(&spec), Err(LimitError::Span(_))));
    }
}
