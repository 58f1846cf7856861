//! The discovery log (log page 70h): the subsystems and addresses that a host may connect to.
//!
//! ```text
//!   [header 1 KiB: GENCTR, NUMREC][this service, by listener][subsystem x listener ...][referral ...]
//! ```
//! A log is built when it is first read and kept with its configuration ([`DiscoveryLogs`]), for all hosts
//! that see the same; no state is kept for a connection. The log has only subsystems to which the host may
//! connect. An unspecified address (0.0.0.0, ::) is replaced by the address that the host used. An entry
//! with an unspecified address of the other family is left out, since the host would connect to itself.
//!
//! Not supported: registration of hosts or of other discovery services, zoning, extended entries.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use arrayvec::ArrayString;
use nvme_spec::fabrics::{ADMIN_QUEUE_ENTRIES, CNTLID_DYNAMIC};
use nvme_spec::log::{
    AddressFamily, DISCOVERY_ENTRY_BYTES, DiscoveryLogEntry, DiscoveryLogHeader, Eflags, SubsystemType,
    TransportType, Treq, TsasRdma,
};
use nvme_spec::nqn::{Nqn, padded_ascii};
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::zerocopy::little_endian::U16;
use spindle_nvme_transport::{Peer, TransportKind};
use spindle_reactor::lock::Lock;

use crate::snapshot::{Listener, Referral, Snapshot};

/// One entry before it is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry<'a> {
    subtype: SubsystemType,
    /// `None`: the discovery service, of this system or of a referral.
    subsystem: Option<&'a Nqn>,
    transport: TransportKind,
    address: SocketAddr,
    port_id: u16,
    eflags: Eflags,
}

/// Logs that are kept. Hosts see few different ones: those of the subsystems for everyone, and those with
/// subsystems of their own. More are built again.
const KEPT_MAX: usize = 16;

/// The discovery logs of one configuration, each built when it is first read. Locked by each read of a log;
/// never on the data path.
#[derive(Default)]
pub struct DiscoveryLogs {
    /// Oldest first.
    kept: Lock<VecDeque<(View, Arc<[u8]>)>>,
}

/// What a log depends on besides the configuration.
#[derive(PartialEq, Eq)]
struct View {
    /// Indices of the subsystems to which the host may connect.
    subsystems: Vec<usize>,
    /// Address that the host used, which replaces unspecified ones; `None`: no listener has one.
    local: Option<IpAddr>,
}

impl View {
    fn new(snapshot: &Snapshot, peer: &Peer, host: &Nqn) -> View {
        let subsystems = (0..).zip(&snapshot.subsystems);
        let is_unspecified = |listener: &Listener| listener.address.ip().is_unspecified();
        View {
            subsystems: subsystems.filter(|(_, it)| it.hosts.allows(host)).map(|(at, _)| at).collect(),
            local: snapshot.listeners.iter().any(is_unspecified).then(|| peer.local.ip().to_canonical()),
        }
    }
}

/// Returns the discovery log of `host` on the connection `peer`.
#[must_use]
pub fn log(snapshot: &Snapshot, peer: &Peer, host: &Nqn) -> Arc<[u8]> {
    let view = View::new(snapshot, peer, host);
    let mut kept = snapshot.discovery_logs.kept.lock();
    if let Some((_, log)) = kept.iter().find(|(other, _)| *other == view) {
        return Arc::clone(log);
    }
    let log = build(snapshot, peer, host);
    if kept.len() >= KEPT_MAX {
        kept.pop_front();
    }
    kept.push_back((view, Arc::clone(&log)));
    log
}

/// Builds the log, with the address of each entry at which this host can connect. Omits others.
fn build(snapshot: &Snapshot, peer: &Peer, host: &Nqn) -> Arc<[u8]> {
    let mut log = vec![0; DISCOVERY_ENTRY_BYTES];
    let mut records = 0;
    for entry in entries(snapshot, host) {
        let address = match entry.subtype {
            // A referral is an address of another system: it stays as configured.
            SubsystemType::REFERRAL => Some(entry.address),
            _ => peer.reachable(entry.address),
        };
        if let Some(address) = address {
            log.extend_from_slice(encode(&Entry { address, ..entry }).as_bytes());
            records += 1;
        }
    }
    let header = DiscoveryLogHeader::new(snapshot.generation, records);
    log[..header.as_bytes().len()].copy_from_slice(header.as_bytes());
    log.into()
}

