//! Command-line helpers of the subcommands of `spindle`: a parser of numbers from 1 up ([`at_least_one`]),
//! output of results to standard output ([`say!`](crate::say)), and a final message to standard error
//! ([`write_final_message`]).

use std::fmt::Arguments;
use std::io::{self, Write};
use std::process;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Longest wait for the final message: standard error may be a full pipe without a reader.
const FINAL_MESSAGE_MAX: Duration = Duration::from_secs(1);
/// Bytes that a pipe which is ready takes without blocking (`PIPE_BUF` of Linux).
const PIPE_BUF: usize = 4096;

/// Prints a line of a result, as `println!` does; a failed write ends the process (see [`write_result`]).
#[macro_export]
macro_rules! say {
    ($($line:tt)*) => { $crate::console::write_result(format_args!($($line)*)) };
}

/// Writes a line of a result to standard output. If the write fails, the process exits with status 1.
/// Standard error then has the reason, unless the reader has closed the pipe.
pub fn write_result(line: Arguments<'_>) {
    let Err(error) = writeln!(io::stdout(), "{line}") else { return };
    if error.kind() != io::ErrorKind::BrokenPipe {
        write_final_message(format!("spindle: cannot write the result: {error}"));
    }
    process::exit(1);
}

/// Writes `text` and a newline to standard error from a thread, and waits at most 1 s for this write: a full
/// pipe without a reader must not keep the process from ending. If no thread can be started, the
/// caller's thread writes as much of it as standard error takes without blocking: the message may be about
/// the limit of threads.
pub fn write_final_message(text: String) {
    let (done, is_done) = sync_channel(1);
    let text = Arc::new(text);
    let shared = Arc::clone(&text);
    let write = move || {
        eprintln!("{shared}");
        let _ = done.try_send(());
    };
    if std::thread::Builder::new().spawn(write).is_ok() {
        let _ = is_done.recv_timeout(FINAL_MESSAGE_MAX);
    } else {
        write_without_thread(&text);
    }
}

/// Writes the beginning of `text` and a newline to standard error, if that is possible within 1 s.
fn write_without_thread(text: &str) {
    let standard_error = std::io::stderr();
    let mut wanted = [PollFd::new(&standard_error, PollFlags::OUT)];
    let timeout = Timespec { tv_sec: 1, tv_nsec: 0 };
    if poll(&mut wanted, Some(&timeout)).is_ok_and(|ready| ready > 0) {
        let bytes = text.bytes().take(PIPE_BUF - 1).chain([b'\n']).collect::<Vec<_>>();
        let _ = rustix::io::write(&standard_error, &bytes);
    }
}

/// Parses a command-line number from 1 up, for clap's `value_parser`.
///
/// # Errors
/// `text` is not a number, is 0, or exceeds `usize`.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(format!("`{text}` is not a number from 1 up")),
    }
}
