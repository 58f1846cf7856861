//! What a status of the far target means for the disk.

use nvme_spec::status::{Status, StatusType};
use spindle_disk::DiskError;

/// The disk's error for a status that is not success. What the far target says of its medium, of its state
/// and of its path goes to the host as it is, with whether it may be repeated.
pub(crate) fn disk_error(status: Status) -> DiskError {
    match status.code() {
        Status::CAPACITY_EXCEEDED | Status::NAMESPACE_INSUFFICIENT_CAPACITY => DiskError::NoSpace,
        Status::NAMESPACE_IS_WRITE_PROTECTED | Status::WRITE_TO_READ_ONLY_RANGE => DiskError::WriteProtected,
        Status::INVALID_OPCODE => DiskError::NotSupported,
        Status::COMPARE_FAILURE => DiskError::CompareDiffers,
        code if StatusType(code.parts().sct()) == StatusType::MEDIA => DiskError::device(status),
        // Of what we sent and of the far controller, which the host does not know. A namespace that went may
        // come back, with another association.
        _ => DiskError::Internal,
    }
}

/// The command is one that the far target does not do, or not as long.
pub(crate) fn is_unsupported(status: Status) -> bool {
    matches!(
        status.code(),
        Status::INVALID_OPCODE | Status::INVALID_FIELD | Status::COMMAND_SIZE_LIMIT_EXCEEDED
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_far_medium_says_reaches_the_host_and_what_the_far_controller_says_does_not() {
        for status in [Status::UNRECOVERED_READ_ERROR, Status::WRITE_FAULT.dnr()] {
            assert_eq!(disk_error(status), DiskError::Device(status));
        }
        assert_eq!(disk_error(Status::COMPARE_FAILURE), DiskError::CompareDiffers);
        assert_eq!(disk_error(Status::CAPACITY_EXCEEDED), DiskError::NoSpace);
        for status in [Status::INVALID_FIELD.dnr(), Status::INVALID_NAMESPACE_OR_FORMAT.dnr()] {
            assert_eq!(disk_error(status), DiskError::Internal);
        }
    }

    #[test]
    fn what_a_far_target_cannot_do_is_done_in_another_way() {
        assert!(is_unsupported(Status::INVALID_OPCODE.dnr()) && is_unsupported(Status::INVALID_FIELD.dnr()));
        assert!(!is_unsupported(Status::WRITE_FAULT));
    }
}
