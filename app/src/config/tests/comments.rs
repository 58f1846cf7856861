//! Comments survive every method of the control socket.

use serde_json::{Value, json};
use spindle_reactor::mem::ResidentBytes;

use super::Directory;
use crate::config::Config;
use crate::rpc::Edit;
use crate::rpc::tests::{change, changing};

const EXAMPLE: &str = include_str!("../../../../conf/spindle.toml");
const NQN: &str = "nqn.2026-01.io.spindle:default";

/// Comments in all places: in lists, behind values and headings, above keys that are set or removed.
const MORE: &str = r##"
# of the null disk
[[disk]] # its heading
# above name
name = "null0" # behind name
kind = "null"
# above size
size = "1MiB" # behind size
# the end of the null disk

# of the file disk
[[disk]]
name = "file0"
kind = "file"
path = "PATH" # behind path
# above the cache
[disk.cache] # heading of the cache
# above its size
size = "1MiB" # behind its size
# above the policy
policy = "lru" # behind the policy
# above the mode
mode = "shared" # behind the mode
# above read_ahead
read_ahead = "256KiB" # behind read_ahead

# of the listener
[[listener]]
address = "127.0.0.1:4421" # behind its address

# of another subsystem
[[subsystem]]
nqn = "nqn.2026-01.io.spindle:listed"
# above hosts
hosts = [ # behind the bracket
    "nqn.2026-01.test:a", # behind a
    # above b
    "nqn.2026-01.test:b", # behind b
    # the end of hosts
] # behind hosts
# above listeners
listeners = [
    # above the first
    "127.0.0.1:4420", # behind the first
    "127.0.0.1:4421", # behind the second
]
# of its namespace
[[subsystem.namespace]]
nsid = 1 # behind nsid
disk = "null0" # behind disk

# of the referral
[[referral]]
address = "192.0.2.9:8009" # behind the referral
# the end
"##;

/// The comments of a text without `#` in a string.
fn comments(text: &str) -> Vec<String> {
    let comments = text.lines().filter_map(|line| line.split_once('#'));
    comments.map(|(_, comment)| comment.trim().to_owned()).collect()
}

fn calls(file: &str) -> Vec<(&'static str, Value)> {
    let (host, listed) = ("nqn.2026-01.test:b", "nqn.2026-01.io.spindle:listed");
    let at = |port: u16| json!({ "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": port.to_string() });
    let referral = json!({ "trtype": "tcp", "traddr": "192.0.2.9", "trsvcid": "8009" });
    let drive = json!({ "name": "far", "trtype": "tcp", "traddr": "192.0.2.7", "subnqn": NQN });
    let cache = json!({ "name": "file0", "size": 65536, "policy": "s3-fifo", "mode": "exclusive",
                        "read_ahead": 65536 });
    let made = |name: &str| json!({ "name": name, "num_blocks": 2048, "block_size": 512 });
    vec![
        ("log_set_level", json!({ "level": "DEBUG" })),
        ("nvmf_create_transport", json!({ "trtype": "tcp" })),
        ("bdev_malloc_create", made("m")),
        ("bdev_null_create", made("n")),
        ("bdev_aio_create", json!({ "name": "a", "filename": file })),
        ("bdev_aio_delete", json!({ "name": "a" })),
        ("bdev_uring_create", json!({ "name": "u", "filename": file })),
        ("bdev_uring_delete", json!({ "name": "u" })),
        ("bdev_nvme_attach_controller", drive),
        ("bdev_nvme_detach_controller", json!({ "name": "far" })),
        ("spindle_disk_cache", cache),
        ("spindle_disk_cache", json!({ "name": "file0", "size": 0 })),
        ("spindle_file_resize", json!({ "name": "file0", "new_size": 2 })),
        ("bdev_null_resize", json!({ "name": "null0", "new_size": 2 })),
        ("bdev_malloc_resize", json!({ "name": "ram0", "new_size": 512 })),
        ("nvmf_create_subsystem", json!({ "nqn": "nqn.2026-01.test:new" })),
        ("nvmf_delete_subsystem", json!({ "nqn": "nqn.2026-01.test:new" })),
        ("nvmf_subsystem_add_ns", json!({ "nqn": listed, "namespace": { "bdev_name": "m" } })),
        ("nvmf_subsystem_remove_ns", json!({ "nqn": listed, "nsid": 1 })),
        ("nvmf_subsystem_add_listener", json!({ "nqn": listed, "listen_address": at(4422) })),
        ("nvmf_subsystem_remove_listener", json!({ "nqn": listed, "listen_address": at(4421) })),
        ("nvmf_subsystem_remove_listener", json!({ "nqn": NQN, "listen_address": at(4421) })),
        ("nvmf_subsystem_remove_host", json!({ "nqn": listed, "host": host })),
        ("nvmf_subsystem_add_host", json!({ "nqn": listed, "host": "nqn.2026-01.test:c" })),
        ("nvmf_subsystem_allow_any_host", json!({ "nqn": listed, "allow_any_host": true })),
        ("nvmf_subsystem_allow_any_host", json!({ "nqn": NQN, "allow_any_host": false })),
        ("nvmf_discovery_add_referral", json!({ "address": at(8010) })),
        ("nvmf_discovery_remove_referral", json!({ "address": referral })),
        ("bdev_null_delete", json!({ "name": "null0" })),
        ("bdev_malloc_delete", json!({ "name": "ram0" })),
        ("nvmf_delete_subsystem", json!({ "nqn": listed })),
        ("nvmf_delete_subsystem", json!({ "nqn": NQN })),
    ]
}

