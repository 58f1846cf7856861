//! A disk that is made slow: every kind may be, what the section needs, what of it a reload can change.

use super::*;
use spindle_reactor::clock::Nanos;
use spindle_target_disk::DelaySpec;

fn spec(latency_us: u64, bandwidth: Option<u64>, seek_us: u64) -> DelaySpec {
    DelaySpec { latency: Nanos::from_us(latency_us), bandwidth, seek: Nanos::from_us(seek_us) }
}

fn disk(keys: &str, delay: &str) -> String {
    format!("{LISTENER}[[disk]]\nname = \"d\"\n{keys}\n[disk.delay]\n{delay}\n")
}

fn slow_null(delay: &str) -> String {
    disk("kind = \"null\"\nsize = \"1MiB\"", delay)
}

#[test]
fn every_kind_may_be_slow_and_says_so() {
    let directory = Directory::new();
    let file = format!("kind = \"file\"\npath = \"{}\"", directory.file("d.img", 1 << 20));
    let remote = "kind = \"remote\"\naddress = \"192.0.2.7:4420\"\nnqn = \"nqn.2026-01.test:far\"";
    for keys in ["kind = \"ram\"\nsize = \"1MiB\"", "kind = \"null\"\nsize = \"1MiB\"", &file, remote] {
        let plan = plan(&disk(keys, "latency_us = 10_000_000\nbandwidth = \"150MiB\"\nseek_us = 8000"));
        let all = spec(10_000_000, Some(150 << 20), 8000);
        assert_eq!(plan.disks[0].delay, Some(all));
        let said = "disk \"d\" is slow on purpose: latency 10000000 us, bandwidth 150 MiB/s, seek 8000 us";
        assert!(plan.notes.iter().any(|note| note.starts_with(said)), "{:?}", plan.notes);
    }
    let of = |delay| plan(&slow_null(delay)).disks[0].delay.expect("a delay");
    assert_eq!(of("seek_us = 1"), spec(0, None, 1));
    assert_eq!(of("bandwidth = 65536"), spec(0, Some(65536), 0));
    let text = slow_null("");
    let without = plan(text.split("[disk.delay]").next().expect("a beginning"));
    assert_eq!((without.disks[0].delay, without.notes.join("\n").contains("slow")), (None, false));
    // It goes with a cache.
    let both = format!("{}[disk.cache]\nsize = \"1MiB\"\n", disk(&file, "latency_us = 1"));
    let both = plan(&both);
    assert!(both.disks[0].delay.is_some() && both.disks[0].cache.is_some());
}

#[test]
fn a_section_that_delays_nothing_and_values_out_of_range_are_refused() {
    for delay in ["", "latency_us = 0", "latency_us = 0\nseek_us = 0"] {
        let found = errors(&slow_null(delay));
        assert_eq!(found.len(), 1, "{found:?}");
        let said = "disk[0].delay: delays nothing; set latency_us or seek_us above 0, or bandwidth, or leave";
        assert!(found[0].contains(said), "{found:?}");
    }
    for (key, value) in [
        ("latency_us", "10_000_001"),
        ("latency_us", "-1"),
        ("seek_us", "1_000_001"),
        ("bandwidth", "0"),
        ("bandwidth", "\"63KiB\""),
        ("bandwidth", "\"2TiB\""),
    ] {
        let found = errors(&slow_null(&format!("{key} = {value}")));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains(&format!("disk[0].delay.{key} = {value}: must be")), "{found:?}");
    }
}

#[test]
fn each_key_of_a_delay_is_in_the_difference_of_two_plans() {
    let with = |delay: &str| plan(&slow_null(delay));
    let before = with("latency_us = 5");
    assert_eq!(with("latency_us = 5\nseek_us = 0").changes(&before), []);
    for other in ["latency_us = 6", "latency_us = 5\nseek_us = 1", "latency_us = 5\nbandwidth = \"1MiB\""] {
        let changes = with(other).changes(&before);
        assert!(changes.len() == 1 && changes[0].is_refused(), "{changes:?}");
        assert!(format!("{changes:?}").contains("disk \\\"d\\\": delay"), "{changes:?}");
    }
}
