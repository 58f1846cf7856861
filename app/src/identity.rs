//! Identifiers of namespaces (UUID, NGUID) and subsystems (serial number), derived from the configuration.
//!
//! ```text
//!   subsystem NQN ───────────────────────────> serial number  /dev/disk/by-id/nvme-Spindle_SPDL...
//!   subsystem NQN, disk name, NSID ──────────> UUID, NGUID    /dev/disk/by-id/nvme-uuid. ...
//!   the same and a life ─────────────────────> UUID, NGUID    for RAM disks
//!   subsystem NQN, NSID, far identity ───────> UUID, NGUID    for remote disks
//! ```
//!
//! Equal names have equal identifiers on every machine and in every order of the file; other names have other
//! identifiers. Hosts store identifiers in boot loaders and mount tables, so the derivation must never
//! change. The tests contain the values.
//!
//! A RAM disk is empty when the process starts. With an unchanged identifier, a host that waited for the
//! target would continue to use its mounted file system on zeroes. So the identifier of a RAM disk also
//! depends on a life ([`life`]), which differs for each process and each creation of a disk.
//!
//! The identifiers of a remote disk depend on those of the far namespace, and not on the name of the disk.
//! They are never equal to those of the far namespace. A host may connect to both targets, and Linux refuses
//! a second namespace with the UUID or NGUID of a present one.
//!
//! Two machines with one NQN can have equal identifiers; `docs/configuration.md` forbids that.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use nvme_spec::nqn::Nqn;
use uuid::Uuid;

/// Namespace of the version 5 UUIDs (RFC 9562 section 5.5). A random constant that must never change.
const NAME_SPACE: Uuid = Uuid::from_u128(0xb1f7_d9c2_6c0e_4f57_9a3e_2f1d_5c8e_7a64);

/// Returns the version 5 UUID of `what` and the names, separated by NUL. No name contains NUL, so different
/// lists of names have different UUIDs.
fn derive(what: &str, names: &[&str]) -> [u8; 16] {
    let mut text = what.to_owned();
    for name in names {
        text.push('\0');
        text.push_str(name);
    }
    Uuid::new_v5(&NAME_SPACE, text.as_bytes()).into_bytes()
}

/// Returns the serial number of a subsystem: 20 characters, the size of the SN field.
pub fn serial(nqn: &Nqn) -> String {
    let bytes = derive("serial", &[nqn.as_str()]);
    let digits: String = bytes.iter().take(8).map(|byte| format!("{byte:02X}")).collect();
    format!("SPDL{digits}")
}

/// Returns the life of a disk whose data is lost with it. It consists of a UUID that is random for each
/// process, and of `number`, which is unique among the disks of the process ([`next_disk_number`]).
pub fn life(number: u64) -> String {
    static PROCESS: OnceLock<Uuid> = OnceLock::new();
    format!("{} {number}", PROCESS.get_or_init(Uuid::new_v4))
}

/// Returns a number that no other disk of this process has had.
pub fn next_disk_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Identification of the data of a namespace.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    /// The name of the disk.
    Named(&'a str),
    /// The name of the disk and its life.
    Living(&'a str, &'a str),
    /// The identity seed of the far namespace (`Disk::identity_seed`).
    Far(&'a str),
}

fn of_namespace(what: &str, nqn: &Nqn, nsid: u32, data: Data<'_>) -> [u8; 16] {
    let (nqn, nsid) = (nqn.as_str(), nsid.to_string());
    match data {
        Data::Named(disk) => derive(what, &[nqn, disk, &nsid]),
        Data::Living(disk, life) => derive(what, &[nqn, disk, &nsid, life]),
        Data::Far(far) => derive(&format!("far {what}"), &[nqn, &nsid, far]),
    }
}

pub fn uuid(nqn: &Nqn, nsid: u32, data: Data<'_>) -> [u8; 16] {
    of_namespace("namespace", nqn, nsid, data)
}

/// Returns the NGUID of a namespace. Bytes 8 to 10 are an OUI (Base 2.0 section 4.5.1). In byte 8, bit 1
/// (locally administered) is set and bit 0 (multicast) is clear, so that the OUI equals no assigned OUI.
pub fn nguid(nqn: &Nqn, nsid: u32, data: Data<'_>) -> [u8; 16] {
    let mut bytes = of_namespace("nguid", nqn, nsid, data);
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
            Uuid::from_bytes(uuid(&nqn, 1, Data::Named("ram0"))).to_string(),
            "224dd7ce-e1dd-53fa-ba82-c6188e2caff1"
        );
        assert_eq!(
            format!("{:032x}", u128::from_be_bytes(nguid(&nqn, 1, Data::Named("ram0")))),
            "724537abac305dc1be2d8849ac5b751a"
        );
        let far = Data::Far("a far disk");
        assert_eq!(Uuid::from_bytes(uuid(&nqn, 1, far)).to_string(), "5450d373-7558-5833-8958-436e742c1859");
        assert_eq!(
            format!("{:032x}", u128::from_be_bytes(nguid(&nqn, 1, far))),
            "9b8324e1f5b05980ba3bd3652c7ae283"
        );
    }

    #[test]
    fn every_name_makes_another_identity() {
        let (a, b) = (nqn("nqn.2026-01.io.spindle:a"), nqn("nqn.2026-01.io.spindle:b"));
        let names = [(&a, "d", 1), (&b, "d", 1), (&a, "e", 1), (&a, "d", 2), (&a, "d1", 1)];
        let mut all = std::collections::HashSet::new();
        for (nqn, name, nsid) in names {
            for data in [Data::Named(name), Data::Living(name, "life"), Data::Far(name)] {
                all.extend([uuid(nqn, nsid, data), nguid(nqn, nsid, data)]);
            }
        }
        assert_eq!(all.len(), 2 * 3 * names.len());
        assert_ne!(serial(&a), serial(&b));
    }

    #[test]
    fn each_life_has_another_identity_and_keeps_it() {
        let a = nqn("nqn.2026-01.io.spindle:a");
        let of = |life: &str| {
            let data = Data::Living("d", life);
            (uuid(&a, 1, data), nguid(&a, 1, data))
        };
        let (first, second) = (of(&life(0)), of(&life(1)));
        assert!(first.0 != second.0 && first.1 != second.1);
        assert_eq!(first, of(&life(0)));
    }

    #[test]
    fn identities_are_of_the_form_that_hosts_expect() {
        let nqn = nqn("nqn.2026-01.io.spindle:a");
        let serial = serial(&nqn);
        assert!(serial.len() == 20 && serial.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{serial}");
        let uuid = Uuid::from_bytes(uuid(&nqn, 1, Data::Living("d", &life(3))));
        assert_eq!((uuid.get_version_num(), uuid.get_variant()), (5, uuid::Variant::RFC4122));
        for data in [Data::Named("d"), Data::Living("d", "a"), Data::Far("a"), Data::Far("b")] {
            assert_eq!(nguid(&nqn, 1, data)[8] & 3, 2, "a local number, of one machine");
        }
    }
}
