//! A worker: the connections of one owner, and the operations in progress on them.
//!
//! A worker has an address, which other processes get by other means. An endpoint connects it with the worker of such
//! an address. Messages are sent to an endpoint and received by the worker, by their 64-bit tags. Nothing progresses
//! outside of [`Worker::progress`], except for what the hardware does.
//!
//! Operations have no callbacks: they leave a [`Request`], which is tested. One callback is needed, for the failure of
//! an endpoint; it stores the status beside the endpoint.

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicI8, Ordering};

use crate::context::Context;
use crate::error::UcxError;
use crate::loader::Library;
use crate::sys::{
    UcxSymbols, ucp_ep_close_flags_t, ucp_ep_h, ucp_ep_params_field, ucp_ep_params_t, ucp_err_handler_t,
    ucp_err_handling_mode_t, ucp_op_attr_t, ucp_request_param_t, ucp_request_param_t__bindgen_ty_1,
    ucp_request_param_t__bindgen_ty_2, ucp_tag_message_h, ucp_tag_recv_info_t, ucp_worker_h,
    ucp_worker_params_field, ucp_worker_params_t, ucs_cpu_set_t, ucs_memory_type_t, ucs_sock_addr_t,
    ucs_status_t, ucs_thread_mode_t,
};

/// How often a worker that is dropped progresses until its endpoints are closed.
const CLOSE_ROUNDS: usize = 100_000;

/// The connections of one owner, and the operations in progress on them. It may move between threads, and is used by one
/// at a time.
///
/// Dropping it ends all connections and operations; the peers' endpoints fail.
#[derive(Debug)]
pub struct Worker {
    handle: ucp_worker_h,
    event_fd: RawFd,
    endpoints: Vec<Endpoint>,
    context: Arc<Context>,
}

// SAFETY: the worker is made for threads that use it one at a time, and its endpoints and requests belong to it.
unsafe impl Send for Worker {}

/// An endpoint of a [`Worker`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointId(usize);

#[derive(Debug)]
struct Endpoint {
    /// Null once it is closed.
    handle: ucp_ep_h,
    /// The status with which it has failed, or 0. Its address is known to UCX.
    failure: Box<AtomicI8>,
}

/// An operation in progress, of the worker that has begun it. It must be tested until it is done, or dropped after that
/// worker.
#[derive(Debug)]
#[must_use = "an operation in progress uses memory until a test says that it is done"]
pub struct Request(NonNull<c_void>);

// SAFETY: a request is a handle, which is only used together with its worker.
unsafe impl Send for Request {}

/// The state of an operation.
#[derive(Debug)]
pub enum Tested<T> {
    /// It goes on.
    Pending(Request),
    /// It is done, and uses no memory any more.
    Done(Result<T, UcxError>),
}

/// A message that has arrived, taken from the worker's queue.
#[derive(Debug)]
#[must_use = "a message stays in UCX's memory until it is received"]
pub struct Message {
    handle: ucp_tag_message_h,
    /// Its tag.
    pub tag: u64,
    /// Its length in bytes.
    pub bytes: usize,
}

/// Stores the status with which an endpoint has failed.
unsafe extern "C" fn note_failure(failure: *mut c_void, _: ucp_ep_h, status: ucs_status_t) {
    // SAFETY: the argument is the `failure` of an endpoint, which the worker keeps as long as it lives.
    unsafe { &*failure.cast::<AtomicI8>() }.store(status.0, Ordering::Relaxed);
}

/// Parameters of an operation: these attributes, nothing else.
fn operation(attributes: u32, flags: u32) -> ucp_request_param_t {
    ucp_request_param_t {
        op_attr_mask: attributes,
        flags,
        request: ptr::null_mut(),
        cb: ucp_request_param_t__bindgen_ty_1 { send: None },
        datatype: 0,
        user_data: ptr::null_mut(),
        reply_buffer: ptr::null_mut(),
        memory_type: ucs_memory_type_t::UCS_MEMORY_TYPE_HOST,
        recv_info: ucp_request_param_t__bindgen_ty_2 { length: ptr::null_mut() },
        memh: ptr::null_mut(),
        remote_datatype: 0,
        remote: ptr::null(),
        remote_count: 0,
    }
}

/// Buffers are in host memory, so UCX need not find out.
const HOST_MEMORY: u32 = ucp_op_attr_t::UCP_OP_ATTR_FIELD_MEMORY_TYPE.0;

