//! What a drive's status means for the one who asked the disk.

use nvme_spec::status::Status;
use spindle_disk::DiskError;

/// True for a failure that the same command may not meet again: DNR is clear, and the code says that it was
/// not the command's fault.
pub(crate) fn is_passing(status: Status) -> bool {
    if status.parts().dnr() {
        return false;
    }
    matches!(
        status.code(),
        Status::ABORTED_BY_REQUEST
            | Status::ABORTED_SQ_DELETION
            | Status::ABORTED_POWER_LOSS
            | Status::COMMAND_INTERRUPTED
            | Status::COMMAND_TRANSIENT_TRANSPORT_ERROR
            | Status::NAMESPACE_NOT_READY
            | Status::DATA_TRANSFER_ERROR
            | Status::INTERNAL_PATH_ERROR
            | Status::CONTROLLER_PATHING_ERROR
            | Status::HOST_PATHING_ERROR
            | Status::ABORTED_BY_HOST
    )
}

/// The disk's error for a status that is not success.
pub(crate) fn disk_error(status: Status) -> DiskError {
    match status.code() {
        // The namespace was deleted or detached: it does not come back by asking again.
        Status::INVALID_NAMESPACE_OR_FORMAT => DiskError::Gone,
        _ => DiskError::of_status(status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_errors_are_as_the_drive_says_them_and_the_others_are_the_disks() {
        for status in [Status::UNRECOVERED_READ_ERROR, Status::WRITE_FAULT, Status::WRITE_FAULT.dnr()] {
            assert_eq!(disk_error(status), DiskError::Device(status));
        }
        assert_eq!(disk_error(Status::COMPARE_FAILURE), DiskError::CompareDiffers);
        assert_eq!(disk_error(Status::NAMESPACE_IS_WRITE_PROTECTED), DiskError::WriteProtected);
        assert_eq!(disk_error(Status::CAPACITY_EXCEEDED), DiskError::NoSpace);
        assert_eq!(disk_error(Status::INVALID_FIELD), DiskError::Internal);
    }

    #[test]
    fn what_passes_is_tried_again_unless_the_drive_says_not_to() {
        assert!(is_passing(Status::ABORTED_BY_REQUEST) && is_passing(Status::NAMESPACE_NOT_READY));
        assert!(!is_passing(Status::UNRECOVERED_READ_ERROR) && !is_passing(Status::INVALID_FIELD));
        let never = Status::from_bits(Status::ABORTED_BY_REQUEST.bits() | 1 << 14);
        assert!(!is_passing(never));
    }
}
