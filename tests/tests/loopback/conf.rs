//! The configurations of `conf/`: `spindle check` accepts each of them, and refuses a drive that is absent.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use spindle_reactor::affinity::available_cores;
use spindle_tests::loopback::{Folder, binary};

/// Files that are at least in the folder: a test of an empty folder shows nothing.
const FILES_MIN: usize = 6;
/// The device of `conf/cached-disk.toml`.
const DEVICE: &str = "path = \"/dev/disk/by-id/nvme-example\"";
/// The drive of `conf/drive-rdma.toml`.
const DRIVE: &str = "nvme = \"0000:01:00.0\"";
/// A PCI address that no machine of ours has.
const ABSENT: &str = "nvme = \"ffff:ff:1f.7\"";

/// The configurations, in the order of their names.
fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conf");
    let entries = std::fs::read_dir(folder).expect("the folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut files: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "toml")).collect();
    files.sort();
    files
}

fn check(file: &Path) -> Output {
    Command::new(binary()).arg("check").arg(file).stdin(Stdio::null()).output().expect("spindle starts")
}

/// The text with what this machine may lack replaced: the device by a file, the drive by a null disk, a core
/// by one that it has.
fn for_this_machine(text: &str) -> String {
    let cores = available_cores();
    let line = |line: &str| match line.strip_prefix("cores = [").and_then(|rest| rest.strip_suffix(']')) {
        _ if line == DEVICE => {
            let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("device.img");
            let file = std::fs::File::create(&path).expect("a file");
            file.set_len(64 << 20).expect("its size");
            format!("path = {path:?}\n")
        }
        _ if line == DRIVE => "kind = \"null\"\nsize = \"1GiB\"\n".to_owned(),
        Some(core) if !core.parse().is_ok_and(|core: usize| cores.contains(&core)) => {
            format!("cores = [{}]\n", cores[0])
        }
        _ => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

#[test]
fn every_configuration_is_valid() {
    let files = files();
    assert!(files.len() >= FILES_MIN, "only {files:?} were found");
    let folder = Folder::new("conf");
    let mut as_shipped = 0;
    for file in &files {
        let text = std::fs::read_to_string(file).expect("its text");
        let text_here = for_this_machine(&text);
        as_shipped += usize::from(text_here == text);
        let output = if text_here == text { check(file) } else { check(&folder.write(&text_here)) };
        let said = String::from_utf8_lossy(&output.stdout);
        let wrong = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(0) && wrong.is_empty(), "{}:\n{wrong}", file.display());
        assert!(said.contains(" is valid.\n") && said.contains("\nWhat hosts type\n"), "{said}");
    }
    assert!(as_shipped > 0, "none was checked as it is shipped");
}

#[test]
fn an_absent_drive_is_the_only_complaint() {
    let drives = files().into_iter().filter_map(|file| {
        let text = std::fs::read_to_string(file).expect("its text");
        text.lines().any(|line| line == DRIVE).then_some(text)
    });
    let folder = Folder::new("conf-drive");
    let mut count = 0;
    for text in drives {
        count += 1;
        let file = folder.write(&text.replace(DRIVE, ABSENT));
        let line = 1 + text.lines().position(|line| line == DRIVE).expect("the drive");
        let output = check(&file);
        assert_eq!(output.status.code(), Some(1));
        let wanted = format!(
            "spindle: {}:{line}: disk[0].{ABSENT}: must be a drive of this machine: there is no such PCI \
             function; spindle nvme list shows the drives\n",
            file.display()
        );
        assert_eq!(String::from_utf8_lossy(&output.stderr), wanted);
    }
    assert!(count > 0, "no configuration has a drive");
}
