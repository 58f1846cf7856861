//! Whom to connect to, as whom, and how. Every default says why.

use std::net::SocketAddr;
use std::time::Duration;

use nvme_spec::Nqn;
use spindle_rdma::registration::Limits as RegistrationLimits;
use spindle_transport::TransportKind;
use uuid::Uuid;

/// Who the host is to a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// HOSTNQN.
    pub nqn: Nqn,
    /// HOSTID.
    pub id: [u8; 16],
}

/// What names that are made of a UUID begin with (Base 2.0 section 4.5).
const UUID_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

impl Host {
    /// The host that has this UUID as its identifier and in its name.
    ///
    /// # Panics
    /// Never: a name of that form is well formed.
    #[must_use]
    pub fn from_uuid(id: [u8; 16]) -> Host {
        let name = format!("{UUID_PREFIX}{}", Uuid::from_bytes(id));
        Host { nqn: Nqn::new(&name).expect("well formed"), id }
    }

    /// The host with this name: its identifier is the UUID in the name, else made of the name, so that it is
    /// always the same.
    #[must_use]
    pub fn from_nqn(nqn: Nqn) -> Host {
        let uuid = nqn.as_str().strip_prefix(UUID_PREFIX).and_then(|text| Uuid::try_parse(text).ok());
        let id = uuid.map_or_else(|| hash(nqn.as_bytes()), Uuid::into_bytes);
        Host { nqn, id }
    }

    /// This machine, the same at each call and after a restart (`/etc/machine-id`, which itself is not
    /// shown).
    #[must_use]
    pub fn of_this_machine() -> Host {
        let known = ["/etc/machine-id", "/proc/sys/kernel/random/boot_id"];
        let text = known.iter().find_map(|path| std::fs::read(path).ok().filter(|text| !text.is_empty()));
        Host::from_uuid(hash(&text.unwrap_or_default()))
    }
}

/// A UUID of version 8 (custom) out of some bytes: FNV-1a in two lanes. It names, it does not protect.
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

/// A subsystem, and how this host gets there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// How.
    pub transport: TransportKind,
    /// Where.
    pub address: SocketAddr,
    /// Which subsystem; [`Nqn::discovery`] for the discovery service.
    pub nqn: Nqn,
    /// As whom.
    pub host: Host,
}

/// How to connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Commands that an I/O queue may have outstanding. 127: what a queue of 128 entries holds, the common
    /// default of targets.
    pub depth: u16,
    /// I/O queues to ask for. 1: who needs more says so.
    pub io_queues: u16,
    /// Keep-alive time-out in ms; 0: none. 10 s: noticed soon enough, and a busy process does not miss it.
    pub keep_alive_ms: u32,
    /// Digests of headers. Off: TCP has checksums, and the link below too.
    pub header_digest: bool,
    /// Digests of data. Off, as above; they cost a pass over every byte.
    pub data_digest: bool,
    /// Writes up to this many bytes go with their command, if the controller takes as much (IOCCSZ). No limit
    /// of ours.
    pub in_capsule_bytes_max: u32,
    /// Time for each step of connecting but Connect, and for admin commands. 10 s, as Linux.
    pub connect_timeout: Duration,
    /// Time for the answer to Connect. A Spindle holds it while commands of an ended association are at a
    /// disk, up to 40 s. 10 s, as Linux: who can wait says so.
    pub connect_answer_timeout: Duration,
    /// A connection on which commands are outstanding and none is completed for so long is given up. 30 s, as
    /// Linux.
    pub command_timeout: Option<Duration>,
    /// Bytes that one receive may bring. 256 KiB: smaller ones cost calls, larger ones leave the core's
    /// cache.
    pub batch_bytes: usize,
    /// RDMA: what becomes of registrations of the caller's buffers. They are kept and given up in batches, up
    /// to 1 GiB for each device and thread.
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
