// Generated from the headers of UCX 1.22.0 (PyPI package libucx-cu12) by bindgen 0.73.2.
// Do not edit: run bindgen/ucx/regenerate.sh.

impl ucs_memory_type {
    pub const UCS_MEMORY_TYPE_HOST: ucs_memory_type = ucs_memory_type(0);
    pub const UCS_MEMORY_TYPE_CUDA: ucs_memory_type = ucs_memory_type(1);
    pub const UCS_MEMORY_TYPE_CUDA_MANAGED: ucs_memory_type = ucs_memory_type(2);
    pub const UCS_MEMORY_TYPE_ROCM: ucs_memory_type = ucs_memory_type(3);
    pub const UCS_MEMORY_TYPE_ROCM_MANAGED: ucs_memory_type = ucs_memory_type(4);
    pub const UCS_MEMORY_TYPE_RDMA: ucs_memory_type = ucs_memory_type(5);
    pub const UCS_MEMORY_TYPE_ZE_HOST: ucs_memory_type = ucs_memory_type(6);
    pub const UCS_MEMORY_TYPE_ZE_DEVICE: ucs_memory_type = ucs_memory_type(7);
    pub const UCS_MEMORY_TYPE_ZE_MANAGED: ucs_memory_type = ucs_memory_type(8);
    pub const UCS_MEMORY_TYPE_GAUDI: ucs_memory_type = ucs_memory_type(9);
    pub const UCS_MEMORY_TYPE_LAST: ucs_memory_type = ucs_memory_type(10);
    pub const UCS_MEMORY_TYPE_UNKNOWN: ucs_memory_type = ucs_memory_type(10);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ucs_memory_type(pub ::core::ffi::c_uint);
pub use self::ucs_memory_type as ucs_memory_type_t;
impl ucs_status_t {
    pub const UCS_OK: ucs_status_t = ucs_status_t(0);
    pub const UCS_INPROGRESS: ucs_status_t = ucs_status_t(1);
    pub const UCS_ERR_NO_MESSAGE: ucs_status_t = ucs_status_t(-1);
    pub const UCS_ERR_NO_RESOURCE: ucs_status_t = ucs_status_t(-2);
    pub const UCS_ERR_IO_ERROR: ucs_status_t = ucs_status_t(-3);
    pub const UCS_ERR_NO_MEMORY: ucs_status_t = ucs_status_t(-4);
    pub const UCS_ERR_INVALID_PARAM: ucs_status_t = ucs_status_t(-5);
    pub const UCS_ERR_UNREACHABLE: ucs_status_t = ucs_status_t(-6);
    pub const UCS_ERR_INVALID_ADDR: ucs_status_t = ucs_status_t(-7);
    pub const UCS_ERR_NOT_IMPLEMENTED: ucs_status_t = ucs_status_t(-8);
    pub const UCS_ERR_MESSAGE_TRUNCATED: ucs_status_t = ucs_status_t(-9);
    pub const UCS_ERR_NO_PROGRESS: ucs_status_t = ucs_status_t(-10);
    pub const UCS_ERR_BUFFER_TOO_SMALL: ucs_status_t = ucs_status_t(-11);
    pub const UCS_ERR_NO_ELEM: ucs_status_t = ucs_status_t(-12);
    pub const UCS_ERR_SOME_CONNECTS_FAILED: ucs_status_t = ucs_status_t(-13);
    pub const UCS_ERR_NO_DEVICE: ucs_status_t = ucs_status_t(-14);
    pub const UCS_ERR_BUSY: ucs_status_t = ucs_status_t(-15);
    pub const UCS_ERR_CANCELED: ucs_status_t = ucs_status_t(-16);
    pub const UCS_ERR_SHMEM_SEGMENT: ucs_status_t = ucs_status_t(-17);
    pub const UCS_ERR_ALREADY_EXISTS: ucs_status_t = ucs_status_t(-18);
    pub const UCS_ERR_OUT_OF_RANGE: ucs_status_t = ucs_status_t(-19);
    pub const UCS_ERR_TIMED_OUT: ucs_status_t = ucs_status_t(-20);
    pub const UCS_ERR_EXCEEDS_LIMIT: ucs_status_t = ucs_status_t(-21);
    pub const UCS_ERR_UNSUPPORTED: ucs_status_t = ucs_status_t(-22);
    pub const UCS_ERR_REJECTED: ucs_status_t = ucs_status_t(-23);
    pub const UCS_ERR_NOT_CONNECTED: ucs_status_t = ucs_status_t(-24);
    pub const UCS_ERR_CONNECTION_RESET: ucs_status_t = ucs_status_t(-25);
    pub const UCS_ERR_FIRST_LINK_FAILURE: ucs_status_t = ucs_status_t(-40);
    pub const UCS_ERR_LAST_LINK_FAILURE: ucs_status_t = ucs_status_t(-59);
    pub const UCS_ERR_FIRST_ENDPOINT_FAILURE: ucs_status_t = ucs_status_t(-60);
    pub const UCS_ERR_ENDPOINT_TIMEOUT: ucs_status_t = ucs_status_t(-80);
    pub const UCS_ERR_LAST_ENDPOINT_FAILURE: ucs_status_t = ucs_status_t(-89);
    pub const UCS_ERR_LAST: ucs_status_t = ucs_status_t(-100);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ucs_status_t(pub ::core::ffi::c_schar);
pub type ucs_status_ptr_t = *mut ::core::ffi::c_void;
pub type socklen_t = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct sockaddr {
    pub sa_family: ::core::ffi::c_ushort,
    pub sa_data: [::core::ffi::c_char; 14usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of sockaddr"][::core::mem::size_of::<sockaddr>() - 16usize];
    ["Alignment of sockaddr"][::core::mem::align_of::<sockaddr>() - 2usize];
    ["Offset of field: sockaddr::sa_family"][::core::mem::offset_of!(sockaddr, sa_family) - 0usize];
    ["Offset of field: sockaddr::sa_data"][::core::mem::offset_of!(sockaddr, sa_data) - 2usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucs_sock_addr {
    pub addr: *const sockaddr,
    pub addrlen: socklen_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucs_sock_addr"][::core::mem::size_of::<ucs_sock_addr>() - 16usize];
    ["Alignment of ucs_sock_addr"][::core::mem::align_of::<ucs_sock_addr>() - 8usize];
    ["Offset of field: ucs_sock_addr::addr"][::core::mem::offset_of!(ucs_sock_addr, addr) - 0usize];
    ["Offset of field: ucs_sock_addr::addrlen"][::core::mem::offset_of!(ucs_sock_addr, addrlen) - 8usize];
};
pub type ucs_sock_addr_t = ucs_sock_addr;
pub type ucp_tag_recv_info_t = ucp_tag_recv_info;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_context {
    _unused: [u8; 0],
}
pub type ucp_context_h = *mut ucp_context;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_config {
    _unused: [u8; 0],
}
pub type ucp_config_t = ucp_config;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_ep {
    _unused: [u8; 0],
}
pub type ucp_ep_h = *mut ucp_ep;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_conn_request {
    _unused: [u8; 0],
}
pub type ucp_conn_request_h = *mut ucp_conn_request;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_address {
    _unused: [u8; 0],
}
pub type ucp_address_t = ucp_address;
impl ucp_err_handling_mode_t {
    pub const UCP_ERR_HANDLING_MODE_NONE: ucp_err_handling_mode_t = ucp_err_handling_mode_t(0);
    pub const UCP_ERR_HANDLING_MODE_PEER: ucp_err_handling_mode_t = ucp_err_handling_mode_t(1);
    pub const UCP_ERR_HANDLING_MODE_FAILOVER: ucp_err_handling_mode_t = ucp_err_handling_mode_t(2);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ucp_err_handling_mode_t(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug)]
pub struct ucp_mem {
    _unused: [u8; 0],
}
pub type ucp_mem_h = *mut ucp_mem;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_worker {
    _unused: [u8; 0],
}
pub type ucp_worker_h = *mut ucp_worker;
pub type ucp_tag_t = u64;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_recv_desc {
    _unused: [u8; 0],
}
pub type ucp_tag_message_h = *mut ucp_recv_desc;
pub type ucp_datatype_t = u64;
pub type ucp_request_init_callback_t =
    ::core::option::Option<unsafe extern "C" fn(request: *mut ::core::ffi::c_void)>;
pub type ucp_request_cleanup_callback_t =
    ::core::option::Option<unsafe extern "C" fn(request: *mut ::core::ffi::c_void)>;
pub type ucp_send_nbx_callback_t = ::core::option::Option<
    unsafe extern "C" fn(
        request: *mut ::core::ffi::c_void,
        status: ucs_status_t,
        user_data: *mut ::core::ffi::c_void,
    ),
>;
pub type ucp_err_handler_cb_t = ::core::option::Option<
    unsafe extern "C" fn(arg: *mut ::core::ffi::c_void, ep: ucp_ep_h, status: ucs_status_t),
>;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_err_handler {
    pub cb: ucp_err_handler_cb_t,
    pub arg: *mut ::core::ffi::c_void,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_err_handler"][::core::mem::size_of::<ucp_err_handler>() - 16usize];
    ["Alignment of ucp_err_handler"][::core::mem::align_of::<ucp_err_handler>() - 8usize];
    ["Offset of field: ucp_err_handler::cb"][::core::mem::offset_of!(ucp_err_handler, cb) - 0usize];
    ["Offset of field: ucp_err_handler::arg"][::core::mem::offset_of!(ucp_err_handler, arg) - 8usize];
};
pub type ucp_err_handler_t = ucp_err_handler;
pub type ucp_stream_recv_nbx_callback_t = ::core::option::Option<
    unsafe extern "C" fn(
        request: *mut ::core::ffi::c_void,
        status: ucs_status_t,
        length: usize,
        user_data: *mut ::core::ffi::c_void,
    ),
>;
pub type ucp_tag_recv_nbx_callback_t = ::core::option::Option<
    unsafe extern "C" fn(
        request: *mut ::core::ffi::c_void,
        status: ucs_status_t,
        tag_info: *const ucp_tag_recv_info_t,
        user_data: *mut ::core::ffi::c_void,
    ),
>;
pub type ucp_am_recv_data_nbx_callback_t = ::core::option::Option<
    unsafe extern "C" fn(
        request: *mut ::core::ffi::c_void,
        status: ucs_status_t,
        length: usize,
        user_data: *mut ::core::ffi::c_void,
    ),
>;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_ep_params {
    pub field_mask: u64,
    pub address: *const ucp_address_t,
    pub err_mode: ucp_err_handling_mode_t,
    pub err_handler: ucp_err_handler_t,
    pub user_data: *mut ::core::ffi::c_void,
    pub flags: ::core::ffi::c_uint,
    pub sockaddr: ucs_sock_addr_t,
    pub conn_request: ucp_conn_request_h,
    pub name: *const ::core::ffi::c_char,
    pub local_sockaddr: ucs_sock_addr_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_ep_params"][::core::mem::size_of::<ucp_ep_params>() - 104usize];
    ["Alignment of ucp_ep_params"][::core::mem::align_of::<ucp_ep_params>() - 8usize];
    ["Offset of field: ucp_ep_params::field_mask"]
        [::core::mem::offset_of!(ucp_ep_params, field_mask) - 0usize];
    ["Offset of field: ucp_ep_params::address"][::core::mem::offset_of!(ucp_ep_params, address) - 8usize];
    ["Offset of field: ucp_ep_params::err_mode"][::core::mem::offset_of!(ucp_ep_params, err_mode) - 16usize];
    ["Offset of field: ucp_ep_params::err_handler"]
        [::core::mem::offset_of!(ucp_ep_params, err_handler) - 24usize];
    ["Offset of field: ucp_ep_params::user_data"]
        [::core::mem::offset_of!(ucp_ep_params, user_data) - 40usize];
    ["Offset of field: ucp_ep_params::flags"][::core::mem::offset_of!(ucp_ep_params, flags) - 48usize];
    ["Offset of field: ucp_ep_params::sockaddr"][::core::mem::offset_of!(ucp_ep_params, sockaddr) - 56usize];
    ["Offset of field: ucp_ep_params::conn_request"]
        [::core::mem::offset_of!(ucp_ep_params, conn_request) - 72usize];
    ["Offset of field: ucp_ep_params::name"][::core::mem::offset_of!(ucp_ep_params, name) - 80usize];
    ["Offset of field: ucp_ep_params::local_sockaddr"]
        [::core::mem::offset_of!(ucp_ep_params, local_sockaddr) - 88usize];
};
pub type ucp_ep_params_t = ucp_ep_params;
impl ucs_thread_mode_t {
    pub const UCS_THREAD_MODE_SINGLE: ucs_thread_mode_t = ucs_thread_mode_t(0);
    pub const UCS_THREAD_MODE_SERIALIZED: ucs_thread_mode_t = ucs_thread_mode_t(1);
    pub const UCS_THREAD_MODE_MULTI: ucs_thread_mode_t = ucs_thread_mode_t(2);
    pub const UCS_THREAD_MODE_LAST: ucs_thread_mode_t = ucs_thread_mode_t(3);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ucs_thread_mode_t(pub ::core::ffi::c_uint);
pub type ucs_cpu_mask_t = ::core::ffi::c_ulong;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucs_cpu_set_t {
    pub ucs_bits: [ucs_cpu_mask_t; 16usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucs_cpu_set_t"][::core::mem::size_of::<ucs_cpu_set_t>() - 128usize];
    ["Alignment of ucs_cpu_set_t"][::core::mem::align_of::<ucs_cpu_set_t>() - 8usize];
    ["Offset of field: ucs_cpu_set_t::ucs_bits"][::core::mem::offset_of!(ucs_cpu_set_t, ucs_bits) - 0usize];
};
impl ucp_params_field {
    pub const UCP_PARAM_FIELD_FEATURES: ucp_params_field = ucp_params_field(1);
    pub const UCP_PARAM_FIELD_REQUEST_SIZE: ucp_params_field = ucp_params_field(2);
    pub const UCP_PARAM_FIELD_REQUEST_INIT: ucp_params_field = ucp_params_field(4);
    pub const UCP_PARAM_FIELD_REQUEST_CLEANUP: ucp_params_field = ucp_params_field(8);
    pub const UCP_PARAM_FIELD_TAG_SENDER_MASK: ucp_params_field = ucp_params_field(16);
    pub const UCP_PARAM_FIELD_MT_WORKERS_SHARED: ucp_params_field = ucp_params_field(32);
    pub const UCP_PARAM_FIELD_ESTIMATED_NUM_EPS: ucp_params_field = ucp_params_field(64);
    pub const UCP_PARAM_FIELD_ESTIMATED_NUM_PPN: ucp_params_field = ucp_params_field(128);
    pub const UCP_PARAM_FIELD_NAME: ucp_params_field = ucp_params_field(256);
    pub const UCP_PARAM_FIELD_NODE_LOCAL_ID: ucp_params_field = ucp_params_field(512);
}
impl ::core::ops::BitOr<ucp_params_field> for ucp_params_field {
    type Output = Self;
    #[inline]
    fn bitor(self, other: Self) -> Self {
        ucp_params_field(self.0 | other.0)
    }
}
impl ::core::ops::BitOrAssign for ucp_params_field {
    #[inline]
    fn bitor_assign(&mut self, rhs: ucp_params_field) {
        self.0 |= rhs.0;
    }
}
impl ::core::ops::BitAnd<ucp_params_field> for ucp_params_field {
    type Output = Self;
    #[inline]
    fn bitand(self, other: Self) -> Self {
        ucp_params_field(self.0 & other.0)
    }
}
impl ::core::ops::BitAndAssign for ucp_params_field {
    #[inline]
    fn bitand_assign(&mut self, rhs: ucp_params_field) {
        self.0 &= rhs.0;
    }
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ucp_params_field(pub ::core::ffi::c_uint);
impl ucp_feature {
    pub const UCP_FEATURE_TAG: ucp_feature = ucp_feature(1);
    pub const UCP_FEATURE_RMA: ucp_feature = ucp_feature(2);
    pub const UCP_FEATURE_AMO32: ucp_feature = ucp_feature(4);
    pub const UCP_FEATURE_AMO64: ucp_feature = ucp_feature(8);
    pub const UCP_FEATURE_WAKEUP: ucp_feature = ucp_feature(16);
    pub const UCP_FEATURE_STREAM: ucp_feature = ucp_feature(32);
    pub const UCP_FEATURE_AM: ucp_feature = ucp_feature(64);
    pub const UCP_FEATURE_EXPORTED_MEMH: ucp_feature = ucp_feature(128);
    pub const UCP_FEATURE_DEVICE: ucp_feature = ucp_feature(256);
}
impl ::core::ops::BitOr<ucp_feature> for ucp_feature {
    type Output = Self;
    #[inline]
    fn bitor(self, other: Self) -> Self {
        ucp_feature(self.0 | other.0)
    }
}
impl ::core::ops::BitOrAssign for ucp_feature {
    #[inline]
    fn bitor_assign(&mut self, rhs: ucp_feature) {
        self.0 |= rhs.0;
    }
}
impl ::core::ops::BitAnd<ucp_feature> for ucp_feature {
    type Output = Self;
    #[inline]
    fn bitand(self, other: Self) -> Self {
        ucp_feature(self.0 & other.0)
    }
}
impl ::core::ops::BitAndAssign for ucp_feature {
    #[inline]
    fn bitand_assign(&mut self, rhs: ucp_feature) {
        self.0 &= rhs.0;
    }
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ucp_feature(pub ::core::ffi::c_uint);
impl ucp_worker_params_field {
    pub const UCP_WORKER_PARAM_FIELD_THREAD_MODE: ucp_worker_params_field = ucp_worker_params_field(1);
    pub const UCP_WORKER_PARAM_FIELD_CPU_MASK: ucp_worker_params_field = ucp_worker_params_field(2);
    pub const UCP_WORKER_PARAM_FIELD_EVENTS: ucp_worker_params_field = ucp_worker_params_field(4);
    pub const UCP_WORKER_PARAM_FIELD_USER_DATA: ucp_worker_params_field = ucp_worker_params_field(8);
    pub const UCP_WORKER_PARAM_FIELD_EVENT_FD: ucp_worker_params_field = ucp_worker_params_field(16);
    pub const UCP_WORKER_PARAM_FIELD_FLAGS: ucp_worker_params_field = ucp_worker_params_field(32);
    pub const UCP_WORKER_PARAM_FIELD_NAME: ucp_worker_params_field = ucp_worker_params_field(64);
    pub const UCP_WORKER_PARAM_FIELD_AM_ALIGNMENT: ucp_worker_params_field = ucp_worker_params_field(128);
    pub const UCP_WORKER_PARAM_FIELD_CLIENT_ID: ucp_worker_params_field = ucp_worker_params_field(256);
}
impl ::core::ops::BitOr<ucp_worker_params_field> for ucp_worker_params_field {
    type Output = Self;
    #[inline]
    fn bitor(self, other: Self) -> Self {
        ucp_worker_params_field(self.0 | other.0)
    }
}
impl ::core::ops::BitOrAssign for ucp_worker_params_field {
    #[inline]
    fn bitor_assign(&mut self, rhs: ucp_worker_params_field) {
        self.0 |= rhs.0;
    }
}
impl ::core::ops::BitAnd<ucp_worker_params_field> for ucp_worker_params_field {
    type Output = Self;
    #[inline]
    fn bitand(self, other: Self) -> Self {
        ucp_worker_params_field(self.0 & other.0)
    }
}
impl ::core::ops::BitAndAssign for ucp_worker_params_field {
    #[inline]
    fn bitand_assign(&mut self, rhs: ucp_worker_params_field) {
        self.0 &= rhs.0;
    }
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ucp_worker_params_field(pub ::core::ffi::c_uint);
impl ucp_ep_params_field {
    pub const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: ucp_ep_params_field = ucp_ep_params_field(1);
    pub const UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: ucp_ep_params_field = ucp_ep_params_field(2);
    pub const UCP_EP_PARAM_FIELD_ERR_HANDLER: ucp_ep_params_field = ucp_ep_params_field(4);
    pub const UCP_EP_PARAM_FIELD_USER_DATA: ucp_ep_params_field = ucp_ep_params_field(8);
    pub const UCP_EP_PARAM_FIELD_SOCK_ADDR: ucp_ep_params_field = ucp_ep_params_field(16);
    pub const UCP_EP_PARAM_FIELD_FLAGS: ucp_ep_params_field = ucp_ep_params_field(32);
    pub const UCP_EP_PARAM_FIELD_CONN_REQUEST: ucp_ep_params_field = ucp_ep_params_field(64);
    pub const UCP_EP_PARAM_FIELD_NAME: ucp_ep_params_field = ucp_ep_params_field(128);
    pub const UCP_EP_PARAM_FIELD_LOCAL_SOCK_ADDR: ucp_ep_params_field = ucp_ep_params_field(256);
}
impl ::core::ops::BitOr<ucp_ep_params_field> for ucp_ep_params_field {
    type Output = Self;
    #[inline]
    fn bitor(self, other: Self) -> Self {
        ucp_ep_params_field(self.0 | other.0)
    }
}
impl ::core::ops::BitOrAssign for ucp_ep_params_field {
    #[inline]
    fn bitor_assign(&mut self, rhs: ucp_ep_params_field) {
        self.0 |= rhs.0;
    }
}
impl ::core::ops::BitAnd<ucp_ep_params_field> for ucp_ep_params_field {
    type Output = Self;
    #[inline]
    fn bitand(self, other: Self) -> Self {
        ucp_ep_params_field(self.0 & other.0)
    }
}
impl ::core::ops::BitAndAssign for ucp_ep_params_field {
    #[inline]
    fn bitand_assign(&mut self, rhs: ucp_ep_params_field) {
        self.0 &= rhs.0;
    }
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ucp_ep_params_field(pub ::core::ffi::c_uint);
impl ucp_ep_close_flags_t {
    pub const UCP_EP_CLOSE_FLAG_FORCE: ucp_ep_close_flags_t = ucp_ep_close_flags_t(1);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ucp_ep_close_flags_t(pub ::core::ffi::c_uint);
impl ucp_op_attr_t {
    pub const UCP_OP_ATTR_FIELD_REQUEST: ucp_op_attr_t = ucp_op_attr_t(1);
    pub const UCP_OP_ATTR_FIELD_CALLBACK: ucp_op_attr_t = ucp_op_attr_t(2);
    pub const UCP_OP_ATTR_FIELD_USER_DATA: ucp_op_attr_t = ucp_op_attr_t(4);
    pub const UCP_OP_ATTR_FIELD_DATATYPE: ucp_op_attr_t = ucp_op_attr_t(8);
    pub const UCP_OP_ATTR_FIELD_FLAGS: ucp_op_attr_t = ucp_op_attr_t(16);
    pub const UCP_OP_ATTR_FIELD_REPLY_BUFFER: ucp_op_attr_t = ucp_op_attr_t(32);
    pub const UCP_OP_ATTR_FIELD_MEMORY_TYPE: ucp_op_attr_t = ucp_op_attr_t(64);
    pub const UCP_OP_ATTR_FIELD_RECV_INFO: ucp_op_attr_t = ucp_op_attr_t(128);
    pub const UCP_OP_ATTR_FIELD_MEMH: ucp_op_attr_t = ucp_op_attr_t(256);
    pub const UCP_OP_ATTR_FIELD_REMOTE_DATATYPE: ucp_op_attr_t = ucp_op_attr_t(512);
    pub const UCP_OP_ATTR_FIELD_REMOTE: ucp_op_attr_t = ucp_op_attr_t(1024);
    pub const UCP_OP_ATTR_FIELD_REMOTE_COUNT: ucp_op_attr_t = ucp_op_attr_t(2048);
    pub const UCP_OP_ATTR_FLAG_NO_IMM_CMPL: ucp_op_attr_t = ucp_op_attr_t(65536);
    pub const UCP_OP_ATTR_FLAG_FAST_CMPL: ucp_op_attr_t = ucp_op_attr_t(131072);
    pub const UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL: ucp_op_attr_t = ucp_op_attr_t(262144);
    pub const UCP_OP_ATTR_FLAG_MULTI_SEND: ucp_op_attr_t = ucp_op_attr_t(524288);
}
impl ::core::ops::BitOr<ucp_op_attr_t> for ucp_op_attr_t {
    type Output = Self;
    #[inline]
    fn bitor(self, other: Self) -> Self {
        ucp_op_attr_t(self.0 | other.0)
    }
}
impl ::core::ops::BitOrAssign for ucp_op_attr_t {
    #[inline]
    fn bitor_assign(&mut self, rhs: ucp_op_attr_t) {
        self.0 |= rhs.0;
    }
}
impl ::core::ops::BitAnd<ucp_op_attr_t> for ucp_op_attr_t {
    type Output = Self;
    #[inline]
    fn bitand(self, other: Self) -> Self {
        ucp_op_attr_t(self.0 & other.0)
    }
}
impl ::core::ops::BitAndAssign for ucp_op_attr_t {
    #[inline]
    fn bitand_assign(&mut self, rhs: ucp_op_attr_t) {
        self.0 &= rhs.0;
    }
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ucp_op_attr_t(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_params {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: usize,
    pub request_init: ucp_request_init_callback_t,
    pub request_cleanup: ucp_request_cleanup_callback_t,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: ::core::ffi::c_int,
    pub estimated_num_eps: usize,
    pub estimated_num_ppn: usize,
    pub name: *const ::core::ffi::c_char,
    pub node_local_id: usize,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_params"][::core::mem::size_of::<ucp_params>() - 88usize];
    ["Alignment of ucp_params"][::core::mem::align_of::<ucp_params>() - 8usize];
    ["Offset of field: ucp_params::field_mask"][::core::mem::offset_of!(ucp_params, field_mask) - 0usize];
    ["Offset of field: ucp_params::features"][::core::mem::offset_of!(ucp_params, features) - 8usize];
    ["Offset of field: ucp_params::request_size"]
        [::core::mem::offset_of!(ucp_params, request_size) - 16usize];
    ["Offset of field: ucp_params::request_init"]
        [::core::mem::offset_of!(ucp_params, request_init) - 24usize];
    ["Offset of field: ucp_params::request_cleanup"]
        [::core::mem::offset_of!(ucp_params, request_cleanup) - 32usize];
    ["Offset of field: ucp_params::tag_sender_mask"]
        [::core::mem::offset_of!(ucp_params, tag_sender_mask) - 40usize];
    ["Offset of field: ucp_params::mt_workers_shared"]
        [::core::mem::offset_of!(ucp_params, mt_workers_shared) - 48usize];
    ["Offset of field: ucp_params::estimated_num_eps"]
        [::core::mem::offset_of!(ucp_params, estimated_num_eps) - 56usize];
    ["Offset of field: ucp_params::estimated_num_ppn"]
        [::core::mem::offset_of!(ucp_params, estimated_num_ppn) - 64usize];
    ["Offset of field: ucp_params::name"][::core::mem::offset_of!(ucp_params, name) - 72usize];
    ["Offset of field: ucp_params::node_local_id"]
        [::core::mem::offset_of!(ucp_params, node_local_id) - 80usize];
};
pub type ucp_params_t = ucp_params;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_worker_params {
    pub field_mask: u64,
    pub thread_mode: ucs_thread_mode_t,
    pub cpu_mask: ucs_cpu_set_t,
    pub events: ::core::ffi::c_uint,
    pub user_data: *mut ::core::ffi::c_void,
    pub event_fd: ::core::ffi::c_int,
    pub flags: u64,
    pub name: *const ::core::ffi::c_char,
    pub am_alignment: usize,
    pub client_id: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_worker_params"][::core::mem::size_of::<ucp_worker_params>() - 200usize];
    ["Alignment of ucp_worker_params"][::core::mem::align_of::<ucp_worker_params>() - 8usize];
    ["Offset of field: ucp_worker_params::field_mask"]
        [::core::mem::offset_of!(ucp_worker_params, field_mask) - 0usize];
    ["Offset of field: ucp_worker_params::thread_mode"]
        [::core::mem::offset_of!(ucp_worker_params, thread_mode) - 8usize];
    ["Offset of field: ucp_worker_params::cpu_mask"]
        [::core::mem::offset_of!(ucp_worker_params, cpu_mask) - 16usize];
    ["Offset of field: ucp_worker_params::events"]
        [::core::mem::offset_of!(ucp_worker_params, events) - 144usize];
    ["Offset of field: ucp_worker_params::user_data"]
        [::core::mem::offset_of!(ucp_worker_params, user_data) - 152usize];
    ["Offset of field: ucp_worker_params::event_fd"]
        [::core::mem::offset_of!(ucp_worker_params, event_fd) - 160usize];
    ["Offset of field: ucp_worker_params::flags"]
        [::core::mem::offset_of!(ucp_worker_params, flags) - 168usize];
    ["Offset of field: ucp_worker_params::name"][::core::mem::offset_of!(ucp_worker_params, name) - 176usize];
    ["Offset of field: ucp_worker_params::am_alignment"]
        [::core::mem::offset_of!(ucp_worker_params, am_alignment) - 184usize];
    ["Offset of field: ucp_worker_params::client_id"]
        [::core::mem::offset_of!(ucp_worker_params, client_id) - 192usize];
};
pub type ucp_worker_params_t = ucp_worker_params;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_tag_recv_info {
    pub sender_tag: ucp_tag_t,
    pub length: usize,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_tag_recv_info"][::core::mem::size_of::<ucp_tag_recv_info>() - 16usize];
    ["Alignment of ucp_tag_recv_info"][::core::mem::align_of::<ucp_tag_recv_info>() - 8usize];
    ["Offset of field: ucp_tag_recv_info::sender_tag"]
        [::core::mem::offset_of!(ucp_tag_recv_info, sender_tag) - 0usize];
    ["Offset of field: ucp_tag_recv_info::length"]
        [::core::mem::offset_of!(ucp_tag_recv_info, length) - 8usize];
};
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ucp_request_param_t {
    pub op_attr_mask: u32,
    pub flags: u32,
    pub request: *mut ::core::ffi::c_void,
    pub cb: ucp_request_param_t__bindgen_ty_1,
    pub datatype: ucp_datatype_t,
    pub user_data: *mut ::core::ffi::c_void,
    pub reply_buffer: *mut ::core::ffi::c_void,
    pub memory_type: ucs_memory_type_t,
    pub recv_info: ucp_request_param_t__bindgen_ty_2,
    pub memh: ucp_mem_h,
    pub remote_datatype: ucp_datatype_t,
    pub remote: *const ::core::ffi::c_void,
    pub remote_count: usize,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub union ucp_request_param_t__bindgen_ty_1 {
    pub send: ucp_send_nbx_callback_t,
    pub recv: ucp_tag_recv_nbx_callback_t,
    pub recv_stream: ucp_stream_recv_nbx_callback_t,
    pub recv_am: ucp_am_recv_data_nbx_callback_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_request_param_t__bindgen_ty_1"]
        [::core::mem::size_of::<ucp_request_param_t__bindgen_ty_1>() - 8usize];
    ["Alignment of ucp_request_param_t__bindgen_ty_1"]
        [::core::mem::align_of::<ucp_request_param_t__bindgen_ty_1>() - 8usize];
    ["Offset of field: ucp_request_param_t__bindgen_ty_1::send"]
        [::core::mem::offset_of!(ucp_request_param_t__bindgen_ty_1, send) - 0usize];
    ["Offset of field: ucp_request_param_t__bindgen_ty_1::recv"]
        [::core::mem::offset_of!(ucp_request_param_t__bindgen_ty_1, recv) - 0usize];
    ["Offset of field: ucp_request_param_t__bindgen_ty_1::recv_stream"]
        [::core::mem::offset_of!(ucp_request_param_t__bindgen_ty_1, recv_stream) - 0usize];
    ["Offset of field: ucp_request_param_t__bindgen_ty_1::recv_am"]
        [::core::mem::offset_of!(ucp_request_param_t__bindgen_ty_1, recv_am) - 0usize];
};
#[repr(C)]
#[derive(Copy, Clone)]
pub union ucp_request_param_t__bindgen_ty_2 {
    pub length: *mut usize,
    pub tag_info: *mut ucp_tag_recv_info_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_request_param_t__bindgen_ty_2"]
        [::core::mem::size_of::<ucp_request_param_t__bindgen_ty_2>() - 8usize];
    ["Alignment of ucp_request_param_t__bindgen_ty_2"]
        [::core::mem::align_of::<ucp_request_param_t__bindgen_ty_2>() - 8usize];
    ["Offset of field: ucp_request_param_t__bindgen_ty_2::length"]
        [::core::mem::offset_of!(ucp_request_param_t__bindgen_ty_2, length) - 0usize];
    ["Offset of field: ucp_request_param_t__bindgen_ty_2::tag_info"]
        [::core::mem::offset_of!(ucp_request_param_t__bindgen_ty_2, tag_info) - 0usize];
};
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ucp_request_param_t"][::core::mem::size_of::<ucp_request_param_t>() - 96usize];
    ["Alignment of ucp_request_param_t"][::core::mem::align_of::<ucp_request_param_t>() - 8usize];
    ["Offset of field: ucp_request_param_t::op_attr_mask"]
        [::core::mem::offset_of!(ucp_request_param_t, op_attr_mask) - 0usize];
    ["Offset of field: ucp_request_param_t::flags"]
        [::core::mem::offset_of!(ucp_request_param_t, flags) - 4usize];
    ["Offset of field: ucp_request_param_t::request"]
        [::core::mem::offset_of!(ucp_request_param_t, request) - 8usize];
    ["Offset of field: ucp_request_param_t::cb"][::core::mem::offset_of!(ucp_request_param_t, cb) - 16usize];
    ["Offset of field: ucp_request_param_t::datatype"]
        [::core::mem::offset_of!(ucp_request_param_t, datatype) - 24usize];
    ["Offset of field: ucp_request_param_t::user_data"]
        [::core::mem::offset_of!(ucp_request_param_t, user_data) - 32usize];
    ["Offset of field: ucp_request_param_t::reply_buffer"]
        [::core::mem::offset_of!(ucp_request_param_t, reply_buffer) - 40usize];
    ["Offset of field: ucp_request_param_t::memory_type"]
        [::core::mem::offset_of!(ucp_request_param_t, memory_type) - 48usize];
    ["Offset of field: ucp_request_param_t::recv_info"]
        [::core::mem::offset_of!(ucp_request_param_t, recv_info) - 56usize];
    ["Offset of field: ucp_request_param_t::memh"]
        [::core::mem::offset_of!(ucp_request_param_t, memh) - 64usize];
    ["Offset of field: ucp_request_param_t::remote_datatype"]
        [::core::mem::offset_of!(ucp_request_param_t, remote_datatype) - 72usize];
    ["Offset of field: ucp_request_param_t::remote"]
        [::core::mem::offset_of!(ucp_request_param_t, remote) - 80usize];
    ["Offset of field: ucp_request_param_t::remote_count"]
        [::core::mem::offset_of!(ucp_request_param_t, remote_count) - 88usize];
};
pub struct UcxSymbols {
    __library: ::libloading::Library,
    pub ucs_status_string: unsafe extern "C" fn(status: ucs_status_t) -> *const ::core::ffi::c_char,
    pub ucp_worker_get_address: unsafe extern "C" fn(
        worker: ucp_worker_h,
        address_p: *mut *mut ucp_address_t,
        address_length_p: *mut usize,
    ) -> ucs_status_t,
    pub ucp_get_version: unsafe extern "C" fn(
        major_version: *mut ::core::ffi::c_uint,
        minor_version: *mut ::core::ffi::c_uint,
        release_number: *mut ::core::ffi::c_uint,
    ),
    pub ucp_init_version: unsafe extern "C" fn(
        api_major_version: ::core::ffi::c_uint,
        api_minor_version: ::core::ffi::c_uint,
        params: *const ucp_params_t,
        config: *const ucp_config_t,
        context_p: *mut ucp_context_h,
    ) -> ucs_status_t,
    pub ucp_cleanup: unsafe extern "C" fn(context_p: ucp_context_h),
    pub ucp_worker_create: unsafe extern "C" fn(
        context: ucp_context_h,
        params: *const ucp_worker_params_t,
        worker_p: *mut ucp_worker_h,
    ) -> ucs_status_t,
    pub ucp_worker_destroy: unsafe extern "C" fn(worker: ucp_worker_h),
    pub ucp_worker_release_address: unsafe extern "C" fn(worker: ucp_worker_h, address: *mut ucp_address_t),
    pub ucp_worker_progress: unsafe extern "C" fn(worker: ucp_worker_h) -> ::core::ffi::c_uint,
    pub ucp_worker_get_efd:
        unsafe extern "C" fn(worker: ucp_worker_h, fd: *mut ::core::ffi::c_int) -> ucs_status_t,
    pub ucp_worker_arm: unsafe extern "C" fn(worker: ucp_worker_h) -> ucs_status_t,
    pub ucp_worker_signal: unsafe extern "C" fn(worker: ucp_worker_h) -> ucs_status_t,
    pub ucp_ep_create: unsafe extern "C" fn(
        worker: ucp_worker_h,
        params: *const ucp_ep_params_t,
        ep_p: *mut ucp_ep_h,
    ) -> ucs_status_t,
    pub ucp_ep_close_nbx:
        unsafe extern "C" fn(ep: ucp_ep_h, param: *const ucp_request_param_t) -> ucs_status_ptr_t,
    pub ucp_tag_send_nbx: unsafe extern "C" fn(
        ep: ucp_ep_h,
        buffer: *const ::core::ffi::c_void,
        count: usize,
        tag: ucp_tag_t,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t,
    pub ucp_tag_recv_nbx: unsafe extern "C" fn(
        worker: ucp_worker_h,
        buffer: *mut ::core::ffi::c_void,
        count: usize,
        tag: ucp_tag_t,
        tag_mask: ucp_tag_t,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t,
    pub ucp_tag_probe_nb: unsafe extern "C" fn(
        worker: ucp_worker_h,
        tag: ucp_tag_t,
        tag_mask: ucp_tag_t,
        remove: ::core::ffi::c_int,
        info: *mut ucp_tag_recv_info_t,
    ) -> ucp_tag_message_h,
    pub ucp_tag_msg_recv_nbx: unsafe extern "C" fn(
        worker: ucp_worker_h,
        buffer: *mut ::core::ffi::c_void,
        count: usize,
        message: ucp_tag_message_h,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t,
    pub ucp_request_check_status: unsafe extern "C" fn(request: *mut ::core::ffi::c_void) -> ucs_status_t,
    pub ucp_tag_recv_request_test: unsafe extern "C" fn(
        request: *mut ::core::ffi::c_void,
        info: *mut ucp_tag_recv_info_t,
    ) -> ucs_status_t,
    pub ucp_request_cancel: unsafe extern "C" fn(worker: ucp_worker_h, request: *mut ::core::ffi::c_void),
    pub ucp_request_free: unsafe extern "C" fn(request: *mut ::core::ffi::c_void),
}
impl UcxSymbols {
    pub unsafe fn new<P>(path: P) -> Result<Self, ::libloading::Error>
    where
        P: AsRef<::std::ffi::OsStr>,
    {
        let path = path.as_ref();
        let library = unsafe { ::libloading::Library::new(path) }?;
        unsafe { Self::from_library(library) }
    }
    pub unsafe fn from_library<L>(library: L) -> Result<Self, ::libloading::Error>
    where
        L: Into<::libloading::Library>,
    {
        let __library = library.into();
        let ucs_status_string = unsafe { __library.get(b"ucs_status_string\0") }.map(|sym| *sym)?;
        let ucp_worker_get_address = unsafe { __library.get(b"ucp_worker_get_address\0") }.map(|sym| *sym)?;
        let ucp_get_version = unsafe { __library.get(b"ucp_get_version\0") }.map(|sym| *sym)?;
        let ucp_init_version = unsafe { __library.get(b"ucp_init_version\0") }.map(|sym| *sym)?;
        let ucp_cleanup = unsafe { __library.get(b"ucp_cleanup\0") }.map(|sym| *sym)?;
        let ucp_worker_create = unsafe { __library.get(b"ucp_worker_create\0") }.map(|sym| *sym)?;
        let ucp_worker_destroy = unsafe { __library.get(b"ucp_worker_destroy\0") }.map(|sym| *sym)?;
        let ucp_worker_release_address =
            unsafe { __library.get(b"ucp_worker_release_address\0") }.map(|sym| *sym)?;
        let ucp_worker_progress = unsafe { __library.get(b"ucp_worker_progress\0") }.map(|sym| *sym)?;
        let ucp_worker_get_efd = unsafe { __library.get(b"ucp_worker_get_efd\0") }.map(|sym| *sym)?;
        let ucp_worker_arm = unsafe { __library.get(b"ucp_worker_arm\0") }.map(|sym| *sym)?;
        let ucp_worker_signal = unsafe { __library.get(b"ucp_worker_signal\0") }.map(|sym| *sym)?;
        let ucp_ep_create = unsafe { __library.get(b"ucp_ep_create\0") }.map(|sym| *sym)?;
        let ucp_ep_close_nbx = unsafe { __library.get(b"ucp_ep_close_nbx\0") }.map(|sym| *sym)?;
        let ucp_tag_send_nbx = unsafe { __library.get(b"ucp_tag_send_nbx\0") }.map(|sym| *sym)?;
        let ucp_tag_recv_nbx = unsafe { __library.get(b"ucp_tag_recv_nbx\0") }.map(|sym| *sym)?;
        let ucp_tag_probe_nb = unsafe { __library.get(b"ucp_tag_probe_nb\0") }.map(|sym| *sym)?;
        let ucp_tag_msg_recv_nbx = unsafe { __library.get(b"ucp_tag_msg_recv_nbx\0") }.map(|sym| *sym)?;
        let ucp_request_check_status =
            unsafe { __library.get(b"ucp_request_check_status\0") }.map(|sym| *sym)?;
        let ucp_tag_recv_request_test =
            unsafe { __library.get(b"ucp_tag_recv_request_test\0") }.map(|sym| *sym)?;
        let ucp_request_cancel = unsafe { __library.get(b"ucp_request_cancel\0") }.map(|sym| *sym)?;
        let ucp_request_free = unsafe { __library.get(b"ucp_request_free\0") }.map(|sym| *sym)?;
        Ok(UcxSymbols {
            __library,
            ucs_status_string,
            ucp_worker_get_address,
            ucp_get_version,
            ucp_init_version,
            ucp_cleanup,
            ucp_worker_create,
            ucp_worker_destroy,
            ucp_worker_release_address,
            ucp_worker_progress,
            ucp_worker_get_efd,
            ucp_worker_arm,
            ucp_worker_signal,
            ucp_ep_create,
            ucp_ep_close_nbx,
            ucp_tag_send_nbx,
            ucp_tag_recv_nbx,
            ucp_tag_probe_nb,
            ucp_tag_msg_recv_nbx,
            ucp_request_check_status,
            ucp_tag_recv_request_test,
            ucp_request_cancel,
            ucp_request_free,
        })
    }
    pub unsafe fn ucs_status_string(&self, status: ucs_status_t) -> *const ::core::ffi::c_char {
        unsafe { (self.ucs_status_string)(status) }
    }
    pub unsafe fn ucp_worker_get_address(
        &self,
        worker: ucp_worker_h,
        address_p: *mut *mut ucp_address_t,
        address_length_p: *mut usize,
    ) -> ucs_status_t {
        unsafe { (self.ucp_worker_get_address)(worker, address_p, address_length_p) }
    }
    pub unsafe fn ucp_get_version(
        &self,
        major_version: *mut ::core::ffi::c_uint,
        minor_version: *mut ::core::ffi::c_uint,
        release_number: *mut ::core::ffi::c_uint,
    ) {
        unsafe { (self.ucp_get_version)(major_version, minor_version, release_number) }
    }
    pub unsafe fn ucp_init_version(
        &self,
        api_major_version: ::core::ffi::c_uint,
        api_minor_version: ::core::ffi::c_uint,
        params: *const ucp_params_t,
        config: *const ucp_config_t,
        context_p: *mut ucp_context_h,
    ) -> ucs_status_t {
        unsafe { (self.ucp_init_version)(api_major_version, api_minor_version, params, config, context_p) }
    }
    pub unsafe fn ucp_cleanup(&self, context_p: ucp_context_h) {
        unsafe { (self.ucp_cleanup)(context_p) }
    }
    pub unsafe fn ucp_worker_create(
        &self,
        context: ucp_context_h,
        params: *const ucp_worker_params_t,
        worker_p: *mut ucp_worker_h,
    ) -> ucs_status_t {
        unsafe { (self.ucp_worker_create)(context, params, worker_p) }
    }
    pub unsafe fn ucp_worker_destroy(&self, worker: ucp_worker_h) {
        unsafe { (self.ucp_worker_destroy)(worker) }
    }
    pub unsafe fn ucp_worker_release_address(&self, worker: ucp_worker_h, address: *mut ucp_address_t) {
        unsafe { (self.ucp_worker_release_address)(worker, address) }
    }
    pub unsafe fn ucp_worker_progress(&self, worker: ucp_worker_h) -> ::core::ffi::c_uint {
        unsafe { (self.ucp_worker_progress)(worker) }
    }
    pub unsafe fn ucp_worker_get_efd(
        &self,
        worker: ucp_worker_h,
        fd: *mut ::core::ffi::c_int,
    ) -> ucs_status_t {
        unsafe { (self.ucp_worker_get_efd)(worker, fd) }
    }
    pub unsafe fn ucp_worker_arm(&self, worker: ucp_worker_h) -> ucs_status_t {
        unsafe { (self.ucp_worker_arm)(worker) }
    }
    pub unsafe fn ucp_worker_signal(&self, worker: ucp_worker_h) -> ucs_status_t {
        unsafe { (self.ucp_worker_signal)(worker) }
    }
    pub unsafe fn ucp_ep_create(
        &self,
        worker: ucp_worker_h,
        params: *const ucp_ep_params_t,
        ep_p: *mut ucp_ep_h,
    ) -> ucs_status_t {
        unsafe { (self.ucp_ep_create)(worker, params, ep_p) }
    }
    pub unsafe fn ucp_ep_close_nbx(
        &self,
        ep: ucp_ep_h,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t {
        unsafe { (self.ucp_ep_close_nbx)(ep, param) }
    }
    pub unsafe fn ucp_tag_send_nbx(
        &self,
        ep: ucp_ep_h,
        buffer: *const ::core::ffi::c_void,
        count: usize,
        tag: ucp_tag_t,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t {
        unsafe { (self.ucp_tag_send_nbx)(ep, buffer, count, tag, param) }
    }
    pub unsafe fn ucp_tag_recv_nbx(
        &self,
        worker: ucp_worker_h,
        buffer: *mut ::core::ffi::c_void,
        count: usize,
        tag: ucp_tag_t,
        tag_mask: ucp_tag_t,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t {
        unsafe { (self.ucp_tag_recv_nbx)(worker, buffer, count, tag, tag_mask, param) }
    }
    pub unsafe fn ucp_tag_probe_nb(
        &self,
        worker: ucp_worker_h,
        tag: ucp_tag_t,
        tag_mask: ucp_tag_t,
        remove: ::core::ffi::c_int,
        info: *mut ucp_tag_recv_info_t,
    ) -> ucp_tag_message_h {
        unsafe { (self.ucp_tag_probe_nb)(worker, tag, tag_mask, remove, info) }
    }
    pub unsafe fn ucp_tag_msg_recv_nbx(
        &self,
        worker: ucp_worker_h,
        buffer: *mut ::core::ffi::c_void,
        count: usize,
        message: ucp_tag_message_h,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t {
        unsafe { (self.ucp_tag_msg_recv_nbx)(worker, buffer, count, message, param) }
    }
    pub unsafe fn ucp_request_check_status(&self, request: *mut ::core::ffi::c_void) -> ucs_status_t {
        unsafe { (self.ucp_request_check_status)(request) }
    }
    pub unsafe fn ucp_tag_recv_request_test(
        &self,
        request: *mut ::core::ffi::c_void,
        info: *mut ucp_tag_recv_info_t,
    ) -> ucs_status_t {
        unsafe { (self.ucp_tag_recv_request_test)(request, info) }
    }
    pub unsafe fn ucp_request_cancel(&self, worker: ucp_worker_h, request: *mut ::core::ffi::c_void) {
        unsafe { (self.ucp_request_cancel)(worker, request) }
    }
    pub unsafe fn ucp_request_free(&self, request: *mut ::core::ffi::c_void) {
        unsafe { (self.ucp_request_free)(request) }
    }
}
