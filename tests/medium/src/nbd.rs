//! The server: as much of NBD (fixed newstyle, `NBD_OPT_GO`, simple replies) as QEMU's client wants.
//!
//! Source: the protocol's description, doc/proto.md of github.com/NetworkBlockDevice/nbd. The client is the
//! lab's own QEMU. One connection to an export at a time; its end is the power cut.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::medium::{LoggedDisk, Loss};

const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";
const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x3_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// Fixed newstyle, and no zeroes behind the old form of an export's size.
const HANDSHAKE_FLAGS: u16 = 1 | 2;
/// It has flags, it has Flush, it has FUA.
const EXPORT_FLAGS: u16 = 1 | 4 | 8;

const OPT_ABORT: u32 = 2;
const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_ERR_UNSUP: u32 = 0x8000_0001;
const REP_ERR_UNKNOWN: u32 = 0x8000_0006;
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

const CMD_READ: u16 = 0;
const CMD_WRITE: u16 = 1;
const CMD_DISC: u16 = 2;
const CMD_FLUSH: u16 = 3;
const CMD_FLAG_FUA: u16 = 1;

const EIO: u32 = 5;
const EINVAL: u32 = 22;

/// Of an option or a transfer; more is not taken.
const OPTION_BYTES_MAX: u32 = 4096;
const TRANSFER_BYTES_MAX: u32 = 32 << 20;

type Exports = BTreeMap<String, Mutex<LoggedDisk>>;

/// Serve these at this socket until the process is ended.
pub fn serve(socket: &Path, media: Vec<(String, LoggedDisk)>, loss: Loss) -> io::Result<()> {
    let listener = UnixListener::bind(socket)?;
    let exports = media.into_iter().map(|(name, medium)| (name, Mutex::new(medium))).collect();
    let exports: Arc<Exports> = Arc::new(exports);
    println!("serving {}", exports.keys().cloned().collect::<Vec<_>>().join(" "));
    for stream in listener.incoming() {
        let (stream, exports) = (stream?, Arc::clone(&exports));
        std::thread::spawn(move || {
            if let Err(error) = connection(stream, &exports, loss) {
                eprintln!("spindle-medium: {error}");
            }
        });
    }
    Ok(())
}

fn connection(mut stream: UnixStream, exports: &Exports, loss: Loss) -> io::Result<()> {
    let Some(name) = negotiate(&mut stream, exports)? else { return Ok(()) };
    // The machine before may not be quite gone: its cut is done before the next one reads.
    let mut medium = exports[&name].lock().unwrap_or_else(PoisonError::into_inner);
    // A killed client ends in the middle of whatever it sent.
    let ended = transmit(&mut stream, &mut medium);
    let cut = medium.cut(loss)?;
    println!("cut {name} lost {} kept {}", cut.lost, cut.kept);
    match ended {
        Err(error) if !is_end(&error) => Err(error),
        _ => Ok(()),
    }
}

fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

fn number<const BYTES: usize>(stream: &mut impl Read) -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn u16_of(stream: &mut impl Read) -> io::Result<u16> {
    number(stream).map(u16::from_be_bytes)
}

fn u32_of(stream: &mut impl Read) -> io::Result<u32> {
    number(stream).map(u32::from_be_bytes)
}

fn u64_of(stream: &mut impl Read) -> io::Result<u64> {
    number(stream).map(u64::from_be_bytes)
}

fn bytes_of(stream: &mut impl Read, bytes: u32, bytes_max: u32) -> io::Result<Vec<u8>> {
    if bytes > bytes_max {
        return Err(io::Error::other(format!("{bytes} bytes at once, at most {bytes_max}")));
    }
    let mut data = vec![0; bytes as usize];
    stream.read_exact(&mut data)?;
    Ok(data)
}