/// True when the entries for `host` differ between `old` and `new`; the generation is not compared.
#[must_use]
pub fn differs(old: &Snapshot, new: &Snapshot, host: &Nqn) -> bool {
    !entries(old, host).eq(entries(new, host))
}

/// All entries for `host`, in order, with the configured addresses.
fn entries<'a>(snapshot: &'a Snapshot, host: &'a Nqn) -> impl Iterator<Item = Entry<'a>> {
    // All listeners reach the same service, and persistent connections are allowed on each. Entries are the
    // same on each, except those with an unspecified address if there are both address families.
    let is_for_all = |listener: &Listener| {
        let is_v4 = listener.address.is_ipv4();
        !listener.address.ip().is_unspecified()
            || snapshot.open_listeners().all(|other| other.address.is_ipv4() == is_v4)
    };
    let is_same = snapshot.open_listeners().all(is_for_all);
    let own = Eflags::new().with_duplicate_information(is_same).with_persistent_connection(true);
    let services = snapshot
        .open_listeners()
        .map(move |listener| from_listener(listener, SubsystemType::CURRENT_DISCOVERY, None, own));
    let allowed = snapshot.subsystems.iter().filter(move |subsystem| subsystem.hosts.allows(host));
    let subsystems = allowed.flat_map(move |subsystem| {
        let listeners = subsystem.listeners.iter().filter_map(|index| snapshot.listeners.get(*index));
        listeners
            .map(|listener| from_listener(listener, SubsystemType::NVM, Some(&subsystem.nqn), Eflags::new()))
    });
    let referrals = snapshot.referrals.iter().map(from_referral);
    services.chain(subsystems).chain(referrals)
}

fn from_listener<'a>(
    listener: &Listener,
    subtype: SubsystemType,
    subsystem: Option<&'a Nqn>,
    eflags: Eflags,
) -> Entry<'a> {
    Entry {
        subtype,
        subsystem,
        transport: listener.transport,
        address: listener.address,
        port_id: listener.port_id,
        eflags,
    }
}

fn from_referral(referral: &Referral) -> Entry<'_> {
    Entry {
        subtype: SubsystemType::REFERRAL,
        subsystem: None,
        transport: referral.transport,
        address: referral.address,
        port_id: referral.port_id,
        // This target has no information on persistent connections of the other service.
        eflags: Eflags::new(),
    }
}

fn encode(entry: &Entry<'_>) -> DiscoveryLogEntry {
    let address = entry.address;
    let treq =
        // "Secure channel not required" also applies, but nvme-cli takes both bits as a demand for TLS.
        Treq::new().with_sq_flow_control_disable(true);
    DiscoveryLogEntry {
        trtype: transport_type(entry.transport),
        adrfam: if address.is_ipv4() { AddressFamily::IPV4 } else { AddressFamily::IPV6 },
        subtype: entry.subtype,
        treq: treq.into_bits(),
        portid: U16::new(entry.port_id),
        cntlid: U16::new(CNTLID_DYNAMIC),
        asqsz: U16::new(ADMIN_QUEUE_ENTRIES),
        eflags: entry.eflags.into(),
        trsvcid: padded(format_args!("{}", address.port())),
        subnqn: entry.subsystem.map_or_else(|| Nqn::discovery().to_field(), Nqn::to_field),
        traddr: padded(format_args!("{}", address.ip())),
        tsas: tsas(entry.transport),
        ..DiscoveryLogEntry::default()
    }
}

/// TRTYPE of a transport.
pub(crate) fn transport_type(transport: TransportKind) -> TransportType {
    match transport {
        TransportKind::Tcp => TransportType::TCP,
        TransportKind::Rdma => TransportType::RDMA,
    }
}

