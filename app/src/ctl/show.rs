//! Formats results of methods as text.

use serde_json::Value;

use crate::size::Bytes;
use crate::status::{list, number, string};
use crate::text::table;

fn join_lines(words: impl Iterator<Item = String>) -> String {
    words.collect::<Vec<_>>().join("\n")
}

/// Formats an address as verbs accept it, without the transport.
fn address(of: &Value) -> String {
    let (ip, port) = (string(of, "traddr"), string(of, "trsvcid"));
    let ip = if ip.contains(':') { format!("[{ip}]") } else { ip };
    if port.is_empty() { ip } else { format!("{ip}:{port}") }
}

fn listener(of: &Value) -> String {
    format!("{}:{}", string(of, "trtype").to_ascii_lowercase(), address(of))
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

pub fn connections(controllers: &Value) -> String {
    let header = ["host", "subsystem", "controller", "core", "I/O queues", "peer"];
    table_text(header, array(controllers).iter(), |controller| {
        let peers = list(controller, "qpairs").iter().map(|qpair| &qpair["peer_address"]);
        let peers = join_lines(peers.filter(|peer| peer.is_object()).map(address));
        [
            string(controller, "host"),
            string(controller, "subsystem"),
            number(controller, "controller").to_string(),
            number(controller, "core").to_string(),
            number(controller, "io_queues").to_string(),
            if peers.is_empty() { "-".to_owned() } else { peers },
        ]
    })
}

fn allowed_hosts(subsystem: &Value) -> String {
    if subsystem["allow_any_host"] == true {
        return "any".to_owned();
    }
    join_lines(list(subsystem, "hosts").iter().map(|host| string(host, "nqn")))
}

/// Formats the subsystems, without the discovery subsystem.
pub fn subsystems(subsystems: &Value) -> String {
    let header = ["subsystem", "serial", "model", "hosts", "listeners", "nsid: disk"];
    let own = array(subsystems).iter().filter(|it| it["subtype"] != "Discovery");
    table_text(header, own, |subsystem| {
        let namespaces = list(subsystem, "namespaces").iter();
        [
            string(subsystem, "nqn"),
            string(subsystem, "serial_number"),
            string(subsystem, "model_number"),
            allowed_hosts(subsystem),
            join_lines(list(subsystem, "listen_addresses").iter().map(listener)),
            join_lines(namespaces.map(|it| format!("{}: {}", number(it, "nsid"), string(it, "name")))),
        ]
    })
}

pub fn hosts(subsystems: &Value) -> String {
    table_text(["host"], array(subsystems).iter(), |subsystem| [allowed_hosts(subsystem)])
}

pub fn listeners(listeners: &Value) -> String {
    table_text(["listener"], array(listeners).iter(), |it| [listener(&it["address"])])
}

pub fn namespaces(subsystems: &Value) -> String {
    table_text(["nsid", "disk", "UUID", "NGUID"], list(&subsystems[0], "namespaces").iter(), |it| {
        [number(it, "nsid").to_string(), string(it, "name"), string(it, "uuid"), string(it, "nguid")]
    })
}

pub fn disks(disks: &Value) -> String {
    table_text(["disk", "kind", "size", "block", "namespace"], array(disks).iter(), |disk| {
        let block = number(disk, "block_size");
        [
            string(disk, "name"),
            string(&disk["driver_specific"]["spindle"], "kind"),
            Bytes::new(block.saturating_mul(number(disk, "num_blocks"))).to_string(),
            Bytes::new(block).to_string(),
            if disk["claimed"] == true { "yes" } else { "no" }.to_owned(),
        ]
    })
}

/// Reads of recently evicted pages; shown only in the table by host.
const GHOSTS: (&str, &str) = ("ghosts", "ghost_hits");

/// Counters that a cache has in total and by host: (column header, JSON name).
const COUNTS: [(&str, &str); 9] = [
    ("hits", "hits"),
    ("misses", "misses"),
    GHOSTS,
    ("passed", "passed"),
    ("over", "over_budget"),
    ("evicted", "evictions"),
    ("ahead", "read_ahead"),
    ("useful", "read_ahead_useful"),
    ("late", "read_ahead_late"),
];

/// Formats a table of the disks with a cache.
pub fn caches(iostat: &Value) -> String {
    let mut header = vec!["disk", "namespace", "policy", "size", "used", "found", "half", "twice"];
    let counts = || COUNTS.into_iter().filter(|count| *count != GHOSTS);
    header.extend(counts().map(|(head, _)| head).chain(["wasted"]));
    let mut table = table(header);
    table.add_rows(list(iostat, "bdevs").iter().filter(|disk| disk["cache"].is_object()).map(|disk| {
        let cache = &disk["cache"];
        let pages = |name| number(cache, name).to_string();
        let ratio = hit_ratio(cache);
        let estimated = |name| percent(ratio.and_then(|ratio| estimated_hit_ratio(cache, ratio, name)));
        let mut row = vec![
            string(disk, "name"),
            namespace(disk),
            string(cache, "policy"),
            Bytes::new(number(cache, "size")).to_string(),
            Bytes::new(number(cache, "used")).to_string(),
            percent(ratio),
            estimated("sampled_hits_half_size"),
            estimated("sampled_hits_twice_size"),
        ];
        row.extend(counts().map(|(_, name)| pages(name)).chain([pages("read_ahead_wasted")]));
        row
    }));
    table.to_string()
}

/// Formats a table of cache counters by disk and host.
pub fn caches_by_host(iostat: &Value) -> String {
    let mut header = vec!["disk", "namespace", "host", "found"];
    header.extend(COUNTS.map(|(head, _)| head));
    let disks = list(iostat, "bdevs").iter();
    let hosts = disks.flat_map(|disk| list(&disk["cache"], "hosts").iter().map(move |host| (disk, host)));
    let mut table = table(header);
    table.add_rows(hosts.map(|(disk, host)| {
        let pages = |name| number(host, name).to_string();
        let mut row =
            vec![string(disk, "name"), namespace(disk), string(host, "hostnqn"), percent(hit_ratio(host))];
        row.extend(COUNTS.map(|(_, name)| pages(name)));
        row
    }));
    table.to_string()
}

/// Returns the hit ratio in tenths of a percent: hits / (hits + misses + passed + over budget), in
/// pages. `None` without reads.
fn hit_ratio(counts: &Value) -> Option<u64> {
    let pages = |name| number(counts, name);
    let read = ["hits", "misses", "passed", "over_budget"].map(pages);
    let sum = read.into_iter().fold(0, u64::saturating_add);
    pages("hits").saturating_mul(1000).checked_div(sum)
}

/// Returns the estimated hit ratio at another cache size, in tenths of a percent: the ratio at this size plus
/// the difference between the sampled ratios of both sizes. `name` is the sampled counter of the other size.
/// `None` without samples.
fn estimated_hit_ratio(cache: &Value, ratio: u64, name: &str) -> Option<u64> {
    let share = |name| number(cache, name).saturating_mul(1000).checked_div(number(cache, "sampled"));
    let (same, other) = (share("sampled_hits_this_size")?, share(name)?);
    Some(ratio.saturating_add(other).saturating_sub(same).min(1000))
}

fn percent(tenths: Option<u64>) -> String {
    tenths.map_or_else(|| "-".to_owned(), |tenths| format!("{}.{} %", tenths / 10, tenths % 10))
}

/// Returns `NSID of NQN` of a disk; `-` if it is in no namespace.
fn namespace(disk: &Value) -> String {
    let namespace = &disk["namespace"];
    if namespace.is_object() {
        format!("{} of {}", number(namespace, "nsid"), string(namespace, "nqn"))
    } else {
        "-".to_owned()
    }
}

fn table_text<'a, const N: usize>(
    header: [&str; N],
    of: impl Iterator<Item = &'a Value>,
    row: impl Fn(&Value) -> [String; N],
) -> String {
    let mut table = table(header);
    table.add_rows(of.map(row));
    table.to_string()
}
