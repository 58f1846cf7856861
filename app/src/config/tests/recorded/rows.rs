//! The keys with their values.

use super::disk_rows::DISK_ROWS;
use super::template::KINDS;

/// A key in a file, and the values that it gets there.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// As `section.key`.
    pub key: &'static str,
    /// Kinds of the disk; [`KIND_ANY`]: the key is none of a disk.
    pub kinds: &'static [&'static str],
    /// Separated by `|`, in TOML syntax.
    pub values: &'static str,
    /// The value before; empty: that of the template, or the key is left out.
    pub from: &'static str,
    /// Other lines of the section.
    pub with: &'static str,
    /// Keys of the template that are left out, separated by commas.
    pub without: &'static str,
}

impl Row {
    pub const fn of(self, kinds: &'static [&'static str]) -> Row {
        Row { kinds, ..self }
    }

    pub const fn from(self, from: &'static str) -> Row {
        Row { from, ..self }
    }

    pub const fn with(self, with: &'static str) -> Row {
        Row { with, ..self }
    }

    pub const fn without(self, without: &'static str) -> Row {
        Row { without, ..self }
    }

    /// True for a key of a disk, and for one of a section whose answers depend on the kind of a disk.
    pub fn is_of_disk(&self) -> bool {
        self.kinds != KIND_ANY
    }

    pub fn section(&self) -> &'static str {
        self.key.rsplit_once('.').map_or("", |(section, _)| section)
    }

    pub fn name(&self) -> &'static str {
        self.key.rsplit_once('.').map_or("", |(_, name)| name)
    }
}

/// The disk of a file where its kind does not matter.
const KIND_ANY: &[&str] = &["null"];

pub const fn row(key: &'static str, values: &'static str) -> Row {
    Row { key, kinds: KIND_ANY, values, from: "", with: "", without: "" }
}

pub fn all() -> impl Iterator<Item = &'static Row> {
    ROWS.iter().chain(DISK_ROWS)
}

