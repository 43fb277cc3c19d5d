//! What a tool gets of NVTX: tables of the functions that a program may call, in which the tool puts its own.
//!
//! The numbers and structures are those of NVTX 3 (`nvtxDetail/nvtxTypes.h`). Every function has a slot, because a tool
//! fills all that it knows; only the few that this crate calls are read.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The version of NVTX that this is.
pub(super) const VERSION: u32 = 3;

/// Number of functions of each module (`NvtxCallbackModule`), which includes the unused one with number 0. Modules are
/// numbered from 1: core, CUDA driver, OpenCL, CUDA run time, core of version 2, synchronisation.
const SIZES: [usize; 6] = [16, 9, 15, 7, 16, 7];
const MOST: usize = 16;

/// The module with domains, and its functions that are called (`NvtxCallbackIdCore2`).
const CORE2: usize = 5;
pub(super) const RANGE_PUSH: usize = 4;
pub(super) const RANGE_POP: usize = 5;
pub(super) const DOMAIN_CREATE: usize = 12;

/// Numbers of the tables that a tool asks for (`NvtxExportTableID`).
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;

/// A function of the tool, null if it has none.
type Slot = AtomicPtr<c_void>;
/// The address of a slot; null for the function with number 0, and behind the last one.
type Entry = AtomicPtr<Slot>;

static SLOTS: [[Slot; MOST]; 6] = [const { [const { AtomicPtr::new(null_mut()) }; MOST] }; 6];

/// The addresses of the slots of each module.
fn entries() -> &'static [[Entry; MOST + 1]; 6] {
    static ENTRIES: OnceLock<[[Entry; MOST + 1]; 6]> = OnceLock::new();
    ENTRIES.get_or_init(|| {
        std::array::from_fn(|module| {
            std::array::from_fn(|function| {
                let is_used = (1..SIZES[module]).contains(&function);
                AtomicPtr::new(if is_used {
                    (&raw const SLOTS[module][function]).cast_mut()
                } else {
                    null_mut()
                })
            })
        })
    })
}

/// The function of the tool, of the module with domains.
pub(super) fn function(number: usize) -> *mut c_void {
    SLOTS[CORE2 - 1][number].load(Ordering::Acquire)
}

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    size: usize,
    function_table: extern "C" fn(c_uint, *mut *const Entry, *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionInfo {
    size: usize,
    version: u32,
    reserved: u32,
    set_tool_version: extern "C" fn(u32),
}

/// Gives the tool the table of a module. 0 if there is none.
extern "C" fn function_table(module: c_uint, table: *mut *const Entry, size: *mut c_uint) -> c_int {
    let Some(index) = (module as usize).checked_sub(1).filter(|index| *index < SIZES.len()) else { return 0 };
    if !size.is_null() {
        // SAFETY: the tool passes null or a writable integer.
        unsafe { size.write(SIZES[index] as c_uint) };
    }
    if !table.is_null() {
        // SAFETY: the tool passes null or a writable pointer.
        unsafe { table.write(entries()[index].as_ptr()) };
    }
    1
}

/// A tool tells its version here, which changes nothing.
extern "C" fn set_tool_version(_: u32) {}

/// Gives the tool a table by its number, null if there is none.
pub(super) extern "C" fn export_table(number: u32) -> *const c_void {
    static CALLBACK_TABLE: Callbacks = Callbacks { size: size_of::<Callbacks>(), function_table };
    static VERSION_TABLE: VersionInfo =
        VersionInfo { size: size_of::<VersionInfo>(), version: VERSION, reserved: 0, set_tool_version };
    match number {
        CALLBACKS => (&raw const CALLBACK_TABLE).cast(),
        VERSION_INFO => (&raw const VERSION_TABLE).cast(),
        _ => std::ptr::null(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_those_of_the_header() {
        assert!(export_table(0).is_null() && export_table(2).is_null() && export_table(4).is_null());
        // SAFETY: the tables above.
        let version = unsafe { &*export_table(VERSION_INFO).cast::<VersionInfo>() };
        assert_eq!((version.size, version.version), (24, 3));
        // SAFETY: as above.
        let callbacks = unsafe { &*export_table(CALLBACKS).cast::<Callbacks>() };
        assert_eq!(callbacks.size, 16);
        for (module, functions) in (1..).zip(SIZES) {
            let (mut table, mut size) = (std::ptr::null(), 0);
            assert_eq!((callbacks.function_table)(module, &mut table, &mut size), 1);
            assert_eq!(size as usize, functions);
            let entry = |index: usize| {
                // SAFETY: a table has one entry more than functions.
                unsafe { &*table.add(index) }.load(Ordering::Relaxed)
            };
            assert!(entry(0).is_null() && entry(functions).is_null());
            assert!((1..functions).all(|index| !entry(index).is_null()));
            assert_eq!((callbacks.function_table)(module, null_mut(), null_mut()), 1);
        }
        for none in [0, 7, c_uint::MAX] {
            assert_eq!((callbacks.function_table)(none, null_mut(), null_mut()), 0);
        }
    }
}
