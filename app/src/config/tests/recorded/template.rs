//! The file around a key: the least that can be served and has a place for the key.

use super::LEFT_OUT;
use super::rows::Row;

pub const KINDS: [&str; 6] = ["ram", "null", "file", "nvme", "ng", "remote"];

pub const LISTENER: &str = "[[listener]]\naddress = \"127.0.0.1:4420\"\n";
/// A disk that needs nothing.
pub const NULL: &str = "[[disk]]\nname = \"n\"\nkind = \"null\"\nsize = \"1MiB\"\n";
pub const SUBSYSTEM: &str = "[[subsystem]]\nnqn = \"nqn.2026-01.test:s\"\nallow_any_host = true\n";

/// The line of the key.
const PLACE: &str = "@";

pub struct Template {
    text: String,
    key: &'static str,
    /// The value while the target serves; `None`: the key is left out.
    pub base: Option<String>,
}

impl Template {
    /// The template of a row for a disk of this kind.
    pub fn of(row: &Row, kind: &str) -> Template {
        let (section, key) = (row.section(), row.name());
        let whole = text_of(section, key, kind);
        let (before, after) = whole.split_once(&format!("{PLACE}\n")).expect("a place for the key");
        let is_of = |line: &str, key: &str| line.split(" = ").next() == Some(key);
        let is_out = |line: &&str| is_of(line, key) || row.without.split(", ").any(|key| is_of(line, key));
        // Up to the next heading, the keys are those of the section.
        let own_end = after.find("\n[").map_or(after.len(), |at| at + 1);
        let (own, rest) = after.split_at(own_end);
        let base = match row.from {
            "" => own.lines().find(|line| is_of(line, key)).and_then(|line| line.split_once(" = ")),
            value => Some((key, value)),
        };
        let base = base.map(|(_, value)| value.to_owned()).filter(|value| value != LEFT_OUT);
        let own: String = own.lines().filter(|line| !is_out(line)).map(|line| format!("{line}\n")).collect();
        let with = if row.with.is_empty() { String::new() } else { format!("{}\n", row.with) };
        Template { text: format!("{before}{PLACE}\n{with}{own}{rest}"), key, base }
    }

    /// The file with this value of the key.
    pub fn text(&self, value: &str) -> String {
        let line = match value {
            LEFT_OUT => String::new(),
            value => format!("{} = {value}", self.key),
        };
        self.text.replacen(&format!("{PLACE}\n"), &format!("{line}\n"), 1)
    }
}

/// The keys that a disk of this kind needs, in three lines for every kind.
pub fn keys_of_kind(kind: &str) -> String {
    let keys = match kind {
        "file" => "path = \"{dir}/f\"",
        "nvme" => "nvme = \"fffe:ff:1f.6\"",
        "ng" => "ng = \"/dev/ng4095n1\"",
        "remote" => {
            "address = \"192.0.2.7:4420\"\nnqn = \"nqn.2026-01.test:far\"\n\
             host_nqn = \"nqn.2026-01.test:own\""
        }
        _ => "size = \"1MiB\"",
    };
    let lines = keys.lines().chain(["#", "#"]).take(3);
    lines.map(|line| format!("{line}\n")).collect()
}

pub fn disk(name: &str, kind: &str) -> String {
    format!("[[disk]]\nname = \"{name}\"\nkind = \"{kind}\"\n{}", keys_of_kind(kind))
}

/// The first disk of the file, with a place for a key before its other keys.
fn disk_with_place(kind: &str) -> String {
    disk("d", kind).replacen("[[disk]]\n", &format!("[[disk]]\n{PLACE}\n"), 1)
}

pub fn namespace(nsid: u32, disk: &str) -> String {
    format!("[[subsystem.namespace]]\nnsid = {nsid}\ndisk = \"{disk}\"\n")
}

/// A subsystem of this disk, at a listener.
pub fn served(disk: &str) -> String {
    [LISTENER, SUBSYSTEM, &namespace(1, disk)].concat()
}

/// A file with a disk of this kind.
pub fn served_disk(kind: &str) -> String {
    [disk("d", kind), served("d")].concat()
}

fn text_of(section: &str, key: &str, kind: &str) -> String {
    let sole_writer = if kind == "remote" { "sole_writer = true" } else { "#" };
    let place = |heading: &str, keys: &str| format!("{heading}\n{PLACE}\n{keys}");
    match section {
        "pool.zone" => {
            let first = place("[[pool.zone]]", "buffer = \"8KiB\"\ncount = 64\n");
            let second = "[[pool.zone]]\nbuffer = \"1MiB\"\ncount = 2\n";
            [&first, second, NULL, &served("n")].concat()
        }
        // The name is that of the disk in the namespace, too.
        "disk" if key == "name" => [&disk_with_place(kind), NULL, &served("n")].concat(),
        "disk" => [disk_with_place(kind), served("d")].concat(),
        "disk.cache" => {
            let cache = place("[disk.cache]", &format!("size = \"1MiB\"\n{sole_writer}\n"));
            [disk("d", kind), cache, served("d")].concat()
        }
        "disk.delay" => {
            let delay = place("[disk.delay]", "latency_us = 100\n");
            [disk("d", kind), delay, served("d")].concat()
        }
        "disk.cluster" => [disk("d", kind), place("[disk.cluster]", ""), served("d")].concat(),
        "listener" => {
            let listener = place("[[listener]]", "address = \"127.0.0.1:4420\"\n");
            let second = "[[listener]]\naddress = \"127.0.0.1:4421\"\nname = \"second\"\n";
            [&listener, second, NULL, SUBSYSTEM, &namespace(1, "n")].concat()
        }
        "subsystem" => {
            let keys = "nqn = \"nqn.2026-01.test:s\"\nallow_any_host = true\n";
            let second =
                "[[subsystem]]\nnqn = \"nqn.2026-01.test:t\"\nserial = \"T\"\nallow_any_host = true\n";
            [&place("[[subsystem]]", keys), &namespace(1, "n"), second, LISTENER, NULL].concat()
        }
        "subsystem.namespace" => {
            let first = place("[[subsystem.namespace]]", "nsid = 1\ndisk = \"d\"\n");
            let others = [NULL, &disk("d", kind), &disk("e", "null"), LISTENER].concat();
            [SUBSYSTEM, &first, &namespace(2, "n"), &others].concat()
        }
        "referral" => {
            let referral = place("[[referral]]", "address = \"192.0.2.9:8009\"\n");
            [&referral, NULL, &served("n")].concat()
        }
        _ => [&place(&format!("[{section}]"), ""), NULL, &served("n")].concat(),
    }
}