fn assert_all(before: &[String], text: &str, what: &str) {
    let mut left = comments(text);
    for comment in before {
        let at = left.iter().position(|it| it == comment);
        left.remove(at.unwrap_or_else(|| panic!("{what}: {comment:?} is lost:\n{text}")));
    }
    assert!(left.is_empty(), "{what}: written twice: {left:?}");
}

/// Returns the configuration after a call.
fn after(config: &Config, method: &str, params: Value) -> Config {
    let what = format!("{method} {params}");
    let (change, args) = change(method, params).expect("a right call");
    let sections = config.sections().expect("TOML").clone();
    let mut edit = Edit {
        sections,
        plan: config.plan(),
        has_rdma: false,
        is_log_level_fixed: false,
        is_revocation: false,
    };
    change(&mut edit, &args).unwrap_or_else(|failure| panic!("{what}: {}", failure.message));
    let next = config.with_sections(edit.sections, ResidentBytes::default());
    next.unwrap_or_else(|errors| panic!("{what}: {errors}"))
}

#[test]
fn every_comment_of_the_example_survives_each_method() {
    let directory = Directory::new();
    let (file, new) = (directory.file("disk.img", 1 << 20), directory.file("new.img", 1 << 20));
    let text = format!("{EXAMPLE}{}", MORE.replace("PATH", &file));
    let before = comments(&text);
    assert!(before.len() > 250, "{}", before.len());
    let mut config = Config::of(&text);
    let mut methods = Vec::new();
    for (method, params) in calls(&new) {
        let what = format!("{method} {params}");
        config = after(&config, method, params);
        assert_all(&before, config.text(), &what);
        methods.push(method);
    }
    let missing: Vec<_> = changing().into_iter().filter(|method| !methods.contains(method)).collect();
    assert!(missing.is_empty(), "without a call: {missing:?}");
}

#[test]
fn comments_stay_with_what_is_above_or_below_them() {
    let nqn = "nqn.2026-01.test:x";
    let mut config = Config::of(&format!(
        "[[subsystem]]\nnqn = \"{nqn}\"\nhosts = [\n    \"nqn.a\", # a\n    \"nqn.b\", # b\n]\n"
    ));
    for (method, host, hosts) in [
        ("nvmf_subsystem_add_host", "nqn.c", "\n    \"nqn.a\", # a\n    \"nqn.b\", # b\n    \"nqn.c\",\n"),
        ("nvmf_subsystem_remove_host", "nqn.b", "\n    \"nqn.a\", # a\n # b\n    \"nqn.c\",\n"),
    ] {
        config = after(&config, method, json!({ "nqn": nqn, "host": host }));
        assert!(config.text().ends_with(&format!("hosts = [{hosts}]\n")), "{}", config.text());
    }
}

#[test]
fn comments_of_lists_that_are_written_inline_stay_when_these_become_sections() {
    let text = "# above\ndisk = [ # bracket\n    # one\n    { name = 'a', kind = 'null', size = '1MiB' },\n\
                ] # end\n[[subsystem]]\nnqn = 'nqn.2026-01.test:x'\nallow_any_host = true\n\
                # above namespaces\nnamespace = [\n    # first\n    { nsid = 1, disk = 'a' },\n]\n";
    let config = Config::of(text);
    assert_all(&comments(text), &config.sections().expect("TOML").text(), "cut");
}

#[test]
fn a_hash_in_a_string_is_no_comment() {
    let text = "a = '#' # one\nb = \"\\\"#\" # two\nc = '''\n# no\n''''' # three\n\
                d = \"\"\"\n\\\"\"\"#\"\"\"\n# four";
    assert_eq!(crate::config::comments::comments_of(text), "# one\n# two\n# three\n# four\n");
    assert_eq!(crate::config::comments::comments_of("\na = '#'\n\n"), "");
}
