//! House rules as tests: what a reader of any file may rely on.
//!
//! The whole tree is read, without what tools make of it. Formatting and lints are rustfmt's and clippy's;
//! here is what they do not see.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const FILE_LINES_MAX: usize = 800;
const FUNCTION_LINES_MAX: usize = 70;
const LINE_CHARS_MAX: usize = 110;

/// Folders that tools fill; the corpora have any bytes.
const NOT_OURS: &[&str] = &[
    ".git",
    "build",
    "target-dir",
    "tests/fuzz/corpus",
    "tests/fuzz/artifacts",
    "tests/fuzz/coverage",
    "tests/fuzz/target",
    "tests/fuzz/Cargo.lock",
];

/// Where `unsafe` may be, each file with its reason at its top.
const UNSAFE: &[&str] = &[
    "tests/emulator/src/memory.rs",
    "nvme/pcie/src/bar.rs",
    "nvme/pcie/src/dma.rs",
    "nvme/pcie/src/vfio/system.rs",
    "rdma/src/address.rs",
    "rdma/src/batch.rs",
    "rdma/src/cm_channel.rs",
    "rdma/src/cm_id.rs",
    "rdma/src/completion.rs",
    "rdma/src/device.rs",
    "rdma/src/domain.rs",
    "rdma/src/memory.rs",
    "rdma/src/queue_pair.rs",
    "rdma/src/receive.rs",
    "reactor/src/affinity.rs",
    "reactor/src/alloc_count.rs",
    "reactor/src/mem/buf.rs",
    "reactor/src/mem/cache.rs",
    "reactor/src/mem/seals.rs",
    "reactor/src/mem/cpu_cache.rs",
    "reactor/src/mem/frames.rs",
    "reactor/src/mem/pool.rs",
    "reactor/src/mem/region.rs",
    "reactor/src/uring/admin.rs",
    "reactor/src/uring.rs",
];

/// Where a thread may sleep: what it waits for has no event to wait on (a lock of another process, a register
/// of a controller, its turn to write in a load that leaves the processor to others).
const SLEEPS: &[&str] = &[
    "app/src/nvme/change.rs",
    "target/disk/src/lock.rs",
    "nvme/initiator/src/controller/bring_up.rs",
    "nvme/pcie/src/drive.rs",
    "tests/medium/src/stamps.rs",
];

/// A file of the repository.
struct Source {
    /// From the root of the repository.
    path: String,
    text: String,
}

impl Source {
    fn is(&self, extension: &str) -> bool {
        Path::new(&self.path).extension().is_some_and(|found| found == extension)
    }

    /// Its lines, numbered from 1.
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.text.lines())
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// All text files.
fn sources() -> Vec<Source> {
    fn walk(root: &Path, folder: &str, found: &mut Vec<Source>) {
        for entry in std::fs::read_dir(root.join(folder)).expect("a folder") {
            let entry = entry.expect("an entry");
            let name = entry.file_name().into_string().expect("a name in UTF-8");
            let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
            if NOT_OURS.contains(&path.as_str()) {
                continue;
            }
            if entry.file_type().expect("a type").is_dir() {
                walk(root, &path, found);
            } else if let Ok(text) = std::fs::read_to_string(entry.path()) {
                found.push(Source { path, text });
            }
        }
    }
    let mut found = Vec::new();
    walk(&root(), "", &mut found);
    found.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(found.iter().any(|source| source.path == "target/src/lib.rs"), "this is the root");
    found
}

fn rust_sources() -> Vec<Source> {
    sources().into_iter().filter(|source| source.is("rs")).collect()
}

/// Fails with all complaints at once.
fn assert_none(complaints: &[String]) {
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

/// Name, first line and number of lines of each function, as rustfmt lays it out: it ends at the first brace
/// that stands alone under its first letter.
fn functions(source: &Source) -> Vec<(String, usize, usize)> {
    const BEFORE: &[&str] = &["pub", "pub(crate)", "pub(super)", "const", "async", "unsafe"];
    let lines: Vec<&str> = source.text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some((before, after)) = line.split_once("fn ") else { continue };
        if !before.split_whitespace().all(|word| BEFORE.contains(&word)) {
            continue;
        }
        let indent = &line[..line.len() - line.trim_start().len()];
        let has_body = lines[at..].iter().find(|line| line.ends_with(['{', '}', ';']));
        if !has_body.is_some_and(|line| line.ends_with('{')) {
            continue;
        }
        let end = format!("{indent}}}");
        let count = lines[at..].iter().position(|line| *line == end).expect("its end") + 1;
        let name = after.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next();
        found.push((name.unwrap_or_default().to_owned(), at + 1, count));
    }
    found
}

