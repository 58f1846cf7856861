//! The log: lines on standard error, as text or as JSON. Standard output is for results.
//!
//! The level is `log.level` of the configuration, also after a reload. The environment variable `SPINDLE_LOG`
//! overrides that level, also for single crates (`SPINDLE_LOG=spindle_nvme_tcp=debug,info`). A thread writes
//! the lines ([`queue`]), so that a log without a reader does not block a core. Panics are log lines too.
//!
//! Callers limit the rate of lines that a peer can cause (`reactor::rate`), since only callers can identify
//! the peer.

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
use queue::{FLUSH_MAX, LINES_MAX, Queue, QueueWriter};

/// What helps a process that may not have its threads.
pub const THREADS_HINT: &str = "raise the limit of the user's processes (ulimit -u, LimitNPROC=) or that of \
                                the control group (pids.max)";
/// The environment variable that overrides the level of the configuration.
const VARIABLE: &str = "SPINDLE_LOG";

/// Changes the level of the log. Dropped, it waits until all lines are written, at most [`FLUSH_MAX`].
#[derive(Debug)]
pub struct LogControl {
    /// `None`: `SPINDLE_LOG` is set, so the level is fixed.
    filter: Option<reload::Handle<EnvFilter, Registry>>,
    queue: Queue,
}

impl Drop for LogControl {
    fn drop(&mut self) {
        self.queue.flush(FLUSH_MAX);
    }
}

impl LogControl {
    /// A log that drops its lines, for tests.
    #[cfg(test)]
    pub fn unread() -> LogControl {
        LogControl { filter: None, queue: Queue::new(1).0 }
    }

    /// Whether `SPINDLE_LOG` is set, so that the level cannot be changed.
    pub fn is_fixed(&self) -> bool {
        self.filter.is_none()
    }

    /// Sets the lowest severity that is written. Without effect when `SPINDLE_LOG` is set.
    pub fn set_level(&self, level: Level) {
        if let Some(filter) = &self.filter {
            // Fails only when the subscriber was dropped; then there are no lines to filter.
            let _ = filter.reload(EnvFilter::new(level.as_str()));
        }
    }
}

/// Sets up the log of this process and its panic hook. May be called once.
///
/// # Errors
/// `SPINDLE_LOG` is not a filter, the thread cannot be started, or the log is set up already.
pub fn start(plan: &LogPlan) -> Result<LogControl, String> {
    let variable = std::env::var(VARIABLE).ok().filter(|value| !value.is_empty());
    let filter = filter(plan.level, variable.as_deref())?;
    let (filter, handle) = reload::Layer::new(filter);
    let (queue, outlet) = Queue::new(LINES_MAX);
    let format = plan.format;
    let thread = std::thread::Builder::new().name("log".to_owned());
    thread
        .spawn(move || write_out(outlet, format))
        .map_err(|error| format!("cannot start the thread of the log: {error}; {THREADS_HINT}"))?;
    let lines = lines(format, io::stderr().is_terminal(), queue.clone());
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .try_init()
        .map_err(|_| "the log is set up already")?;
    log_panics(queue.clone());
    Ok(LogControl { filter: variable.is_none().then_some(handle), queue })
}

/// Runs the thread of the log. Its own lines, about lost lines, bypass the queue.
fn write_out(outlet: QueueWriter, format: LogFormat) {
    let direct = tracing_subscriber::registry().with(lines(format, io::stderr().is_terminal(), io::stderr));
    let _here = tracing::subscriber::set_default(direct);
    outlet.run(&mut io::stderr(), &mut |lines| {
        tracing::warn!(lines, "log lines were lost: standard error is read too slowly");
    });
}

/// Installs the panic hook, which logs a panic and waits until the line is written, at most [`FLUSH_MAX`].
fn log_panics(queue: Queue) {
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        // Captured only if RUST_LIB_BACKTRACE or RUST_BACKTRACE is set.
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
                "{VARIABLE} = {value:?}: {error}; allowed are levels and crates with levels, like debug or \
                 spindle_nvme_tcp=debug,info"
            )
        }),
    }
}

/// Returns the layer that formats events as lines. In text the message comes first, then `name=value` for
/// each field.
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

/// Writes one field of a text line; the message without a name. Escapes control characters, so that text from
/// a peer can neither forge a line nor control a terminal.
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
        assert_eq!(written(LogFormat::Text, Level::TRACE, Some("spindle_nvme_tcp=debug"), one_line), "");
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
