//! Texts that are cut into sections and changed.

use std::cell::RefCell;

use serde_json::json;
use spindle_reactor::mem::ResidentBytes;

use super::*;
use crate::config::sections::{Kind, Sections};
use crate::config::{Config, parse_beside, validate};
use crate::rpc::Edit;
use crate::rpc::tests::change;

/// Comments, lists within lists, another order, a string with headings in it, and no end of the last line.
const FULL: &str = r#"# The first lines.
log.level = "warn"

# of the reactor
[reactor]
cores = [0] # one

  [[disk]] # a disk
name = "a"
kind = "ram"
size = "64MiB"
[ disk . "delay" ]
# slow
latency_us = 5

[[pool.zone]]
buffer = "4KiB"
count = 1024
[[pool.zone]]
buffer = "2MiB"
count = 4

# many hosts
[["subsystem"]]
nqn = "nqn.2026-01.test:a"
model = """
[[disk]]
name"""
hosts = [
    "nqn.2026-01.test:h",
    # the only host
]

[[disk]]
name = "b"
kind = "null"
size = "64MiB"

[[subsystem.namespace]]
nsid = 7
disk = "b"

[pool]
pages = "base"
# the end
# of all"#;

fn read(sections: &Sections) -> Option<Plan> {
    let errors = RefCell::new(Vec::new());
    let plan = validate::plan(&sections.read(&errors)?, &machine(), None, &errors);
    errors.borrow().is_empty().then_some(plan)
}

#[test]
fn sections_have_all_of_the_text_and_are_read_as_it_is() {
    let right = FULL.replace("model = \"\"\"\n[[disk]]\nname\"\"\"\n", "model = \"m\"\n");
    let all = [plain_texts(), vec![right.clone(), right.replace('\n', "\r\n")]].concat();
    for text in all {
        let sections = Sections::cut(&text).expect("TOML");
        // `[pool]` is put to the zones.
        if !text.contains("[pool]") {
            assert_eq!(sections.text(), text);
        }
        let mut lines: Vec<_> = text.lines().collect();
        let cut = sections.text();
        let mut cut: Vec<_> = cut.lines().collect();
        lines.sort_unstable();
        cut.sort_unstable();
        assert_eq!(lines, cut);
        assert_eq!(read(&sections), Some(plan(&text)), "{text}");
        assert_eq!(plan(&sections.text()), plan(&text), "{text}");
    }
}

fn plain_texts() -> Vec<String> {
    let disks: String = ["a", "b", "c"].map(ram).concat();
    vec![
        String::new(),
        "# nothing\n\n".to_owned(),
        disks.clone() + LISTENER + &subsystem("x", &["a", "c"]) + &subsystem("y", &["b"]),
        subsystem("x", &["a", "c"]) + &disks + &subsystem("y", &["b"]) + "# the end\n",
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../conf/spindle.toml"))
            .expect("a file"),
    ]
}

#[test]
fn a_heading_in_a_string_is_none() {
    let sections = Sections::cut(FULL).expect("TOML");
    let is_disk = |name: &'static str| {
        sections.position("disk", |section| section.text("name") == Some(name)).is_some()
    };
    assert!(is_disk("a") && is_disk("b"));
    assert!(sections.position("disk", |section| section.text("name").is_none()).is_none());
}

#[test]
fn lists_that_are_written_inline_become_sections() {
    let text = "disk = [{ name = 'a', kind = 'null', size = '1MiB' }]\nreferral = []\n[[subsystem]]\n\
                nqn = 'nqn.2026-01.test:x'\nallow_any_host = true\nnamespace = [{ nsid = 1, disk = 'a' }]\n";
    let sections = Sections::cut(text).expect("TOML");
    assert!(sections.text().contains("[[disk]]") && sections.text().contains("[[subsystem.namespace]]"));
    assert_eq!(read(&sections), Some(plan(text)));
    // Not a change, though the text is another one.
    let mut same = sections.clone();
    same.edit(1, |_| {}).expect("TOML");
    assert!(same.is_same(&sections) && sections.text() != text);
    same.edit(1, |table| table["name"] = toml_edit::value("b")).expect("TOML");
    assert!(!same.is_same(&sections));
}

#[test]
fn a_section_with_an_error_is_not_read() {
    for wrong in
        ["[[disk]]\nname = \"a\"\n", "[[disk]]\nname = 7\nkind = \"null\"\nsize = \"1MiB\"\n", "disk = 7\n"]
    {
        let sections =
            Sections::cut(&format!("{}{wrong}", if wrong.starts_with('[') { LISTENER } else { "" }));
        assert_eq!(read(&sections.expect("TOML")), None, "{wrong}");
    }
    assert!(Sections::cut("[[disk]\n").is_err());
}

