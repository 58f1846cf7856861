//! Results of methods as text.

use serde_json::Value;

use crate::size::Bytes;
use crate::status::{list, number, table, word};

/// Words, each in a line of its own.
fn lines(words: impl Iterator<Item = String>) -> String {
    words.collect::<Vec<_>>().join("\n")
}

/// An address, as verbs take it.
fn address(of: &Value) -> String {
    let (ip, port) = (word(of, "traddr"), word(of, "trsvcid"));
    let ip = if ip.contains(':') { format!("[{ip}]") } else { ip };
    if port.is_empty() { ip } else { format!("{ip}:{port}") }
}

fn listener(of: &Value) -> String {
    format!("{}:{}", word(of, "trtype").to_ascii_lowercase(), address(of))
}

fn all(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

pub fn connections(controllers: &Value) -> String {
    let header = ["host", "subsystem", "controller", "core", "I/O queues", "peer"];
    rows(header, all(controllers).iter(), |controller| {
        let peers = list(controller, "qpairs").iter().map(|qpair| &qpair["peer_address"]);
        let peers = lines(peers.filter(|peer| peer.is_object()).map(address));
        [
            word(controller, "host"),
            word(controller, "subsystem"),
            number(controller, "controller").to_string(),
            number(controller, "core").to_string(),
            number(controller, "io_queues").to_string(),
            if peers.is_empty() { "-".to_owned() } else { peers },
        ]
    })
}

fn allowed(subsystem: &Value) -> String {
    if subsystem["allow_any_host"] == true {
        return "any".to_owned();
    }
    lines(list(subsystem, "hosts").iter().map(|host| word(host, "nqn")))
}

/// All but that of discovery, which cannot be changed.
pub fn subsystems(subsystems: &Value) -> String {
    let header = ["subsystem", "serial", "model", "hosts", "listeners", "nsid: disk"];
    let own = all(subsystems).iter().filter(|it| it["subtype"] != "Discovery");
    rows(header, own, |subsystem| {
        let namespaces = list(subsystem, "namespaces").iter();
        [
            word(subsystem, "nqn"),
            word(subsystem, "serial_number"),
            word(subsystem, "model_number"),
            allowed(subsystem),
            lines(list(subsystem, "listen_addresses").iter().map(listener)),
            lines(namespaces.map(|it| format!("{}: {}", number(it, "nsid"), word(it, "name")))),
        ]
    })
}

pub fn hosts(subsystems: &Value) -> String {
    rows(["host"], all(subsystems).iter(), |subsystem| [allowed(subsystem)])
}

pub fn listeners(listeners: &Value) -> String {
    rows(["listener"], all(listeners).iter(), |it| [listener(&it["address"])])
}

pub fn namespaces(subsystems: &Value) -> String {
    rows(["nsid", "disk", "UUID", "NGUID"], list(&subsystems[0], "namespaces").iter(), |it| {
        [number(it, "nsid").to_string(), word(it, "name"), word(it, "uuid"), word(it, "nguid")]
    })
}

pub fn disks(disks: &Value) -> String {
    rows(["disk", "kind", "size", "block", "namespace"], all(disks).iter(), |disk| {
        let block = number(disk, "block_size");
        [
            word(disk, "name"),
            word(&disk["driver_specific"]["spindle"], "kind"),
            Bytes::new(block.saturating_mul(number(disk, "num_blocks"))).to_string(),
            Bytes::new(block).to_string(),
            if disk["claimed"] == true { "yes" } else { "no" }.to_owned(),
        ]
    })
}

/// Of the disks that have one.
pub fn caches(iostat: &Value) -> String {
    let header = [
        "disk", "policy", "size", "used", "found", "hits", "misses", "ghosts", "passed", "evicted", "ahead",
        "useful", "late", "wasted",
    ];
    let disks = list(iostat, "bdevs").iter().filter(|disk| disk["cache"].is_object());
    rows(header, disks, |disk| {
        let cache = &disk["cache"];
        let pages = |name| number(cache, name);
        let asked = pages("hits") + pages("misses") + pages("passed");
        // In tenths of a percent.
        let found = (pages("hits") * 1000).checked_div(asked);
        [
            word(disk, "name"),
            word(cache, "policy"),
            Bytes::new(pages("size")).to_string(),
            Bytes::new(pages("used")).to_string(),
            found.map_or_else(|| "-".to_owned(), |tenths| format!("{}.{} %", tenths / 10, tenths % 10)),
            pages("hits").to_string(),
            pages("misses").to_string(),
            pages("ghost_hits").to_string(),
            pages("passed").to_string(),
            pages("evictions").to_string(),
            pages("read_ahead").to_string(),
            pages("read_ahead_useful").to_string(),
            pages("read_ahead_late").to_string(),
            pages("read_ahead_wasted").to_string(),
        ]
    })
}

fn rows<'a, const N: usize>(
    header: [&str; N],
    of: impl Iterator<Item = &'a Value>,
    row: impl Fn(&Value) -> [String; N],
) -> String {
    let mut table = table(header);
    table.add_rows(of.map(row));
    table.to_string()
}