const ROWS: &[Row] = &[
    row("reactor.cores", r#"[1] | [1, 0] | [] | [2] | [8191] | [8192] | [-1] | [0, 0] | ["0"] | 0"#),
    row("reactor.cores", "[0, 1]").with("idle = \"spin\""),
    row("reactor.pin", r#"false | true | 0 | "false""#),
    row("reactor.idle", r#""spin" | "adaptive" | "Spin" | "" | true"#),
    row("reactor.adaptive_spin_us", r#"0 | 1000000 | 1000001 | -1 | "200""#),
    row("reactor.adaptive_spin_us", "0").with("idle = \"spin\""),
    row("pool.pages", r#""base" | "huge" | "transparent" | "large" | true"#),
    row("pool.admin_buffer", r#""8KiB" | "1MiB" | "4KiB" | "2MiB" | 8193 | "8 parsec" | true"#),
    row("pool.admin_count", r#"4 | 4096 | 3 | 4097 | "4""#),
    row("pool.zone.buffer", r#""4KiB" | "1020KiB" | "1MiB" | "2MiB" | "64MiB" | 4095 | "65MiB" | true"#),
    row("pool.zone.buffer", r#""4KiB" | "8KiB""#).with("count = 1").without("count"),
    row("pool.zone.count", r#"1 | 131072 | 131073 | 262144 | 262145 | 0 | "1""#),
    row("limits.queue_entries", r#"2 | 1024 | 1 | 1025 | "2""#),
    row("limits.transfer", r#""4KiB" | "2MiB" | "12KiB" | "3MiB" | 2048 | "1GiB" | "much" | true"#),
    row("limits.bulk_unit", r#"0 | "4KiB" | "2MiB" | 4097 | "1GiB" | -1 | true"#),
    row("limits.io_queues", r#"1 | 128 | 0 | 129 | "1""#),
    row("limits.connections", r#"1 | 65535 | 0 | 65536 | "1""#),
    row("limits.unconnected_per_address", r#"0 | 65535 | 65536 | -1 | "0""#),
    row("limits.disk_commands", r#"1 | 4096 | 0 | 4097 | "1""#),
    row("limits.keep_alive_ms_max", r#"1000 | 86400000 | 999 | 86400001 | "1000""#),
    row("limits.memory_overcommit", r#"true | false | 1 | "true""#),
    row("tcp.in_capsule", r#"0 | "64KiB" | 24 | 65552 | -16 | "1KB" | true"#),
    row("tcp.max_h2c_data", r#""4KiB" | "16MiB" | 2048 | 4097 | "17MiB" | true"#),
    row("tcp.header_digest", r#"false | true | 0 | "false""#),
    row("tcp.data_digest", r#"false | true | 0 | "false""#),
    row("tcp.receive_batch", r#""8KiB" | "4MiB" | 4096 | 8193 | "5MiB" | true"#),
    row("tcp.congestion", r#""reno" | "system" | "cubic" | "bbr" | "" | "{x16}" | " reno" | 1"#),
    row("tcp.user_timeout_ms", r#"0 | 86400000 | -1 | 86400001 | "0""#),
    row("tcp.socket_buffer", r#"1 | "64MiB" | 0 | -1 | "65MiB" | true"#),
    row("tcp.initialize_timeout_ms", r#"100 | 86400000 | 99 | 86400001 | "100""#),
    row("tcp.close_timeout_ms", r#"100 | 86400000 | 99 | 86400001 | "100""#),
    row("rdma.shared_receives", r#"0 | 32768 | -1 | 32769 | "0""#),
    row("rdma.segments", r#"1 | 32 | 0 | 33 | "1""#),
    row("rdma.optimistic_port", r#"4422 | 4420 | 65535 | 0 | -1 | 65536 | "4422""#),
    row("discovery.keep_alive_ms", r#"1000 | 86400000 | 999 | 86400001 | "1000""#),
    row("log.level", r#""debug" | "error" | "info" | "INFO" | "" | 1"#),
    row("log.format", r#""json" | "text" | "xml" | true"#),
    row("log.peer_lines_per_s", r#"1 | 100000 | 0 | 100001 | "1""#),
    row("control.socket", r#""/run/a/socket" | "" | "run/socket" | "/{x107}" | "/a\u0000" | true"#),
    row("control.socket", r#""" | "/run/b""#).from("\"/run/a\""),
    row("control.group", r#""0" | "no-such-group" | "" | " a" | "{x65}" | 0"#),
    row("shutdown.deadline_ms", r#"0 | 600000 | -1 | 600001 | "0""#),
    row(
        "listener.address",
        r#""127.0.0.1:4422" | "[::1]:4420" | "0.0.0.0:4420"
        | "127.0.0.1:4421" | "127.0.0.1" | "localhost:4420" | "127.0.0.1:0" | 4420"#,
    ),
    row("listener.transport", r#""tcp" | "rdma" | "TCP" | "fc" | true"#),
    row("listener.transport", r#""tcp""#).from("\"rdma\""),
    row("listener.name", r#""first" | "second" | "127.0.0.1:4421" | "" | "{x65}" | "a " | 1"#),
    row("listener.in_capsule", r#""8KiB" | 0 | "64KiB" | 24 | "65KiB" | -16 | true"#),
    row("listener.in_capsule", r#""4KiB" | "16KiB""#).from("\"8KiB\"").with("transport = \"rdma\""),
    row(
        "subsystem.nqn",
        r#""nqn.2026-01.test:u" | "u" | "nqn.2026-01.test:t"
        | "nqn.2014-08.org.nvmexpress.discovery" | "" | "nqn.{x220}" | "nqn.a\u0007" | 1"#,
    ),
    row("subsystem.serial", r#""S" | "T" | "" | "{x21}" | " S" | "\u00e9" | 1"#),
    row("subsystem.model", r#""M" | "Spindle" | "" | "{x41}" | "M " | 1"#),
    row("subsystem.allow_any_host", r#"true | false | 1 | "true""#),
    row("subsystem.allow_any_host", "false | true").with(r#"hosts = ["nqn.2026-01.test:h"]"#).from("-"),
    row(
        "subsystem.hosts",
        r#"[] | ["nqn.2026-01.test:h"]
        | ["nqn.2026-01.test:h", "nqn.2026-01.test:h"] | [""] | "any""#,
    ),
    row("subsystem.hosts", r#"["nqn.2026-01.test:i"] | ["nqn.2026-01.test:h", "nqn.2026-01.test:i"] | []"#)
        .from(r#"["nqn.2026-01.test:h"]"#)
        .without("allow_any_host"),
    row(
        "subsystem.optimistic_hosts",
        r#"[] | ["nqn.2026-01.test:h"]
        | ["nqn.2026-01.test:h", "nqn.2026-01.test:h"] | [""] | "any""#,
    ),
    row(
        "subsystem.listeners",
        r#"["127.0.0.1:4420"] | [] | ["127.0.0.1:4421"]
        | ["127.0.0.1:4420", "127.0.0.1:4420"] | [""] | "all""#,
    ),
    row("subsystem.cntlid_min", r#"2 | 65519 | 0 | 65520 | "2""#),
    row("subsystem.cntlid_min", "8 | 9").with("cntlid_max = 8"),
    row("subsystem.cntlid_max", r#"1 | 65519 | 0 | 65520 | "1""#),
    row("subsystem.cntlid_max", "9 | 8").with("cntlid_min = 9"),
    row("subsystem.namespace.nsid", r#"3 | 2 | 0 | 1024 | 1025 | 4294967295 | "3""#).of(&["null", "ram"]),
    row("subsystem.namespace.disk", r#""e" | "n" | "no-such-disk" | "" | 1"#),
    row("subsystem.namespace.disk", r#""e""#).with(r#"uuid = "6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00""#),
    row(
        "subsystem.namespace.uuid",
        r#""6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00"
        | "00000000-0000-0000-0000-000000000000" | "6f1b3b7e" | "" | 1"#,
    )
    .of(KINDS_ALL),
    row(
        "subsystem.namespace.nguid",
        r#""6f1b3b7e9d7a5c1e8a550d9f3c2b1a00"
        | "00000000000000000000000000000000" | "6f1b" | "" | 1"#,
    )
    .of(KINDS_ALL),
    row(
        "referral.address",
        r#""192.0.2.10:8009" | "[2001:db8::1]:8009" | "0.0.0.0:8009"
        | "192.0.2.9" | "192.0.2.9:0" | 8009"#,
    ),
    row("referral.transport", r#""rdma" | "tcp" | "fc" | true"#),
];

pub const KINDS_ALL: &[&str] = &KINDS;
