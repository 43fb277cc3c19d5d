//! NCCL's functions as methods of [`Library`].
//!
//! Three of them need no GPU and no pointers from the caller, and are safe. The rest keep NCCL's own arguments: a
//! communicator, device pointers, a stream. They are what a communication backend is built from, and that backend
//! is who can know that the pointers are good, so they are `unsafe`; what they add to the C functions is that a
//! missing symbol and a result code are errors with a name.

use crate::config::InitConfig;
use crate::loader::Library;
use crate::results::{NcclError, Progress, check, describe_without_library};
use crate::sys::{
    NCCL_UNIQUE_ID_BYTES, cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId,
};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;

/// A release of NCCL; ordered as releases are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// 2 in 2.28.9.
    pub major: u32,
    /// 28 in 2.28.9.
    pub minor: u32,
    /// 9 in 2.28.9.
    pub patch: u32,
}

impl Version {
    /// Decodes NCCL's integer. Up to 2.8 a minor version had one digit (2.8.4 is 2804), since then two (2.10.3 is
    /// 21003). A negative code, which no library gives, is 0.0.0.
    ///
    /// ```
    /// # use nccl_sys::Version;
    /// assert_eq!(Version::from_code(22809), Version { major: 2, minor: 28, patch: 9 });
    /// assert_eq!(Version::from_code(2804).to_string(), "2.8.4");
    /// ```
    pub const fn from_code(code: i32) -> Self {
        let code = if code < 0 { 0 } else { code as u32 };
        let per_major = if code < 10_000 { 1_000 } else { 10_000 };
        Self { major: code / per_major, minor: code % per_major / 100, patch: code % 100 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The 128 bytes by which ranks find each other: rank 0 makes them, every rank initialises with the same ones.
///
/// They hold an address and a secret, so they travel over a private channel only and are not printed in full.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; UniqueId::LEN]);

impl UniqueId {
    /// The length in bytes, fixed by NCCL.
    pub const LEN: usize = NCCL_UNIQUE_ID_BYTES as usize;

    /// An id received from rank 0.
    pub const fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// The bytes to send to the other ranks.
    pub const fn as_bytes(&self) -> &[u8; Self::LEN] {
        &self.0
    }

    fn from_nccl(id: ncclUniqueId) -> Self {
        Self(id.internal.map(|byte| byte as u8))
    }

    fn to_nccl(self) -> ncclUniqueId {
        ncclUniqueId { internal: self.0.map(|byte| byte as c_char) }
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

/// What needs neither a GPU nor a pointer from the caller.
impl Library {
    /// The library's own version, which decides what it can do; the header's is
    /// [`HEADER_VERSION`](crate::HEADER_VERSION).
    ///
    /// # Errors
    ///
    /// As NCCL reports them.
    pub fn version(&self) -> Result<Version, NcclError> {
        let function = self.function("ncclGetVersion", |symbols| &symbols.ncclGetVersion)?;
        let mut code: c_int = 0;
        // SAFETY: the argument is a live, writable integer, which is all the function touches.
        let result = unsafe { function(&mut code) };
        self.check_done(result, "ncclGetVersion")?;
        Ok(Version::from_code(code))
    }

    /// A new id for a group of ranks. NCCL opens a listening socket in this process and puts its address into the
    /// id, so the process that calls this must take part as a rank, and `NCCL_SOCKET_IFNAME=lo` keeps it
    /// off the network when all ranks are on this machine.
    ///
    /// # Errors
    ///
    /// As NCCL reports them, for example when no network interface is usable.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let function = self.function("ncclGetUniqueId", |symbols| &symbols.ncclGetUniqueId)?;
        let mut id = ncclUniqueId { internal: [0; UniqueId::LEN] };
        // SAFETY: the argument is a live, writable struct of the type NCCL fills.
        let result = unsafe { function(&mut id) };
        self.check_done(result, "ncclGetUniqueId")?;
        Ok(UniqueId::from_nccl(id))
    }

    /// NCCL's text for a result, known to these bindings or not; our own where the library exports none.
    pub fn error_string(&self, result: ncclResult_t) -> String {
        let ours = describe_without_library(result);
        let Ok(function) = self.function("ncclGetErrorString", |symbols| &symbols.ncclGetErrorString) else {
            return ours.to_owned();
        };
        // SAFETY: the function accepts every integer and touches no memory of ours.
        let text = unsafe { function(result) };
        if text.is_null() {
            return ours.to_owned();
        }
        // SAFETY: not null, so it is one of the library's string constants: terminated, and mapped for good, as
        // the library is never closed.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// The last warning of NCCL in this process, whichever communicator or thread it was about: often in more words why a
    /// call failed. Empty if there is none, or the library is older than 2.13.
    pub fn last_error(&self) -> String {
        let Ok(function) = self.function("ncclGetLastError", |symbols| &symbols.ncclGetLastError) else {
            return String::new();
        };
        // SAFETY: the function takes no communicator as well as any, and touches no memory of ours.
        let text = unsafe { function(std::ptr::null_mut()) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: not null, so it is the one buffer that the library has for this text in a process: mapped for good, and its
        // last byte is never written, so that it is terminated even while another thread's warning changes the rest.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
    }

    fn check(&self, result: ncclResult_t, function: &'static str) -> Result<Progress, NcclError> {
        check(result, function, |result| self.error_string(result))
    }

    /// For functions outside any communicator: nothing can be in progress, so a library that says so has failed.
    fn check_done(&self, result: ncclResult_t, function: &'static str) -> Result<(), NcclError> {
        match self.check(result, function)? {
            Progress::Done => Ok(()),
            Progress::InProgress => {
                Err(NcclError::Call { code: result.0, function, message: self.error_string(result) })
            }
        }
    }
}

/// Defines one method for each C function: look it up, call it, check the result.
macro_rules! calls {
    ($($(#[$doc:meta])* $method:ident = $symbol:ident($($argument:ident: $kind:ty),*);)*) => {
        /// What needs a communicator. Each method is the C function of the same name.
        ///
        /// # Safety
        ///
        /// For all of them: `comm` came from [`Library::comm_init_rank_config`] of this library and was neither
        /// destroyed nor aborted; no other thread calls with it, [`Library::comm_abort`] excepted; the device
        /// current in this thread is the communicator's. Buffers are device memory with room for `count` elements
        /// of the type (times the number of ranks where the method says so), which stays allocated until `stream`
        /// has passed the operation.
        ///
        /// # Errors
        ///
        /// For all of them: [`NcclError::Call`] as NCCL reports it, [`NcclError::MissingSymbol`] if the library has
        /// no such function.
        impl Library {$(
            $(#[$doc])*
            ///
            /// # Safety
            ///
            /// The contract at the head of this `impl` block, and what is said above.
            ///
            /// # Errors
            ///
            /// As NCCL reports them, or the function is missing.
            #[allow(clippy::too_many_arguments)]
            pub unsafe fn $method(&self, $($argument: $kind),*) -> Result<Progress, NcclError> {
                let function = self.function(stringify!($symbol), |symbols| &symbols.$symbol)?;
                // SAFETY: the caller keeps the contract written above; the types are those of nccl.h.
                let result = unsafe { function($($argument),*) };
                self.check(result, stringify!($symbol))
            }
        )*}
    };
}

calls! {
    /// Opens a group: the calls of this thread up to [`Library::group_end`] are started together.
    group_start = ncclGroupStart();
    /// Closes the group and starts what it holds.
    group_end = ncclGroupEnd();

    /// Completes what was issued on the communicator and readies it for [`Library::comm_destroy`]. Collective.
    comm_finalize = ncclCommFinalize(comm: ncclComm_t);
    /// Frees a communicator whose ranks are all known healthy: within one machine it waits for the others.
    comm_destroy = ncclCommDestroy(comm: ncclComm_t);
    /// Stops what is running and frees the communicator. The one call that another thread may make meanwhile.
    comm_abort = ncclCommAbort(comm: ncclComm_t);
    /// Writes the world size to `count`.
    comm_count = ncclCommCount(comm: ncclComm_t, count: *mut c_int);
    /// Writes this communicator's rank to `rank`.
    comm_user_rank = ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int);
    /// Writes the CUDA device's ordinal to `device`.
    comm_cu_device = ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int);

    /// Reduces `count` elements of every rank into `recv` of every rank. In place if both buffers are one.
    all_reduce = ncclAllReduce(send: *const c_void, recv: *mut c_void, count: usize, kind: ncclDataType_t,
        op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t);
    /// Reduces `count` elements of every rank into `recv` of `root`; `recv` is ignored elsewhere.
    reduce = ncclReduce(send: *const c_void, recv: *mut c_void, count: usize, kind: ncclDataType_t,
        op: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t);
    /// Copies `count` elements of `root` to `recv` of every rank; `send` is ignored elsewhere.
    broadcast = ncclBroadcast(send: *const c_void, recv: *mut c_void, count: usize, kind: ncclDataType_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t);
    /// Gathers `count` elements of every rank, in rank order: `recv` holds world size × `count`.
    all_gather = ncclAllGather(send: *const c_void, recv: *mut c_void, count: usize, kind: ncclDataType_t,
        comm: ncclComm_t, stream: cudaStream_t);
    /// Reduces and leaves rank r the r-th part of `count` elements: `send` holds world size × `count`.
    reduce_scatter = ncclReduceScatter(send: *const c_void, recv: *mut c_void, count: usize,
        kind: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t);
    /// Sends `count` elements to `peer`, which must receive as many.
    send = ncclSend(send: *const c_void, count: usize, kind: ncclDataType_t, peer: c_int, comm: ncclComm_t,
        stream: cudaStream_t);
    /// Receives `count` elements from `peer`.
    recv = ncclRecv(recv: *mut c_void, count: usize, kind: ncclDataType_t, peer: c_int, comm: ncclComm_t,
        stream: cudaStream_t);
}

/// Calls whose arguments differ from the C functions'.
impl Library {
    /// Joins rank `rank` of `world_size` to the group of `id` and writes the communicator to `comm`.
    ///
    /// # Safety
    ///
    /// `comm` is writable, and stays so until [`Library::comm_async_error`] no longer says "in progress": a
    /// non-blocking initialisation writes the handle again from a thread of its own when it is through. The device
    /// current in this thread is the one the rank is to use.
    ///
    /// # Errors
    ///
    /// As NCCL reports them; without a GPU that is the missing CUDA driver.
    pub unsafe fn comm_init_rank_config(
        &self,
        comm: *mut ncclComm_t,
        world_size: c_int,
        id: UniqueId,
        rank: c_int,
        mut config: InitConfig,
    ) -> Result<Progress, NcclError> {
        let function = self.function("ncclCommInitRankConfig", |symbols| &symbols.ncclCommInitRankConfig)?;
        // SAFETY: the caller vouches for `comm`; the configuration is live for the call, says its own size, and is
        // copied before the call returns.
        let result = unsafe { function(comm, world_size, id.to_nccl(), rank, config.as_nccl()) };
        self.check(result, "ncclCommInitRankConfig")
    }

    /// The communicator's state: done, in progress, or the error that befell it in the background. A peer that
    /// died on this machine is none NCCL would notice.
    ///
    /// # Safety
    ///
    /// `comm` came from [`Library::comm_init_rank_config`] of this library and was neither destroyed nor aborted.
    ///
    /// # Errors
    ///
    /// The background error, or that of asking for it.
    pub unsafe fn comm_async_error(&self, comm: ncclComm_t) -> Result<Progress, NcclError> {
        let function = self.function("ncclCommGetAsyncError", |symbols| &symbols.ncclCommGetAsyncError)?;
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the caller vouches for `comm`; `state` is a live, writable result.
        let result = unsafe { function(comm, &mut state) };
        match self.check(result, "ncclCommGetAsyncError")? {
            Progress::Done => self.check(state, "ncclCommGetAsyncError"),
            Progress::InProgress => Ok(Progress::InProgress),
        }
    }
}
