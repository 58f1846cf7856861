//! `spindle status`: what a target of this machine does, asked at its control socket.

use std::time::Duration;

use comfy_table::Table;
use serde_json::{Map, Value};

use crate::cli::StatusArgs;
use crate::rpc::client::{CallError, call};
use crate::size::Bytes;
use crate::text::{printable, table};
use spindle_console::say;

/// Over so long it is seen how busy cores are and what traffic there is.
const SAMPLE: Duration = Duration::from_secs(1);

pub fn run(args: &StatusArgs) -> Result<(), CallError> {
    let ask = || call(&args.socket, "spindle_get_status", Map::new());
    let first = ask()?;
    if args.json {
        say!("{first}");
        return Ok(());
    }
    // Woken too early, it is a shorter time.
    std::thread::park_timeout(SAMPLE);
    say!("{}", text(&first, &ask()?));
    Ok(())
}

/// Two answers as text: what changes is over the time between them.
fn text(first: &Value, second: &Value) -> String {
    let uptime = Duration::from_nanos(number(second, "uptime_ns")).as_secs();
    let mut text = format!(
        "spindle {}, process {}, up for {uptime} s, configuration {}\n",
        word(second, "version"),
        number(second, "pid"),
        number(second, "generation")
    );
    for table in [cores(first, second), namespaces(first, second), controllers(second)] {
        text.push_str(&table.to_string());
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text
}

fn cores(first: &Value, second: &Value) -> Table {
    let mut table = table(["core", "CPU", "connections", "busy", "turns over 1 ms", "longest turn"]);
    let nanos = since(first, second, "uptime_ns").max(1);
    for (before, core) in pairs(first, second, "cores") {
        let busy = before.map_or(0, |before| since(before, core, "busy_ns"));
        let longest = core["longest_turns"].get(0).map_or_else(String::new, |turn| {
            let parts: Vec<_> = list(turn, "parts").iter().filter_map(Value::as_str).collect();
            format!("{} us: {}", number(turn, "ns") / 1000, parts.join(", "))
        });
        table.add_row([
            number(core, "core").to_string(),
            core["cpu"].as_u64().map_or_else(|| "any".to_owned(), |cpu| cpu.to_string()),
            number(core, "connections").to_string(),
            format!("{} %", busy.saturating_mul(100) / nanos),
            number(core, "long_turns").to_string(),
            longest,
        ]);
    }
    table
}

fn namespaces(first: &Value, second: &Value) -> Table {
    let header =
        ["subsystem", "nsid", "disk", "kind", "size", "reads/s", "writes/s", "read MB/s", "written MB/s"];
    let mut table = table(header);
    let nanos = since(first, second, "uptime_ns").max(1);
    for namespace in list(second, "namespaces") {
        let is_same =
            |before: &&Value| ["subsystem", "nsid", "disk"].iter().all(|key| before[*key] == namespace[*key]);
        let before = list(first, "namespaces").iter().find(is_same);
        let rate = |key: &str, unit: u64| {
            let count = before.map_or(0, |before| since(before, namespace, key));
            let count = u128::from(count) * 1_000_000_000 / u128::from(nanos) / u128::from(unit);
            count.to_string()
        };
        table.add_row([
            word(namespace, "subsystem"),
            number(namespace, "nsid").to_string(),
            word(namespace, "disk"),
            word(namespace, "kind"),
            Bytes::new(number(namespace, "bytes")).to_string(),
            rate("reads", 1),
            rate("writes", 1),
            rate("bytes_read", 1_000_000),
            rate("bytes_written", 1_000_000),
        ]);
    }
    table
}

fn controllers(answer: &Value) -> Table {
    let mut table = table(["host", "subsystem", "controller", "core", "I/O queues"]);
    for controller in list(answer, "controllers") {
        table.add_row([
            word(controller, "host"),
            word(controller, "subsystem"),
            number(controller, "controller").to_string(),
            number(controller, "core").to_string(),
            number(controller, "io_queues").to_string(),
        ]);
    }
    table
}

/// The elements of a list in the second answer, with those at their place in the first.
fn pairs<'a>(
    first: &'a Value,
    second: &'a Value,
    key: &'a str,
) -> impl Iterator<Item = (Option<&'a Value>, &'a Value)> {
    list(second, key).iter().enumerate().map(move |(at, value)| (list(first, key).get(at), value))
}

/// The elements of a list; none where there is no list.
pub fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map(Vec::as_slice).unwrap_or_default()
}

/// A number; 0 where there is none.
pub fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or(0)
}

/// A text; empty where there is none.
pub fn word(value: &Value, key: &str) -> String {
    printable(value[key].as_str().unwrap_or_default())
}

fn since(before: &Value, after: &Value, key: &str) -> u64 {
    number(after, key).saturating_sub(number(before, key))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(uptime_ns: u64, busy_ns: u64, reads: u64) -> Value {
        json!({
            "version": "1.2", "pid": 7, "uptime_ns": uptime_ns, "generation": 3,
            "cores": [{
                "core": 0, "cpu": null, "connections": 2, "busy_ns": busy_ns, "long_turns": 1,
                "longest_turns": [{ "parts": ["mail", "requests"], "ns": 1_234_567 }]
            }],
            "controllers": [
                { "host": "nqn.h\u{1b}[2J", "subsystem": "nqn.s", "controller": 5, "core": 0, "io_queues": 4 }
            ],
            "namespaces": [{
                "subsystem": "nqn.s", "nsid": 1, "disk": "d0", "kind": "ram", "bytes": 1 << 30,
                "reads": reads, "writes": 0, "bytes_read": reads * 4096, "bytes_written": 0
            }],
        })
    }

    #[test]
    fn rates_and_shares_are_over_the_time_between_two_answers() {
        let text = text(&answer(5_000_000_000, 100, 1000), &answer(5_500_000_000, 250_000_100, 51_000));
        for wanted in ["up for 5 s", "50 %", "1234 us: mail, requests", "100000", "409", "nqn.h?[2J", "any"] {
            assert!(text.contains(wanted), "{wanted}\n{text}");
        }
    }

    #[test]
    fn an_answer_without_anything_is_no_panic() {
        let text = text(&json!({}), &json!({ "cores": [{}], "namespaces": [{}], "controllers": [{}] }));
        assert!(text.contains("process 0"), "{text}");
    }
}