/// Capacity for an address or a port. The longest, an IPv6 address with an embedded IPv4, has 45 bytes.
const TEXT_BYTES: usize = 64;

/// Formats a text as a field padded with spaces.
fn padded<const N: usize>(text: fmt::Arguments<'_>) -> [u8; N] {
    let mut buffer = ArrayString::<TEXT_BYTES>::new();
    // The longest text fits, so the write cannot fail.
    let _ = buffer.write_fmt(text);
    padded_ascii(&buffer)
}

/// Transport specific address subtype (TSAS): all zero for TCP without TLS; connection type for RDMA.
fn tsas(transport: TransportKind) -> [u8; 256] {
    /// RDMA_QPTYPE 1: connected and reliable. RDMA_PRTYPE 1: no provider given. RDMA_CMS 1: RDMA_IP_CM.
    const ONE: u8 = 1;
    let mut field = [0; 256];
    match transport {
        TransportKind::Tcp => {}
        TransportKind::Rdma => {
            let rdma = TsasRdma { qptype: ONE, prtype: ONE, cms: ONE, ..TsasRdma::default() };
            field.copy_from_slice(rdma.as_bytes());
        }
    }
    field
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::tests::{HOST, OTHER_HOST, PRIVATE, SUBSYSTEM, World, nqn, u16_at, u64_at};

    fn read(world: &World, host: &str) -> Vec<u8> {
        build(&world.snapshot, &world.peer, &nqn(host)).to_vec()
    }

    /// Type, subsystem, address, port of each entry.
    fn entries(log: &[u8]) -> Vec<(u8, String, String, String)> {
        let text = |field: &[u8]| {
            let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
            String::from_utf8(field[..end].to_vec()).unwrap().trim_end().to_owned()
        };
        let entry =
            |entry: &[u8]| (entry[2], text(&entry[256..512]), text(&entry[512..768]), text(&entry[32..64]));
        log[1024..].chunks(1024).map(entry).collect()
    }

    const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";

    fn owned(list: &[(u8, &str, &str, &str)]) -> Vec<(u8, String, String, String)> {
        list.iter().map(|(t, n, a, p)| (*t, (*n).to_owned(), (*a).to_owned(), (*p).to_owned())).collect()
    }

    #[test]
    fn a_host_sees_the_service_its_subsystems_and_the_referrals() {
        let world = World::new();
        let log = read(&world, HOST);
        assert_eq!((u64_at(&log, 0), u64_at(&log, 8), u16_at(&log, 16)), (7, 4, 0), "GENCTR, NUMREC, RECFMT");
        assert_eq!(
            entries(&log),
            owned(&[
                (3, DISCOVERY, "192.0.2.1", "4420"),
                (3, DISCOVERY, "fe80::1", "4421"),
                (2, SUBSYSTEM, "192.0.2.1", "4420"),
                (1, DISCOVERY, "10.9.8.7", "8009"),
            ])
        );
        assert!(entries(&read(&world, OTHER_HOST)).iter().any(|(_, name, ..)| name == PRIVATE));
    }

    #[test]
    fn an_entry_has_its_fields_where_the_figure_has_them() {
        let mut world = World::new();
        world.snapshot.listeners[0].address = "192.0.2.1:4420".parse().unwrap();
        let log = read(&world, HOST);
        let subsystem = &log[3 * 1024..4 * 1024];
        // TCP, IPv4, NVM subsystem, nothing said of a secure channel, SQ flow control may be disabled, port
        // 1, dynamic.
        assert_eq!(subsystem[..12], [3, 1, 2, 0b100, 1, 0, 0xff, 0xff, 32, 0, 0, 0]);
        assert!(subsystem[768..].iter().all(|byte| *byte == 0), "TSAS: no security");
        let own = &log[1024..2048];
        assert_eq!(u16_at(own, 10), 0b11, "EFLAGS: duplicate information, persistent connections");
        let rdma = &log[2048..3072];
        assert_eq!((rdma[0], rdma[1], &rdma[768..771]), (1, 2, &[1, 1, 1][..]));
        assert_eq!(u16_at(&log[4 * 1024..], 4), 9, "PORTID of the referral");
    }

    #[test]
    fn unspecified_addresses_are_replaced_by_the_one_the_host_used() {
        let mut world = World::new();
        world.snapshot.listeners[1].address = "[::]:4422".parse().unwrap();
        world.subsystem().listeners = vec![0, 1];
        world.peer.local = "[2001:db8::5]:4422".parse().unwrap();
        let log = read(&world, HOST);
        let addresses: Vec<_> = entries(&log).into_iter().map(|(_, _, address, _)| address).collect();
        // An IPv6 connection does not tell which IPv4 address to use: the listener at 0.0.0.0 is left out.
        assert_eq!(addresses, ["2001:db8::5", "2001:db8::5", "10.9.8.7"]);
        assert_eq!((u64_at(&log, 8), log[1024 + 1]), (3, 2), "NUMREC; ADRFAM: IPv6");
        assert_eq!(u16_at(&log[1024..], 10), 0b10, "EFLAGS: not what every host is told");
        world.peer.local = "192.0.2.7:4420".parse().unwrap();
        let addresses = entries(&read(&world, HOST)).into_iter().map(|(_, _, address, _)| address);
        assert_eq!(addresses.collect::<Vec<_>>(), ["192.0.2.7", "192.0.2.7", "10.9.8.7"]);
    }

    #[test]
    fn a_listener_that_is_not_there_any_more_has_no_entry() {
        let mut world = World::new();
        world.subsystem().listeners = vec![7, 1];
        let subsystems = entries(&read(&world, HOST)).into_iter().filter(|(kind, ..)| *kind == 2);
        assert_eq!(subsystems.map(|(_, _, address, _)| address).collect::<Vec<_>>(), ["fe80::1"]);
    }

    #[test]
    fn any_change_that_the_host_can_see_is_a_difference() {
        let old = World::new();
        let host = nqn(HOST);
        assert!(!differs(&old.snapshot, &World::new().snapshot, &host));
        let changes: [fn(&mut World); 5] = [
            |world| world.snapshot.listeners[0].address.set_port(4430),
            |world| world.subsystem().listeners.push(1),
            |world| world.snapshot.referrals.clear(),
            |world| drop(world.snapshot.subsystems.remove(0)),
            |world| world.subsystem().hosts = crate::snapshot::AllowedHosts::Only(Vec::new()),
        ];
        for change in changes {
            let mut new = World::new();
            change(&mut new);
            assert!(differs(&old.snapshot, &new.snapshot, &host));
        }
        let mut unseen = World::new();
        unseen.snapshot.generation += 1;
        unseen.snapshot.subsystems.remove(1);
        assert!(!differs(&old.snapshot, &unseen.snapshot, &host));
    }

    #[test]
    fn a_log_is_built_once_for_all_hosts_that_see_the_same() {
        let world = World::new();
        let log_of = |host: &str| log(&world.snapshot, &world.peer, &nqn(host));
        let (first, private) = (log_of(HOST), log_of(OTHER_HOST));
        assert_eq!((&first[..], &private[..]), (&read(&world, HOST)[..], &read(&world, OTHER_HOST)[..]));
        assert!(
            Arc::ptr_eq(&first, &log_of("nqn.2026-01.test:any"))
                && Arc::ptr_eq(&private, &log_of(OTHER_HOST))
        );
        // By another address: the listener at 0.0.0.0 is there.
        let there = Peer { local: "192.0.2.7:4420".parse().unwrap(), ..world.peer };
        let other = log(&world.snapshot, &there, &nqn(HOST));
        assert!(entries(&other).iter().any(|(_, _, address, _)| address == "192.0.2.7"));
        for last in 0..=u8::MAX {
            let there = Peer { local: SocketAddr::from(([192, 0, 2, last], 4420)), ..world.peer };
            let _ = log(&world.snapshot, &there, &nqn(HOST));
        }
        assert_eq!(world.snapshot.discovery_logs.kept.lock().len(), KEPT_MAX);
        assert_eq!(log_of(HOST), first);
    }
}
