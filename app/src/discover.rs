//! `spindle discover ADDRESS`: prints the discovery log of a target.

use std::net::SocketAddr;

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use serde_json::{Value, json};
use spindle_nvme_initiator::nvme_spec::log::{DiscoveryLogEntry, SubsystemType};
use spindle_nvme_initiator::nvme_spec::nqn::{Nqn, NqnError};
use spindle_nvme_initiator::{
    AddressError, DISCOVERY_PORT, DiscoveryLog, Error, Host, NVME_RDMA_PORT, NVME_TCP_PORT, Options,
    TransportKind, discover, resolve, split_transport,
};

use crate::cli::DiscoverArgs;
use spindle_app_bench::say;

/// Why no discovery log can be printed.
#[derive(Debug, thiserror::Error)]
pub enum DiscoverError {
    #[error(transparent)]
    Address(#[from] AddressError),
    #[error("--hostnqn = `{0}`: {1}")]
    Host(String, #[source] NqnError),
    #[error("no target listens at {0}")]
    Unreachable(String),
    #[error(transparent)]
    Target(#[from] Error),
}

pub fn run(args: &DiscoverArgs) -> Result<(), DiscoverError> {
    let host = match &args.hostnqn {
        Some(nqn) => {
            Host::from_nqn(Nqn::new(nqn).map_err(|source| DiscoverError::Host(nqn.clone(), source))?)
        }
        None => Host::of_this_machine(),
    };
    let (address, log) = fetch_log(&args.address, &host)?;
    if args.json {
        say!("{}", to_json(address, &log));
    } else {
        say!("{address}: {} entries, generation {}", log.entries.len(), log.generation);
        say!("{}", to_table(&log));
    }
    Ok(())
}

/// Reads the discovery log from the first address that accepts a connection. If `text` has no port, TCP tries
/// 8009 (discovery) and then 4420 (NVMe/TCP), a port at which targets also serve discovery. RDMA uses 4420.
fn fetch_log(text: &str, host: &Host) -> Result<(SocketAddr, DiscoveryLog), DiscoverError> {
    let (transport, text) = split_transport(text);
    let ports: &[u16] = match transport {
        TransportKind::Tcp => &[DISCOVERY_PORT, NVME_TCP_PORT],
        TransportKind::Rdma => &[NVME_RDMA_PORT],
    };
    let mut addresses = Vec::new();
    for port in ports {
        for address in resolve(text, *port)? {
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
    }
    let mut tried = Vec::new();
    for address in addresses {
        match discover(transport, address, host, &Options::default()) {
            Ok(log) => return Ok((address, log)),
            Err(error @ Error::Connect { .. }) => tried.push(error.to_string()),
            Err(error) => return Err(error.into()),
        }
    }
    Err(DiscoverError::Unreachable(format!("{text}: {}", tried.join("; "))))
}

/// Returns the subsystem type (SUBTYPE) of an entry in one word.
fn kind(entry: &DiscoveryLogEntry) -> String {
    match entry.subtype {
        SubsystemType::NVM => "nvm".to_owned(),
        SubsystemType::REFERRAL => "referral".to_owned(),
        SubsystemType::CURRENT_DISCOVERY => "discovery".to_owned(),
        other => other.to_string(),
    }
}

/// Returns the entry's SUBNQN, or in parentheses the reason why it is invalid.
fn nqn(entry: &DiscoveryLogEntry) -> String {
    entry.subnqn().map_or_else(|error| format!("({error})"), |nqn| nqn.to_string())
}

fn to_table(log: &DiscoveryLog) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header(["kind", "transport", "address", "port", "subsystem", "port id"]);
    for entry in &log.entries {
        table.add_row([
            kind(entry),
            entry.trtype.to_string().to_lowercase(),
            crate::text::printable(entry.traddr()),
            crate::text::printable(entry.trsvcid()),
            nqn(entry),
            entry.portid.get().to_string(),
        ]);
    }
    table
}

fn to_json(address: SocketAddr, log: &DiscoveryLog) -> Value {
    let entries: Vec<Value> = log
        .entries
        .iter()
        .map(|entry| {
            json!({
                "kind": kind(entry),
                "transport": entry.trtype.to_string().to_lowercase(),
                "family": entry.adrfam.to_string().to_lowercase(),
                "address": entry.traddr(),
                "port": entry.trsvcid(),
                "subnqn": nqn(entry),
                "port_id": entry.portid.get(),
                "cntlid": entry.cntlid.get(),
                "admin_queue_entries": entry.asqsz.get(),
                "sq_flow_control_can_be_off": entry.treq().sq_flow_control_disable(),
            })
        })
        .collect();
    json!({ "address": address.to_string(), "generation": log.generation, "entries": entries })
}

#[cfg(test)]
mod tests {
    use spindle_nvme_initiator::nvme_spec::Nqn;
    use spindle_nvme_initiator::nvme_spec::log::{AddressFamily, TransportType};
    use spindle_nvme_initiator::nvme_spec::nqn::padded_ascii;

    use super::*;

    fn log() -> DiscoveryLog {
        let entry = DiscoveryLogEntry {
            trtype: TransportType::TCP,
            adrfam: AddressFamily::IPV6,
            subtype: SubsystemType::NVM,
            trsvcid: padded_ascii("4420"),
            traddr: padded_ascii("fe80::1"),
            subnqn: Nqn::new("nqn.2026-01.io.spindle:default").expect("a name").to_field(),
            ..DiscoveryLogEntry::default()
        };
        let mut broken = entry;
        broken.subnqn = [0xff; 256];
        broken.traddr[0] = 0x1b;
        broken.subtype = SubsystemType(9);
        DiscoveryLog { generation: 7, entries: vec![entry, broken] }
    }

    #[test]
    fn the_log_is_a_table_and_a_json_object() {
        let table = to_table(&log()).to_string();
        for part in ["nvm", "tcp", "fe80::1", "4420", "nqn.2026-01.io.spindle:default"] {
            assert!(table.contains(part), "{part} in\n{table}");
        }
        let object = to_json("127.0.0.1:4420".parse().expect("an address"), &log());
        assert_eq!(object["generation"], 7);
        assert_eq!(object["entries"][0]["subnqn"], "nqn.2026-01.io.spindle:default");
        assert_eq!(object["entries"][0]["family"], "ipv6");
    }

    #[test]
    fn what_a_target_sends_cannot_command_the_terminal() {
        let table = to_table(&log()).to_string();
        assert!(!table.contains('\u{1b}') && table.contains("(an NQN has at most 223 bytes)"), "{table}");
    }
}
