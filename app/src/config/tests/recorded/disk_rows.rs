//! The keys of disks with their values.

use super::rows::{KINDS_ALL, Row, row};

const RAM: &[&str] = &["ram"];
const MEMORY: &[&str] = &["ram", "null"];
const FILE: &[&str] = &["file"];
const NVME: &[&str] = &["nvme"];
const NG: &[&str] = &["ng"];
const REMOTE: &[&str] = &["remote"];
const CACHED: &[&str] = &["file", "nvme", "ng", "remote"];

pub const DISK_ROWS: &[Row] = &[
    row("disk.name", r#""e" | "n" | "" | "{x65}" | " d" | "\u00e9" | 1"#).of(KINDS_ALL),
    row("disk.kind", r#""ram" | "null" | "file" | "nvme" | "ng" | "remote" | "RAM" | "" | 1"#).of(KINDS_ALL),
    row("disk.nvme", r#""fffe:ff:1f.6" | "fffe:ff:1f.7" | "ff:1f.6" | "fffe:ff:20.0" | "" | 1"#).of(NVME),
    row("disk.namespace", r#"2 | 4294967294 | 1 | 0 | 4294967295 | "1""#).of(&["nvme", "remote"]),
    row(
        "disk.address",
        r#""192.0.2.8:4420" | "[2001:db8::1]:4420" | "192.0.2.8" | "192.0.2.8:0" | "far:4420" | 1"#,
    )
    .of(REMOTE),
    row("disk.transport", r#""rdma" | "tcp" | "fc" | true"#).of(REMOTE),
    row(
        "disk.nqn",
        r#""nqn.2026-01.test:g" | "nqn.2014-08.org.nvmexpress.discovery" | "" | "nqn.{x220}" | 1"#,
    )
    .of(REMOTE),
    row("disk.host_nqn", r#""nqn.2026-01.test:h" | "" | "nqn.{x220}" | 1"#).of(REMOTE),
    row("disk.command_timeout_ms", r#"1000 | 3600000 | 999 | 3600001 | "1000""#).of(REMOTE),
    row("disk.quiesce_ms", r#"600000 | 0 | -1 | 600001 | "0""#).of(REMOTE),
    row("disk.optimistic", r#"true | false | 1 | "true""#).of(REMOTE),
    row("disk.optimistic_pages", r#"262144 | 1024 | 16777216 | 1023 | 16777217 | "1024""#).of(REMOTE),
    row("disk.optimistic_pages", "1024 | 1023").of(REMOTE).with("optimistic = true"),
    row("disk.optimistic_eager", r#"true | false | 1 | "true""#).of(REMOTE),
    row("disk.optimistic_eager", "true | 1").of(REMOTE).with("optimistic = true"),
    row("disk.ng", r#""/dev/ng4095n2" | "ng4095n2" | "{dir}/f" | "" | 1"#).of(NG),
    row("disk.size", r#""2MiB" | "512KiB" | 513 | 0 | "8EiB" | "20GiB" | "1 parsec" | true"#).of(MEMORY),
    row("disk.size", r#""1MiB" | "2MiB" | "512KiB" | 513 | 0 | "8EiB" | "1 parsec" | true"#).of(FILE),
    row("disk.size", r#""1MiB" | "512KiB" | "2MiB""#).of(FILE).with("read_only = true"),
    row("disk.size", "4096 | 4608").of(&["ram", "null", "file"]).with("block_bytes = 4096"),
    row("disk.size", "\"2MiB\"").of(FILE).from("\"1MiB\""),
    row(
        "disk.path",
        r#""{dir}/g" | "{dir}/missing" | "{dir}" | "{dir}/odd" | "{dir}/loop" | "{dir}/f/under"
        | "/dev/null" | "disk.img" | "" | 1"#,
    )
    .of(FILE),
    row("disk.path", r#""{dir}/new" | "{dir}/none/new""#).of(FILE).with("create = true\nsize = \"1MiB\""),
    row("disk.block_bytes", r#"4096 | 512 | 1024 | 0 | "512""#).of(&["ram", "null", "file"]),
    row("disk.read_only", r#"true | false | 0 | "true""#).of(&["file", "ng"]),
    row("disk.create", r#"true | false | 0 | "true""#).of(FILE),
    row("disk.create", "true")
        .of(FILE)
        .with("path = \"{dir}/new\"\nsize = \"1MiB\"\nmedium_id = \"file.1\"")
        .without("path"),
    row("disk.direct", r#"false | true | 0 | "false""#).of(FILE),
    row("disk.poll", r#"false | true | 0 | "true""#).of(FILE),
    row("disk.poll", "true").of(FILE).with("path = \"{dir}/loop\"").without("path"),
    row("disk.medium_id", r#""{medium}" | "file.1" | "" | "{x256}" | " a" | 1"#).of(FILE),
    row("disk.medium_id", r#""eui.0025385b71b0a3f1" | "" | "{x256}" | " a" | 1"#)
        .of(&["nvme", "ng", "remote"]),
    row("disk.pages", r#""base" | "huge" | "transparent" | "large" | true"#).of(RAM),
    row("disk.populate", r#"true | false | 0 | "true""#).of(RAM),
    row("disk.cache.size", r#""2MiB" | "64KiB" | "32KiB" | 65537 | "64GiB" | "1PiB" | "1 parsec" | true"#)
        .of(CACHED),
    row("disk.cache.policy", r#""lru" | "s3-fifo" | "fifo" | 1"#).of(CACHED),
    row("disk.cache.mode", r#""exclusive" | "shared" | "private" | 1"#).of(CACHED),
    row("disk.cache.read_ahead", r#"0 | "1MiB" | "64KiB" | 4097 | "1GiB" | -1 | true"#).of(CACHED),
    row("disk.cache.sole_writer", r#"true | false | 0 | "true""#).of(CACHED),
    row("disk.delay.latency_us", r#"200 | 0 | 10000000 | 1000000000 | -1 | "200""#).of(KINDS_ALL),
    row("disk.delay.latency_us", "200 | 0").of(RAM).with("seek_us = 1"),
    row("disk.delay.bandwidth", r#""100MiB" | 1 | "1EiB" | "fast" | true"#).of(KINDS_ALL),
    row("disk.delay.seek_us", r#"8000 | 0 | 1000000000 | -1 | "8000""#).of(KINDS_ALL),
    row(
        "disk.cluster.agents",
        r#"["nqn.2026-01.test:a"] | ["nqn.2026-01.test:a", "nqn.2026-01.test:b"] | [] | ["a"]
        | "nqn.2026-01.test:a" | 1"#,
    )
    .of(&["ram", "file"])
    .from("[\"nqn.2026-01.test:z\"]"),
];