#[test]
fn files_functions_and_lines_are_short() {
    let mut complaints = Vec::new();
    let mut count = 0;
    for source in rust_sources() {
        let lines = source.text.lines().count();
        if lines > FILE_LINES_MAX {
            complaints.push(format!("{}: {lines} lines, at most {FILE_LINES_MAX}", source.path));
        }
        for (line, text) in source.lines() {
            let chars = text.chars().count();
            if chars > LINE_CHARS_MAX {
                complaints
                    .push(format!("{}:{line}: {chars} characters, at most {LINE_CHARS_MAX}", source.path));
            }
        }
        for (name, line, lines) in functions(&source) {
            count += 1;
            if lines > FUNCTION_LINES_MAX {
                let path = &source.path;
                complaints
                    .push(format!("{path}:{line}: {name} has {lines} lines, at most {FUNCTION_LINES_MAX}"));
            }
        }
    }
    assert!(count > 1000, "only {count} functions were found");
    assert_none(&complaints);
}

#[test]
fn every_module_says_what_it_is() {
    let is_silent = |source: &Source| !source.text.starts_with("//! ");
    let silent = rust_sources().into_iter().filter(is_silent);
    assert_none(
        &silent.map(|source| format!("{}: does not begin with //!", source.path)).collect::<Vec<_>>(),
    );
}

/// True where a crate begins: a library, a program, an integration test, an example.
fn is_crate_root(path: &str) -> bool {
    let parts: Vec<&str> = path.rsplit('/').collect();
    match parts[..] {
        ["lib.rs" | "main.rs", "src", ..] | [_, "bin", "src", ..] | [_, "examples", ..] => true,
        ["main.rs", _, "tests", ref before @ ..] => !before.contains(&"src"),
        [_, "tests", ref before @ ..] => !before.contains(&"src"),
        _ => false,
    }
}

#[test]
fn unsafe_is_only_where_it_has_to_be() {
    let mut complaints = Vec::new();
    let mut used = BTreeSet::new();
    for source in rust_sources() {
        let is_listed = UNSAFE.contains(&source.path.as_str());
        let is_code = |line: &str| !line.trim_start().starts_with("//");
        let words = [concat!("unsafe", " {"), concat!("unsafe", " fn"), concat!("unsafe", " impl")];
        for (line, text) in source.lines().filter(|(_, text)| is_code(text)) {
            if words.iter().any(|word| text.contains(word)) {
                used.insert(source.path.clone());
                if !is_listed {
                    complaints.push(format!("{}:{line}: {}", source.path, text.trim()));
                }
            }
        }
        // The roots of these cannot: a forbid there would hold for the listed files too.
        // libFuzzer's macro needs it.
        let roots =
            ["reactor/src/lib.rs", "rdma/src/lib.rs", "tests/emulator/src/lib.rs", "nvme/pcie/src/lib.rs"];
        let is_exempt = roots.contains(&source.path.as_str()) || source.path.starts_with("tests/fuzz/");
        if is_crate_root(&source.path) && !is_exempt && !source.text.contains("#![forbid(unsafe_code)]") {
            complaints.push(format!("{}: a crate without #![forbid(unsafe_code)]", source.path));
        }
    }
    complaints.extend(UNSAFE.iter().filter(|path| !used.contains(**path)).map(|path| {
        format!("{path}: in UNSAFE of tests/tests/tidy.rs, but there is no such file or no unsafe in it")
    }));
    // Each block has its SAFETY comment: clippy sees to it in every crate.
    for source in sources().iter().filter(|source| source.path.ends_with("Cargo.toml")) {
        let is_root = source.path == "Cargo.toml";
        let wanted =
            if is_root { "undocumented_unsafe_blocks = \"deny\"" } else { "[lints]\nworkspace = true" };
        if !source.path.starts_with("tests/fuzz/") && !source.text.contains(wanted) {
            complaints.push(format!("{}: does not say {wanted:?}", source.path));
        }
    }
    assert_none(&complaints);
}

