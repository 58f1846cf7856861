//! The files in `/etc` that repeat a bind at boot and at hot-plug (`--persist`).
//!
//! ```text
//!   /etc/udev/rules.d/90-spindle-nvme-0000:01:00.0.rules   runs `spindle nvme bind` when the drive appears
//!   /etc/modules-load.d/spindle-nvme.conf                  loads vfio-pci at boot
//!   /etc/sysctl.d/90-spindle-nvme.conf                     huge pages at boot
//!   /etc/tmpfiles.d/spindle-nvme.conf                      the same per node, with several NUMA nodes
//! ```
//!
//! Debian's initramfs loads `nvme` before the rule exists, so at boot the kernel's driver is bound when udev
//! reports the drive again. By then the address may belong to another drive, even the root disk, because
//! added cards change bus numbers. So the rule does not write to sysfs itself. It runs this program, which
//! checks again for uses of the drive. It also compares the serial number with the rule's, if that has one.

use std::collections::BTreeMap;

use spindle_nvme_pcie::PciAddress;

use super::change::Step;
use super::drive::Drive;
use super::root::Root;
use crate::text::printable;

const RULES: &str = "/etc/udev/rules.d";
const RULE_PREFIX: &str = "90-spindle-nvme-";
const RULE_SUFFIX: &str = ".rules";
const MODULES: &str = "/etc/modules-load.d/spindle-nvme.conf";
const SYSCTL: &str = "/etc/sysctl.d/90-spindle-nvme.conf";
const TMPFILES: &str = "/etc/tmpfiles.d/spindle-nvme.conf";
/// First text of each file. [`remove_steps`] removes a shared file only if the file begins with this text.
const HEADER: &str = "# Made by `spindle nvme bind --persist`";
const SERIAL_PREFIX: &str = "# serial: ";

/// The refusal's text for a path that is not valid in a udev rule.
pub const PROGRAM_ALLOWED: &str = "must be an absolute path of letters, digits and any of / . _ + -, to be \
     run by a udev rule: install the program first, as docs/operating.md says";

/// Returns the path of the udev rule of a drive.
pub fn rule_path(address: &PciAddress) -> String {
    format!("{RULES}/{RULE_PREFIX}{address}{RULE_SUFFIX}")
}

/// Whether the drive has a rule.
pub fn is_persistent(root: &Root, address: &PciAddress) -> bool {
    root.has(&rule_path(address))
}

/// Returns the serial number in the rule of a drive; `None`: no rule, or a rule without a serial number.
pub fn serial(root: &Root, address: &PciAddress) -> Option<String> {
    let text = root.text(&rule_path(address))?;
    text.lines().find_map(|line| line.strip_prefix(SERIAL_PREFIX)).map(str::to_owned)
}

/// Whether a udev rule can run the program: udev splits at blanks and substitutes `%` and `$`.
pub fn is_valid_program(program: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "/._+-".contains(letter);
    program.starts_with('/') && program.chars().all(is_plain)
}

/// Returns the steps that write the drive's rule and the list of modules, if they are missing or differ.
/// `serial` is the number that the kernel's driver reports. With `None` (vfio-pci is bound), an existing rule
/// keeps its serial number.
pub fn rule_steps(root: &Root, address: &PciAddress, serial: Option<&str>, program: &str) -> Vec<Step> {
    let known = serial.map(printable).or_else(|| self::serial(root, address));
    let mut rule = format!("{HEADER}; `spindle nvme unbind {address}` removes it.\n");
    if let Some(serial) = known {
        rule.push_str(&format!("{SERIAL_PREFIX}{serial}\n"));
    }
    rule.push_str(&format!(
        "ACTION==\"add\", SUBSYSTEM==\"pci\", KERNEL==\"{address}\", RUN+=\"{program} nvme bind --from-rule \
         {address}\"\n"
    ));
    let modules = format!("{HEADER}.\nvfio-pci\n");
    [(rule_path(address), rule), (MODULES.to_owned(), modules)]
        .into_iter()
        .filter(|(path, text)| root.text(path).as_ref() != Some(text))
        .map(|(path, text)| Step::Make { path, text })
        .collect()
}

/// Returns the step that writes the file which reserves huge pages at boot; `None`: the file already has this
/// content. `files` are those of [`plan_pages`], each with its wanted count of pages.
pub fn page_step(root: &Root, files: &[(String, u64)]) -> Option<Step> {
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
    let text = format!("{HEADER} --huge-pages.\n{lines}");
    (root.text(path).as_ref() != Some(&text)).then(|| Step::Make { path: path.to_owned(), text })
}

/// Returns the steps that remove the rules of the drives, and with the last rule also the shared files.
pub fn remove_steps(root: &Root, addresses: &[PciAddress]) -> Vec<Step> {
    let paths: Vec<String> = addresses.iter().map(rule_path).filter(|path| root.has(path)).collect();
    if paths.is_empty() {
        return Vec::new();
    }
    let is_rule = |name: &String| name.starts_with(RULE_PREFIX) && name.ends_with(RULE_SUFFIX);
    let rules = root.names(RULES).into_iter().filter(is_rule).map(|name| format!("{RULES}/{name}"));
    let is_last = rules.filter(|rule| !paths.contains(rule)).count() == 0;
    let shared = [MODULES, SYSCTL, TMPFILES]
        .into_iter()
        .filter(|path| is_last && root.text(path).is_some_and(|text| text.starts_with(HEADER)));
    let shared: Vec<String> = shared.map(str::to_owned).collect();
    paths.into_iter().chain(shared).map(|path| Step::Remove { path }).collect()
}

/// The file with the count of reserved huge pages of 2 MiB of the whole machine.
const MACHINE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// Returns the file with the count of reserved huge pages of a NUMA node; that of the machine if `node` is
/// `None` or has no such file.
fn pages_file(root: &Root, node: Option<u64>) -> String {
    let of_node = node
        .map(|node| format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages"));
    of_node.filter(|path| root.has(path)).unwrap_or_else(|| MACHINE_PAGES.to_owned())
}

/// Returns `NUMA node 0` or `the machine`, for messages.
pub fn node_name(file: &str) -> String {
    let node = file.split('/').find_map(|part| part.strip_prefix("node").filter(|number| !number.is_empty()));
    node.map_or_else(|| "the machine".to_owned(), |node| format!("NUMA node {node}"))
}

/// Returns, for the NUMA node of each drive, the file with the count of reserved huge pages, that count, and
/// the count to reserve. The latter is the larger of the present count and `wanted`.
///
/// # Errors
/// The path of a file that cannot be read: the kernel has no huge pages of 2 MiB.
pub fn plan_pages(
    root: &Root,
    drives: &[&Drive],
    wanted: u64,
) -> Result<BTreeMap<String, (u64, u64)>, String> {
    let mut plan = BTreeMap::new();
    for drive in drives {
        let file = pages_file(root, drive.node);
        let Some(has) = root.number(&file) else { return Err(file) };
        plan.insert(file, (has, has.max(wanted)));
    }
    Ok(plan)
}
