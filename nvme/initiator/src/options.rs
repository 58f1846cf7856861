//! Targets, host identity and connection options, with the reasons of the defaults.

use std::net::SocketAddr;
use std::time::Duration;

use nvme_spec::Nqn;
use spindle_nvme_rdma::registration::Limits as RegistrationLimits;
use spindle_nvme_transport::TransportKind;
use uuid::Uuid;

/// Identity of the host in Connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Host NQN (HOSTNQN).
    pub nqn: Nqn,
    /// Host Identifier (HOSTID).
    pub id: [u8; 16],
}

/// Prefix of UUID-based NQNs (Base 2.0 section 4.5).
const UUID_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

impl Host {
    /// Creates a host with this UUID as its identifier and in its NQN.
    ///
    /// # Panics
    /// Never: an NQN of that form is valid.
    #[must_use]
    pub fn from_uuid(id: [u8; 16]) -> Host {
        let name = format!("{UUID_PREFIX}{}", Uuid::from_bytes(id));
        Host { nqn: Nqn::new(&name).expect("well formed"), id }
    }

    /// Creates a host with this NQN. Its identifier is the UUID in the NQN, else a hash of the NQN.
    #[must_use]
    pub fn from_nqn(nqn: Nqn) -> Host {
        let uuid = nqn.as_str().strip_prefix(UUID_PREFIX).and_then(|text| Uuid::try_parse(text).ok());
        let id = uuid.map_or_else(|| hash(nqn.as_bytes()), Uuid::into_bytes);
        Host { nqn, id }
    }

    /// Returns the identity of this machine: a hash of `/etc/machine-id`, stable across restarts. Without
    /// that file it is a hash of the boot ID, which changes with each boot; without both, a constant.
    #[must_use]
    pub fn of_this_machine() -> Host {
        let known = ["/etc/machine-id", "/proc/sys/kernel/random/boot_id"];
        let text = known.iter().find_map(|path| std::fs::read(path).ok().filter(|text| !text.is_empty()));
        Host::from_uuid(hash(&text.unwrap_or_default()))
    }
}

/// Returns a version 8 (custom) UUID from an FNV-1a hash in two lanes. Not cryptographic: it identifies a
/// host but does not authenticate it.
fn hash(bytes: &[u8]) -> [u8; 16] {
    let mut id = [0; 16];
    for (lane, salt) in id.chunks_exact_mut(8).zip([0xcbf2_9ce4_8422_2325_u64, 0x6c62_272e_07bb_0142]) {
        let mut value = salt;
        for byte in b"spindle host".iter().chain(bytes) {
            value = (value ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        lane.copy_from_slice(&value.to_be_bytes());
    }
    uuid::Builder::from_custom_bytes(id).into_uuid().into_bytes()
}

/// Address of a subsystem, and the host identity to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// TCP or RDMA.
    pub transport: TransportKind,
    /// IP address and port.
    pub address: SocketAddr,
    /// NQN of the subsystem; [`Nqn::discovery`] for the discovery service.
    pub nqn: Nqn,
    /// Host identity sent in Connect.
    pub host: Host,
}

/// Options of a controller and its queues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Most outstanding commands of an I/O queue. Default 127: a queue of 128 entries, a common default.
    pub depth: u16,
    /// Number of I/O queues to request, at least 1. Default 1.
    pub io_queues: u16,
    /// Keep-alive timeout in ms; 0: none. Default 10 s: short enough to detect a loss soon, long enough that
    /// a busy process sends in time.
    pub keep_alive_ms: u32,
    /// PDU header digests (TCP). Default off: TCP and the link layer have checksums.
    pub header_digest: bool,
    /// PDU data digests (TCP). Default off: they cost a pass over every byte.
    pub data_digest: bool,
    /// Most bytes of a write in the capsule, if the controller allows it (IOCCSZ). Default: no limit.
    pub in_capsule_bytes_max: u32,
    /// Timeout of each step of connecting except Connect, and of each admin command. Default 10 s, as Linux.
    pub connect_timeout: Duration,
    /// Timeout of the answer to Connect. A Spindle target delays the answer up to 40 s while commands of an
    /// ended association are at a disk. Default 10 s, as Linux.
    pub connect_answer_timeout: Duration,
    /// Time without a completion, while commands are outstanding, after which a connection is given up;
    /// `None`: never. Default 30 s, as Linux.
    pub command_timeout: Option<Duration>,
    /// Longest time without a completion while optimistic READs are in flight. Then the optimistic connection
    /// ends, and the reads are repeated as ordinary ones. Default 2 s: soft-RoCE repeats a READ
    /// for ever.
    pub optimistic_silence: Duration,
    /// Bytes of the receive batch, at least 4 KiB. Default 256 KiB: a smaller batch costs more system calls,
    /// a larger batch exceeds the core's cache.
    pub batch_bytes: usize,
    /// RDMA: limits of the registration cache. By default, registrations of the caller's buffers are kept up
    /// to 1 GiB per device and thread, and removed in batches.
    pub registration: RegistrationLimits,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            depth: 127,
            io_queues: 1,
            keep_alive_ms: 10_000,
            header_digest: false,
            data_digest: false,
            in_capsule_bytes_max: u32::MAX,
            connect_timeout: Duration::from_secs(10),
            connect_answer_timeout: Duration::from_secs(10),
            command_timeout: Some(Duration::from_secs(30)),
            optimistic_silence: Duration::from_secs(2),
            batch_bytes: 256 << 10,
            registration: RegistrationLimits::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_and_identifier_of_a_host_are_of_one_uuid() {
        let host = Host::from_uuid(*b"\x0b\x8a\x7f\x70\x3b\x2c\x4a\x7e\x9f\x60\x8f\x4d\x2f\x1f\x1b\x11");
        assert_eq!(host.nqn.as_str(), "nqn.2014-08.org.nvmexpress:uuid:0b8a7f70-3b2c-4a7e-9f60-8f4d2f1f1b11");
        assert_eq!(Host::from_nqn(host.nqn), host);
    }

    #[test]
    fn a_name_without_a_uuid_always_has_the_same_identifier() {
        let host = |name: &str| Host::from_nqn(Nqn::new(name).expect("a name"));
        assert_eq!(host("nqn.2026-01.io.spindle:a"), host("nqn.2026-01.io.spindle:a"));
        assert_ne!(host("nqn.2026-01.io.spindle:a").id, host("nqn.2026-01.io.spindle:b").id);
        let cut = "nqn.2014-08.org.nvmexpress:uuid:0b8a7f70-3b2c-4a7e-9f60-8f4d2f1f1b1";
        assert_eq!(host(cut).id[6] >> 4, 8, "not a UUID: made of the name");
        assert_eq!(Host::of_this_machine(), Host::of_this_machine());
    }
}
