//! The socket and its clients: one thread, which waits for all of them at once.
//!
//! A client's requests are answered in their order. While it does not read an answer, nothing more is
//! received from it, so that what it costs is bounded.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use spindle_reactor::net::Waker;

use super::methods::{Called, call};
use super::wire::{self, Text, Work};
use super::{Change, Failure, Reply};
use crate::serve::view::View;

/// Most clients. One more takes the place of the one that has been idle for longest.
const CLIENTS_MAX: usize = 128;
/// A request that has begun comes, and an answer is read, within this time; or the client is gone.
const PATIENCE: Duration = Duration::from_secs(30);
/// From a failure to accept, as without descriptors, to the next try.
const PAUSE: Duration = Duration::from_millis(100);
/// Clients that are accepted before the others have their turn.
const ACCEPTS_MAX: usize = 16;
/// Bytes that are received at once.
const PIECE_BYTES: usize = 16 << 10;

/// What came of a change, and whose it was.
type Done = (u64, Result<Value, Failure>);

/// What all clients need.
struct Server<O> {
    view: Arc<View>,
    orders: Sender<O>,
    done: (Sender<Done>, Receiver<Done>),
    /// Raised when a change is done.
    waker: Waker,
}

struct Client {
    /// No other client has it.
    number: u64,
    stream: UnixStream,
    /// What has come and is not taken.
    input: Vec<u8>,
    /// What is to be sent.
    output: Vec<u8>,
    sent: usize,
    /// A change that is with the main thread: the request's identifier, and what is to follow it.
    change: Option<(Option<Value>, Work)>,
    /// It ends when all is sent.
    is_ending: bool,
    /// When it last read some of an answer, or sent a request that is whole.
    moved: Instant,
    /// When the request began that is not whole yet.
    begun: Option<Instant>,
}

/// Answer the clients of a socket, for as long as the process lives. Changes go to `orders`; `waker` is for
/// their answers.
pub fn answer<O: From<Change>>(
    listener: &UnixListener,
    waker: Waker,
    view: Arc<View>,
    orders: Sender<O>,
) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let server = Server { view, orders, done: channel(), waker };
    let (mut clients, mut number): (Vec<Client>, u64) = (Vec::new(), 0);
    loop {
        let can_accept = wait(listener, &server.waker, &clients)?;
        server.waker.drain();
        while let Ok((whose, result)) = server.done.1.try_recv() {
            if let Some(client) = clients.iter_mut().find(|client| client.number == whose) {
                client.on_done(&server, result);
            }
        }
        let now = Instant::now();
        clients.retain_mut(|client| client.turn(&server, now));
        if can_accept && !accept(listener, &mut clients, &mut number, now) {
            std::thread::park_timeout(PAUSE);
        }
    }
}

/// Until there is something to do. True where there may be a client to accept.
fn wait(listener: &UnixListener, waker: &Waker, clients: &[Client]) -> std::io::Result<bool> {
    let mut fds = vec![PollFd::new(listener, PollFlags::IN), PollFd::new(waker, PollFlags::IN)];
    // Of one whose change is not done nothing is received: its hang-up would be told over and over.
    fds.extend(clients.iter().filter(|client| client.change.is_none()).map(|client| {
        let flags = if client.wants_send() { PollFlags::OUT } else { PollFlags::IN };
        PollFd::new(&client.stream, flags)
    }));
    // In time for those that have had their patience.
    let timeout = clients.iter().any(|client| client.since().is_some()).then_some(PATIENCE / 10);
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(!fds[0].revents().is_empty()),
        Err(error) => Err(error.into()),
    }
}

