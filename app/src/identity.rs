//! Identities that outlive restarts: what a host knows a disk by, derived from names in the configuration.
//!
//! ```text
//!   subsystem NQN ───────────────────> serial number          /dev/disk/by-id/nvme-Spindle_SPDL...
//!   subsystem NQN, disk name, NSID ──> UUID, NGUID            /dev/disk/by-id/nvme-uuid. ...
//! ```
//!
//! The same names give the same identities on every machine and in every order of the file; another name
//! gives others. Hosts have them in their boot loaders and mount tables, so nothing here may ever change: the
//! tests hold the values.
//!
//! What it does not do: it cannot know that two machines use one NQN for different disks.
//! `docs/configuration.md` says not to.

use nvme_spec::nqn::Nqn;
use uuid::Uuid;

/// The name space of all our UUIDs (RFC 9562 section 5.5): random once, and then for ever.
const NAME_SPACE: Uuid = Uuid::from_u128(0xb1f7_d9c2_6c0e_4f57_9a3e_2f1d_5c8e_7a64);

/// Identity of `what` with these names. NUL stands between them: no name has one, so no two lists of names
/// are alike.
fn derive(what: &str, names: &[&str]) -> [u8; 16] {
    let mut text = what.to_owned();
    for name in names {
        text.push('\0');
        text.push_str(name);
    }
    Uuid::new_v5(&NAME_SPACE, text.as_bytes()).into_bytes()
}

/// Serial number of a subsystem: 20 characters, the most there may be.
pub fn serial(nqn: &Nqn) -> String {
    let bytes = derive("serial", &[nqn.as_str()]);
    let digits: String = bytes.iter().take(8).map(|byte| format!("{byte:02X}")).collect();
    format!("SPDL{digits}")
}

/// UUID of a namespace.
pub fn uuid(nqn: &Nqn, disk: &str, nsid: u32) -> [u8; 16] {
    derive("namespace", &[nqn.as_str(), disk, &nsid.to_string()])
}

/// NGUID of a namespace. Bytes 8 to 10 are an organisation's number (Base 2.0 section 4.5.1); ours is a local
/// one, which the second-lowest bit of byte 8 says, so that it is nobody else's.
pub fn nguid(nqn: &Nqn, disk: &str, nsid: u32) -> [u8; 16] {
    let mut bytes = derive("nguid", &[nqn.as_str(), disk, &nsid.to_string()]);
    bytes[8] = bytes[8] & !1 | 2;
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nqn(name: &str) -> Nqn {
        Nqn::new(name).expect("an NQN")
    }

    #[test]
    fn identities_are_the_same_for_ever() {
        let nqn = nqn("nqn.2026-01.io.spindle:default");
        assert_eq!(serial(&nqn), "SPDLECC6CFDC70095C25");
        assert_eq!(
            Uuid::from_bytes(uuid(&nqn, "ram0", 1)).to_string(),
            "224dd7ce-e1dd-53fa-ba82-c6188e2caff1"
        );
        assert_eq!(
            format!("{:032x}", u128::from_be_bytes(nguid(&nqn, "ram0", 1))),
            "724537abac305dc1be2d8849ac5b751a"
        );
    }

    #[test]
    fn every_name_makes_another_identity() {
        let (a, b) = (nqn("nqn.2026-01.io.spindle:a"), nqn("nqn.2026-01.io.spindle:b"));
        let uuids =
            [uuid(&a, "d", 1), uuid(&b, "d", 1), uuid(&a, "e", 1), uuid(&a, "d", 2), uuid(&a, "d1", 1)];
        let nguids = [nguid(&a, "d", 1), nguid(&b, "d", 1), nguid(&a, "e", 1), nguid(&a, "d", 2)];
        let all: std::collections::HashSet<_> = uuids.iter().chain(&nguids).collect();
        assert_eq!(all.len(), uuids.len() + nguids.len());
        assert_ne!(serial(&a), serial(&b));
    }

    #[test]
    fn identities_are_of_the_form_that_hosts_expect() {
        let nqn = nqn("nqn.2026-01.io.spindle:a");
        let serial = serial(&nqn);
        assert!(serial.len() == 20 && serial.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{serial}");
        let uuid = Uuid::from_bytes(uuid(&nqn, "d", 1));
        assert_eq!((uuid.get_version_num(), uuid.get_variant()), (5, uuid::Variant::RFC4122));
        assert_eq!(nguid(&nqn, "d", 1)[8] & 3, 2, "a local number, of one machine");
    }
}
