//! What a far target cannot do.

use nvme_spec::status::Status;

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
    fn what_a_far_target_cannot_do_is_done_in_another_way() {
        assert!(is_unsupported(Status::INVALID_OPCODE.dnr()) && is_unsupported(Status::INVALID_FIELD.dnr()));
        assert!(!is_unsupported(Status::WRITE_FAULT));
    }
}
