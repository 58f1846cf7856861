//! I/O commands.

use nvme_spec::{Sqe, Status};

use super::Host;
use crate::emulator::EmulatorSpec;

/// Bytes that differ from each other and from those of another seed.
pub fn pattern(seed: u8, count: usize) -> Vec<u8> {
    (0..count)
        .map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8).wrapping_add(seed))
        .collect()
}

#[test]
fn what_is_written_is_read() {
    let mut host = Host::with_io(EmulatorSpec::default());
    let data = pattern(1, 8192);
    host.put(0, &data);
    let write = Sqe::write(0, 1, 5, 2, false).with_prp(host.at(0), host.at(4096));
    assert_eq!(host.io(write), Status::SUCCESS);
    assert_eq!(host.emulator.read_medium(1, 5, 2), data);
    let read = Sqe::read(0, 1, 5, 2).with_prp(host.at(0x1_0000), host.at(0x2_0000));
    assert_eq!(host.io(read), Status::SUCCESS);
    assert_eq!([host.get(0x1_0000, 4096), host.get(0x2_0000, 4096)].concat(), data);
    host.assert_clean();
}
