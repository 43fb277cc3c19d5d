//! NCCL's functions as methods of [`Library`].
//!
//! Three of them need neither a GPU nor pointers from the caller, and are safe. The others keep NCCL's own arguments:
//! a communicator, device pointers, a stream. A communication backend is built from them, and only that backend can
//! know that the pointers are valid, so they are `unsafe`. Unlike the C functions they report a missing symbol or a
//! failed call as an error with the function's name.

use crate::config::InitConfig;
use crate::loader::Library;
use crate::results::{NcclError, Progress, check, describe_without_library};
use crate::sys::{
    NCCL_UNIQUE_ID_BYTES, NCCL_WIN_COLL_SYMMETRIC, cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t,
    ncclResult_t, ncclUniqueId, ncclWindow_t,
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
    /// 21003). A negative code, which no library returns, is 0.0.0.
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

/// The 128 bytes that identify a communicator while it is created: rank 0 generates them, every rank passes the same
/// ones.
///
/// They contain an address and a secret, so send them over a private channel only. They are not printed.
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

/// Functions that need neither a GPU nor a pointer from the caller.
impl Library {
    /// The version of the loaded library, which decides what it supports; that of the header is
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

    /// A new id for a group of ranks. NCCL opens a listening socket in this process and puts its address into the id,
    /// so the calling process must itself be one of the ranks. `NCCL_SOCKET_IFNAME=lo` keeps the socket off the
    /// network if all ranks are on this machine.
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

    /// NCCL's text for a result code, whether these bindings know the code or not; our own text if the library
    /// exports none.
    pub fn error_string(&self, result: ncclResult_t) -> String {
        let ours = describe_without_library(result);
        let Ok(function) = self.function("ncclGetErrorString", |symbols| &symbols.ncclGetErrorString) else {
            return ours.to_owned();
        };
        // SAFETY: the function accepts every integer and does not access our memory.
        let text = unsafe { function(result) };
        if text.is_null() {
            return ours.to_owned();
        }
        // SAFETY: not null, so it is one of the library's string constants: terminated, and never unmapped, as the
        // library is never closed.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// NCCL's last warning in this process, for any communicator and thread: often a more detailed reason why a call
    /// failed. Empty if there is none, or if the library is older than 2.13.
    pub fn last_error(&self) -> String {
        let Ok(function) = self.function("ncclGetLastError", |symbols| &symbols.ncclGetLastError) else {
            return String::new();
        };
        // SAFETY: the function accepts a null communicator, and does not access our memory.
        let text = unsafe { function(std::ptr::null_mut()) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: not null, so it is the process-wide buffer that the library has for this text: never unmapped, and
        // its last byte is never written, so it is terminated even while another thread's warning changes the rest.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
    }

    fn check(&self, result: ncclResult_t, function: &'static str) -> Result<Progress, NcclError> {
        check(result, function, |result| self.error_string(result))
    }

    /// For functions without a communicator: nothing can be in progress, so a library that returns "in progress" has
    /// failed.
    fn check_done(&self, result: ncclResult_t, function: &'static str) -> Result<(), NcclError> {
        match self.check(result, function)? {
            Progress::Done => Ok(()),
            Progress::InProgress => {
                Err(NcclError::Call { code: result.0, function, message: self.error_string(result) })
            }
        }
    }
}

/// Defines one method for each C function: look up the symbol, call it, check the result.
macro_rules! calls {
    ($($(#[$doc:meta])* $method:ident = $symbol:ident($($argument:ident: $kind:ty),*);)*) => {
        /// Functions that need a communicator. Each method is the C function of the same name.
        ///
        /// # Safety
        ///
        /// For all of them: `comm` came from [`Library::comm_init_rank_config`] of this library and was neither
        /// destroyed nor aborted; no other thread uses it at the same time, except for [`Library::comm_abort`]; the
        /// current device of this thread is the communicator's. Buffers are device memory with room for `count`
        /// elements of the type (times the number of ranks where the method says so), which stays allocated until
        /// `stream` has completed the operation.
        ///
        /// # Errors
        ///
        /// For all of them: [`NcclError::Call`] as NCCL reports it, [`NcclError::MissingSymbol`] if the library lacks
        /// the function.
        impl Library {$(
            $(#[$doc])*
            ///
            /// # Safety
            ///
            /// The contract at the top of this `impl` block, and that in the description above.
            ///
            /// # Errors
            ///
            /// As NCCL reports them, or if the function is missing.
            #[allow(clippy::too_many_arguments)]
            pub unsafe fn $method(&self, $($argument: $kind),*) -> Result<Progress, NcclError> {
                let function = self.function(stringify!($symbol), |symbols| &symbols.$symbol)?;
                // SAFETY: the caller fulfils the contract written above; the types are those of nccl.h.
                let result = unsafe { function($($argument),*) };
                self.check(result, stringify!($symbol))
            }
        )*}
    };
}

calls! {
    /// Opens a group: the calls of this thread up to [`Library::group_end`] are started together.
    group_start = ncclGroupStart();
    /// Closes the group and starts its calls.
    group_end = ncclGroupEnd();

    /// Completes what was issued on the communicator and prepares it for [`Library::comm_destroy`]. Collective.
    comm_finalize = ncclCommFinalize(comm: ncclComm_t);
    /// Frees a communicator. All ranks must be known to be healthy: on one machine it waits for the others.
    comm_destroy = ncclCommDestroy(comm: ncclComm_t);
    /// Stops running operations and frees the communicator. Only this call may be made while another thread uses it.
    comm_abort = ncclCommAbort(comm: ncclComm_t);
    /// Writes the world size to `count`.
    comm_count = ncclCommCount(comm: ncclComm_t, count: *mut c_int);
    /// Writes this communicator's rank to `rank`.
    comm_user_rank = ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int);
    /// Writes the CUDA device's ordinal to `device`.
    comm_cu_device = ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int);

    /// Reduces `count` elements of every rank into `recv` of every rank. In place if both buffers are the same.
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
    /// Reduces and stores the r-th part of `count` elements on rank r: `send` holds world size × `count`.
    reduce_scatter = ncclReduceScatter(send: *const c_void, recv: *mut c_void, count: usize,
        kind: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t);
    /// Sends `count` elements to `peer`, which must receive the same number.
    send = ncclSend(send: *const c_void, count: usize, kind: ncclDataType_t, peer: c_int, comm: ncclComm_t,
        stream: cudaStream_t);
    /// Receives `count` elements from `peer`.
    recv = ncclRecv(recv: *mut c_void, count: usize, kind: ncclDataType_t, peer: c_int, comm: ncclComm_t,
        stream: cudaStream_t);
}

/// Memory that NCCL and the GPU's peers can access in place.
impl Library {
    /// Whether the library has everything to allocate and register memory (since 2.19).
    pub fn has_registration(&self) -> bool {
        self.function("ncclMemAlloc", |symbols| &symbols.ncclMemAlloc).is_ok()
            && self.function("ncclMemFree", |symbols| &symbols.ncclMemFree).is_ok()
            && self.function("ncclCommRegister", |symbols| &symbols.ncclCommRegister).is_ok()
            && self.function("ncclCommDeregister", |symbols| &symbols.ncclCommDeregister).is_ok()
    }

    /// Whether the library has windows (since 2.27).
    pub fn has_windows(&self) -> bool {
        self.function("ncclCommWindowRegister", |symbols| &symbols.ncclCommWindowRegister).is_ok()
            && self.function("ncclCommWindowDeregister", |symbols| &symbols.ncclCommWindowDeregister).is_ok()
    }

    /// Allocates memory of the current device, which can be registered. It has any content, and NCCL rounds its size up
    /// (to 2 MiB on today's GPUs). Where the driver cannot share physical memory, or with `NCCL_CUMEM_ENABLE=0`, it is
    /// ordinary memory. Available since 2.19.
    ///
    /// # Errors
    ///
    /// As NCCL reports them, or if the function is missing.
    pub fn mem_alloc(&self, bytes: usize) -> Result<*mut c_void, NcclError> {
        let function = self.function("ncclMemAlloc", |symbols| &symbols.ncclMemAlloc)?;
        let mut address = std::ptr::null_mut();
        // SAFETY: the argument is a live, writable pointer, which is all the function touches of our memory.
        let result = unsafe { function(&mut address, bytes) };
        self.check_done(result, "ncclMemAlloc")?;
        Ok(address)
    }

    /// Frees memory, without waiting for work that may still use it.
    ///
    /// # Safety
    ///
    /// [`Library::mem_alloc`] returned the address, no work uses the memory any more, and no communicator has it
    /// registered.
    ///
    /// # Errors
    ///
    /// As NCCL reports them, or if the function is missing.
    pub unsafe fn mem_free(&self, address: *mut c_void) -> Result<(), NcclError> {
        let function = self.function("ncclMemFree", |symbols| &symbols.ncclMemFree)?;
        // SAFETY: as the caller guarantees.
        let result = unsafe { function(address) };
        self.check_done(result, "ncclMemFree")
    }

    /// Registers memory with a communicator, on this rank alone: returns at once and waits for nobody. Returns a null
    /// handle if NCCL has registered nothing (`NCCL_LOCAL_REGISTER=0`). If operations of one rank use registered memory,
    /// those of all ranks must, at the same offsets from its beginning. Available since 2.19.
    ///
    /// # Safety
    ///
    /// The contract of the functions with a communicator, which is not "in progress". The memory is device memory of
    /// this many bytes, and stays allocated until it is deregistered, or the communicator destroyed or aborted.
    ///
    /// # Errors
    ///
    /// As NCCL reports them, or if the function is missing. The communicator can still be used.
    pub unsafe fn comm_register(
        &self,
        comm: ncclComm_t,
        address: *mut c_void,
        bytes: usize,
    ) -> Result<*mut c_void, NcclError> {
        let function = self.function("ncclCommRegister", |symbols| &symbols.ncclCommRegister)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the caller guarantees the communicator and the memory; `handle` is a live, writable pointer.
        let result = unsafe { function(comm, address, bytes, &mut handle) };
        self.check_done(result, "ncclCommRegister")?;
        Ok(handle)
    }

    /// Deregisters memory. Local, and returns at once.
    ///
    /// # Safety
    ///
    /// The contract of the functions with a communicator. [`Library::comm_register`] of it returned the handle, which is
    /// not null, and no operation uses the memory any more.
    ///
    /// # Errors
    ///
    /// As NCCL reports them, or if the function is missing.
    pub unsafe fn comm_deregister(&self, comm: ncclComm_t, handle: *mut c_void) -> Result<(), NcclError> {
        let function = self.function("ncclCommDeregister", |symbols| &symbols.ncclCommDeregister)?;
        // SAFETY: as the caller guarantees.
        let result = unsafe { function(comm, handle) };
        self.check_done(result, "ncclCommDeregister")
    }

    /// Registers memory as a window for symmetric collectives: peers access it by loads and stores. Collective over all
    /// ranks of the communicator, with memory of the same size from [`Library::mem_alloc`]. Leaves `window` null, without
    /// an error, where the GPUs cannot access each other's memory. Available since 2.27.
    ///
    /// Like all calls that connect ranks it may return "in progress"; an error then is the communicator's own, which can
    /// only be aborted.
    ///
    /// # Safety
    ///
    /// That of [`Library::comm_register`]. `window` is null, writable, and stays so until
    /// [`Library::comm_async_error`] no longer returns "in progress", or [`Library::comm_abort`] has returned.
    ///
    /// # Errors
    ///
    /// As NCCL reports them, or if the function is missing.
    pub unsafe fn comm_window_register(
        &self,
        comm: ncclComm_t,
        address: *mut c_void,
        bytes: usize,
        window: *mut ncclWindow_t,
    ) -> Result<Progress, NcclError> {
        let function = self.function("ncclCommWindowRegister", |symbols| &symbols.ncclCommWindowRegister)?;
        let flags = NCCL_WIN_COLL_SYMMETRIC as c_int;
        // SAFETY: the caller guarantees the communicator, the memory and `window`.
        let result = unsafe { function(comm, address, bytes, window, flags) };
        self.check(result, "ncclCommWindowRegister")
    }

    /// Deregisters a window. Local, and returns at once.
    ///
    /// # Safety
    ///
    /// The contract of the functions with a communicator. [`Library::comm_window_register`] of it has written `window`,
    /// which is not null, and no operation of any rank uses the memory any more.
    ///
    /// # Errors
    ///
    /// As NCCL reports them, or if the function is missing.
    pub unsafe fn comm_window_deregister(
        &self,
        comm: ncclComm_t,
        window: ncclWindow_t,
    ) -> Result<(), NcclError> {
        let function =
            self.function("ncclCommWindowDeregister", |symbols| &symbols.ncclCommWindowDeregister)?;
        // SAFETY: as the caller guarantees.
        let result = unsafe { function(comm, window) };
        self.check_done(result, "ncclCommWindowDeregister")
    }
}

/// Calls whose arguments differ from those of the C functions.
impl Library {
    /// Joins the group of `id` as rank `rank` of `world_size` and writes the communicator to `comm`.
    ///
    /// # Safety
    ///
    /// `comm` is writable, and stays so until [`Library::comm_async_error`] no longer returns "in progress": a
    /// non-blocking initialisation writes the handle again from its own thread when it is complete. The current
    /// device of this thread is the one that the rank is to use.
    ///
    /// # Errors
    ///
    /// As NCCL reports them; without a GPU that the CUDA driver is missing.
    pub unsafe fn comm_init_rank_config(
        &self,
        comm: *mut ncclComm_t,
        world_size: c_int,
        id: UniqueId,
        rank: c_int,
        mut config: InitConfig,
    ) -> Result<Progress, NcclError> {
        let function = self.function("ncclCommInitRankConfig", |symbols| &symbols.ncclCommInitRankConfig)?;
        // SAFETY: the caller guarantees `comm`; the configuration is live during the call, contains its own size, and
        // is copied before the call returns.
        let result = unsafe { function(comm, world_size, id.to_nccl(), rank, config.as_nccl()) };
        self.check(result, "ncclCommInitRankConfig")
    }

    /// Splits a communicator: the ranks that pass the same `color` form a new one, which is written to `new`. They are
    /// ordered by `key`, then by their rank in `comm`. All ranks of `comm` call it, while none of its operations is in
    /// progress. Available since 2.18.1. A rank that needs no new communicator takes a color of its own:
    /// `NCCL_SPLIT_NOCOLOR` is not offered, since NCCL 2.28.3 then writes to address 0 if the split fails.
    ///
    /// While it is in progress, so is `comm`, which is used for the synchronisation, although this function may return
    /// "done"; [`Library::comm_abort`] of `comm` ends it. Afterwards the two are independent.
    ///
    /// # Safety
    ///
    /// The contract of the functions with a communicator. `new` is null, writable, and stays so until
    /// [`Library::comm_async_error`] of `comm` no longer returns "in progress" and `new` is not null, or until
    /// [`Library::comm_abort`] of `comm` has returned: NCCL writes the handle from its own thread, when it is complete
    /// or has failed, and perhaps a little later than the state of `comm`.
    ///
    /// # Errors
    ///
    /// As NCCL reports them, or if the function is missing.
    pub unsafe fn comm_split(
        &self,
        comm: ncclComm_t,
        color: u16,
        key: c_int,
        new: *mut ncclComm_t,
        mut config: InitConfig,
    ) -> Result<Progress, NcclError> {
        let function = self.function("ncclCommSplit", |symbols| &symbols.ncclCommSplit)?;
        // SAFETY: the caller guarantees `comm` and `new`; the configuration is live during the call, contains its own
        // size, and is copied before the call returns.
        let result = unsafe { function(comm, c_int::from(color), key, new, config.as_nccl()) };
        self.check(result, "ncclCommSplit")
    }

    /// The communicator's state: done, in progress, or an asynchronous error. NCCL does not notice the death of a
    /// peer on this machine.
    ///
    /// # Safety
    ///
    /// `comm` came from [`Library::comm_init_rank_config`] of this library and was neither destroyed nor aborted.
    ///
    /// # Errors
    ///
    /// The asynchronous error, or an error of this call.
    pub unsafe fn comm_async_error(&self, comm: ncclComm_t) -> Result<Progress, NcclError> {
        let function = self.function("ncclCommGetAsyncError", |symbols| &symbols.ncclCommGetAsyncError)?;
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the caller guarantees `comm`; `state` is a live, writable result.
        let result = unsafe { function(comm, &mut state) };
        match self.check(result, "ncclCommGetAsyncError")? {
            Progress::Done => self.check(state, "ncclCommGetAsyncError"),
            Progress::InProgress => Ok(Progress::InProgress),
        }
    }
}
