//! The lab's media, whose volatile write cache a power cut really empties, and what a host writes to them.
//!
//! `serve` is an NBD server. QEMU makes disks and NVMe drives of its exports, and is killed: that is the
//! power cut. What was written and not flushed by then is lost, all of it or each sector of 512 bytes by
//! chance, and the next machine finds what is left. `write`, `stamps` and `check` run in the machine, on a
//! host's block devices: numbered blocks, which of them were acknowledged as durable, and whether those are
//! there ([`stamps`]). `scripts/lab/power-cut` puts it together.
//!
//! What it does not do: a cache that leaves an older version of a sector than the last one that was not
//! flushed.

#![forbid(unsafe_code)]

mod medium;
mod nbd;
mod stamps;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use medium::{LoggedDisk, Loss};

const USAGE: &str = "\
spindle-medium serve SOCKET [--forget NAME]... --lose all|half:SEED NAME=IMAGE...
    until killed: NBD exports with a volatile cache; one of --forget takes a flush and FUA for nothing
spindle-medium write ACKS [NAME=DEVICE]...
    until killed: writes and flushes, all devices at once; ACKS/NAME.flush says which are durable
spindle-medium noise [NAME=DEVICE]...
    until killed: writes without a flush
spindle-medium stamps ACKS NAME COUNT FOLDER
    the next COUNT writes with FUA, for somebody else to do: FOLDER/list has NUMBER OFFSET,
    FOLDER/NUMBER the bytes
spindle-medium check ACKS NAME DEVICE
    exit code 1 if something that is durable is not there";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("spindle-medium: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(words: &[&str]) -> Result<ExitCode, Box<dyn Error>> {
    match words {
        ["serve", socket, rest @ ..] => serve(Path::new(socket), rest)?,
        ["write", acks, devices @ ..] => stamps::write(Path::new(acks), &pairs(devices)?)?,
        ["noise", devices @ ..] => stamps::noise(&pairs(devices)?)?,
        ["stamps", acks, name, count, folder] => {
            stamps::prepare(Path::new(acks), name, count.parse()?, Path::new(folder))?;
        }
        ["check", acks, name, device] => {
            let verdict = stamps::check(Path::new(acks), name, Path::new(device))?;
            println!("{verdict}");
            return Ok(ExitCode::from(u8::from(!verdict.is_fine())));
        }
        _ => return Err(USAGE.into()),
    }
    Ok(ExitCode::SUCCESS)
}

/// `NAME=PLACE` words.
fn pairs<'a>(words: &[&'a str]) -> Result<Vec<(&'a str, &'a Path)>, Box<dyn Error>> {
    let pair = |word: &&'a str| {
        let (name, place) = word.split_once('=').ok_or_else(|| format!("'{word}': wanted NAME=PLACE"))?;
        Ok((name, Path::new(place)))
    };
    words.iter().map(pair).collect()
}

fn serve(socket: &Path, mut words: &[&str]) -> Result<(), Box<dyn Error>> {
    let (mut forgetful, mut loss) = (Vec::new(), Loss::All);
    while let [option, value, rest @ ..] = words {
        match *option {
            "--forget" => forgetful.push(*value),
            "--lose" => loss = value.parse()?,
            _ => break,
        }
        words = rest;
    }
    let media = pairs(words)?.into_iter().map(|(name, image)| {
        let medium = LoggedDisk::open(image, forgetful.contains(&name));
        Ok((name.to_owned(), medium.map_err(|error| format!("{}: {error}", image.display()))?))
    });
    let media: Result<Vec<(String, LoggedDisk)>, String> = media.collect();
    Ok(nbd::serve(socket, media?, loss)?)
}
