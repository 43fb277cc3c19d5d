//! NCCL, loaded at run time: no NVIDIA package is needed to build, and on a machine without NCCL the program starts
//! all the same and gets an error that lists where the library was searched for.
//!
//! Three layers, from the lowest to the highest:
//!
//! 1. `sys` is the output of `bindgen` for `nccl.h`: types, constants, and a table with one entry for each function.
//!    It is committed, so a build needs no libclang; `regenerate.sh` generates it again and `regenerate.sh --check`
//!    verifies that nobody edited it. Enums are newtypes over integers: a result code that a newer library introduces
//!    is an unknown number, whereas as a value of a Rust enum it would be undefined behaviour. A symbol that the
//!    library lacks is an `Err` in the table.
//! 2. [`NcclError`] and [`check`] turn result codes into values, and the methods of [`Library`] named after NCCL's
//!    functions call through the table. They are `unsafe` if NCCL takes pointers. They report a missing symbol or a
//!    failed call as an error with the function's name.
//! 3. [`Library::open`] finds the library (see [`nvidia_libraries::candidates`] for the order). Functions that work
//!    on any machine, with or without a GPU, are safe: [`Library::version`], [`Library::unique_id`],
//!    [`Library::error_string`].
//!
//! ```
//! match nccl_sys::Library::open() {
//!     Ok(nccl) => println!("NCCL {} from {}", nccl.version()?, nccl.origin()),
//!     Err(error) => println!("{}", error.summary()),
//! }
//! # Ok::<(), nccl_sys::NcclError>(())
//! ```
//!
//! The table itself stays private: its generated methods panic on a missing symbol, so code outside this crate must
//! not reach them.

mod calls;
mod config;
mod loader;
mod results;
#[allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals
)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod sys;

pub use calls::{UniqueId, Version};
pub use config::InitConfig;
pub use loader::{Attempt, LIBRARY_NAME, LIBRARY_VARIABLE, LIBRARY_WHEELS, Library, LoadError};
pub use results::{NcclError, Progress, check};
/// The types of `nccl.h` that appear in this crate's signatures, under their C names.
pub use sys::{
    CUevent_st, CUstream_st, cudaEvent_t, cudaStream_t, ncclComm, ncclComm_t, ncclDataType_t, ncclRedOp_t,
    ncclResult_t, ncclUniqueId, ncclWindow_t, ncclWindow_vidmem,
};

/// The NCCL release whose header the bindings were generated from, in the library's own encoding.
pub const HEADER_VERSION: Version = Version::from_code(sys::NCCL_VERSION_CODE as i32);