#[test]
fn removed_subsystems_take_their_namespaces_with_them() {
    let disks: String = ["a", "b", "c"].map(ram).concat();
    let text = disks + &subsystem("x", &["a", "c"]) + &subsystem("y", &["b"]);
    let mut sections = Sections::cut(&text).expect("TOML");
    sections.remove(Kind::Element("subsystem"), |section| {
        section.value("nqn") == Some(nvme_spec::nqn::Nqn::new("nqn.2026-01.test:x").expect("an NQN"))
    });
    assert_eq!(sections.text(), text.replace(&subsystem("x", &["a", "c"]), ""));
}

/// A call of a method that adds, edits or removes, by a number.
fn call(number: u64) -> (&'static str, serde_json::Value) {
    let (disk, nqn) = (format!("d{}", number >> 8 & 7), format!("nqn.2026-01.test:{}", number >> 16 & 3));
    let address =
        json!({ "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": (5000 + (number >> 24 & 3)).to_string() });
    match number % 14 {
        0 | 1 => ("bdev_malloc_create", json!({ "name": disk, "num_blocks": 256, "block_size": 4096 })),
        2 => ("bdev_null_create", json!({ "name": disk, "num_blocks": 256, "block_size": 512 })),
        3 => ("bdev_malloc_delete", json!({ "name": disk })),
        4 => ("bdev_null_resize", json!({ "name": disk, "new_size": (number >> 32 & 7) + 1 })),
        5 => ("nvmf_create_subsystem", json!({ "nqn": nqn, "allow_any_host": number & 16 == 0 })),
        6 => ("nvmf_delete_subsystem", json!({ "nqn": nqn })),
        7 | 8 => ("nvmf_subsystem_add_ns", json!({ "nqn": nqn, "namespace": { "bdev_name": disk } })),
        9 => ("nvmf_subsystem_remove_ns", json!({ "nqn": nqn, "nsid": (number >> 32 & 3) + 1 })),
        10 => ("nvmf_subsystem_add_listener", json!({ "nqn": nqn, "listen_address": address })),
        11 => ("nvmf_subsystem_remove_listener", json!({ "nqn": nqn, "listen_address": address })),
        12 => ("log_set_level", json!({ "level": if number & 16 == 0 { "DEBUG" } else { "ERROR" } })),
        _ => ("nvmf_subsystem_add_host", json!({ "nqn": nqn, "host": "nqn.2026-01.test:h" })),
    }
}

/// [`Config::with_sections`] compares each plan with that of the text.
#[test]
fn changes_in_any_order_are_read_as_their_text_is_and_keep_its_comments() {
    let mut made = 0;
    for seed in 0..20u64 {
        let text = "# first\n[log]\nlevel = 'info' # words\n\n# the null disk\n[[disk]]\n\
                    name = 'd0'\nkind = 'null'\nsize = '1MiB'\n# last";
        let mut config = Config::of(text);
        let mut number = seed;
        for _ in 0..60 {
            number = number.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (method, params) = call(number.rotate_right(21));
            let (change, args) = change(method, params).expect("a right call");
            let sections = config.sections().expect("TOML").clone();
            let mut edit = Edit {
                sections,
                plan: config.plan(),
                has_rdma: false,
                is_log_level_fixed: false,
                is_revocation: false,
            };
            if change(&mut edit, &args).is_err() {
                continue;
            }
            let sections = edit.sections;
            if let Ok(next) = config.with_sections(sections, ResidentBytes::default()) {
                config = next;
                made += 1;
            }
            assert_eq!(Sections::cut(config.text()).expect("TOML").text(), config.text());
            assert!(config.text().starts_with("# first\n") && config.text().ends_with("# last"));
            assert!(config.text().contains(" # words\n"));
        }
    }
    assert!(made > 400, "{made} changes were made");
}

#[test]
fn a_change_that_the_next_start_could_not_read_is_refused() {
    let config = Config::of(&null("a"));
    let mut sections = config.sections().expect("TOML").clone();
    let comment = format!("# {}\n", "x".repeat(4 << 20));
    sections.edit(1, |table| table.decor_mut().set_prefix(comment)).expect("TOML");
    let error = config.with_sections(sections, ResidentBytes::default()).expect_err("too long").to_string();
    assert!(error.contains("longer than 4 MiB"), "{error}");
}

