//! The control socket's listener and clients, served by one thread with `poll`.
//!
//! Responses are in the order of a client's requests. The server does not receive from a client with unsent
//! responses or a pending change, which bounds the memory of each client.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use spindle_reactor::net::Waker;

use super::methods::{CallOutcome, call};
use super::wire::{self, Parsed, RequestBatch};
use super::{Change, Failure, Reply};
use crate::serve::view::View;

/// Most clients. A further client replaces the client with the oldest progress. Clients with a pending change
/// are not replaced; if all clients have one, the new client is closed.
const CLIENTS_MAX: usize = 128;
/// Longest time for a request to arrive, and without sending a byte of a response; then the client is closed.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after a failed accept, for example without free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Most clients accepted before the connected clients are polled again.
const ACCEPTS_MAX: usize = 16;
const READ_BYTES: usize = 16 << 10;

/// [`Client::number`] and result of a change that the main thread applied.
type ChangeResult = (u64, Result<Value, Failure>);

/// State that all clients share. `C` is the main thread's message type.
struct Server<C> {
    view: Arc<View>,
    changes: Sender<C>,
    results: (Sender<ChangeResult>, Receiver<ChangeResult>),
    /// Woken by the main thread when a result is ready.
    waker: Waker,
}

struct Client {
    /// Identifier, unique for the life of the process.
    number: u64,
    stream: UnixStream,
    /// Bytes received and not parsed yet.
    input: Vec<u8>,
    /// Responses; the first `sent` bytes are sent.
    output: Vec<u8>,
    sent: usize,
    /// The change that the main thread is applying: the request's identifier, and the rest of its batch.
    change: Option<(Option<Value>, RequestBatch)>,
    /// The client is closed once `output` is sent.
    is_closing: bool,
    /// Last time that a whole request arrived, a change was finished or bytes of a response were sent; at
    /// first the time of the connect.
    last_progress: Instant,
    /// When the first bytes of the incomplete request in `input` arrived.
    request_start: Option<Instant>,
}

/// Serves the clients of the control socket until the process ends; returns only on an error. Sends changes
/// to the main thread by `changes`. The main thread wakes `waker` once a result is ready.
pub fn serve_clients<C: From<Change>>(
    listener: &UnixListener,
    waker: Waker,
    view: Arc<View>,
    changes: Sender<C>,
) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let server = Server { view, changes, results: channel(), waker };
    let (mut clients, mut number): (Vec<Client>, u64) = (Vec::new(), 0);
    loop {
        let can_accept = wait_ready(listener, &server.waker, &clients)?;
        server.waker.drain();
        while let Ok((number, result)) = server.results.1.try_recv() {
            if let Some(client) = clients.iter_mut().find(|client| client.number == number) {
                client.on_change_result(&server, result);
            }
        }
        let now = Instant::now();
        clients.retain_mut(|client| client.poll(&server, now));
        if can_accept && !accept(listener, &mut clients, &mut number, now) {
            std::thread::park_timeout(ACCEPT_PAUSE);
        }
    }
}

/// Waits until the listener, the waker or a client is ready, or the deadline of a client has to be checked.
/// True if the listener may have a connection.
fn wait_ready(listener: &UnixListener, waker: &Waker, clients: &[Client]) -> std::io::Result<bool> {
    let mut fds = vec![PollFd::new(listener, PollFlags::IN), PollFd::new(waker, PollFlags::IN)];
    // A client with a pending change is not polled: `poll` would report its hang-up again and again.
    fds.extend(clients.iter().filter(|client| client.change.is_none()).map(|client| {
        let flags = if client.has_output() { PollFlags::OUT } else { PollFlags::IN };
        PollFd::new(&client.stream, flags)
    }));
    // The resolution of the timeout is 10 %.
    let is_timed = clients.iter().any(|client| client.waiting_since().is_some());
    let timeout = is_timed.then_some(CLIENT_TIMEOUT / 10);
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(!fds[0].revents().is_empty()),
        Err(error) => Err(error.into()),
    }
}