fn must_be(what: &str, is: u64, wanted: u64) -> io::Result<()> {
    if is == wanted {
        Ok(())
    } else {
        Err(io::Error::other(format!("{what} is {is:#x}, wanted {wanted:#x}")))
    }
}

/// Until the client has chosen an export; none if it goes without.
fn negotiate(stream: &mut (impl Read + Write), exports: &Exports) -> io::Result<Option<String>> {
    stream.write_all(GREETING)?;
    stream.write_all(&HANDSHAKE_FLAGS.to_be_bytes())?;
    let _flags = u32_of(stream)?;
    loop {
        must_be("the magic of an option", u64_of(stream)?, OPTION_MAGIC)?;
        let option = u32_of(stream)?;
        let length = u32_of(stream)?;
        let data = bytes_of(stream, length, OPTION_BYTES_MAX)?;
        match option {
            OPT_GO => {
                let name = export_name(&data)?;
                let Some(medium) = exports.get(&name) else {
                    reply_option(stream, option, REP_ERR_UNKNOWN, &[])?;
                    continue;
                };
                let bytes = medium.lock().unwrap_or_else(PoisonError::into_inner).bytes();
                reply_option(stream, option, REP_INFO, &export_info(bytes))?;
                reply_option(stream, option, REP_INFO, &block_info())?;
                reply_option(stream, option, REP_ACK, &[])?;
                return Ok(Some(name));
            }
            OPT_ABORT => {
                reply_option(stream, option, REP_ACK, &[])?;
                return Ok(None);
            }
            _ => reply_option(stream, option, REP_ERR_UNSUP, &[])?,
        }
    }
}

/// The name in front of what `NBD_OPT_GO` asks for.
fn export_name(mut data: &[u8]) -> io::Result<String> {
    let length = u32_of(&mut data)?;
    let name = bytes_of(&mut data, length, OPTION_BYTES_MAX)?;
    String::from_utf8(name).map_err(io::Error::other)
}

fn export_info(bytes: u64) -> Vec<u8> {
    [&INFO_EXPORT.to_be_bytes()[..], &bytes.to_be_bytes(), &EXPORT_FLAGS.to_be_bytes()].concat()
}

/// The smallest, the best and the largest request.
fn block_info() -> Vec<u8> {
    let sizes = [512_u32, 4096, TRANSFER_BYTES_MAX].map(u32::to_be_bytes);
    [&INFO_BLOCK_SIZE.to_be_bytes()[..], &sizes.concat()].concat()
}

fn reply_option(stream: &mut impl Write, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
    let length = u32::try_from(data.len()).expect("a short reply").to_be_bytes();
    let head = [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes(), &length];
    stream.write_all(&[&head.concat()[..], data].concat())
}

/// Requests, one after another, until the client goes.
fn transmit(stream: &mut (impl Read + Write), medium: &mut LoggedDisk) -> io::Result<()> {
    loop {
        must_be("the magic of a request", u32_of(stream)?.into(), REQUEST_MAGIC.into())?;
        let (flags, kind) = (u16_of(stream)?, u16_of(stream)?);
        let (cookie, offset, length) = (u64_of(stream)?, u64_of(stream)?, u32_of(stream)?);
        let mut data = Vec::new();
        let done = match kind {
            CMD_DISC => return Ok(()),
            CMD_FLUSH => medium.flush(),
            CMD_WRITE => {
                let written = bytes_of(stream, length, TRANSFER_BYTES_MAX)?;
                if !medium.has(offset, written.len()) {
                    reply(stream, EINVAL, cookie, &[])?;
                    continue;
                }
                medium.write(offset, &written, flags & CMD_FLAG_FUA != 0)
            }
            CMD_READ if length <= TRANSFER_BYTES_MAX && medium.has(offset, length as usize) => {
                data = vec![0; length as usize];
                medium.read(offset, &mut data)
            }
            _ => {
                reply(stream, EINVAL, cookie, &[])?;
                continue;
            }
        };
        match done {
            Ok(()) => reply(stream, 0, cookie, &data)?,
            Err(_) => reply(stream, EIO, cookie, &[])?,
        }
    }
}