#[test]
fn nothing_is_left_out_left_over_or_slept_through() {
    let never = [
        concat!("#[ig", "nore"),
        concat!("todo", "!("),
        concat!("unimpl", "emented!("),
        concat!("dbg", "!("),
    ];
    let sleep = concat!("thread::", "sleep");
    let mut complaints = Vec::new();
    for source in rust_sources() {
        for (line, text) in source.lines() {
            let is_asleep = text.contains(sleep) && !SLEEPS.contains(&source.path.as_str());
            if is_asleep || never.iter().any(|word| text.contains(word)) {
                complaints.push(format!("{}:{line}: {}", source.path, text.trim()));
            }
        }
    }
    assert_none(&complaints);
}

/// The crates of others that a Cargo.toml names as dependencies, of any kind.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let mut is_inside = false;
    let mut found = BTreeSet::new();
    for line in manifest.lines() {
        if let Some(section) = line.strip_prefix('[') {
            is_inside = section.trim_end_matches(']').ends_with("dependencies");
        } else if is_inside && !line.starts_with('#') && !line.contains("path = ") {
            let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
            if !name.is_empty() && !name.starts_with("spindle-") && name != "nvme-spec" {
                found.insert(name.to_owned());
            }
        }
    }
    found
}

#[test]
fn every_dependency_has_its_reason() {
    let reasons = std::fs::read_to_string(root().join("docs/dependencies.md")).expect("the page");
    let table = reasons.lines().filter(|line| line.starts_with("| `"));
    let firsts = table.filter_map(|line| line.split('|').nth(1));
    let explained: BTreeSet<String> = firsts
        .flat_map(|cell| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>())
        .collect();
    let (mut declared, mut used) = (BTreeSet::new(), BTreeSet::new());
    for source in sources().iter().filter(|source| source.path.ends_with("Cargo.toml")) {
        let found = dependencies(&source.text);
        if source.path == "Cargo.toml" { &mut declared } else { &mut used }.extend(found);
    }
    assert!(used.len() > 10, "only {used:?} were found");
    assert_eq!(used.difference(&explained).collect::<Vec<_>>(), [""; 0], "no reason in docs/dependencies.md");
    assert_eq!(explained.difference(&used).collect::<Vec<_>>(), [""; 0], "in docs/dependencies.md, not used");
    assert_eq!(declared.difference(&used).collect::<Vec<_>>(), [""; 0], "in Cargo.toml, not used");
}

/// `scripts/crates` has the list of what a crate may use, and draws the picture of `docs/architecture.md`.
#[test]
fn crates_use_what_they_may_and_their_picture_is_true() {
    let output = std::process::Command::new(root().join("scripts/crates")).arg("--check").output();
    let output = output.expect("python3 is there");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// At the top: a folder for each part, and the pages that a reader looks for there.
const TOP: &[&str] = &[
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "app",
    "conf",
    "docs",
    "nvme",
    "rdma",
    "reactor",
    "rustfmt.toml",
    "scripts",
    "target",
    "tests",
];

#[test]
fn the_top_has_only_what_belongs_there_and_no_module_is_a_mod_rs() {
    let sources = sources();
    let is_dotted = |path: &str| path.starts_with('.');
    let tops: BTreeSet<&str> = sources
        .iter()
        .filter_map(|source| source.path.split('/').next())
        .filter(|top| !is_dotted(top))
        .collect();
    assert_eq!(tops, TOP.iter().copied().collect(), "the top of the repository");
    let named_mod = |source: &&Source| source.path.rsplit('/').next() == Some("mod.rs");
    assert_none(
        &sources
            .iter()
            .filter(named_mod)
            .map(|it| format!("{}: name it x.rs, beside x/", it.path))
            .collect::<Vec<_>>(),
    );
}

/// What a link of a page names: a path from the page's folder.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let ours = targets.filter(|target| !target.contains("://") && !target.starts_with('#'));
    ours.filter_map(|target| target.split('#').next())
}

#[test]
fn links_and_scripts_are_there() {
    let mut complaints = Vec::new();
    let mut count = 0;
    for source in sources() {
        if source.is("md") {
            let folder = root().join(&source.path).parent().expect("a folder").to_owned();
            for link in links(&source.text) {
                count += 1;
                if !folder.join(link).exists() {
                    complaints.push(format!("{}: link to {link}", source.path));
                }
            }
        }
        for rest in source.text.split("scripts/").skip(1) {
            let is_part = |letter: char| letter.is_ascii_alphanumeric() || "._-/".contains(letter);
            let name = rest.split(|letter| !is_part(letter)).next().unwrap_or_default().trim_end_matches('.');
            count += 1;
            if !root().join("scripts").join(name).exists() {
                complaints.push(format!("{}: scripts/{name}", source.path));
            }
        }
    }
    assert!(count > 20, "only {count} were found");
    assert_none(&complaints);
}

