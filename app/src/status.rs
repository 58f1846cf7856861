//! `spindle status`: prints cores, traffic and hosts of a local target, from its control socket.

use std::time::Duration;

use comfy_table::Table;
use serde_json::{Map, Value};

use crate::cli::StatusArgs;
use crate::rpc::client::{CallError, call};
use crate::size::Bytes;
use crate::text::{printable, table};
use spindle_app_bench::say;

/// Interval over which core utilization and I/O rates are measured.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

pub fn run(args: &StatusArgs) -> Result<(), CallError> {
    let fetch = || call(&args.socket, "spindle_get_status", Map::new());
    let first = fetch()?;
    if args.json {
        say!("{first}");
        return Ok(());
    }
    // A spurious wake-up only shortens the interval: rates use the uptimes of both results.
    std::thread::park_timeout(SAMPLE_INTERVAL);
    say!("{}", text(&first, &fetch()?));
    Ok(())
}

/// Formats the second status, with rates between the first and the second.
fn text(first: &Value, second: &Value) -> String {
    let uptime = Duration::from_nanos(number(second, "uptime_ns")).as_secs();
    let mut text = format!(
        "spindle {}, process {}, up for {uptime} s, configuration {}\n",
        string(second, "version"),
        number(second, "pid"),
        number(second, "generation")
    );
    let stalled = number(second, "stalled_hosts");
    if stalled > 0 {
        text.push_str(&format!(
            "{stalled} hosts have kept memory without progress since the start: see the log\n"
        ));
    }
    if second["unsaved"].is_string() {
        let why = string(second, "unsaved");
        text.push_str(&format!(
            "a revocation is in force and not saved in the configuration file, a restart would undo it: \
             {why}\n"
        ));
    }
    for missing in list(second, "missing") {
        let (what, why) = (string(missing, "what"), string(missing, "why"));
        text.push_str(&format!("{what} is unavailable, retrying: {why}\n"));
    }
    text.push_str(&caches(second));
    for table in [cores(first, second), namespaces(first, second), controllers(second)] {
        text.push_str(&table.to_string());
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text
}

/// Returns a line for each disk with a cache: how much of it is resident, or how long that took.
fn caches(answer: &Value) -> String {
    let mut lines = Vec::new();
    for namespace in list(answer, "namespaces").iter().filter(|it| it["cache"].is_object()) {
        let (disk, cache) = (string(namespace, "disk"), &namespace["cache"]);
        let (size, usable) = (Bytes::new(number(cache, "size")), Bytes::new(number(cache, "usable")));
        let state = match cache["resident_after_ms"].as_u64() {
            Some(ms) => format!("all resident after {}.{:03} s", ms / 1000, ms % 1000),
            None if number(cache, "usable") < number(cache, "size") => {
                format!("{usable} resident so far, and in use")
            }
            None => "in use, not all resident (see the log): cores touch it first".to_owned(),
        };
        let line = format!("cache of {disk}: {size}, {state}\n");
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines.concat()
}

fn cores(first: &Value, second: &Value) -> Table {
    let mut table = table(["core", "CPU", "connections", "busy", "turns over 1 ms", "longest turn"]);
    let nanos = increase(first, second, "uptime_ns").max(1);
    for (before, core) in zip_by_index(first, second, "cores") {
        let busy = before.map_or(0, |before| increase(before, core, "busy_ns"));
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
    let nanos = increase(first, second, "uptime_ns").max(1);
    for namespace in list(second, "namespaces") {
        let is_same =
            |before: &&Value| ["subsystem", "nsid", "disk"].iter().all(|key| before[*key] == namespace[*key]);
        let before = list(first, "namespaces").iter().find(is_same);
        let rate = |key: &str, unit: u64| {
            let count = before.map_or(0, |before| increase(before, namespace, key));
            let count = u128::from(count) * 1_000_000_000 / u128::from(nanos) / u128::from(unit);
            count.to_string()
        };
        table.add_row([
            string(namespace, "subsystem"),
            number(namespace, "nsid").to_string(),
            string(namespace, "disk"),
            string(namespace, "kind"),
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
    let mut table = table(["host", "subsystem", "controller", "core", "I/O queues", "optimistic"]);
    for controller in list(answer, "controllers") {
        table.add_row([
            string(controller, "host"),
            string(controller, "subsystem"),
            number(controller, "controller").to_string(),
            number(controller, "core").to_string(),
            number(controller, "io_queues").to_string(),
            number(controller, "optimistic_connections").to_string(),
        ]);
    }
    table
}

/// Returns the elements of a list in `second`, each with the element at the same index in `first`.
fn zip_by_index<'a>(
    first: &'a Value,
    second: &'a Value,
    key: &'a str,
) -> impl Iterator<Item = (Option<&'a Value>, &'a Value)> {
    list(second, key).iter().enumerate().map(move |(at, value)| (list(first, key).get(at), value))
}

/// Returns the elements of a JSON array; empty if there is no such array.
pub fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Returns a JSON number; 0 if there is no such number.
pub fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or(0)
}

/// Returns a JSON string without control characters; empty if there is no such string.
pub fn string(value: &Value, key: &str) -> String {
    printable(value[key].as_str().unwrap_or_default())
}

fn increase(before: &Value, after: &Value, key: &str) -> u64 {
    number(after, key).saturating_sub(number(before, key))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(uptime_ns: u64, busy_ns: u64, reads: u64) -> Value {
        json!({
            "version": "1.2", "pid": 7, "uptime_ns": uptime_ns, "generation": 3,
            "stalled_hosts": 2, "cores": [{
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
        for wanted in
            ["up for 5 s", "50 %", "1234 us: mail, requests", "100000", "409", "nqn.h?[2J", "any", "2 hosts"]
        {
            assert!(text.contains(wanted), "{wanted}\n{text}");
        }
    }

    #[test]
    fn a_cache_says_how_much_of_it_is_resident_and_how_long_that_took() {
        let cache = |disk: &str, cache: Value| json!({ "disk": disk, "cache": cache });
        let answer = json!({ "namespaces": [
            cache("new", json!({ "size": 64 << 20, "usable": 2 << 20, "resident_after_ms": null })),
            cache("short", json!({ "size": 64 << 20, "usable": 64 << 20, "resident_after_ms": null })),
            cache("old", json!({ "size": 64 << 20, "usable": 64 << 20, "resident_after_ms": 1034 })),
            cache("old", json!({ "size": 64 << 20, "usable": 64 << 20, "resident_after_ms": 1034 })),
            cache("without", Value::Null),
        ] });
        let text = caches(&answer);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "cache of new: 64 MiB, 2 MiB resident so far, and in use",
                "cache of short: 64 MiB, in use, not all resident (see the log): cores touch it first",
                "cache of old: 64 MiB, all resident after 1.034 s",
            ]
        );
    }

    #[test]
    fn an_answer_without_anything_is_no_panic() {
        let text = text(&json!({}), &json!({ "cores": [{}], "namespaces": [{}], "controllers": [{}] }));
        assert!(text.contains("process 0"), "{text}");
    }
}
