//! [`DriveSource`]: where the drives of a plan come from, so that what is made of absent ones, and of those
//! that come back, can be tested without any.

use std::io;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};

use spindle_nvme_pcie::{Drive, DriveError, Drives, PciAddress, Settings};

use super::machine::look_at_function;

/// Drives by their addresses.
pub trait DriveSource: Send + Sync {
    /// There is a drive at the address that could be a disk.
    fn is_there(&self, address: PciAddress) -> bool;

    /// The drive, opened unless it is open already. Takes as long as the drive says that it takes (CAP.TO,
    /// up to minutes) where it does not become ready.
    ///
    /// # Errors
    /// [`DriveError`], with the reason.
    fn open(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError>;
}

/// Drives that were opened all at once, or could not be, each with its reason. Held until this is dropped.
pub(super) struct OpenedDrives(Vec<(PciAddress, Result<Arc<Drive>, DriveError>)>);

impl OpenedDrives {
    /// Open those at `addresses`, each once and on a thread of its own: together they take as long as the one
    /// that takes longest.
    pub(super) fn open(drives: &dyn DriveSource, mut addresses: Vec<PciAddress>) -> OpenedDrives {
        addresses.sort_unstable();
        addresses.dedup();
        let open = |address| (address, drives.open(address));
        thread::scope(|scope| {
            let start = |address: PciAddress| {
                let thread = thread::Builder::new().name(format!("open-{address}"));
                (address, thread.spawn_scoped(scope, move || open(address)))
            };
            let begun: Vec<_> = addresses.into_iter().map(start).collect();
            let end = |(address, thread): (PciAddress, io::Result<ScopedJoinHandle<'_, _>>)| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
                // No more threads: it is the caller's to wait for.
                Err(_) => open(address),
            };
            OpenedDrives(begun.into_iter().map(end).collect())
        })
    }

    /// The drive at an address that was asked for.
    ///
    /// # Errors
    /// Why it could not be opened.
    pub(super) fn get(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError> {
        let found = self.0.iter().find(|(at, _)| *at == address);
        found.map_or_else(
            || {
                Err(DriveError {
                    address: address.to_string(),
                    why: "not asked for".to_owned(),
                    is_absent: true,
                })
            },
            |(_, result)| result.clone(),
        )
    }
}

/// The drives of this machine that are bound to vfio-pci.
pub struct DrivesHere;

impl DriveSource for DrivesHere {
    fn is_there(&self, address: PciAddress) -> bool {
        look_at_function(address) == Ok(true)
    }

    fn open(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError> {
        Drives::here().open(address, Settings::default())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};
    use std::time::Duration;

    use super::*;

    /// Drives that say how many were being opened at once, when they were as many as `all`.
    struct Together {
        all: usize,
        asked: Mutex<Vec<PciAddress>>,
        more: Condvar,
    }

    impl DriveSource for Together {
        fn is_there(&self, _: PciAddress) -> bool {
            true
        }

        fn open(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError> {
            let mut asked = self.asked.lock().expect("not poisoned");
            asked.push(address);
            self.more.notify_all();
            let limit = Duration::from_secs(20);
            let (asked, _) = self
                .more
                .wait_timeout_while(asked, limit, |asked| asked.len() < self.all)
                .expect("not poisoned");
            Err(DriveError {
                address: address.to_string(),
                why: format!("one of {}", asked.len()),
                is_absent: true,
            })
        }
    }

    #[test]
    fn drives_are_opened_at_once_and_each_once() {
        let [a, b, c] =
            ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0"].map(|at| at.parse().expect("an address"));
        let drives = Together { all: 3, asked: Mutex::default(), more: Condvar::new() };
        let opened = OpenedDrives::open(&drives, vec![b, a, b, c]);
        for address in [a, b, c] {
            let error = opened.get(address).err().expect("not opened");
            assert_eq!((error.address, error.why.as_str()), (address.to_string(), "one of 3"));
        }
        assert_eq!(drives.asked.into_inner().expect("not poisoned").len(), 3);
    }
}
