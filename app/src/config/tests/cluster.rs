//! `[disk.cluster]`: which disks may have it, and what it needs.

use super::*;
use crate::config::memory_items;

const REMOTE: &str = "kind = \"remote\"\naddress = \"192.0.2.7:4420\"\nnqn = \"nqn.2026-01.test:far\"";
const AGENTS: &str = "agents = [\"nqn.2026-01.test:a\", \"nqn.2026-01.test:b\"]";
const CACHE: &str = "[disk.cache]\nsize = \"1MiB\"";

fn disk(keys: &str, cluster: &str) -> String {
    format!("{LISTENER}[[disk]]\nname = \"d\"\n{keys}\n[disk.cluster]\n{cluster}\n")
}

#[test]
fn a_disk_of_this_target_names_its_agents_and_a_remote_disk_has_a_cache() {
    let directory = Directory::new();
    let file = format!("kind = \"file\"\npath = \"{}\"", directory.file("d.img", 1 << 20));
    for keys in ["kind = \"ram\"\nsize = \"1MiB\"", &file] {
        let plan = plan(&disk(keys, AGENTS));
        let agents = &plan.disks[0].cluster.as_ref().expect("a cluster").agents;
        assert_eq!(
            agents.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["nqn.2026-01.test:a", "nqn.2026-01.test:b"]
        );
        assert!(
            memory_items(&plan).iter().any(|item| item.reason().contains("may have which part")),
            "{keys}"
        );
    }
    let plan = plan(&disk(&format!("{REMOTE}\n{CACHE}"), ""));
    assert!(plan.disks[0].cluster.is_some() && plan.disks[0].cache.is_some());
}

#[test]
fn what_the_section_needs_and_who_cannot_have_it_is_said() {
    let cached = format!("{REMOTE}\n{CACHE}");
    for (keys, cluster, words) in [
        ("kind = \"ram\"\nsize = \"1MiB\"", "", "disk[0].cluster.agents: missing; it names the hosts"),
        ("kind = \"ram\"\nsize = \"1MiB\"", "agents = []", "disk[0].cluster.agents = []: is empty"),
        ("kind = \"null\"\nsize = \"1MiB\"", AGENTS, "a null disk has none"),
        (REMOTE, "", "needs [disk.cache]"),
        (&cached, AGENTS, "is a key of the far target's disk"),
        (&format!("{REMOTE}\noptimistic = true\n{CACHE}"), "", "needs optimistic = false"),
        (&format!("{cached}\nsole_writer = true"), "", "has no effect with [disk.cluster]"),
    ] {
        let found = errors(&disk(keys, cluster));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains(words), "{found:?}");
    }
}

#[test]
fn a_reload_cannot_change_it() {
    let ram = "kind = \"ram\"\nsize = \"1MiB\"";
    let (without, with) = (format!("{LISTENER}[[disk]]\nname = \"d\"\n{ram}\n"), disk(ram, AGENTS));
    for (from, to) in
        [(&without, &with), (&with, &without), (&with, &disk(ram, "agents = [\"nqn.2026-01.test:c\"]"))]
    {
        let changes = plan(to).changes(&plan(from));
        assert_eq!(changes.len(), 1, "{changes:?}");
    }
}
