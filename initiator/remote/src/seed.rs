//! What tells a far namespace from every other one, as text: the identity that hosts of a remote disk see is
//! derived from it, so it may never change for one and the same namespace.

use std::fmt::Write as _;

use spindle_initiator::Identity;

/// Of a namespace with this identity and NSID. The NSID counts where nothing but the serial number tells the
/// namespaces of a subsystem from each other.
pub(crate) fn seed(identity: &Identity, nsid: u32) -> String {
    let Identity { nguid, eui64, uuid, serial } = identity;
    let mut text = String::new();
    for part in [&nguid[..], eui64, uuid, serial] {
        part.iter().for_each(|byte| {
            let _ = write!(text, "{byte:02x}");
        });
        text.push(' ');
    }
    if (nguid, eui64, uuid) == (&[0; 16], &[0; 8], &[0; 16]) {
        let _ = write!(text, "{nsid}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_the_same_for_ever_and_each_part_makes_another() {
        let serial = *b"S1                  ";
        let bare = Identity { serial, ..Identity::default() };
        let zeroes = |bytes: usize| "00".repeat(bytes);
        let of_serial = format!("5331{}", "20".repeat(18));
        let expected = |nsid: u32| format!("{} {} {} {of_serial} {nsid}", zeroes(16), zeroes(8), zeroes(16));
        assert_eq!((seed(&bare, 1), seed(&bare, 2)), (expected(1), expected(2)));
        let nguid = Identity { nguid: [0xa1; 16], ..bare };
        let expected = format!("{} {} {} {of_serial} ", "a1".repeat(16), zeroes(8), zeroes(16));
        assert_eq!((seed(&nguid, 1), seed(&nguid, 2)), (expected.clone(), expected));
        let others = [
            bare,
            nguid,
            Identity { eui64: [0xa1; 8], ..bare },
            Identity { uuid: [0xa1; 16], ..bare },
            Identity { serial: [b'S'; 20], ..nguid },
        ];
        let all: std::collections::HashSet<_> = others.iter().map(|identity| seed(identity, 1)).collect();
        assert_eq!(all.len(), others.len());
    }
}