fn reply(stream: &mut impl Write, error: u32, cookie: u64, data: &[u8]) -> io::Result<()> {
    let head = [&REPLY_MAGIC.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes()].concat();
    stream.write_all(&[&head[..], data].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::medium::tests::medium;

    fn request(stream: &mut UnixStream, kind: u16, flags: u16, offset: u64, length: u32, data: &[u8]) -> u32 {
        let head = [
            &REQUEST_MAGIC.to_be_bytes()[..],
            &flags.to_be_bytes(),
            &kind.to_be_bytes(),
            &7_u64.to_be_bytes(),
            &offset.to_be_bytes(),
            &length.to_be_bytes(),
        ];
        stream.write_all(&[&head.concat()[..], data].concat()).expect("sent");
        assert_eq!(u32_of(stream).expect("a reply"), REPLY_MAGIC);
        let error = u32_of(stream).expect("a reply");
        assert_eq!(u64_of(stream).expect("a reply"), 7);
        error
    }

    /// A client that has chosen the export.
    fn connect(exports: &Arc<Exports>) -> (UnixStream, std::thread::JoinHandle<io::Result<()>>) {
        let (mut client, server) = UnixStream::pair().expect("a pair");
        let exports = Arc::clone(exports);
        let server = std::thread::spawn(move || connection(server, &exports, Loss::All));
        let (mut greeting, go) = ([0; 18], *b"\0\0\0\x01a\0\0");
        client.read_exact(&mut greeting).expect("a greeting");
        client.write_all(&3_u32.to_be_bytes()).expect("sent");
        // One that it does not have (structured replies), then GO.
        for (option, data) in [(8_u32, &[][..]), (OPT_GO, &go)] {
            let length = u32::try_from(data.len()).expect("short").to_be_bytes();
            let head = [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &length, data].concat();
            client.write_all(&head).expect("sent");
        }
        // An error of 20 bytes, the export's 12 and the blocks' 14 behind 20 each, the end.
        let mut replies = [0; 20 + 32 + 34 + 20];
        client.read_exact(&mut replies).expect("replies");
        assert_eq!(replies[12..16], REP_ERR_UNSUP.to_be_bytes());
        assert_eq!(replies[42..50], 4096_u64.to_be_bytes());
        assert_eq!(replies[98..102], REP_ACK.to_be_bytes());
        (client, server)
    }

    #[test]
    fn what_was_flushed_is_there_for_the_next_client_and_nothing_else() {
        let exports: Arc<Exports> = Arc::new([("a".to_owned(), Mutex::new(medium(8, false)))].into());
        let (mut client, server) = connect(&exports);
        assert_eq!(request(&mut client, CMD_WRITE, 0, 0, 512, &[1; 512]), 0);
        assert_eq!(request(&mut client, CMD_FLUSH, 0, 0, 0, &[]), 0);
        assert_eq!(request(&mut client, CMD_WRITE, 0, 512, 512, &[2; 512]), 0);
        assert_eq!(request(&mut client, CMD_WRITE, CMD_FLAG_FUA, 1024, 512, &[3; 512]), 0);
        assert_eq!(request(&mut client, CMD_WRITE, 0, 4096, 512, &[4; 512]), EINVAL);
        assert_eq!(request(&mut client, CMD_READ, 0, 100, 512, &[]), EINVAL);
        drop(client);
        server.join().expect("no panic").expect("an end");
        let (mut client, server) = connect(&exports);
        assert_eq!(request(&mut client, CMD_READ, 0, 0, 1536, &[]), 0);
        let read = bytes_of(&mut client, 1536, 1536).expect("data");
        assert_eq!([read[0], read[512], read[1024]], [1, 0, 3]);
        drop(client);
        server.join().expect("no panic").expect("an end");
    }
}
