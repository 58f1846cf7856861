//! The log: structured lines to standard error, as text for people or as JSON for collectors.
//!
//! The level comes from the configuration and follows it at a reload; the environment variable `SPINDLE_LOG`
//! goes before both, for a look at one room (`SPINDLE_LOG=spindle_tcp=debug,info`). Standard output belongs
//! to results. A thread of its own writes ([`queue`]), so that a log without a reader does not stop a core;
//! panics go the same way.
//!
//! What it does not do: lines that a peer can cause are limited where they are written (`reactor::rate`),
//! since only there it is known who caused them.

mod queue;

use std::fmt::{self, Debug};
use std::io::{self, IsTerminal};

use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::Registry;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt;

use tracing::Level;

use crate::config::{LogFormat, LogPlan};
use queue::{FLUSH_MAX, LINES_MAX, Outlet, Queue};

/// The environment variable that goes before the configuration.
const VARIABLE: &str = "SPINDLE_LOG";

/// Changes the level of a log that is set up. Dropping it waits, a bounded time, until all lines are out.
#[derive(Debug)]
pub struct LogControl {
    /// `None`: the environment has the say.
    filter: Option<reload::Handle<EnvFilter, Registry>>,
    queue: Queue,
}

impl Drop for LogControl {
    fn drop(&mut self) {
        self.queue.flush(FLUSH_MAX);
    }
}

impl LogControl {
    /// Of a log without a reader, for tests.
    #[cfg(test)]
    pub fn unread() -> LogControl {
        LogControl { filter: None, queue: Queue::new(1).0 }
    }

    /// Write lines of this level and more urgent ones from now on. Without effect while `SPINDLE_LOG` is set.
    pub fn set_level(&self, level: Level) {
        if let Some(filter) = &self.filter {
            // It fails only when the log is gone, and then there is nothing to be filtered.
            let _ = filter.reload(EnvFilter::new(level.as_str()));
        }
    }
}

/// Set up the log of this process as `plan` says. Once.
///
/// # Errors
/// The environment asks for something that is no filter, there is no thread, or there is a log already.
pub fn start(plan: &LogPlan) -> Result<LogControl, String> {
    let variable = std::env::var(VARIABLE).ok().filter(|value| !value.is_empty());
    let filter = filter(plan.level, variable.as_deref())?;
    let (filter, handle) = reload::Layer::new(filter);
    let (queue, outlet) = Queue::new(LINES_MAX);
    let format = plan.format;
    let thread = std::thread::Builder::new().name("log".to_owned());
    thread
        .spawn(move || write_out(outlet, format))
        .map_err(|error| format!("cannot start the thread of the log: {error}"))?;
    let lines = lines(format, io::stderr().is_terminal(), queue.clone());
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .try_init()
        .map_err(|_| "the log is set up already")?;
    tell_panics(queue.clone());
    Ok(LogControl { filter: variable.is_none().then_some(handle), queue })
}

/// The thread that writes. Its own lines, that some were lost, go straight out.
fn write_out(outlet: Outlet, format: LogFormat) {
    let direct = tracing_subscriber::registry().with(lines(format, io::stderr().is_terminal(), io::stderr));
    let _here = tracing::subscriber::set_default(direct);
    outlet.run(&mut io::stderr(), &mut |lines| {
        tracing::warn!(lines, "log lines were lost: standard error is read too slowly");
    });
}

/// A panic is a line of the log, and is out before its thread goes on to end.
fn tell_panics(queue: Queue) {
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        // Taken only where RUST_BACKTRACE asks for it.
        let backtrace = std::backtrace::Backtrace::capture();
        let backtrace =
            (backtrace.status() == std::backtrace::BacktraceStatus::Captured).then_some(backtrace);
        tracing::error!(
            thread = thread.name(),
            backtrace = backtrace.map(tracing::field::display),
            "{panic}"
        );
        queue.flush(FLUSH_MAX);
    }));
}

