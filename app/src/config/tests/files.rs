//! The files that describe the configuration say what the program does.

use super::*;
use crate::config::Config;
use crate::config::kind::Kind;
use crate::config::schema::{self, Preset};
use crate::identity::{self, Data};

fn repository(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Keys of a file by heading, those behind `#` too, as (heading, key, value, is behind #).
fn keys(text: &str) -> Vec<(String, String, String, bool)> {
    let mut heading = String::new();
    let mut found = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with("# ")) {
        let bare = line.trim_start_matches('#');
        if bare.starts_with('[') {
            heading = bare.to_owned();
        } else if let Some((key, value)) = bare.split_once(" = ") {
            found.push((heading.clone(), key.to_owned(), value.to_owned(), bare != line));
        }
    }
    found
}

/// Where the example deliberately differs from the default, and says so.
const OTHER_THAN_DEFAULT: [(&str, &str); 1] = [("[[subsystem]]", "allow_any_host")];

#[test]
fn the_example_has_every_key_with_its_default_and_its_reason() {
    let found = keys(&repository("conf/spindle.toml"));
    for (heading, _, keys) in schema::sections() {
        assert!(
            schema::comment(&heading, &heading).is_some(),
            "conf/spindle.toml: a comment above {heading}"
        );
        for key in keys.iter().filter(|key| key.section().is_none()) {
            let name = key.name;
            let mut of_key = found.iter().filter(|(its, key, ..)| *its == heading && key == name).peekable();
            assert!(of_key.peek().is_some(), "conf/spindle.toml: {heading} has no {name}");
            assert!(schema::comment(&heading, name).is_some(), "conf/spindle.toml: {heading}: why {name}?");
            if let Preset::Fixed(preset) = key.preset
                && !OTHER_THAN_DEFAULT.contains(&(heading.as_str(), name))
            {
                for (.., value, _) in of_key {
                    assert_eq!(value, preset, "{heading} {name}");
                }
            }
        }
    }
    for (heading, key, ..) in &found {
        let is_known = schema::sections()
            .iter()
            .any(|(its, _, keys)| its == heading && keys.iter().any(|k| k.name == key));
        assert!(is_known, "{heading} {key} is no key");
    }
}

/// What of the example is no default.
const LEAST: &str = r#"
[[disk]]
name = "ram0"
kind = "ram"
size = "1GiB"

[[listener]]
address = "127.0.0.1:4420"

[[subsystem]]
nqn = "nqn.2026-01.io.spindle:default"
allow_any_host = true

[[subsystem.namespace]]
nsid = 1
disk = "ram0"
"#;

#[test]
fn the_example_is_what_runs_without_a_file() {
    let endless = Machine { available_bytes: u64::MAX, memory_bytes: u64::MAX, ..Machine::detect() };
    let of_file = parse(
        &repository("conf/spindle.toml"),
        Path::new("conf/spindle.toml"),
        &Machine { cores: vec![0], ..endless },
    );
    let mut of_file = of_file.unwrap_or_else(|errors| panic!("{errors}"));
    let builtin = Config::builtin().plan().clone();
    // On a machine that keeps core 0 from this process the built-in takes another.
    of_file.reactor.cores.clone_from(&builtin.reactor.cores);
    assert_eq!(of_file, builtin);
    // All that the example has besides is a default.
    let least = Config::of(LEAST).plan().clone();
    of_file.reactor.cores.clone_from(&least.reactor.cores);
    assert_eq!(of_file, least);
}

#[test]
fn what_the_example_has_behind_a_hash_works_without_it() {
    let directory = Directory::new();
    let file = directory.file("disk0.img", 64 << 30);
    let text = repository("conf/spindle.toml").replace("/var/lib/spindle/disk0.img", &file);
    // This machine has no such drive, and a configuration that names it is refused.
    let drive = "#nvme = \"0000:01:00.0\"";
    assert!(text.contains(drive) && text.contains("#namespace = 1"));
    let text = text.replace(drive, "#kind = \"null\"\n#size = \"1GiB\"").replacen("#namespace = 1\n", "", 1);
    let device = "#ng = \"/dev/ng0n1\"";
    assert!(text.contains(device));
    let text = text.replace(device, "#kind = \"null\"\n#size = \"1GiB\"");
    let medium = "#medium_id = \"eui.0025385b71b0a3f1\"";
    assert!(text.contains(medium));
    let text = text.replace(medium, "");
    let bare = |line: &str| {
        line.strip_prefix('#').filter(|rest| !rest.starts_with(' ') && !rest.is_empty()).map(str::to_owned)
    };
    let all: Vec<String> = text.lines().map(|line| bare(line).unwrap_or_else(|| line.to_owned())).collect();
    let plan = plan(&all.join("\n"));
    assert_eq!((plan.disks.len(), plan.subsystems.len(), plan.referrals.len()), (5, 2, 1));
    assert_eq!(plan.listeners[0].name, "front");
    let (nqn, namespace) = (&plan.subsystems[1].nqn, &plan.subsystems[1].namespaces[0]);
    let derived =
        (identity::uuid(nqn, 1, Data::Named("disk0")), identity::nguid(nqn, 1, Data::Named("disk0")));
    let shown = (namespace.uuid, namespace.nguid);
    assert_eq!(shown, (Some(derived.0), Some(derived.1)), "the identities it shows are the derived ones");
}

#[test]
fn the_reference_in_the_documentation_is_the_schema() {
    let text = repository("docs/configuration.md");
    let reference = schema::reference();
    if !text.ends_with(&reference) {
        let line = reference.lines().find(|line| !text.contains(line)).unwrap_or("the order of the lines");
        panic!(
            "docs/configuration.md must end with the output of \
             `cargo run -p spindle-app -- check --reference`; it lacks\n{line}"
        );
    }
}

#[test]
fn the_systemd_unit_outlasts_the_drain_deadline_and_allows_default_connections() {
    let unit = repository("conf/spindle.service");
    let number = |name: &str| -> u64 {
        let line = unit
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap_or_else(|| panic!("{name} is missing"));
        line.parse().unwrap_or_else(|_| panic!("{name}{line}"))
    };
    let builtin = Config::builtin();
    assert!(u128::from(number("TimeoutStopSec=")) * 1000 > builtin.plan().drain_deadline.as_millis());
    assert!(number("LimitNOFILE=") > 4 * builtin.plan().limits.connections as u64);
}

#[test]
fn sections_that_may_be_several_are_lists() {
    let lists: Vec<String> = schema::sections()
        .into_iter()
        .filter(|(_, key, _)| matches!(key.kind, Kind::Sections(_)))
        .map(|it| it.0)
        .collect();
    assert_eq!(
        lists,
        [
            "[[pool.zone]]",
            "[[disk]]",
            "[[listener]]",
            "[[subsystem]]",
            "[[subsystem.namespace]]",
            "[[referral]]"
        ]
    );
}
