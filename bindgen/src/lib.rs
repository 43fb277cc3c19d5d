//! NCCL, opened at run time: no NVIDIA package is needed to build, and a machine without one gets a value that
//! says where the library was looked for, never a failure to start.
//!
//! Three layers, each thinner than the one above it:
//!
//! 1. `sys` is what `bindgen` makes of `nccl.h`: types, constants, and a table with one entry for each
//!    function. It is committed, so a build needs no libclang; `regenerate.sh` makes it again and
//!    `regenerate.sh --check` proves that nobody edited it. Enums are newtypes over integers: a code that a newer
//!    library invents is a number we do not know, where a Rust enum would make it undefined behaviour. A symbol
//!    that the library lacks is an `Err` in the table.
//! 2. [`NcclError`] and [`check`] turn result codes into values, and the methods of [`Library`] named after NCCL's
//!    functions call through the table. They are `unsafe` where NCCL takes pointers; what they
//!    add is that a missing symbol and a bad code come back as errors with the function's name.
//! 3. [`Library::open`] finds the library (the order is in [`nvidia_libraries::candidates`]), and what works on any machine, GPU or
//!    not, is safe: [`Library::version`], [`Library::unique_id`], [`Library::error_string`].
//!
//! ```
//! match nccl_sys::Library::open() {
//!     Ok(nccl) => println!("NCCL {} from {}", nccl.version()?, nccl.origin()),
//!     Err(error) => println!("{}", error.summary()),
//! }
//! # Ok::<(), nccl_sys::NcclError>(())
//! ```
//!
//! The table itself stays private: the generated methods panic on a missing symbol, so nothing outside this crate
//! may reach them.

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
    ncclResult_t, ncclUniqueId,
};

/// The NCCL release whose header the bindings were generated from, in the library's own encoding.
pub const HEADER_VERSION: Version = Version::from_code(sys::NCCL_VERSION_CODE as i32);
