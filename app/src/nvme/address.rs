//! Addresses of PCI functions: `0000:01:00.0`.

use std::fmt;
use std::str::FromStr;

/// Domain, bus, device and function, as the kernel writes them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PciAddress { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

/// Hexadecimal digits and nothing else: `from_str_radix` would take a sign.
fn hex(text: &str, digits: std::ops::RangeInclusive<usize>) -> Option<u32> {
    let is_hex = digits.contains(&text.len()) && text.bytes().all(|letter| letter.is_ascii_hexdigit());
    is_hex.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

impl FromStr for PciAddress {
    type Err = String;

    /// `0000:01:00.0`, or without the domain `01:00.0`, which is in domain 0.
    fn from_str(text: &str) -> Result<PciAddress, String> {
        let read = || {
            let (rest, function) = text.rsplit_once('.')?;
            let (rest, device) = rest.rsplit_once(':')?;
            let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0000", rest));
            let device = u8::try_from(hex(device, 2..=2)?).ok().filter(|device| *device < 32)?;
            let function = u8::try_from(hex(function, 1..=1)?).ok().filter(|function| *function < 8)?;
            let (domain, bus) = (hex(domain, 4..=8)?, u8::try_from(hex(bus, 2..=2)?).ok()?);
            Some(PciAddress { domain, bus, device, function })
        };
        let wrong = "is not the address of a PCI function, as in 0000:01:00.0 (see `spindle nvme list`)";
        read().ok_or_else(|| format!("`{text}` {wrong}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_the_kernel_or_lspci_writes_them() {
        for (text, address) in [
            ("0000:01:00.0", "0000:01:00.0"),
            ("01:00.0", "0000:01:00.0"),
            ("0000:AF:1f.7", "0000:af:1f.7"),
            ("10000:e1:00.0", "10000:e1:00.0"),
        ] {
            assert_eq!(text.parse::<PciAddress>().expect(text).to_string(), address);
        }
    }

    #[test]
    fn what_is_no_address_is_refused_with_its_text_and_what_is_allowed() {
        for text in [
            "",
            "nvme0",
            "/dev/nvme0n1",
            "0000:01:00",
            "0000:01:20.0",
            "0000:01:00.8",
            "0:01:00.0",
            "0000:1:00.0",
            "../0000:01:00.0",
            "0000:01:00.0/..",
            "0000:+1:00.0",
            "0000:01:00.0 ",
            "000000001:01:00.0",
            "::.",
        ] {
            let refusal = text.parse::<PciAddress>().expect_err(text);
            assert!(refusal.contains(&format!("`{text}`")) && refusal.contains("0000:01:00.0"), "{refusal}");
        }
    }
}