impl Worker {
    /// A worker without endpoints.
    ///
    /// # Errors
    ///
    /// As UCX reports them, for example if memory or descriptors are short.
    pub fn new(context: &Arc<Context>) -> Result<Self, UcxError> {
        let library = context.library();
        let params = ucp_worker_params_t {
            field_mask: ucp_worker_params_field::UCP_WORKER_PARAM_FIELD_THREAD_MODE.0.into(),
            thread_mode: ucs_thread_mode_t::UCS_THREAD_MODE_SERIALIZED,
            cpu_mask: ucs_cpu_set_t { ucs_bits: [0; 16] },
            events: 0,
            user_data: ptr::null_mut(),
            event_fd: -1,
            flags: 0,
            name: ptr::null(),
            am_alignment: 0,
            client_id: 0,
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the context is valid; the struct lives during the call, and names the field that is set.
        let status = unsafe { (library.symbols().ucp_worker_create)(context.handle(), &params, &mut handle) };
        library.check("ucp_worker_create", status)?;
        let mut worker = Worker { handle, event_fd: -1, endpoints: Vec::new(), context: Arc::clone(context) };
        let mut event_fd: c_int = -1;
        // SAFETY: the worker is valid, and the integer is writable.
        let status = unsafe { (library.symbols().ucp_worker_get_efd)(handle, &mut event_fd) };
        library.check("ucp_worker_get_efd", status)?;
        worker.event_fd = event_fd;
        Ok(worker)
    }

    fn library(&self) -> &Library {
        self.context.library()
    }

    fn symbols(&self) -> &'static UcxSymbols {
        self.library().symbols()
    }

    /// The address by which other workers connect to this one, of some hundred bytes.
    ///
    /// # Errors
    ///
    /// As UCX reports them.
    pub fn address(&self) -> Result<Vec<u8>, UcxError> {
        let (mut address, mut length) = (ptr::null_mut(), 0);
        // SAFETY: the worker is valid, and both arguments are writable.
        let status =
            unsafe { (self.symbols().ucp_worker_get_address)(self.handle, &mut address, &mut length) };
        self.library().check("ucp_worker_get_address", status)?;
        // SAFETY: UCX has returned this many bytes at this place; they are copied before they are released.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) }.to_vec();
        // SAFETY: the address is of this worker, and was not released.
        unsafe { (self.symbols().ucp_worker_release_address)(self.handle, address) };
        Ok(bytes)
    }

    /// Connects with the worker that has this address. Returns at once; if the worker cannot be reached, the endpoint
    /// [fails](Self::failure) later.
    ///
    /// # Safety
    ///
    /// The bytes are the result of [`address`](Self::address) of a worker of a [compatible](crate::Version::is_compatible)
    /// release. UCX does not check them.
    ///
    /// # Errors
    ///
    /// As UCX reports them, for example if both workers have no kind of device in common.
    pub unsafe fn connect(&mut self, address: &[u8]) -> Result<EndpointId, UcxError> {
        let fields = ucp_ep_params_field::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
            | ucp_ep_params_field::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
            | ucp_ep_params_field::UCP_EP_PARAM_FIELD_ERR_HANDLER;
        // UCX reads words.
        let mut aligned = vec![0u64; address.len().div_ceil(8)];
        aligned.iter_mut().zip(address.chunks(8)).for_each(|(word, bytes)| {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(padded);
        });
        let failure = Box::new(AtomicI8::new(0));
        let no_address = ucs_sock_addr_t { addr: ptr::null(), addrlen: 0 };
        let params = ucp_ep_params_t {
            field_mask: fields.0.into(),
            address: aligned.as_ptr().cast(),
            // Without it a peer's failure would end in a wait without end.
            err_mode: ucp_err_handling_mode_t::UCP_ERR_HANDLING_MODE_PEER,
            err_handler: ucp_err_handler_t {
                cb: Some(note_failure),
                arg: ptr::from_ref(&*failure).cast_mut().cast(),
            },
            user_data: ptr::null_mut(),
            flags: 0,
            sockaddr: no_address,
            conn_request: ptr::null_mut(),
            name: ptr::null(),
            local_sockaddr: no_address,
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the worker is valid; the struct and the address live during the call; what the callback gets lives as
        // long as the worker. The caller vouches for the bytes.
        let status = unsafe { (self.symbols().ucp_ep_create)(self.handle, &params, &mut handle) };
        self.library().check("ucp_ep_create", status)?;
        self.endpoints.push(Endpoint { handle, failure });
        Ok(EndpointId(self.endpoints.len() - 1))
    }

    /// Why an endpoint cannot be used any more, if so.
    pub fn failure(&self, endpoint: EndpointId) -> Option<String> {
        let code = self.endpoints[endpoint.0].failure.load(Ordering::Relaxed);
        (code != 0).then(|| self.library().status_text(ucs_status_t(code)))
    }

    /// Progresses all operations and connections, without waiting. Returns whether anything has happened.
    pub fn progress(&mut self) -> bool {
        // SAFETY: the worker is valid, and no other thread uses it.
        unsafe { (self.symbols().ucp_worker_progress)(self.handle) != 0 }
    }

    /// A descriptor that becomes readable when there is something to progress, after [`arm`](Self::arm).
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the worker, which outlives the borrow.
        unsafe { BorrowedFd::borrow_raw(self.event_fd) }
    }