/// Accept some of those that wait. False where that has failed.
fn accept(listener: &UnixListener, clients: &mut Vec<Client>, number: &mut u64, now: Instant) -> bool {
    for _ in 0..ACCEPTS_MAX {
        match listener.accept() {
            Ok((stream, _)) => {
                if stream.set_nonblocking(true).is_err() {
                    continue;
                }
                if clients.len() == CLIENTS_MAX {
                    // One whose change is under way is to hear what came of it.
                    let all = clients.iter().enumerate().filter(|(_, client)| client.change.is_none());
                    let Some((index, _)) = all.min_by_key(|(_, client)| client.moved) else { continue };
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
        let (sent, change, is_ending, moved, begun) = (0, None, false, now, None);
        Client { number, stream, input, output, sent, change, is_ending, moved, begun }
    }

    fn wants_send(&self) -> bool {
        self.sent < self.output.len()
    }

    /// Since when it is waited for.
    fn since(&self) -> Option<Instant> {
        let begun = if self.wants_send() { Some(self.moved) } else { self.begun };
        begun.filter(|_| self.change.is_none())
    }

    /// Receive, answer, send. False: it is gone.
    fn turn<O: From<Change>>(&mut self, server: &Server<O>, now: Instant) -> bool {
        // Once a turn: the others want theirs.
        if !self.wants_send() && self.change.is_none() {
            match self.receive() {
                Ok(true) => self.work(server, now),
                Ok(false) => {}
                Err(_) => return false,
            }
        }
        if self.send(now).is_err() {
            return false;
        }
        let is_late = self.since().is_some_and(|since| now.duration_since(since) >= PATIENCE);
        !is_late && (self.wants_send() || !self.is_ending)
    }

    /// True when there may be a request. An end of the stream is one where nothing is to be sent.
    fn receive(&mut self) -> std::io::Result<bool> {
        if self.is_ending {
            return Ok(false);
        }
        let mut piece = [0; PIECE_BYTES];
        match self.stream.read(&mut piece) {
            // A request that is not whole never will be. Those before it are answered.
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

    /// Answer what has come whole, up to the first change.
    fn work<O: From<Change>>(&mut self, server: &Server<O>, now: Instant) {
        let mut taken = 0;
        loop {
            // What is between requests is none: a client may be silent after it.
            let rest = self.input.get(taken..).unwrap_or_default();
            taken += rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            let rest = self.input.get(taken..).unwrap_or_default();
            if rest.is_empty() || self.change.is_some() {
                break;
            }
            match wire::next(rest) {
                Text::Whole(value, bytes) => {
                    taken += bytes;
                    (self.moved, self.begun) = (now, None);
                    self.go_on(server, Work::new(value));
                }
                Text::Part => break,
                Text::Broken(failure) => {
                    self.end(&failure);
                    return;
                }
            }
        }
        self.input.drain(..taken);
        self.begun = if self.input.is_empty() { None } else { Some(self.begun.unwrap_or(now)) };
    }

    /// Do the requests of a text, up to the first change.
    fn go_on<O: From<Change>>(&mut self, server: &Server<O>, mut work: Work) {
        while let Some(request) = work.next() {
            let id = request.id.clone();
            match call(&server.view, request) {
                Called::Done(result) => work.answer(id, result),
                Called::Change(edit, args) => {
                    let (client, waker) = (self.number, server.waker.clone());
                    let reply = Reply { client, send: server.done.0.clone(), waker };
                    if server.orders.send(O::from(Change { edit, args, reply })).is_ok() {
                        self.change = Some((id, work));
                        return;
                    }
                    work.answer(id, Err(Failure::system("the target is ending".to_owned())));
                }
            }
        }
        self.output.extend_from_slice(&work.finish());
    }

    /// Its change is done.
    fn on_done<O: From<Change>>(&mut self, server: &Server<O>, result: Result<Value, Failure>) {
        let Some((id, mut work)) = self.change.take() else { return };
        self.moved = Instant::now();
        work.answer(id, result);
        self.go_on(server, work);
        if self.change.is_none() {
            self.begun = None;
            self.work(server, self.moved);
        }
    }

    fn end(&mut self, failure: &Failure) {
        self.input.clear();
        let text = failure.answer(serde_json::Value::Null).to_string() + "\n";
        self.output.extend_from_slice(text.as_bytes());
        self.is_ending = true;
    }

    fn send(&mut self, now: Instant) -> std::io::Result<()> {
        while self.wants_send() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.moved = now;
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
