//! What makes a bind outlive a reboot and a hot-plug: files in `/etc`.
//!
//! ```text
//!   /etc/udev/rules.d/90-spindle-nvme-0000:01:00.0.rules   a drive: runs `spindle nvme bind` when it appears
//!   /etc/modules-load.d/spindle-nvme.conf                  vfio-pci, at boot
//!   /etc/sysctl.d/90-spindle-nvme.conf                     huge pages; with several NUMA nodes instead
//!   /etc/tmpfiles.d/spindle-nvme.conf                      those of each node
//! ```
//!
//! Debian's initramfs loads `nvme` before the rule exists, so that at boot the drive is with the kernel when
//! udev reports it again. An address alone may by then mean another drive, the root disk among them: cards
//! that are added change the numbers of buses. So the rule does not write into sysfs by itself. It runs this
//! program, which looks again at who uses the drive, and at its serial number.

use std::collections::BTreeMap;

use spindle_nvme_pcie::PciAddress;

use super::change::Step;
use super::drive::Drive;
use super::root::Root;
use crate::text::printable;

const RULES: &str = "/etc/udev/rules.d";
const RULE_BEGIN: &str = "90-spindle-nvme-";
const RULE_END: &str = ".rules";
const MODULES: &str = "/etc/modules-load.d/spindle-nvme.conf";
const SYSCTL: &str = "/etc/sysctl.d/90-spindle-nvme.conf";
const TMPFILES: &str = "/etc/tmpfiles.d/spindle-nvme.conf";
/// How each of them begins.
const MARK: &str = "# Made by `spindle nvme bind --persist`";
const SERIAL: &str = "# serial: ";

/// Why this program cannot stand in a rule.
pub const PROGRAM_ALLOWED: &str = "must be an absolute path of letters, digits and any of / . _ + -, to be \
     run by a udev rule: install the program first, as docs/operating.md says";

/// The rule of a drive.
pub fn rule_path(address: &PciAddress) -> String {
    format!("{RULES}/{RULE_BEGIN}{address}{RULE_END}")
}

/// Whether a drive has one.
pub fn is_persistent(root: &Root, address: &PciAddress) -> bool {
    root.has(&rule_path(address))
}

/// The serial number that the rule of a drive was made for.
pub fn serial(root: &Root, address: &PciAddress) -> Option<String> {
    let text = root.text(&rule_path(address))?;
    text.lines().find_map(|line| line.strip_prefix(SERIAL)).map(str::to_owned)
}

/// True when a rule can run it: udev splits at blanks and replaces `%` and `$`.
pub fn may_run(program: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "/._+-".contains(letter);
    program.starts_with('/') && program.chars().all(is_plain)
}

/// The steps that are missing to keep a drive bound. `serial` is what the kernel says now; a rule that is
/// there keeps its own, since a drive that is bound already does not tell.
pub fn keep(root: &Root, address: &PciAddress, serial: Option<&str>, program: &str) -> Vec<Step> {
    let known = serial.map(printable).or_else(|| self::serial(root, address));
    let mut rule = format!("{MARK}; `spindle nvme unbind {address}` removes it.\n");
    if let Some(serial) = known {
        rule.push_str(&format!("{SERIAL}{serial}\n"));
    }
    rule.push_str(&format!(
        "ACTION==\"add\", SUBSYSTEM==\"pci\", KERNEL==\"{address}\", RUN+=\"{program} nvme bind --from-rule \
         {address}\"\n"
    ));
    let modules = format!("{MARK}.\nvfio-pci\n");
    [(rule_path(address), rule), (MODULES.to_owned(), modules)]
        .into_iter()
        .filter(|(path, text)| root.text(path).as_ref() != Some(text))
        .map(|(path, text)| Step::Make { path, text })
        .collect()
}

/// The step that reserves huge pages at boot, if it is missing: `files` are those of [`plan_pages`] with
/// the pages that each is to have.
pub fn keep_pages(root: &Root, files: &[(String, u64)]) -> Option<Step> {
    let is_of_a_node = files.iter().any(|(path, _)| path.contains("/node/"));
    let several_nodes = root.has("/sys/devices/system/node/node1");
    let (path, lines) = if is_of_a_node && several_nodes {
        let lines: Vec<String> =
            files.iter().map(|(path, pages)| format!("w {path} - - - - {pages}\n")).collect();
        (TMPFILES, lines.concat())
    } else {
        let pages = files.iter().fold(0_u64, |sum, (_, pages)| sum.saturating_add(*pages));
        (SYSCTL, format!("vm.nr_hugepages = {pages}\n"))
    };
    let text = format!("{MARK} --huge-pages.\n{lines}");
    (root.text(path).as_ref() != Some(&text)).then(|| Step::Make { path: path.to_owned(), text })
}

/// The steps that forget a drive; with the last one also what was for all of them.
pub fn forget(root: &Root, addresses: &[PciAddress]) -> Vec<Step> {
    let paths: Vec<String> = addresses.iter().map(rule_path).filter(|path| root.has(path)).collect();
    if paths.is_empty() {
        return Vec::new();
    }
    let is_rule = |name: &String| name.starts_with(RULE_BEGIN) && name.ends_with(RULE_END);
    let rules = root.names(RULES).into_iter().filter(is_rule).map(|name| format!("{RULES}/{name}"));
    let is_last = rules.filter(|rule| !paths.contains(rule)).count() == 0;
    let shared = [MODULES, SYSCTL, TMPFILES]
        .into_iter()
        .filter(|path| is_last && root.text(path).is_some_and(|text| text.starts_with(MARK)));
    let shared: Vec<String> = shared.map(str::to_owned).collect();
    paths.into_iter().chain(shared).map(|path| Step::Remove { path }).collect()
}

/// Where huge pages of 2 MiB are reserved on a machine without NUMA nodes.
const MACHINE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// The file that says how many pages are reserved for a drive's memory.
fn file(root: &Root, node: Option<u64>) -> String {
    let of_node = node
        .map(|node| format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages"));
    of_node.filter(|path| root.has(path)).unwrap_or_else(|| MACHINE.to_owned())
}

/// What people call it.
pub fn place(file: &str) -> String {
    let node = file.split('/').find_map(|part| part.strip_prefix("node").filter(|number| !number.is_empty()));
    node.map_or_else(|| "the machine".to_owned(), |node| format!("NUMA node {node}"))
}

/// The files of these drives, each with the pages that it has and those that it is to have: no fewer than
/// `wanted`, and none is taken away.
///
/// # Errors
/// The path of the file that is missing, where the kernel has no such pages.
pub fn plan_pages(
    root: &Root,
    drives: &[&Drive],
    wanted: u64,
) -> Result<BTreeMap<String, (u64, u64)>, String> {
    let mut plan = BTreeMap::new();
    for drive in drives {
        let file = file(root, drive.node);
        let Some(has) = root.number(&file) else { return Err(file) };
        plan.insert(file, (has, has.max(wanted)));
    }
    Ok(plan)
}