/// `a/{b,c}` as `a/b` and `a/c`.
fn expanded(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_owned()] };
    let (inside, after) = rest.split_once('}').unwrap_or((rest, ""));
    inside.split(',').flat_map(|part| expanded(&format!("{before}{part}{after}"))).collect()
}

#[test]
fn the_paths_in_pages_are_there() {
    // Of a file that the reader makes, or of several.
    let is_pattern =
        |path: &str| path.contains(['<', '*']) || path.contains("KIND") || path.contains("name.sh");
    let mut complaints = Vec::new();
    let mut count = 0;
    for source in sources().iter().filter(|source| source.is("md") && source.path != "CHANGELOG.md") {
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || "._-/{},*<>".contains(letter);
        for (line, text) in source.lines() {
            let words = text.split(|letter| !is_part(letter)).map(|word| word.trim_matches(['.', ',']));
            let is_path = |word: &&str| word.split_once('/').is_some_and(|(top, _)| TOP.contains(&top));
            for path in words.filter(is_path).filter(|word| !is_pattern(word)).flat_map(expanded) {
                count += 1;
                if !root().join(path.trim_end_matches(['/', ','])).exists() {
                    complaints.push(format!("{}:{line}: no {path}", source.path));
                }
            }
        }
    }
    assert!(count > 200, "only {count} were found");
    assert_none(&complaints);
}

/// What README's table "What it does" may call missing, and a word in the names of keys, sections and methods
/// that it would have.
const MISSING: &[(&str, &str)] = &[
    ("ANA states", "ana"),
    ("DH-HMAC-CHAP and any other authentication", "dhchap"),
    ("Prometheus metrics", "metrics"),
    ("RAID", "raid"),
    ("RDMA reads of a cache", "optimistic"),
    ("TLS", "tls"),
    ("a block cache", "cache"),
    ("a cooperative cache", "cooperative"),
    ("authentication", "dhchap"),
    ("cache", "cache"),
    ("iWARP and InfiniBand are untried", "iwarp"),
    ("metadata", "metadata"),
    ("multipath between drives", "multipath"),
    ("multipath", "multipath"),
    ("namespace management", "management"),
    ("packages", "package"),
    ("persistence: they are lost with the process", "persist"),
    ("reservations", "reservation"),
    ("snapshots", "snapshot"),
    ("write-back", "back"),
    ("zoned namespaces", "zoned"),
];

/// Sections, keys and methods by the references at the end of two pages, which other tests compare with the
/// program.
fn names_of_the_program() -> Vec<String> {
    let mut names = Vec::new();
    for page in ["docs/configuration.md", "docs/control.md"] {
        let text = std::fs::read_to_string(root().join(page)).expect("a page");
        let first = |line: &str| {
            let rest = line.strip_prefix("| `").or_else(|| line.strip_prefix("### `["))?;
            rest.split('`').next().map(|name| name.trim_matches(['[', ']']).to_owned())
        };
        let before = names.len();
        names.extend(text.lines().filter_map(first));
        assert!(names.len() > before + 40, "{page}: the reference is there");
    }
    names
}

#[test]
fn what_the_readme_calls_missing_is_not_there() {
    let readme = std::fs::read_to_string(root().join("README.md")).expect("a page");
    let table = readme.lines().skip_while(|line| !line.starts_with("| part |")).skip(2);
    let rows: Vec<Vec<&str>> =
        table.take_while(|line| line.starts_with('|')).map(|line| line.split('|').collect()).collect();
    assert!(rows.len() > 5 && rows.iter().all(|row| row.len() == 6), "{rows:?}");
    let names = names_of_the_program();
    let mut complaints = Vec::new();
    for item in rows.iter().flat_map(|row| row[4].split(", ")).map(str::trim).filter(|it| !it.is_empty()) {
        let Some((_, word)) = MISSING.iter().find(|(missing, _)| *missing == item) else {
            complaints
                .push(format!("README.md: {item:?} is missing: put the word of its names into MISSING"));
            continue;
        };
        let has_word = |name: &&String| name.split(['.', '_']).any(|part| part == *word);
        let found = names.iter().find(has_word);
        complaints.extend(found.map(|name| format!("README.md: {item:?} is missing, and there is {name}")));
    }
    assert_none(&complaints);
}

