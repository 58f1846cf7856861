//! What the subcommands of `spindle` share: sizes as people write them ([`size`]), lines of a result on
//! standard output ([`say!`]), and a last message on standard error ([`last_words`]).

#![forbid(unsafe_code)]

pub mod size;

use std::fmt::Arguments;
use std::io::{self, Write};
use std::process;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

/// How long a last message may take: standard error may be a pipe that nothing reads.
const LAST_WORDS_MAX: Duration = Duration::from_secs(1);

/// A line of a result on standard output, as `println!` takes it; see [`write_result`].
#[macro_export]
macro_rules! say {
    ($($line:tt)*) => { $crate::write_result(format_args!($($line)*)) };
}

/// Write a line of a result to standard output. Where that is a pipe whose reader has seen enough, the
/// process ends and says nothing; where it fails otherwise (a full file system), the process ends with the
/// reason.
pub fn write_result(line: Arguments<'_>) {
    let Err(error) = writeln!(io::stdout(), "{line}") else { return };
    if error.kind() != io::ErrorKind::BrokenPipe {
        last_words(format!("spindle: cannot write the result: {error}"));
    }
    process::exit(1);
}

/// Write a last message to standard error and wait a bounded time until it is out: it may have no reader.
pub fn last_words(text: String) {
    let (done, is_done) = sync_channel(1);
    let write = move || {
        eprintln!("{text}");
        let _ = done.try_send(());
    };
    if std::thread::Builder::new().spawn(write).is_ok() {
        let _ = is_done.recv_timeout(LAST_WORDS_MAX);
    }
}

/// A number of the command line that is 1 or more.
///
/// # Errors
/// The text, and what is allowed.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(format!("`{text}` is not a number from 1 up")),
    }
}
