//! Results of methods as text.

use serde_json::Value;

use crate::size::Bytes;
use crate::status::{list, number, word};
use crate::text::table;

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

/// Reads of pages that were evicted a moment ago: shown for hosts alone.
const GHOSTS: (&str, &str) = ("ghosts", "ghost_hits");

/// Counts of a cache that are kept for each host too, as they are headed and named.
const COUNTS: [(&str, &str); 8] = [
    ("hits", "hits"),
    ("misses", "misses"),
    GHOSTS,
    ("passed", "passed"),
    ("evicted", "evictions"),
    ("ahead", "read_ahead"),
    ("useful", "read_ahead_useful"),
    ("late", "read_ahead_late"),
];

/// Of the disks that have one.
pub fn caches(iostat: &Value) -> String {
    let mut header = vec!["disk", "namespace", "policy", "size", "used", "found", "half", "twice"];
    let counts = || COUNTS.into_iter().filter(|count| *count != GHOSTS);
    header.extend(counts().map(|(head, _)| head).chain(["wasted"]));
    let mut table = table(header);
    table.add_rows(list(iostat, "bdevs").iter().filter(|disk| disk["cache"].is_object()).map(|disk| {
        let cache = &disk["cache"];
        let pages = |name| number(cache, name).to_string();
        let found = found(cache);
        let other = |name| percent(found.and_then(|found| found_with(cache, found, name)));
        let mut row = vec![
            word(disk, "name"),
            namespace(disk),
            word(cache, "policy"),
            Bytes::new(number(cache, "size")).to_string(),
            Bytes::new(number(cache, "used")).to_string(),
            percent(found),
            other("sampled_hits_half_size"),
            other("sampled_hits_twice_size"),
        ];
        row.extend(counts().map(|(_, name)| pages(name)).chain([pages("read_ahead_wasted")]));
        row
    }));
    table.to_string()
}

/// What they have done for each host.
pub fn caches_by_host(iostat: &Value) -> String {
    let mut header = vec!["disk", "namespace", "host", "found"];
    header.extend(COUNTS.map(|(head, _)| head));
    let disks = list(iostat, "bdevs").iter();
    let hosts = disks.flat_map(|disk| list(&disk["cache"], "hosts").iter().map(move |host| (disk, host)));
    let mut table = table(header);
    table.add_rows(hosts.map(|(disk, host)| {
        let pages = |name| number(host, name).to_string();
        let mut row = vec![word(disk, "name"), namespace(disk), word(host, "hostnqn"), percent(found(host))];
        row.extend(COUNTS.map(|(_, name)| pages(name)));
        row
    }));
    table.to_string()
}

/// Share of the pages of reads that were answered from the cache, in tenths of a percent.
fn found(counts: &Value) -> Option<u64> {
    let pages = |name| number(counts, name);
    let asked = pages("hits").saturating_add(pages("misses")).saturating_add(pages("passed"));
    pages("hits").saturating_mul(1000).checked_div(asked)
}

/// The same for another size: what it gains or loses of the sample is added.
fn found_with(cache: &Value, found: u64, name: &str) -> Option<u64> {
    let share = |name| number(cache, name).saturating_mul(1000).checked_div(number(cache, "sampled"));
    let (same, other) = (share("sampled_hits_this_size")?, share(name)?);
    Some(found.saturating_add(other).saturating_sub(same).min(1000))
}

fn percent(tenths: Option<u64>) -> String {
    tenths.map_or_else(|| "-".to_owned(), |tenths| format!("{}.{} %", tenths / 10, tenths % 10))
}

/// The one that a disk is.
fn namespace(disk: &Value) -> String {
    let namespace = &disk["namespace"];
    if namespace.is_object() {
        format!("{} of {}", number(namespace, "nsid"), word(namespace, "nqn"))
    } else {
        "-".to_owned()
    }
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