/// Otherwise a fault is planted nowhere, which is seen only when it is drawn.
#[test]
fn the_code_of_each_planted_fault_is_there_once() {
    let output = std::process::Command::new(root().join("scripts/planted")).arg("--check").output();
    let output = output.expect("python3 is there");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// `scripts/lab/power-cut-planted` applies it to a copy of the tree.
#[test]
fn the_patch_of_the_power_cuts_applies() {
    let command = &mut std::process::Command::new("git");
    let output = command.args(["apply", "--check", "tests/lab/planted.patch"]).current_dir(root()).output();
    let output = output.expect("git is there");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn no_file_knows_the_machine_it_was_made_on() {
    // In the guest of the lab this is a folder of its own.
    const GUEST: &str = "scripts/lab/guest-init";
    let paths =
        [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/tmp/", "wt-")];
    let hosts = [concat!("crates", ".io"), concat!("debian", ".org"), concat!("rustup", ".rs")];
    let mut complaints = Vec::new();
    // Cargo writes into its own file where it took a crate from.
    for source in sources().iter().filter(|source| source.path != "Cargo.lock") {
        for (line, text) in source.lines() {
            let is_path = |path: &str| {
                let is_begin =
                    |at: usize| !text[..at].ends_with(|letter: char| letter.is_ascii_alphanumeric());
                text.match_indices(path).any(|(at, _)| is_begin(at))
            };
            let has_path = source.path != GUEST && paths.iter().any(|path| is_path(path));
            if has_path || hosts.iter().any(|host| text.contains(host)) {
                complaints.push(format!("{}:{line}: {}", source.path, text.trim()));
            }
        }
    }
    assert_none(&complaints);
}

/// In the lab nothing need be skipped: there every test runs that may leave something out elsewhere.
#[test]
fn what_may_be_skipped_runs_in_the_lab() {
    const CASE: &str = "tests/lab/cases/tests-that-skip.sh";
    let sources = sources();
    let case = sources.iter().find(|source| source.path == CASE).expect("the case");
    let words: Vec<&str> = case.text.split([' ', '\n']).collect();
    let mut complaints = Vec::new();
    let mut count = 0;
    for source in sources.iter().filter(|source| source.is("rs") && !source.path.starts_with("tests/skip/")) {
        let tests = functions(source);
        for (line, _) in
            source.lines().filter(|(_, text)| text.contains(concat!("spindle_tests_skip", "::skip(")))
        {
            let inside = |first: usize, lines: usize| (first..first + lines).contains(&line);
            let Some((test, ..)) = tests.iter().find(|(_, first, lines)| inside(*first, *lines)) else {
                complaints.push(format!("{}:{line}: in no function", source.path));
                continue;
            };
            count += 1;
            if !words.iter().any(|word| word.rsplit("::").next() == Some(test)) {
                complaints.push(format!("{}:{line}: {test} is not in {CASE}", source.path));
            }
        }
    }
    assert!(count > 8, "only {count} were found");
    assert_none(&complaints);
}

/// The parts of a path, of a file or of a test, that name a module.
fn modules<'a>(parts: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    parts.filter(|part| !["nvme", "src", "tests", "mod", "lib", "main"].contains(part)).collect()
}

/// A test in `source` of this name, which is the last part of `crate::path::name`.
fn has_test(source: &Source, test: &str) -> bool {
    let Some((path, name)) = test.rsplit_once("::") else { return false };
    let Some(file) = source.path.strip_suffix(".rs") else { return false };
    modules(file.split('/')) == modules(path.split("::"))
        && source.text.split(&format!("fn {name}(")).next().is_some_and(|before| {
            before.len() < source.text.len()
                && before.trim_end().lines().rev().take(3).any(|line| line.trim() == "#[test]")
        })
}

#[test]
fn every_test_of_the_checklist_is_there() {
    let page = std::fs::read_to_string(root().join("docs/checklist.md")).expect("the page");
    let sources = rust_sources();
    let mut complaints = Vec::new();
    let mut count = 0;
    for row in page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("|---")) {
        let cell = row.split('|').nth(2).unwrap_or_default();
        if ["tests", ""].contains(&cell.trim()) {
            continue;
        }
        let tests: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
        if tests.is_empty() {
            complaints.push(format!("no test: {row}"));
        }
        for test in tests {
            count += 1;
            let is_there = match test.strip_prefix("lab ") {
                Some(case) => root().join(format!("tests/lab/cases/{case}.sh")).exists(),
                None => sources.iter().any(|source| has_test(source, test)),
            };
            if !is_there {
                complaints.push(format!("no such test: {test}"));
            }
        }
    }
    assert!(count > 100, "only {count} tests are named");
    assert_none(&complaints);
}
