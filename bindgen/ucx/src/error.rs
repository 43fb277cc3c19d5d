//! UCX's status codes as values.
//!
//! Functions return a status, which is 0, or 1 for work in progress, or negative for an error; or a pointer, which is
//! null for work that is done, the handle of a request, or an error's code in the last hundred addresses.

use std::ffi::CStr;
use std::ptr::NonNull;

use thiserror::Error;

use crate::loader::Library;
use crate::sys::{ucs_status_ptr_t, ucs_status_t};

/// Why a call of a UCX function failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{function} failed: {message} (UCX status {code})")]
pub struct UcxError {
    /// The C function, such as `ucp_ep_create`, or the operation that it had begun.
    pub function: &'static str,
    /// The status as UCX returned it: negative.
    pub code: i8,
    /// UCX's own text for it.
    pub message: String,
}

impl UcxError {
    /// Whether a message was longer than the memory for it.
    pub fn is_truncated(&self) -> bool {
        self.code == ucs_status_t::UCS_ERR_MESSAGE_TRUNCATED.0
    }
}

impl Library {
    /// UCX's text for a status.
    pub(crate) fn status_text(&self, status: ucs_status_t) -> String {
        // SAFETY: the function accepts every code and does not access our memory.
        let text = unsafe { (self.symbols().ucs_status_string)(status) };
        if text.is_null() {
            return "unknown status".into();
        }
        // SAFETY: not null, so it is one of the library's terminated texts, and the library is never closed. (That of an
        // unknown code is overwritten by the next one, by another thread at worst: it stays terminated.)
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    pub(crate) fn error(&self, function: &'static str, status: ucs_status_t) -> UcxError {
        UcxError { function, code: status.0, message: self.status_text(status) }
    }

    /// The error of a status that is not 0.
    pub(crate) fn check(&self, function: &'static str, status: ucs_status_t) -> Result<(), UcxError> {
        match status {
            ucs_status_t::UCS_OK => Ok(()),
            _ => Err(self.error(function, status)),
        }
    }

    /// Tells apart what a function returns that begins an operation: nothing if it is done already.
    pub(crate) fn check_pointer(
        &self,
        function: &'static str,
        pointer: ucs_status_ptr_t,
    ) -> Result<Option<NonNull<std::ffi::c_void>>, UcxError> {
        // As UCS_PTR_IS_ERR.
        let is_error =
            pointer.addr() >= usize::from(ucs_status_t::UCS_ERR_LAST.0.unsigned_abs()).wrapping_neg();
        if is_error {
            return Err(self.error(function, ucs_status_t(pointer.addr() as i8)));
        }
        Ok(NonNull::new(pointer))
    }
}
