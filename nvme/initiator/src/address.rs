//! Parsing of addresses: `HOST` or `HOST:PORT`, with IPv6 in brackets where a port follows, and an optional
//! prefix `tcp:` or `rdma:`.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use spindle_nvme_transport::TransportKind;

/// Default port of NVMe/RDMA I/O and discovery controllers (IANA).
pub const NVME_RDMA_PORT: u16 = 4420;
/// Default port of NVMe/TCP I/O controllers (IANA).
pub const NVME_TCP_PORT: u16 = 4420;
/// Default port of NVMe/TCP discovery controllers (IANA).
pub const DISCOVERY_PORT: u16 = 8009;

/// Errors of [`resolve`].
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// The text is not `HOST` or `HOST:PORT`.
    #[error("`{0}` is not an address: allowed are HOST and HOST:PORT, with IPv6 as ::1 or [::1]:4420")]
    Form(String),
    /// The port is not a number from 1 to 65535.
    #[error("`{port}` in `{text}` is not a port: allowed are 1 to 65535")]
    Port {
        /// The text to parse.
        text: String,
        /// The invalid port.
        port: String,
    },
    /// The host name cannot be resolved.
    #[error("cannot find the host `{host}`: {source}")]
    Resolve {
        /// The host name.
        host: String,
        /// Error of the resolver.
        #[source]
        source: io::Error,
    },
}

/// Splits the transport prefix from an address; TCP without a prefix. The text `rdma:1` is host `1` over
/// RDMA, so a host named `tcp` or `rdma` needs the prefix if a port follows.
#[must_use]
pub fn split_transport(text: &str) -> (TransportKind, &str) {
    for kind in [TransportKind::Tcp, TransportKind::Rdma] {
        let name = kind.to_string();
        if let Some(rest) = text.strip_prefix(&name).and_then(|rest| rest.strip_prefix(':')) {
            return (kind, rest);
        }
    }
    (TransportKind::Tcp, text)
}

/// Resolves `text` to addresses, in the resolver's order. `default_port` is used if the text has no port.
pub fn resolve(text: &str, default_port: u16) -> Result<Vec<SocketAddr>, AddressError> {
    let (host, port) = split(text)?;
    let port = port.unwrap_or(default_port);
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let failed = |source| AddressError::Resolve { host: host.to_owned(), source };
    let found: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(failed)?.collect();
    if found.is_empty() {
        return Err(failed(io::Error::from(io::ErrorKind::NotFound)));
    }
    Ok(found)
}

/// Splits a text into host, without brackets, and optional port. Text with several colons and no brackets is
/// an IPv6 address.
fn split(text: &str) -> Result<(&str, Option<u16>), AddressError> {
    let form = || AddressError::Form(text.to_owned());
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']').ok_or_else(form)?;
        match rest.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None if rest.is_empty() => (host, None),
            None => return Err(form()),
        }
    } else if text.bytes().filter(|byte| *byte == b':').count() > 1 {
        (text, None)
    } else {
        text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)))
    };
    if host.is_empty() || host.contains(char::is_whitespace) {
        return Err(form());
    }
    let Some(port) = port else { return Ok((host, None)) };
    match port.parse::<u16>() {
        Ok(number) if number > 0 => Ok((host, Some(number))),
        _ => Err(AddressError::Port { text: text.to_owned(), port: port.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> String {
        resolve(text, 4420).expect(text)[0].to_string()
    }

    #[test]
    fn a_port_may_be_left_out_and_ipv6_has_two_forms() {
        assert_eq!(one("127.0.0.1"), "127.0.0.1:4420");
        assert_eq!(one("10.0.0.9:8009"), "10.0.0.9:8009");
        assert_eq!(one("::1"), "[::1]:4420");
        assert_eq!(one("[::1]"), "[::1]:4420");
        assert_eq!(one("[fe80::1]:1234"), "[fe80::1]:1234");
        assert!(resolve("localhost:99", 1).expect("known").iter().all(|address| address.port() == 99));
    }

    #[test]
    fn a_transport_may_stand_before_an_address() {
        assert_eq!(split_transport("rdma:10.9.1.1"), (TransportKind::Rdma, "10.9.1.1"));
        assert_eq!(split_transport("rdma:[::1]:99"), (TransportKind::Rdma, "[::1]:99"));
        assert_eq!(split_transport("tcp:host:8009"), (TransportKind::Tcp, "host:8009"));
        assert_eq!(split_transport("::1"), (TransportKind::Tcp, "::1"));
        assert_eq!(split_transport("rdma"), (TransportKind::Tcp, "rdma"));
        assert_eq!(split_transport("tcp:rdma:1"), (TransportKind::Tcp, "rdma:1"));
    }

    #[test]
    fn a_wrong_address_is_refused_with_what_is_allowed() {
        for (text, part) in [
            ("", "HOST:PORT"),
            (":4420", "HOST:PORT"),
            ("[::1", "HOST:PORT"),
            ("[::1]4420", "HOST:PORT"),
            ("a b:1", "HOST:PORT"),
            ("127.0.0.1:0", "1 to 65535"),
            ("127.0.0.1:99999", "`99999`"),
            ("127.0.0.1:", "1 to 65535"),
        ] {
            let message = resolve(text, 4420).expect_err(text).to_string();
            assert!(message.contains(part), "{text}: {message}");
        }
    }
}
