//! What every function of the interface does: it checks pointers, catches panics and records the error.

use std::any::Any;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard};

use crate::interrupt::RunningCall;
use crate::status::{Failure, MGPU_ERROR_PANIC, MGPU_OK, Status};

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// Runs the body of a function. A panic becomes a status, because it must not unwind into C.
pub(crate) fn call(body: impl FnOnce() -> Result<()>) -> Status {
    let _running = RunningCall::begin();
    // Handles are behind locks that a panic poisons, so nobody sees what it has left half-done.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => MGPU_OK,
        Ok(Err(failure)) => failure.record(),
        Err(panic) => Failure::new(MGPU_ERROR_PANIC, panic_text(&*panic)).record(),
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("the library has panicked: {}", text.unwrap_or("without a text"))
}

/// Frees a handle; null is ignored.
///
/// # Safety
/// The handle is null, or was created by this library and is not used any more.
pub(crate) unsafe fn free<T>(handle: *mut T) {
    call(|| {
        if !handle.is_null() {
            // SAFETY: the caller's promise.
            drop(unsafe { Box::from_raw(handle) });
        }
        Ok(())
    });
}

fn null(name: &str) -> Failure {
    Failure::argument(format!("`{name}` is null"))
}

/// What a pointer refers to.
///
/// # Safety
/// The pointer is null, or valid for `'a`.
pub(crate) unsafe fn borrow<'a, T>(pointer: *const T, name: &str) -> Result<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.ok_or_else(|| null(name))
}

/// Writes a result.
///
/// # Safety
/// The pointer is null, or may be written to.
pub(crate) unsafe fn put<T>(pointer: *mut T, name: &str, value: T) -> Result<()> {
    if pointer.is_null() {
        return Err(null(name));
    }
    // SAFETY: the caller's promise.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Writes the handle of a new object. If the pointer is null, the object is dropped.
///
/// # Safety
/// As [`put`].
pub(crate) unsafe fn put_handle<T>(pointer: *mut *mut T, name: &str, value: T) -> Result<()> {
    if pointer.is_null() {
        return Err(null(name));
    }
    // SAFETY: the caller's promise.
    unsafe { put(pointer, name, Box::into_raw(Box::new(value))) }
}

/// `len` elements; the pointer may be null if there are none.
///
/// # Safety
/// The elements are valid for `'a` and not written meanwhile.
pub(crate) unsafe fn slice<'a, T>(pointer: *const T, len: usize, name: &str) -> Result<&'a [T]> {
    check_elements(pointer, len, name)?;
    match len {
        0 => Ok(&[]),
        // SAFETY: neither null nor misaligned; the rest is the caller's promise.
        _ => Ok(unsafe { std::slice::from_raw_parts(pointer, len) }),
    }
}

/// As [`slice`], to be written.
///
/// # Safety
/// The elements are valid for `'a` and not accessed otherwise meanwhile.
pub(crate) unsafe fn slice_mut<'a, T>(pointer: *mut T, len: usize, name: &str) -> Result<&'a mut [T]> {
    check_elements(pointer, len, name)?;
    match len {
        0 => Ok(&mut []),
        // SAFETY: as in `slice`.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(pointer, len) }),
    }
}

fn check_elements<T>(pointer: *const T, len: usize, name: &str) -> Result<()> {
    if len > isize::MAX as usize / size_of::<T>() {
        return Err(Failure::argument(format!("`{name}` has {len} elements, more than any memory")));
    }
    if len > 0 && pointer.is_null() {
        return Err(null(name));
    }
    if !pointer.is_aligned() && len > 0 {
        let (size, address) = (align_of::<T>(), pointer as usize);
        return Err(Failure::argument(format!("`{name}` at {address:#x} is not aligned to {size} bytes")));
    }
    Ok(())
}

/// A text.
///
/// # Safety
/// The pointer is null, or a text that ends with a zero byte and lives for `'a`.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str> {
    if pointer.is_null() {
        return Err(null(name));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| Failure::argument(format!("`{name}` is not UTF-8")))
}

/// Locks a handle.
pub(crate) fn lock<T>(handle: &Mutex<T>) -> Result<MutexGuard<'_, T>> {
    handle.lock().map_err(|_| unusable())
}

/// The error of a handle whose lock is poisoned.
pub(crate) fn unusable() -> Failure {
    Failure::new(
        MGPU_ERROR_PANIC,
        "the handle is unusable, because the library has panicked in an earlier call",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{MGPU_ERROR_ARGUMENT, mgpu_last_error, mgpu_last_error_rank};

    fn last_error() -> String {
        // SAFETY: the text is valid until the next error of this thread.
        unsafe { CStr::from_ptr(mgpu_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_status() {
        std::panic::set_hook(Box::new(|_| ()));
        assert_eq!(call(|| panic!("rank {} is odd", 3)), MGPU_ERROR_PANIC);
        let _ = std::panic::take_hook();
        assert_eq!(last_error(), "the library has panicked: rank 3 is odd");
        assert_eq!(mgpu_last_error_rank(), -1);
    }

    #[test]
    fn bad_pointers_are_errors() {
        let refused = |result: Result<()>| {
            assert_eq!(call(|| result), MGPU_ERROR_ARGUMENT);
            last_error()
        };
        // SAFETY: null pointers are allowed; the others are not read, or are valid.
        unsafe {
            assert_eq!(refused(borrow::<u32>(std::ptr::null(), "world").map(|_| ())), "`world` is null");
            assert_eq!(refused(slice::<f32>(std::ptr::null(), 1, "data").map(|_| ())), "`data` is null");
            assert!(slice::<f32>(std::ptr::null(), 0, "data").is_ok());
            let odd = slice::<f32>(std::ptr::without_provenance(6), 1, "data");
            assert_eq!(refused(odd.map(|_| ())), "`data` at 0x6 is not aligned to 4 bytes");
            let vast = slice::<f32>(std::ptr::without_provenance(8), usize::MAX / 2, "data");
            assert!(refused(vast.map(|_| ())).ends_with("more than any memory"));
            assert_eq!(refused(text(c"\xff".as_ptr(), "name").map(|_| ())), "`name` is not UTF-8");
            assert_eq!(refused(put(std::ptr::null_mut(), "rank", 1)), "`rank` is null");
        }
    }

    #[test]
    fn a_panic_makes_its_handle_unusable() {
        let handle = Mutex::new(1);
        std::panic::set_hook(Box::new(|_| ()));
        call(|| {
            let _locked = lock(&handle)?;
            panic!("half-done")
        });
        let _ = std::panic::take_hook();
        assert_eq!(call(|| lock(&handle).map(|_| ())), MGPU_ERROR_PANIC);
    }
}
