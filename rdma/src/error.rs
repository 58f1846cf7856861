//! [`VerbsError`]: the failed verb and its error number.

use std::fmt;

use libc::c_int;

/// A failure of a call of libibverbs or librdmacm, or of a check before the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VerbsError {
    /// Name of the C function, as in its manual page.
    pub verb: &'static str,
    /// Positive error number of errno(3).
    pub errno: i32,
}

impl fmt::Display for VerbsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = std::io::Error::from_raw_os_error(self.errno).to_string();
        let reason = text.split(" (os error").next().unwrap_or_default();
        write!(f, "{}: {reason} ({})", self.verb, self.errno)
    }
}

impl std::error::Error for VerbsError {}

impl VerbsError {
    /// Returns true if the error says that the machine has no RDMA now: no kernel module, no device, or
    /// nothing in `/dev/infiniband`.
    #[must_use]
    pub fn is_no_rdma(&self) -> bool {
        [libc::ENODEV, libc::ENOSYS, libc::ENOENT, libc::ENXIO].contains(&self.errno)
    }

    pub(crate) fn new(verb: &'static str, errno: c_int) -> VerbsError {
        VerbsError { verb, errno }
    }

    /// Returns an error with the current `errno`; EIO if there is none.
    pub(crate) fn last(verb: &'static str) -> VerbsError {
        VerbsError { verb, errno: std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) }
    }

    /// Checks a pointer that a verb has returned. Null is the error in `errno`.
    pub(crate) fn check_pointer<T>(verb: &'static str, pointer: *mut T) -> Result<*mut T, VerbsError> {
        if pointer.is_null() { Err(VerbsError::last(verb)) } else { Ok(pointer) }
    }

    /// Checks the value that a verb has returned. 0 is success, -1 means that `errno` contains the error; any
    /// other value is the error number, positive or negated.
    pub(crate) fn check(verb: &'static str, returned: c_int) -> Result<(), VerbsError> {
        match returned {
            0 => Ok(()),
            -1 => Err(VerbsError::last(verb)),
            other => Err(VerbsError { verb, errno: other.saturating_abs() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_verb_and_the_reason() {
        let error = VerbsError::new("ibv_create_qp", libc::ENOMEM);
        assert_eq!(error.to_string(), "ibv_create_qp: Cannot allocate memory (12)");
    }

    #[test]
    fn a_returned_number_is_success_errno_or_the_reason() {
        assert_eq!(VerbsError::check("a", 0), Ok(()));
        assert_eq!(VerbsError::check("a", libc::EINVAL), Err(VerbsError::new("a", libc::EINVAL)));
        assert_eq!(VerbsError::check("a", -libc::EINVAL), Err(VerbsError::new("a", libc::EINVAL)));
        assert_eq!(VerbsError::check("a", i32::MIN).map_err(|error| error.errno), Err(i32::MAX));
    }
}