/// The configuration after a method has changed it.
fn changed(config: &Config, method: &'static str, params: serde_json::Value) -> Result<Config, String> {
    let (change, args) = change(method, params).expect("a right call");
    let sections = config.sections().expect("TOML").clone();
    let mut edit = Edit {
        sections,
        plan: config.plan(),
        has_rdma: false,
        is_log_level_fixed: false,
        is_revocation: false,
    };
    change(&mut edit, &args).map_err(|failure| failure.message)?;
    let next = config.with_sections(edit.sections, ResidentBytes::default());
    next.map_err(|errors| errors.to_string())
}

#[test]
fn a_change_does_not_look_at_files_of_other_disks_and_knows_their_media() {
    let directory = Directory::new();
    let path = directory.file("a", 1 << 20);
    // The comment of what is removed goes to the section of the file.
    let file = format!("[[disk]]\nname = \"f\"\nkind = \"file\"\npath = {path:?}\n");
    let config = Config::of(&format!("# To try it.\n{}# To keep.\n{file}", null("n")));
    std::fs::rename(&path, directory.0.join("moved")).expect("it is there");
    let config = changed(&config, "bdev_null_delete", json!({ "name": "n" })).expect("nothing of the file");
    assert_eq!(config.plan().disks[0].bytes, 1 << 20);
    assert!(config.text().starts_with("# To try it.\n"), "{}", config.text());
    let add = |name: &str| {
        let (file, params) = (directory.0.join(name), |file| json!({ "name": "g", "filename": file }));
        changed(&config, "bdev_aio_create", params(file)).map(|_| ())
    };
    let moved = add("moved").expect_err("the same medium");
    assert!(moved.contains("also the path of the disk in line"), "{moved}");
    // The next start would find both in it.
    directory.file("a", 1 << 20);
    let named_alike = add("a").expect_err("the same path");
    assert!(named_alike.contains("also the path of the disk in line"), "{named_alike}");
    directory.file("b", 1 << 20);
    assert_eq!(add("b"), Ok(()));
}

#[test]
fn the_medium_of_a_file_that_is_made_is_known_once_it_is_there() {
    let directory = Directory::new();
    let path = directory.0.join("made");
    let config = Config::of(&format!(
        "[[disk]]\nname = \"f\"\nkind = \"file\"\npath = {path:?}\ncreate = true\nsize = \"1MiB\"\n"
    ));
    directory.file("made", 1 << 20);
    std::fs::hard_link(&path, directory.0.join("link")).expect("made");
    let params = json!({ "name": "g", "filename": directory.0.join("link") });
    let error = changed(&config, "bdev_aio_create", params).expect_err("the same medium");
    assert!(error.contains("also the path of the disk in line"), "{error}");
}

#[test]
fn a_machine_that_has_less_than_at_the_start_refuses_only_what_asks_for_more() {
    let text = |size: &str, cores: &str| {
        format!("[reactor]\ncores = [{cores}]\n[[disk]]\nname = \"a\"\nkind = \"ram\"\nsize = \"{size}\"\n")
    };
    let in_force = plan(&text("1GiB", "0, 1"));
    let poor = Machine { cores: vec![0], available_bytes: 1 << 20, ..machine() };
    let poorer = Machine { memory_bytes: 1 << 20, ..poor.clone() };
    let beside = |text: &str, machine| parse_beside(text, Path::new("t.toml"), machine, Some(&in_force), &[]);
    for machine in [&poor, &poorer] {
        for (size, cores) in [("1GiB", "0, 1"), ("512MiB", "0, 1"), ("512MiB", "1")] {
            assert!(beside(&text(size, cores), machine).is_ok(), "{size} {cores}");
        }
        for (size, cores, said) in
            [("2GiB", "0, 1", "the machine has|are available"), ("1GiB", "2", "may use: 0")]
        {
            let error = beside(&text(size, cores), machine).expect_err("more").to_string();
            assert!(said.split('|').any(|said| error.contains(said)), "{error}");
        }
    }
    // Of a drive's cache, which is locked.
    let cached = |size: &str| {
        let cache = format!("[disk.cache]\nsize = \"{size}\"\n");
        format!("[[disk]]\nname = \"a\"\nnvme = \"fffe:ff:1f.6\"\n{cache}")
    };
    let in_force = plan(&cached("128MiB"));
    let locks_less = Machine { lockable_bytes: Some(1 << 20), ..machine() };
    let beside =
        |text: &str| parse_beside(text, Path::new("t.toml"), &locks_less, Some(&in_force), &[]).map(|_| ());
    assert_eq!(beside(&cached("128MiB")), Ok(()));
    let error = beside(&cached("129MiB")).expect_err("more").to_string();
    assert!(error.contains("ulimit -l"), "{error}");
}