    /// Asks for an event. False if there is something to progress first.
    ///
    /// # Errors
    ///
    /// As UCX reports them.
    pub fn arm(&mut self) -> Result<bool, UcxError> {
        // SAFETY: the worker is valid, and no other thread uses it.
        match unsafe { (self.symbols().ucp_worker_arm)(self.handle) } {
            ucs_status_t::UCS_ERR_BUSY => Ok(false),
            status => self.library().check("ucp_worker_arm", status).map(|()| true),
        }
    }

    /// Makes the [descriptor](Self::event_fd) readable, so that whoever polls it progresses.
    pub fn signal(&mut self) {
        // SAFETY: the worker is valid. A signal that cannot be sent is one that is pending.
        unsafe { (self.symbols().ucp_worker_signal)(self.handle) };
    }

    /// Begins to send `bytes` bytes at `memory`. `None` if UCX has taken them already.
    ///
    /// # Safety
    ///
    /// The memory stays valid and is not written until the request is done, or the worker is dropped.
    ///
    /// # Errors
    ///
    /// As UCX reports them, for example if the endpoint has failed; the memory is not used then.
    pub unsafe fn send(
        &mut self,
        endpoint: EndpointId,
        tag: u64,
        memory: *const u8,
        bytes: usize,
    ) -> Result<Option<Request>, UcxError> {
        let handle = self.endpoints[endpoint.0].handle;
        if handle.is_null() {
            return Err(self.library().error("ucp_tag_send_nbx", ucs_status_t::UCS_ERR_NOT_CONNECTED));
        }
        let param = operation(HOST_MEMORY, 0);
        // SAFETY: the endpoint is valid; the caller vouches for the memory.
        let pointer = unsafe { (self.symbols().ucp_tag_send_nbx)(handle, memory.cast(), bytes, tag, &param) };
        Ok(self.library().check_pointer("ucp_tag_send_nbx", pointer)?.map(Request))
    }

    /// Begins to receive a message with this tag into `bytes` bytes at `memory`.
    ///
    /// # Safety
    ///
    /// The memory stays valid and is not accessed until the request is done, or the worker is dropped.
    ///
    /// # Errors
    ///
    /// As UCX reports them.
    pub unsafe fn receive(&mut self, tag: u64, memory: *mut u8, bytes: usize) -> Result<Request, UcxError> {
        let param = operation(HOST_MEMORY | ucp_op_attr_t::UCP_OP_ATTR_FLAG_NO_IMM_CMPL.0, 0);
        // SAFETY: the worker is valid; the caller vouches for the memory.
        let pointer = unsafe {
            (self.symbols().ucp_tag_recv_nbx)(self.handle, memory.cast(), bytes, tag, u64::MAX, &param)
        };
        self.request("ucp_tag_recv_nbx", pointer)
    }

    /// Takes the next message whose tag has these bits under `mask`, if one has arrived.
    pub fn probe(&mut self, tag: u64, mask: u64) -> Option<Message> {
        let mut info = ucp_tag_recv_info_t { sender_tag: 0, length: 0 };
        // SAFETY: the worker is valid, and the struct is writable.
        let handle = unsafe { (self.symbols().ucp_tag_probe_nb)(self.handle, tag, mask, 1, &mut info) };
        (!handle.is_null()).then_some(Message { handle, tag: info.sender_tag, bytes: info.length })
    }

    /// Begins to receive a message that was taken from the queue. One that is longer than `bytes` is lost, which is the
    /// error of the request.
    ///
    /// # Safety
    ///
    /// As [`receive`](Self::receive).
    ///
    /// # Errors
    ///
    /// As UCX reports them.
    pub unsafe fn receive_message(
        &mut self,
        message: Message,
        memory: *mut u8,
        bytes: usize,
    ) -> Result<Request, UcxError> {
        let param = operation(HOST_MEMORY | ucp_op_attr_t::UCP_OP_ATTR_FLAG_NO_IMM_CMPL.0, 0);
        // SAFETY: the worker is valid, and the message is one of its own; the caller vouches for the memory.
        let pointer = unsafe {
            (self.symbols().ucp_tag_msg_recv_nbx)(self.handle, memory.cast(), bytes, message.handle, &param)
        };
        self.request("ucp_tag_msg_recv_nbx", pointer)
    }