fn filter(level: Level, variable: Option<&str>) -> Result<EnvFilter, String> {
    match variable {
        None => Ok(EnvFilter::new(level.as_str())),
        Some(value) => EnvFilter::try_new(value).map_err(|error| {
            format!(
                "{VARIABLE} = {value:?}: {error}; allowed are levels and rooms with levels, like debug or \
                 spindle_tcp=debug,info"
            )
        }),
    }
}

/// What turns events into lines. The fields of a line stand behind its message, each with its name.
fn lines<W>(format: LogFormat, is_terminal: bool, writer: W) -> Box<dyn Layer<Registry> + Send + Sync>
where
    W: for<'a> tracing_subscriber::fmt::MakeWriter<'a> + Send + Sync + 'static,
{
    let layer = tracing_subscriber::fmt::layer().with_writer(writer);
    match format {
        LogFormat::Text => {
            let fields =
                debug_fn(|writer, field, value| write_field(writer, field.name(), value)).delimited(" ");
            layer.with_ansi(is_terminal).with_target(false).fmt_fields(fields).boxed()
        }
        LogFormat::Json => {
            layer.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed()
        }
    }
}

/// One field of a text line, the message without its name. Control characters are spelled out: what a peer
/// sent neither forges a line nor drives a terminal.
fn write_field(writer: &mut Writer<'_>, name: &str, value: &dyn Debug) -> fmt::Result {
    if name != "message" {
        write!(writer, "{name}=")?;
    }
    format!("{value:?}").chars().try_for_each(|character| match character.is_control() {
        true => write!(writer, "{}", character.escape_default()),
        false => writer.write_char(character),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("one thread").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(format: LogFormat, level: Level, variable: Option<&str>, write: impl FnOnce()) -> String {
        let written = Written::default();
        let writer = written.clone();
        let layer = lines(format, false, move || writer.clone())
            .with_filter(filter(level, variable).expect("a filter"));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), write);
        let bytes = written.0.lock().expect("one thread").clone();
        String::from_utf8(bytes).expect("text")
    }

    fn one_line() {
        tracing::info!(core = 3, remote = "10.0.0.1:5", "connected");
    }

    #[test]
    fn a_text_line_has_time_level_message_and_named_fields() {
        let text = written(LogFormat::Text, Level::INFO, None, one_line);
        assert!(text.contains("Z  INFO connected core=3 remote=\"10.0.0.1:5\"\n"), "{text}");
    }

    #[test]
    fn a_json_line_is_one_flat_object() {
        let text = written(LogFormat::Json, Level::INFO, None, one_line);
        let line: serde_json::Value = serde_json::from_str(text.trim()).expect("JSON");
        assert_eq!((&line["level"], &line["message"]), (&"INFO".into(), &"connected".into()));
        assert_eq!((&line["core"], &line["remote"]), (&3.into(), &"10.0.0.1:5".into()));
        assert_eq!(text.matches('\n').count(), 1);
    }

    #[test]
    fn the_level_holds_and_the_environment_goes_before_it() {
        assert_eq!(written(LogFormat::Text, Level::WARN, None, one_line), "");
        assert_ne!(written(LogFormat::Text, Level::WARN, Some("info"), one_line), "");
        assert_eq!(written(LogFormat::Text, Level::TRACE, Some("spindle_tcp=debug"), one_line), "");
    }

    #[test]
    fn a_filter_that_is_none_is_refused_by_name() {
        let error = filter(Level::INFO, Some("spindle=loud")).expect_err("refused");
        assert!(error.starts_with("SPINDLE_LOG = \"spindle=loud\": "), "{error}");
    }

    #[test]
    fn a_peer_cannot_write_escapes_or_lines_of_its_own() {
        for format in [LogFormat::Text, LogFormat::Json] {
            let text = written(format, Level::INFO, None, || {
                tracing::info!(nqn = %"nqn.\u{1b}[31m\nINFO forged", "refused");
            });
            assert!(!text.contains('\u{1b}') && text.matches('\n').count() == 1, "{text:?}");
        }
    }
}
