//! The command line of `spindle`: subcommands, options and defaults. Other modules implement the subcommands.

mod ctl;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use spindle_app_bench::BenchArgs;
use spindle_app_bench::console::at_least_one;
use spindle_nvme_pcie::{PciAddress, PciAddressError};

use crate::serve::control::SOCKET;

pub use ctl::{
    CtlArgs, CtlCommand, DiskVerb, Endpoint, HostVerb, ListenerVerb, MemoryDisk, NamespaceVerb, NewDisk,
    SubsystemVerb, Switch, Verb,
};

/// Spindle: a polled-mode NVMe-oF storage target.
#[derive(Debug, Parser)]
#[command(name = "spindle", version, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
#[expect(clippy::large_enum_variant, reason = "one value for the life of the process")]
pub enum Command {
    /// Serve disks; without a configuration one RAM disk of 1 GiB on 127.0.0.1:4420
    Serve(ServeArgs),
    /// Check a configuration and print what it serves and the memory that it needs
    Check(CheckArgs),
    /// Print cores, traffic and connected hosts of a target on this machine
    Status(StatusArgs),
    /// Query or change a running target on this machine through its control socket
    Ctl(CtlArgs),
    /// Print the discovery log of a target
    Discover(DiscoverArgs),
    /// List NVMe drives, bind them to vfio-pci, return them to the kernel
    Nvme(NvmeArgs),
    /// Measure a target or a local disk (`bench disk`)
    Bench(BenchArgs),
    /// Print completions for a shell
    Completions(CompletionsArgs),
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Configuration file; without it the built-in default is served
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Do not write changes of the control socket to the file; they are lost at the end of the process
    #[arg(long)]
    pub ephemeral: bool,
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Configuration file to check
    #[arg(value_name = "FILE", required_unless_present = "reference")]
    pub config: Option<PathBuf>,
    /// Also print what a reload would change in a target that serves the file RUNNING
    #[arg(long, value_name = "RUNNING", requires = "config")]
    pub against: Option<PathBuf>,
    /// Print every key with its default, allowed values and description, as Markdown
    #[arg(long, conflicts_with = "config")]
    pub reference: bool,
}

#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Control socket of the target (control.socket in its configuration)
    #[arg(value_name = "SOCKET", default_value = SOCKET)]
    pub socket: PathBuf,
    /// Print one JSON object with totals since the start instead of text
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell that reads the completions
    #[arg(value_enum)]
    pub shell: Shell,
}

#[derive(Debug, Args)]
pub struct DiscoverArgs {
    /// The target, as HOST or HOST:PORT; without a port 8009 is tried, then 4420. rdma:HOST or
    /// rdma:HOST:PORT asks over RDMA
    pub address: String,
    /// Host NQN; by default that of this machine
    #[arg(long, value_name = "NQN")]
    pub hostnqn: Option<String>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct NvmeArgs {
    #[command(subcommand)]
    pub command: NvmeCommand,
}

#[derive(Debug, Subcommand)]
pub enum NvmeCommand {
    /// List the NVMe drives on the PCI bus with driver, IOMMU group and users
    List(NvmeListArgs),
    /// Move drives from the kernel's driver to vfio-pci; a drive in use is refused
    Bind(NvmeBindArgs),
    /// Return drives to the kernel's driver and undo `bind --persist`
    Unbind(NvmeUnbindArgs),
}

#[derive(Debug, Args)]
pub struct NvmeListArgs {
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct NvmeBindArgs {
    /// PCI addresses of the drives, as `spindle nvme list` shows them
    #[arg(value_name = "ADDRESS", required = true, value_parser = pci_address)]
    pub addresses: Vec<PciAddress>,
    /// Also bind after a reboot and at hot-plug: installs a udev rule
    #[arg(long)]
    pub persist: bool,
    /// Reserve at least N huge pages of 2 MiB on the NUMA node of each drive; with --persist at boot too
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=HUGE_PAGES_MAX))]
    pub huge_pages: Option<u64>,
    /// Also bind a drive on which a file system, a volume or a partition table is found that is not in use
    #[arg(long)]
    pub force: bool,
    /// Only print the changes, as shell commands
    #[arg(long)]
    pub dry_run: bool,
    /// Set by the udev rule of `--persist`: binds only the drive for which the rule was made
    #[arg(long, hide = true, conflicts_with_all = ["persist", "huge_pages"])]
    pub from_rule: bool,
}

#[derive(Debug, Args)]
pub struct NvmeUnbindArgs {
    /// PCI addresses of the drives, as `spindle nvme list` shows them
    #[arg(value_name = "ADDRESS", required = true, value_parser = pci_address)]
    pub addresses: Vec<PciAddress>,
    /// Only print the changes, as shell commands
    #[arg(long)]
    pub dry_run: bool,
}

/// Most huge pages of 2 MiB: 2 TiB.
const HUGE_PAGES_MAX: u64 = 1 << 20;

/// Parses `0000:01:00.0`, or `01:00.0` for domain 0 as lspci prints it.
fn pci_address(text: &str) -> Result<PciAddress, String> {
    let is_short = text.bytes().filter(|letter| *letter == b':').count() == 1;
    let parsed = if is_short { format!("0000:{text}").parse() } else { text.parse() };
    parsed.map_err(|error: PciAddressError| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(text.split_whitespace()).map(|cli| cli.command)
    }

    fn refusal(text: &str) -> String {
        parse(text).expect_err(text).to_string()
    }

    #[test]
    fn the_definition_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn every_refusal_names_the_option_the_value_and_what_is_allowed() {
        for (text, parts) in [
            ("spindle nvme bind nvme0", ["ADDRESS", "\"nvme0\"", "0000:01:00.0"]),
            ("spindle nvme bind 01:00.0 --huge-pages 0", ["--huge-pages", "0", "1..=1048576"]),
        ] {
            let message = refusal(text);
            for part in parts {
                assert!(message.contains(part), "{part} in: {message}");
            }
        }
    }

    #[test]
    fn serve_needs_no_configuration_and_check_does() {
        assert!(matches!(
            parse("spindle serve"),
            Ok(Command::Serve(ServeArgs { config: None, ephemeral: false }))
        ));
        assert!(matches!(
            parse("spindle serve -c a.toml"),
            Ok(Command::Serve(ServeArgs { config: Some(_), ephemeral: false }))
        ));
        assert!(refusal("spindle check").contains("FILE"));
    }
}