/// Accepts at most [`ACCEPTS_MAX`] clients. False: accept failed, and the caller pauses.
fn accept(listener: &UnixListener, clients: &mut Vec<Client>, number: &mut u64, now: Instant) -> bool {
    for _ in 0..ACCEPTS_MAX {
        match listener.accept() {
            Ok((stream, _)) => {
                if stream.set_nonblocking(true).is_err() {
                    continue;
                }
                if clients.len() == CLIENTS_MAX {
                    // A client with a pending change must receive the result.
                    let all = clients.iter().enumerate().filter(|(_, client)| client.change.is_none());
                    let Some((index, _)) = all.min_by_key(|(_, client)| client.last_progress) else {
                        continue;
                    };
                    drop(clients.swap_remove(index));
                }
                *number += 1;
                clients.push(Client::new(*number, stream, now));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
            Err(_) => return false,
        }
    }
    true
}

impl Client {
    fn new(number: u64, stream: UnixStream, now: Instant) -> Client {
        let (input, output) = (Vec::new(), Vec::new());
        let (sent, change, is_closing, last_progress, request_start) = (0, None, false, now, None);
        Client { number, stream, input, output, sent, change, is_closing, last_progress, request_start }
    }

    fn has_output(&self) -> bool {
        self.sent < self.output.len()
    }

    /// Returns the time since which the server waits for the client to read a response or to complete a
    /// request; `None`: the server is not waiting.
    fn waiting_since(&self) -> Option<Instant> {
        let start = if self.has_output() { Some(self.last_progress) } else { self.request_start };
        start.filter(|_| self.change.is_none())
    }

    /// Receives, runs requests and sends. False: the caller must close the client.
    fn poll<C: From<Change>>(&mut self, server: &Server<C>, now: Instant) -> bool {
        // One read per poll, for fairness between clients.
        if !self.has_output() && self.change.is_none() {
            match self.receive() {
                Ok(true) => self.process_input(server, now),
                Ok(false) => {}
                Err(_) => return false,
            }
        }
        if self.send(now).is_err() {
            return false;
        }
        let is_late = self.waiting_since().is_some_and(|since| now.duration_since(since) >= CLIENT_TIMEOUT);
        !is_late && (self.has_output() || !self.is_closing)
    }

    /// Reads once into `input`. True if `input` may now contain a request.
    ///
    /// # Errors
    /// `UnexpectedEof` at the end of the stream; errors of the read.
    fn receive(&mut self) -> std::io::Result<bool> {
        if self.is_closing {
            return Ok(false);
        }
        let mut piece = [0; READ_BYTES];
        match self.stream.read(&mut piece) {
            // An incomplete request is dropped. Responses to earlier requests were sent before this read.
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.input.extend_from_slice(&piece[..count]);
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Runs the complete requests in `input`, up to the first change. For input that is not JSON or too long,
    /// queues an error, after which the client is closed.
    fn process_input<C: From<Change>>(&mut self, server: &Server<C>, now: Instant) {
        let mut taken = 0;
        loop {
            // White space does not start the timeout of a request.
            let rest = self.input.get(taken..).unwrap_or_default();
            taken += rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            let rest = self.input.get(taken..).unwrap_or_default();
            if rest.is_empty() || self.change.is_some() {
                break;
            }
            match wire::parse_request(rest) {
                Parsed::Complete(value, bytes) => {
                    taken += bytes;
                    (self.last_progress, self.request_start) = (now, None);
                    self.run_batch(server, RequestBatch::new(value));
                }
                Parsed::Incomplete => break,
                Parsed::Invalid(failure) => {
                    self.close_with(&failure);
                    return;
                }
            }
        }
        self.input.drain(..taken);
        let start = self.request_start.unwrap_or(now);
        self.request_start = (!self.input.is_empty()).then_some(start);
    }

    /// Runs the requests of a batch, up to the first change. Queues the responses once the batch is complete.
    fn run_batch<C: From<Change>>(&mut self, server: &Server<C>, mut batch: RequestBatch) {
        while let Some(request) = batch.next() {
            let id = request.id.clone();
            match call(&server.view, request) {
                CallOutcome::Done(result) => batch.respond(id, result),
                CallOutcome::Change(edit, args) => {
                    let (client, waker) = (self.number, server.waker.clone());
                    let reply = Reply { client, send: server.results.0.clone(), waker };
                    if server.changes.send(C::from(Change { edit, args, reply })).is_ok() {
                        self.change = Some((id, batch));
                        return;
                    }
                    batch.respond(id, Err(Failure::system("the target is shutting down".to_owned())));
                }
            }
        }
        self.output.extend_from_slice(&batch.finish());
    }

    /// Records the result of the pending change and continues with the client's next requests.
    fn on_change_result<C: From<Change>>(&mut self, server: &Server<C>, result: Result<Value, Failure>) {
        let Some((id, mut batch)) = self.change.take() else { return };
        self.last_progress = Instant::now();
        batch.respond(id, result);
        self.run_batch(server, batch);
        if self.change.is_none() {
            self.request_start = None;
            self.process_input(server, self.last_progress);
        }
    }

    /// Queues an error response and drops the unparsed input. The client is closed once the response is sent.
    fn close_with(&mut self, failure: &Failure) {
        self.input.clear();
        let text = failure.response(serde_json::Value::Null).to_string() + "\n";
        self.output.extend_from_slice(text.as_bytes());
        self.is_closing = true;
    }

    fn send(&mut self, now: Instant) -> std::io::Result<()> {
        while self.has_output() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.last_progress = now;
                    self.sent += count;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.output.clear();
        self.sent = 0;
        Ok(())
    }
}
