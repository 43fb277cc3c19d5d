//! UCX, loaded at run time: no package is needed to build, and on a machine without UCX the program starts all the same
//! and gets an error that lists where the library was searched for.
//!
//! UCX (openucx.org) moves messages between processes over what the hosts have: InfiniBand, RoCE, EFA, shared memory,
//! TCP. These bindings cover tagged messages between workers that exchange their addresses by other means.
//!
//! Three layers, from the lowest to the highest:
//!
//! 1. `sys` is the output of `bindgen` for `ucp/api/ucp.h`: types, constants, and a table with the functions that are
//!    used. It is committed, so a build needs no libclang; `regenerate.sh` generates it again and
//!    `regenerate.sh --check` verifies that nobody edited it. Structs have a `field_mask`: a library reads only the
//!    fields that are set, so one layout serves all versions.
//! 2. [`Context`], [`Worker`] and [`Request`] own what UCX allocates, and turn status codes into [`UcxError`]. Only
//!    functions that hand memory to UCX, or bytes from other processes, are `unsafe`.
//! 3. [`Library::open`] finds the library (see [`nvidia_libraries::candidates`] for the order) and checks its version.
//!
//! ```
//! match ucx_sys::Library::open() {
//!     Ok(ucx) => println!("UCX {} from {}", ucx.version(), ucx.origin()),
//!     Err(error) => println!("{error}"),
//! }
//! ```

mod context;
mod devices;
mod error;
mod loader;
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
mod worker;

pub use context::Context;
pub use devices::rdma_devices;
pub use error::UcxError;
pub use loader::{INSTALL, LIBRARY_NAME, LIBRARY_VARIABLE, LIBRARY_WHEELS, Library, LoadError, Version};
pub use worker::{EndpointId, Message, Request, Tested, Worker};
