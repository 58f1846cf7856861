//! [`PciAddress`]: domain, bus, device and function number, parsed and written as the kernel does.

use std::fmt;
use std::str::FromStr;

/// Address of a PCI function; its text is `domain:bus:device.function` in hexadecimal, as in `0000:01:00.0`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

const DEVICES: u8 = 32;
const FUNCTIONS: u8 = 8;

/// Error of parsing a text that is not a PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("PCI address {text:?}: {field} is {value:?}: {allowed}")]
pub struct PciAddressError {
    /// The whole text.
    pub text: String,
    /// Invalid part: form, domain, bus, device or function.
    pub field: &'static str,
    /// Text of that part.
    pub value: String,
    /// Valid values of that part.
    pub allowed: &'static str,
}

impl FromStr for PciAddress {
    type Err = PciAddressError;

    /// Parses the long form with the domain, as the kernel writes it.
    ///
    /// # Errors
    /// [`PciAddressError`] with the invalid part.
    fn from_str(text: &str) -> Result<PciAddress, PciAddressError> {
        let refuse = |field, value: &str, allowed| PciAddressError {
            text: text.to_owned(),
            field,
            value: value.to_owned(),
            allowed,
        };
        let form = || refuse("form", text, "allowed is domain:bus:device.function, as in 0000:01:00.0");
        let (domain, rest) = text.split_once(':').ok_or_else(form)?;
        let (bus, rest) = rest.split_once(':').ok_or_else(form)?;
        let (device, function) = rest.split_once('.').ok_or_else(form)?;
        let domain = hexadecimal(domain, 4..=8).ok_or_else(|| {
            refuse("domain", domain, "allowed are 4 to 8 hexadecimal digits, 0000 to ffffffff")
        })?;
        let byte = |digits: &str, count: usize, limit: u16| {
            let value = u16::try_from(hexadecimal(digits, count..=count)?).ok()?;
            u8::try_from(value).ok().filter(|value| u16::from(*value) < limit)
        };
        Ok(PciAddress {
            domain,
            bus: byte(bus, 2, 256)
                .ok_or_else(|| refuse("bus", bus, "allowed are 2 hexadecimal digits, 00 to ff"))?,
            device: byte(device, 2, DEVICES.into())
                .ok_or_else(|| refuse("device", device, "allowed are 2 hexadecimal digits, 00 to 1f"))?,
            function: byte(function, 1, FUNCTIONS.into())
                .ok_or_else(|| refuse("function", function, "allowed is one digit, 0 to 7"))?,
        })
    }
}

/// Parses hexadecimal digits without a sign. `None`: other characters, or a number of digits outside `count`.
fn hexadecimal(digits: &str, count: std::ops::RangeInclusive<usize>) -> Option<u32> {
    let is_plain = count.contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    u32::from_str_radix(digits, 16).ok().filter(|_| is_plain)
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PciAddress { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refused(text: &str) -> PciAddressError {
        text.parse::<PciAddress>().expect_err("is no address")
    }

    #[test]
    fn an_address_is_written_as_the_kernel_writes_it() {
        for (text, written) in [
            ("0000:01:00.0", "0000:01:00.0"),
            ("0000:AB:1F.7", "0000:ab:1f.7"),
            ("10000:e1:00.0", "10000:e1:00.0"),
            ("ffffffff:ff:1f.7", "ffffffff:ff:1f.7"),
        ] {
            assert_eq!(text.parse::<PciAddress>().expect("an address").to_string(), written);
        }
    }

    #[test]
    fn a_refusal_names_the_part_that_is_wrong_and_what_it_may_be() {
        for (text, field, value) in [
            ("", "form", ""),
            ("01:00.0", "form", "01:00.0"),
            ("0000:01:00", "form", "0000:01:00"),
            ("000:01:00.0", "domain", "000"),
            ("123456789:01:00.0", "domain", "123456789"),
            ("+000:01:00.0", "domain", "+000"),
            ("0000:1:00.0", "bus", "1"),
            ("0000:0g:00.0", "bus", "0g"),
            ("0000:01:20.0", "device", "20"),
            ("0000:01:00.8", "function", "8"),
            ("0000:01:00.", "function", ""),
            ("0000:01:00.0 ", "function", "0 "),
            ("0000:01:00.é", "function", "é"),
        ] {
            let error = refused(text);
            assert_eq!((error.field, error.value.as_str()), (field, value), "{text:?}");
        }
        assert_eq!(
            refused("0000:01:20.0").to_string(),
            "PCI address \"0000:01:20.0\": device is \"20\": allowed are 2 hexadecimal digits, 00 to 1f"
        );
    }

    #[test]
    fn addresses_sort_by_domain_bus_device_function() {
        let texts = ["0000:00:1f.7", "0000:01:00.0", "0000:01:00.1", "0000:01:01.0", "0001:00:00.0"];
        let addresses = texts.map(|text| text.parse::<PciAddress>().expect("an address"));
        assert!(addresses.is_sorted());
    }

    proptest! {
        #[test]
        fn no_text_panics_and_what_is_taken_is_given_back(text in "\\PC{0,16}|[0-9a-fA-F:.]{0,16}") {
            if let Ok(address) = text.parse::<PciAddress>() {
                prop_assert_eq!(address.to_string(), text.to_lowercase());
            }
        }

        #[test]
        fn every_address_is_read_back(domain: u32, bus: u8, device in 0..DEVICES, function in 0..FUNCTIONS) {
            let address = PciAddress { domain, bus, device, function };
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }
    }
}