    /// The request of an operation that always leaves one.
    fn request(&self, function: &'static str, pointer: *mut c_void) -> Result<Request, UcxError> {
        let request = self.library().check_pointer(function, pointer)?;
        request.map(Request).ok_or_else(|| self.library().error(function, ucs_status_t::UCS_ERR_NO_RESOURCE))
    }

    /// Whether a send is done. UCX has copied or delivered the bytes then.
    pub fn test_send(&mut self, request: Request) -> Tested<()> {
        // SAFETY: the request is in use, because a test that says otherwise takes it.
        let status = unsafe { (self.symbols().ucp_request_check_status)(request.0.as_ptr()) };
        self.tested(request, "the send", status, ())
    }

    /// Whether a receive is done: the length of the message, in bytes.
    pub fn test_receive(&mut self, request: Request) -> Tested<usize> {
        let mut info = ucp_tag_recv_info_t { sender_tag: 0, length: 0 };
        // SAFETY: as above, and the struct is writable.
        let status = unsafe { (self.symbols().ucp_tag_recv_request_test)(request.0.as_ptr(), &mut info) };
        self.tested(request, "the receive", status, info.length)
    }

    fn tested<T>(&self, request: Request, what: &'static str, status: ucs_status_t, value: T) -> Tested<T> {
        if status == ucs_status_t::UCS_INPROGRESS {
            return Tested::Pending(request);
        }
        // SAFETY: the request is done, and nobody has its handle any more.
        unsafe { (self.symbols().ucp_request_free)(request.0.as_ptr()) };
        Tested::Done(self.library().check(what, status).map(|()| value))
    }

    /// Asks for the end of an operation. Those of a receive that has no message yet end at the next test; others may go
    /// on, until their [endpoint is closed](Self::close).
    pub fn cancel(&mut self, request: &Request) {
        // SAFETY: worker and request are valid.
        unsafe { (self.symbols().ucp_request_cancel)(self.handle, request.0.as_ptr()) };
    }

    /// Lets an operation end by itself.
    ///
    /// # Safety
    ///
    /// Its memory stays valid until the worker is dropped.
    pub unsafe fn forget(&mut self, request: Request) {
        // SAFETY: the request is valid, and nobody has its handle any more. UCX frees it when the operation ends.
        unsafe { (self.symbols().ucp_request_free)(request.0.as_ptr()) };
    }

    /// Ends a connection: its operations are done, with an error, after some [progress](Self::progress).
    pub fn close(&mut self, endpoint: EndpointId) {
        if let Ok(Some(request)) = self.begin_close(endpoint) {
            // SAFETY: this operation has no memory.
            unsafe { self.forget(request) };
        }
    }

    fn begin_close(&mut self, endpoint: EndpointId) -> Result<Option<Request>, UcxError> {
        let handle = std::mem::replace(&mut self.endpoints[endpoint.0].handle, ptr::null_mut());
        if handle.is_null() {
            return Ok(None);
        }
        let flags = ucp_ep_close_flags_t::UCP_EP_CLOSE_FLAG_FORCE.0;
        let param = operation(ucp_op_attr_t::UCP_OP_ATTR_FIELD_FLAGS.0, flags);
        // SAFETY: the endpoint is valid, and not used afterwards.
        let pointer = unsafe { (self.symbols().ucp_ep_close_nbx)(handle, &param) };
        Ok(self.library().check_pointer("ucp_ep_close_nbx", pointer)?.map(Request))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let ids = (0..self.endpoints.len()).map(EndpointId);
        let mut closing: Vec<Request> =
            ids.filter_map(|endpoint| self.begin_close(endpoint).ok().flatten()).collect();
        for _ in 0..CLOSE_ROUNDS {
            if closing.is_empty() {
                break;
            }
            self.progress();
            let requests = std::mem::take(&mut closing);
            closing.extend(requests.into_iter().filter_map(|request| match self.test_send(request) {
                Tested::Pending(request) => Some(request),
                Tested::Done(_) => None,
            }));
        }
        // SAFETY: the worker is valid and not used afterwards. Endpoints that are still open are closed by this.
        unsafe { (self.symbols().ucp_worker_destroy)(self.handle) };
    }
}
