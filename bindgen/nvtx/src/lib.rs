//! Ranges for NVIDIA's profilers: what a thread is doing, from when to when, shown beside the work of the GPU.
//!
//! NVTX 3 has no library. A profiler such as `nsys` starts the program with the path of its own library in
//! `NVTX_INJECTION64_PATH`; the program opens it and calls `InitializeInjectionNvtx2`, and the profiler puts its functions
//! into tables of the program (`tables`). Without that variable nothing is opened, and a range costs one comparison.
//!
//! ```
//! {
//!     let _range = nvtx::range("augment", None);
//!     // … work that a profiler shows as `augment` …
//! }
//! ```

mod tables;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

/// The variable in which a profiler puts the path of its library.
#[cfg(target_pointer_width = "64")]
pub const VARIABLE: &str = "NVTX_INJECTION64_PATH";
/// The variable in which a profiler puts the path of its library.
#[cfg(not(target_pointer_width = "64"))]
pub const VARIABLE: &str = "NVTX_INJECTION32_PATH";

/// The domain of all ranges: profilers group and filter by it.
const DOMAIN: &CStr = c"mgpu";

/// `NVTX_PAYLOAD_TYPE_UNSIGNED_INT64` and `NVTX_MESSAGE_TYPE_ASCII`.
const PAYLOAD_U64: i32 = 1;
const MESSAGE_ASCII: i32 = 1;

/// `nvtxEventAttributes_v2`.
#[repr(C)]
struct Attributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_char,
}

type GetExportTable = extern "C" fn(u32) -> *const c_void;
type Initialize = unsafe extern "C" fn(GetExportTable) -> c_int;
type DomainCreate = unsafe extern "C" fn(*const c_char) -> *mut c_void;
type RangePush = unsafe extern "C" fn(*mut c_void, *const Attributes) -> c_int;
type RangePop = unsafe extern "C" fn(*mut c_void) -> c_int;

/// A profiler that records ranges.
pub struct Profiler {
    push: RangePush,
    pop: RangePop,
    domain: *mut c_void,
}

// SAFETY: the profiler's functions may be called from all threads, and the domain is a handle for them.
unsafe impl Send for Profiler {}
// SAFETY: as above.
unsafe impl Sync for Profiler {}

impl fmt::Debug for Profiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profiler").finish_non_exhaustive()
    }
}

/// The profiler of this process. The first call opens its library, if [`VARIABLE`] names one. As with NVTX itself, one that
/// cannot be used is ignored.
pub fn profiler() -> Option<&'static Profiler> {
    static PROFILER: OnceLock<Option<Profiler>> = OnceLock::new();
    PROFILER.get_or_init(open).as_ref()
}

fn open() -> Option<Profiler> {
    let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty())?;
    // SAFETY: the library's own start-up runs, which the profiler wants in this process.
    let library = unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_LOCAL) }.ok()?;
    // SAFETY: the symbol of NVTX has this type.
    let initialize =
        unsafe { library.get::<Initialize>(c"InitializeInjectionNvtx2") }.ok().map(|found| *found)?;
    // SAFETY: as NVTX calls it; `export_table` returns tables that live as long as the process.
    if unsafe { initialize(tables::export_table) } == 0 {
        return None;
    }
    // The profiler's functions are called until the end of the process.
    std::mem::forget(library);
    let function = |number| NonNull::new(tables::function(number));
    let (push, pop) = (function(tables::RANGE_PUSH)?, function(tables::RANGE_POP)?);
    // SAFETY: the profiler has put its `nvtxDomainRangePushEx` there.
    let push = unsafe { std::mem::transmute::<NonNull<c_void>, RangePush>(push) };
    // SAFETY: and its `nvtxDomainRangePop` there.
    let pop = unsafe { std::mem::transmute::<NonNull<c_void>, RangePop>(pop) };
    let domain = function(tables::DOMAIN_CREATE).map_or(std::ptr::null_mut(), |create| {
        // SAFETY: the profiler has put its `nvtxDomainCreateA` there.
        let create = unsafe { std::mem::transmute::<NonNull<c_void>, DomainCreate>(create) };
        // SAFETY: a string.
        unsafe { create(DOMAIN.as_ptr()) }
    });
    Some(Profiler { push, pop, domain })
}

impl Profiler {
    /// Starts a range of the calling thread with the name `name`, and a number that the profiler shows with it.
    #[cold]
    pub fn range(&'static self, name: impl Into<Vec<u8>>, payload: Option<u64>) -> Range {
        // Names are programs' own; one with a zero byte is shown without its name.
        let name = CString::new(name).unwrap_or_default();
        let attributes = Attributes {
            version: tables::VERSION as u16,
            size: size_of::<Attributes>() as u16,
            category: 0,
            color_type: 0,
            color: 0,
            payload_type: if payload.is_some() { PAYLOAD_U64 } else { 0 },
            reserved: 0,
            payload: payload.unwrap_or(0),
            message_type: MESSAGE_ASCII,
            message: name.as_ptr(),
        };
        // SAFETY: the profiler reads the attributes and the string during the call.
        unsafe { (self.push)(self.domain, &attributes) };
        Range { profiler: Some(self), thread: PhantomData }
    }
}

/// A range, which ends when it is dropped. Ranges of a thread are nested.
#[derive(Debug, Default)]
#[must_use = "a range ends when it is dropped"]
pub struct Range {
    profiler: Option<&'static Profiler>,
    /// A range ends on the thread that has started it.
    thread: PhantomData<*const ()>,
}

impl Range {
    /// No range.
    pub const NONE: Range = Range { profiler: None, thread: PhantomData };
}

impl Drop for Range {
    #[inline]
    fn drop(&mut self) {
        if let Some(Profiler { pop, domain, .. }) = self.profiler {
            // SAFETY: the profiler's function, and the domain of the range.
            unsafe { pop(*domain) };
        }
    }
}

/// Starts a range of the calling thread, if there is a profiler; `number` follows the name, such as that of a step.
#[inline]
pub fn range(name: &str, number: Option<u64>) -> Range {
    match profiler() {
        None => Range::NONE,
        Some(profiler) => profiler.range(numbered(name, number), None),
    }
}

fn numbered(name: &str, number: Option<u64>) -> String {
    number.map_or_else(|| name.to_owned(), |number| format!("{name} {number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_have_the_layout_of_the_header() {
        assert_eq!(size_of::<Attributes>(), 48);
        assert_eq!(
            (std::mem::offset_of!(Attributes, payload), std::mem::offset_of!(Attributes, message)),
            (24, 40)
        );
        assert_eq!((numbered("step", Some(3)), numbered("loss", None)), ("step 3".into(), "loss".into()));
    }

    #[test]
    fn without_a_profiler_there_is_no_range() {
        if std::env::var_os(VARIABLE).is_none() {
            assert!(profiler().is_none() && range("x", None).profiler.is_none());
        }
    }
}
