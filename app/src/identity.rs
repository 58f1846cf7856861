//! What a host knows a disk by, derived from names in the configuration.
//!
//! ```text
//!   subsystem NQN ───────────────────────────> serial number  /dev/disk/by-id/nvme-Spindle_SPDL...
//!   subsystem NQN, disk name, NSID ──────────> UUID, NGUID    /dev/disk/by-id/nvme-uuid. ...
//!   the same, and a life, for RAM disks ─────> UUID, NGUID
//! ```
//!
//! The same names give the same identities on every machine and in every order of the file; another name
//! gives others. Hosts have them in their boot loaders and mount tables, so nothing here may ever change: the
//! tests hold the values.
//!
//! A RAM disk begins empty each time it is made. Under the identity that it had, a host that waits for the
//! target would go on with its mounted file system over zeroes. So its identity also depends on the life of
//! its data: [`life`] is another one for each process and each time that a disk is made.
//!
//! What it does not do: it cannot know that two machines use one NQN for different disks.
//! `docs/configuration.md` says not to.

use std::sync::OnceLock;

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

/// The life of a disk whose data end with the disk: random for the process, and `made` for the disk, a number
/// that no other disk of this process ever had.
pub fn life(made: usize) -> String {
    static PROCESS: OnceLock<Uuid> = OnceLock::new();
    format!("{} {made}", PROCESS.get_or_init(Uuid::new_v4))
}

/// Identity of a namespace: `life` for a disk whose data have one.
fn of_namespace(what: &str, nqn: &Nqn, disk: &str, nsid: u32, life: Option<&str>) -> [u8; 16] {
    let nsid = nsid.to_string();
    match life {
        Some(life) => derive(what, &[nqn.as_str(), disk, &nsid, life]),
        None => derive(what, &[nqn.as_str(), disk, &nsid]),
    }
}

/// UUID of a namespace.
pub fn uuid(nqn: &Nqn, disk: &str, nsid: u32, life: Option<&str>) -> [u8; 16] {
    of_namespace("namespace", nqn, disk, nsid, life)
}

/// NGUID of a namespace. Bytes 8 to 10 are an organisation's number (Base 2.0 section 4.5.1); ours is a local
/// one, which the second-lowest bit of byte 8 says, so that it is nobody else's.
pub fn nguid(nqn: &Nqn, disk: &str, nsid: u32, life: Option<&str>) -> [u8; 16] {
    let mut bytes = of_namespace("nguid", nqn, disk, nsid, life);
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
            Uuid::from_bytes(uuid(&nqn, "ram0", 1, None)).to_string(),
            "224dd7ce-e1dd-53fa-ba82-c6188e2caff1"
        );
        assert_eq!(
            format!("{:032x}", u128::from_be_bytes(nguid(&nqn, "ram0", 1, None))),
            "724537abac305dc1be2d8849ac5b751a"
        );
    }

    #[test]
    fn every_name_makes_another_identity() {
        let (a, b) = (nqn("nqn.2026-01.io.spindle:a"), nqn("nqn.2026-01.io.spindle:b"));
        let names = [(&a, "d", 1), (&b, "d", 1), (&a, "e", 1), (&a, "d", 2), (&a, "d1", 1)];
        let uuids = names.map(|(nqn, disk, nsid)| uuid(nqn, disk, nsid, None));
        let nguids = names.map(|(nqn, disk, nsid)| nguid(nqn, disk, nsid, None));
        let all: std::collections::HashSet<_> = uuids.iter().chain(&nguids).collect();
        assert_eq!(all.len(), uuids.len() + nguids.len());
        assert_ne!(serial(&a), serial(&b));
    }

    #[test]
    fn each_life_has_another_identity_and_keeps_it() {
        let a = nqn("nqn.2026-01.io.spindle:a");
        let of =
            |life: Option<String>| (uuid(&a, "d", 1, life.as_deref()), nguid(&a, "d", 1, life.as_deref()));
        let (none, first, second) = (of(None), of(Some(life(0))), of(Some(life(1))));
        assert!(none.0 != first.0 && none.1 != first.1 && first.0 != second.0 && first.1 != second.1);
        assert_eq!(first, of(Some(life(0))));
    }

    #[test]
    fn identities_are_of_the_form_that_hosts_expect() {
        let nqn = nqn("nqn.2026-01.io.spindle:a");
        let serial = serial(&nqn);
        assert!(serial.len() == 20 && serial.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{serial}");
        let uuid = Uuid::from_bytes(uuid(&nqn, "d", 1, Some(&life(3))));
        assert_eq!((uuid.get_version_num(), uuid.get_variant()), (5, uuid::Variant::RFC4122));
        for life in [None, Some("a")] {
            assert_eq!(nguid(&nqn, "d", 1, life)[8] & 3, 2, "a local number, of one machine");
        }
    }
}
