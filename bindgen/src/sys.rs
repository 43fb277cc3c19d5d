// Generated from the nccl.h of NCCL 2.32.3 (PyPI package nvidia-nccl-cu13) by bindgen 0.73.2.
// Do not edit: run bindgen/regenerate.sh.

pub const NCCL_MAJOR: u32 = 2;
pub const NCCL_MINOR: u32 = 32;
pub const NCCL_PATCH: u32 = 3;
pub const NCCL_SUFFIX: &[u8; 1] = b"\0";
pub const NCCL_VERSION_CODE: u32 = 23203;
pub const NCCL_UNIQUE_ID_BYTES: u32 = 128;
pub const NCCL_SPLIT_NOCOLOR: i32 = -1;
pub const NCCL_UNDEF_FLOAT: f64 = -1.0;
pub const NCCL_API_MAGIC: u32 = 3405692655;
pub const NCCL_WIN_DEFAULT: u32 = 0;
pub const NCCL_WIN_COLL_SYMMETRIC: u32 = 1;
pub const NCCL_WIN_STRICT_ORDERING: u32 = 2;
pub const NCCL_WIN_GIN_ONLY: u32 = 4;
pub const NCCL_WIN_CFT_COUNTED: u32 = 8;
pub const NCCL_WIN_REQUIRED_ALIGNMENT: u32 = 4096;
pub const NCCL_CTA_POLICY_DEFAULT: u32 = 0;
pub const NCCL_CTA_POLICY_EFFICIENCY: u32 = 1;
pub const NCCL_CTA_POLICY_ZERO: u32 = 2;
pub const NCCL_SHRINK_DEFAULT: u32 = 0;
pub const NCCL_SHRINK_ABORT: u32 = 1;
pub const NCCL_REVOKE_DEFAULT: u32 = 0;
pub const NCCL_SUSPEND_MEM: u32 = 1;
#[repr(C)]
#[derive(Debug)]
pub struct CUstream_st {
    _unused: [u8; 0],
}
pub type cudaStream_t = *mut CUstream_st;
#[repr(C)]
#[derive(Debug)]
pub struct CUevent_st {
    _unused: [u8; 0],
}
pub type cudaEvent_t = *mut CUevent_st;
#[repr(C)]
#[derive(Debug)]
pub struct ncclComm {
    _unused: [u8; 0],
}
pub type ncclComm_t = *mut ncclComm;
#[repr(C)]
#[derive(Debug)]
pub struct ncclWindow_vidmem {
    _unused: [u8; 0],
}
pub type ncclWindow_t = *mut ncclWindow_vidmem;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclUniqueId {
    pub internal: [::core::ffi::c_char; 128usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclUniqueId"][::core::mem::size_of::<ncclUniqueId>() - 128usize];
    ["Alignment of ncclUniqueId"][::core::mem::align_of::<ncclUniqueId>() - 1usize];
    ["Offset of field: ncclUniqueId::internal"][::core::mem::offset_of!(ncclUniqueId, internal) - 0usize];
};
impl ncclResult_t {
    pub const ncclSuccess: ncclResult_t = ncclResult_t(0);
    pub const ncclUnhandledCudaError: ncclResult_t = ncclResult_t(1);
    pub const ncclSystemError: ncclResult_t = ncclResult_t(2);
    pub const ncclInternalError: ncclResult_t = ncclResult_t(3);
    pub const ncclInvalidArgument: ncclResult_t = ncclResult_t(4);
    pub const ncclInvalidUsage: ncclResult_t = ncclResult_t(5);
    pub const ncclRemoteError: ncclResult_t = ncclResult_t(6);
    pub const ncclInProgress: ncclResult_t = ncclResult_t(7);
    pub const ncclTimeout: ncclResult_t = ncclResult_t(8);
    pub const ncclNumResults: ncclResult_t = ncclResult_t(9);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclResult_t(pub ::core::ffi::c_uint);
impl ncclHostCftMode_t {
    pub const ncclHostCftDefault: ncclHostCftMode_t = ncclHostCftMode_t(-2147483648);
    pub const ncclHostCftEnable: ncclHostCftMode_t = ncclHostCftMode_t(1);
    pub const ncclHostCftDisable: ncclHostCftMode_t = ncclHostCftMode_t(2);
    pub const ncclHostCftFallback: ncclHostCftMode_t = ncclHostCftMode_t(3);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclHostCftMode_t(pub ::core::ffi::c_int);
impl ncclNvlsHostMode_t {
    pub const ncclNvlsHostModeDefault: ncclNvlsHostMode_t = ncclNvlsHostMode_t(-2147483648);
    pub const ncclNvlsHostModeEnable: ncclNvlsHostMode_t = ncclNvlsHostMode_t(0);
    pub const ncclNvlsHostModeDisableTransport: ncclNvlsHostMode_t = ncclNvlsHostMode_t(1);
    pub const ncclNvlsHostModeDisableSymmetricMultimem: ncclNvlsHostMode_t = ncclNvlsHostMode_t(2);
    pub const ncclNvlsHostModeDisable: ncclNvlsHostMode_t = ncclNvlsHostMode_t(2147483647);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclNvlsHostMode_t(pub ::core::ffi::c_int);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclConfig_v23100 {
    pub size: usize,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub blocking: ::core::ffi::c_int,
    pub cgaClusterSize: ::core::ffi::c_int,
    pub minCTAs: ::core::ffi::c_int,
    pub maxCTAs: ::core::ffi::c_int,
    pub netName: *const ::core::ffi::c_char,
    pub splitShare: ::core::ffi::c_int,
    pub trafficClass: ::core::ffi::c_int,
    pub commName: *const ::core::ffi::c_char,
    pub collnetEnable: ::core::ffi::c_int,
    pub CTAPolicy: ::core::ffi::c_int,
    pub shrinkShare: ::core::ffi::c_int,
    pub nvlsCTAs: ::core::ffi::c_int,
    pub nChannelsPerNetPeer: ::core::ffi::c_int,
    pub nvlinkCentricSched: ::core::ffi::c_int,
    pub graphUsageMode: ::core::ffi::c_int,
    pub numRmaCtx: ::core::ffi::c_int,
    pub maxP2pPeers: ::core::ffi::c_int,
    pub graphStreamOrdering: ::core::ffi::c_int,
    pub launchOrderImplicit: ::core::ffi::c_int,
    pub numRmaSig: ::core::ffi::c_int,
    pub rmaEagerInit: ::core::ffi::c_int,
    pub hostCftMode: ::core::ffi::c_int,
    pub nvlsHostMode: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclConfig_v23100"][::core::mem::size_of::<ncclConfig_v23100>() - 120usize];
    ["Alignment of ncclConfig_v23100"][::core::mem::align_of::<ncclConfig_v23100>() - 8usize];
    ["Offset of field: ncclConfig_v23100::size"][::core::mem::offset_of!(ncclConfig_v23100, size) - 0usize];
    ["Offset of field: ncclConfig_v23100::magic"][::core::mem::offset_of!(ncclConfig_v23100, magic) - 8usize];
    ["Offset of field: ncclConfig_v23100::version"]
        [::core::mem::offset_of!(ncclConfig_v23100, version) - 12usize];
    ["Offset of field: ncclConfig_v23100::blocking"]
        [::core::mem::offset_of!(ncclConfig_v23100, blocking) - 16usize];
    ["Offset of field: ncclConfig_v23100::cgaClusterSize"]
        [::core::mem::offset_of!(ncclConfig_v23100, cgaClusterSize) - 20usize];
    ["Offset of field: ncclConfig_v23100::minCTAs"]
        [::core::mem::offset_of!(ncclConfig_v23100, minCTAs) - 24usize];
    ["Offset of field: ncclConfig_v23100::maxCTAs"]
        [::core::mem::offset_of!(ncclConfig_v23100, maxCTAs) - 28usize];
    ["Offset of field: ncclConfig_v23100::netName"]
        [::core::mem::offset_of!(ncclConfig_v23100, netName) - 32usize];
    ["Offset of field: ncclConfig_v23100::splitShare"]
        [::core::mem::offset_of!(ncclConfig_v23100, splitShare) - 40usize];
    ["Offset of field: ncclConfig_v23100::trafficClass"]
        [::core::mem::offset_of!(ncclConfig_v23100, trafficClass) - 44usize];
    ["Offset of field: ncclConfig_v23100::commName"]
        [::core::mem::offset_of!(ncclConfig_v23100, commName) - 48usize];
    ["Offset of field: ncclConfig_v23100::collnetEnable"]
        [::core::mem::offset_of!(ncclConfig_v23100, collnetEnable) - 56usize];
    ["Offset of field: ncclConfig_v23100::CTAPolicy"]
        [::core::mem::offset_of!(ncclConfig_v23100, CTAPolicy) - 60usize];
    ["Offset of field: ncclConfig_v23100::shrinkShare"]
        [::core::mem::offset_of!(ncclConfig_v23100, shrinkShare) - 64usize];
    ["Offset of field: ncclConfig_v23100::nvlsCTAs"]
        [::core::mem::offset_of!(ncclConfig_v23100, nvlsCTAs) - 68usize];
    ["Offset of field: ncclConfig_v23100::nChannelsPerNetPeer"]
        [::core::mem::offset_of!(ncclConfig_v23100, nChannelsPerNetPeer) - 72usize];
    ["Offset of field: ncclConfig_v23100::nvlinkCentricSched"]
        [::core::mem::offset_of!(ncclConfig_v23100, nvlinkCentricSched) - 76usize];
    ["Offset of field: ncclConfig_v23100::graphUsageMode"]
        [::core::mem::offset_of!(ncclConfig_v23100, graphUsageMode) - 80usize];
    ["Offset of field: ncclConfig_v23100::numRmaCtx"]
        [::core::mem::offset_of!(ncclConfig_v23100, numRmaCtx) - 84usize];
    ["Offset of field: ncclConfig_v23100::maxP2pPeers"]
        [::core::mem::offset_of!(ncclConfig_v23100, maxP2pPeers) - 88usize];
    ["Offset of field: ncclConfig_v23100::graphStreamOrdering"]
        [::core::mem::offset_of!(ncclConfig_v23100, graphStreamOrdering) - 92usize];
    ["Offset of field: ncclConfig_v23100::launchOrderImplicit"]
        [::core::mem::offset_of!(ncclConfig_v23100, launchOrderImplicit) - 96usize];
    ["Offset of field: ncclConfig_v23100::numRmaSig"]
        [::core::mem::offset_of!(ncclConfig_v23100, numRmaSig) - 100usize];
    ["Offset of field: ncclConfig_v23100::rmaEagerInit"]
        [::core::mem::offset_of!(ncclConfig_v23100, rmaEagerInit) - 104usize];
    ["Offset of field: ncclConfig_v23100::hostCftMode"]
        [::core::mem::offset_of!(ncclConfig_v23100, hostCftMode) - 108usize];
    ["Offset of field: ncclConfig_v23100::nvlsHostMode"]
        [::core::mem::offset_of!(ncclConfig_v23100, nvlsHostMode) - 112usize];
};
pub type ncclConfig_t = ncclConfig_v23100;
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ncclConfigExt {
    pub next: *mut ncclConfigExt,
    pub key: ncclConfigExt__bindgen_ty_1,
    pub val: ncclConfigExt__bindgen_ty_2,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclConfigExt__bindgen_ty_1 {
    pub vendorId: ::core::ffi::c_int,
    pub optionId: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclConfigExt__bindgen_ty_1"][::core::mem::size_of::<ncclConfigExt__bindgen_ty_1>() - 8usize];
    ["Alignment of ncclConfigExt__bindgen_ty_1"]
        [::core::mem::align_of::<ncclConfigExt__bindgen_ty_1>() - 4usize];
    ["Offset of field: ncclConfigExt__bindgen_ty_1::vendorId"]
        [::core::mem::offset_of!(ncclConfigExt__bindgen_ty_1, vendorId) - 0usize];
    ["Offset of field: ncclConfigExt__bindgen_ty_1::optionId"]
        [::core::mem::offset_of!(ncclConfigExt__bindgen_ty_1, optionId) - 4usize];
};
#[repr(C)]
#[derive(Copy, Clone)]
pub union ncclConfigExt__bindgen_ty_2 {
    pub i: ::core::ffi::c_int,
    pub s: *const ::core::ffi::c_char,
    pub raw: *mut ::core::ffi::c_void,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclConfigExt__bindgen_ty_2"][::core::mem::size_of::<ncclConfigExt__bindgen_ty_2>() - 8usize];
    ["Alignment of ncclConfigExt__bindgen_ty_2"]
        [::core::mem::align_of::<ncclConfigExt__bindgen_ty_2>() - 8usize];
    ["Offset of field: ncclConfigExt__bindgen_ty_2::i"]
        [::core::mem::offset_of!(ncclConfigExt__bindgen_ty_2, i) - 0usize];
    ["Offset of field: ncclConfigExt__bindgen_ty_2::s"]
        [::core::mem::offset_of!(ncclConfigExt__bindgen_ty_2, s) - 0usize];
    ["Offset of field: ncclConfigExt__bindgen_ty_2::raw"]
        [::core::mem::offset_of!(ncclConfigExt__bindgen_ty_2, raw) - 0usize];
};
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclConfigExt"][::core::mem::size_of::<ncclConfigExt>() - 24usize];
    ["Alignment of ncclConfigExt"][::core::mem::align_of::<ncclConfigExt>() - 8usize];
    ["Offset of field: ncclConfigExt::next"][::core::mem::offset_of!(ncclConfigExt, next) - 0usize];
    ["Offset of field: ncclConfigExt::key"][::core::mem::offset_of!(ncclConfigExt, key) - 8usize];
    ["Offset of field: ncclConfigExt::val"][::core::mem::offset_of!(ncclConfigExt, val) - 16usize];
};
pub type ncclConfigExt_t = ncclConfigExt;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclCollConfig_v23200 {
    pub size: usize,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub ext: *mut ncclConfigExt_t,
    pub minCTAs: ::core::ffi::c_int,
    pub maxCTAs: ::core::ffi::c_int,
    pub nvlsCTAs: ::core::ffi::c_int,
    pub cgaClusterSize: ::core::ffi::c_int,
    pub algSelection: *const ::core::ffi::c_char,
    pub forceAlgSelection: ::core::ffi::c_int,
    pub CTAPolicy: ::core::ffi::c_int,
    pub userProfilerTag: u64,
    pub launchCompletionEvent: cudaEvent_t,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclCollConfig_v23200"][::core::mem::size_of::<ncclCollConfig_v23200>() - 72usize];
    ["Alignment of ncclCollConfig_v23200"][::core::mem::align_of::<ncclCollConfig_v23200>() - 8usize];
    ["Offset of field: ncclCollConfig_v23200::size"]
        [::core::mem::offset_of!(ncclCollConfig_v23200, size) - 0usize];
    ["Offset of field: ncclCollConfig_v23200::magic"]
        [::core::mem::offset_of!(ncclCollConfig_v23200, magic) - 8usize];
    ["Offset of field: ncclCollConfig_v23200::version"]
        [::core::mem::offset_of!(ncclCollConfig_v23200, version) - 12usize];
    ["Offset of field: ncclCollConfig_v23200::ext"]
        [::core::mem::offset_of!(ncclCollConfig_v23200, ext) - 16usize];
    ["Offset of field: ncclCollConfig_v23200::minCTAs"]
        [::core::mem::offset_of!(ncclCollConfig_v23200, minCTAs) - 24usize];
    ["Offset of field: ncclCollConfig_v23200::maxCTAs"]
        [::core::mem::offset_of!(ncclCollConfig_v23200, maxCTAs) - 28usize];
    ["Offset of field: ncclCollConfig_v23200::nvlsCTAs"]
        [::core::mem::offset_of!(ncclCollConfig_v23200, nvlsCTAs) - 32usize];
    ["Offset of field: ncclCollConfig_v23200::cgaClusterSize"]
        [::core::mem::offset_of!(ncclCollConfig_v23200, cgaClusterSize) - 36usize];
    ["Offset of field: ncclCollConfig_v23200::algSelection"]
        [::core::mem::offset_of!(ncclCollConfig_v23200, algSelection) - 40usize];
    ["Offset of field: ncclCollConfig_v23200::forceAlgSelection"]
        [::core::mem::offset_of!(ncclCollConfig_v23200, forceAlgSelection) - 48usize];
    ["Offset of field: ncclCollConfig_v23200::CTAPolicy"]
        [::core::mem::offset_of!(ncclCollConfig_v23200, CTAPolicy) - 52usize];
    ["Offset of field: ncclCollConfig_v23200::userProfilerTag"]
        [::core::mem::offset_of!(ncclCollConfig_v23200, userProfilerTag) - 56usize];
    ["Offset of field: ncclCollConfig_v23200::launchCompletionEvent"]
        [::core::mem::offset_of!(ncclCollConfig_v23200, launchCompletionEvent) - 64usize];
};
pub type ncclCollConfig_t = ncclCollConfig_v23200;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclSimInfo_v22200 {
    pub size: usize,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub estimatedTime: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclSimInfo_v22200"][::core::mem::size_of::<ncclSimInfo_v22200>() - 24usize];
    ["Alignment of ncclSimInfo_v22200"][::core::mem::align_of::<ncclSimInfo_v22200>() - 8usize];
    ["Offset of field: ncclSimInfo_v22200::size"][::core::mem::offset_of!(ncclSimInfo_v22200, size) - 0usize];
    ["Offset of field: ncclSimInfo_v22200::magic"]
        [::core::mem::offset_of!(ncclSimInfo_v22200, magic) - 8usize];
    ["Offset of field: ncclSimInfo_v22200::version"]
        [::core::mem::offset_of!(ncclSimInfo_v22200, version) - 12usize];
    ["Offset of field: ncclSimInfo_v22200::estimatedTime"]
        [::core::mem::offset_of!(ncclSimInfo_v22200, estimatedTime) - 16usize];
};
pub type ncclSimInfo_t = ncclSimInfo_v22200;
impl ncclCommMemStat_t {
    pub const ncclStatGpuMemSuspend: ncclCommMemStat_t = ncclCommMemStat_t(0);
    pub const ncclStatGpuMemSuspended: ncclCommMemStat_t = ncclCommMemStat_t(1);
    pub const ncclStatGpuMemPersist: ncclCommMemStat_t = ncclCommMemStat_t(2);
    pub const ncclStatGpuMemTotal: ncclCommMemStat_t = ncclCommMemStat_t(3);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclCommMemStat_t(pub ::core::ffi::c_uint);
impl ncclRedOp_dummy_t {
    pub const ncclNumOps_dummy: ncclRedOp_dummy_t = ncclRedOp_dummy_t(5);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclRedOp_dummy_t(pub ::core::ffi::c_uint);
impl ncclRedOp_t {
    pub const ncclSum: ncclRedOp_t = ncclRedOp_t(0);
    pub const ncclProd: ncclRedOp_t = ncclRedOp_t(1);
    pub const ncclMax: ncclRedOp_t = ncclRedOp_t(2);
    pub const ncclMin: ncclRedOp_t = ncclRedOp_t(3);
    pub const ncclAvg: ncclRedOp_t = ncclRedOp_t(4);
    pub const ncclNumOps: ncclRedOp_t = ncclRedOp_t(5);
    pub const ncclMaxRedOp: ncclRedOp_t = ncclRedOp_t(2147483647);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclRedOp_t(pub ::core::ffi::c_uint);
impl ncclDataType_t {
    pub const ncclInt8: ncclDataType_t = ncclDataType_t(0);
    pub const ncclChar: ncclDataType_t = ncclDataType_t(0);
    pub const ncclUint8: ncclDataType_t = ncclDataType_t(1);
    pub const ncclInt32: ncclDataType_t = ncclDataType_t(2);
    pub const ncclInt: ncclDataType_t = ncclDataType_t(2);
    pub const ncclUint32: ncclDataType_t = ncclDataType_t(3);
    pub const ncclInt64: ncclDataType_t = ncclDataType_t(4);
    pub const ncclUint64: ncclDataType_t = ncclDataType_t(5);
    pub const ncclFloat16: ncclDataType_t = ncclDataType_t(6);
    pub const ncclHalf: ncclDataType_t = ncclDataType_t(6);
    pub const ncclFloat32: ncclDataType_t = ncclDataType_t(7);
    pub const ncclFloat: ncclDataType_t = ncclDataType_t(7);
    pub const ncclFloat64: ncclDataType_t = ncclDataType_t(8);
    pub const ncclDouble: ncclDataType_t = ncclDataType_t(8);
    pub const ncclBfloat16: ncclDataType_t = ncclDataType_t(9);
    pub const ncclFloat8e4m3: ncclDataType_t = ncclDataType_t(10);
    pub const ncclFloat8e5m2: ncclDataType_t = ncclDataType_t(11);
    pub const ncclNumTypes: ncclDataType_t = ncclDataType_t(12);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclDataType_t(pub ::core::ffi::c_uint);
impl ncclScalarResidence_t {
    pub const ncclScalarDevice: ncclScalarResidence_t = ncclScalarResidence_t(0);
    pub const ncclScalarHostImmediate: ncclScalarResidence_t = ncclScalarResidence_t(1);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclScalarResidence_t(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclWaitSignalDesc_t {
    pub opCnt: ::core::ffi::c_int,
    pub peer: ::core::ffi::c_int,
    pub sigIdx: ::core::ffi::c_int,
    pub ctx: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclWaitSignalDesc_t"][::core::mem::size_of::<ncclWaitSignalDesc_t>() - 16usize];
    ["Alignment of ncclWaitSignalDesc_t"][::core::mem::align_of::<ncclWaitSignalDesc_t>() - 4usize];
    ["Offset of field: ncclWaitSignalDesc_t::opCnt"]
        [::core::mem::offset_of!(ncclWaitSignalDesc_t, opCnt) - 0usize];
    ["Offset of field: ncclWaitSignalDesc_t::peer"]
        [::core::mem::offset_of!(ncclWaitSignalDesc_t, peer) - 4usize];
    ["Offset of field: ncclWaitSignalDesc_t::sigIdx"]
        [::core::mem::offset_of!(ncclWaitSignalDesc_t, sigIdx) - 8usize];
    ["Offset of field: ncclWaitSignalDesc_t::ctx"]
        [::core::mem::offset_of!(ncclWaitSignalDesc_t, ctx) - 12usize];
};
impl ncclEncryptionMode_t {
    pub const NCCL_ENCRYPTION_MODE_NONE: ncclEncryptionMode_t = ncclEncryptionMode_t(0);
    pub const NCCL_ENCRYPTION_MODE_PSK: ncclEncryptionMode_t = ncclEncryptionMode_t(1);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclEncryptionMode_t(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclEncryptionConfig_v23200 {
    pub size: usize,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub mode: ::core::ffi::c_int,
    pub psk: *const ::core::ffi::c_char,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclEncryptionConfig_v23200"][::core::mem::size_of::<ncclEncryptionConfig_v23200>() - 32usize];
    ["Alignment of ncclEncryptionConfig_v23200"]
        [::core::mem::align_of::<ncclEncryptionConfig_v23200>() - 8usize];
    ["Offset of field: ncclEncryptionConfig_v23200::size"]
        [::core::mem::offset_of!(ncclEncryptionConfig_v23200, size) - 0usize];
    ["Offset of field: ncclEncryptionConfig_v23200::magic"]
        [::core::mem::offset_of!(ncclEncryptionConfig_v23200, magic) - 8usize];
    ["Offset of field: ncclEncryptionConfig_v23200::version"]
        [::core::mem::offset_of!(ncclEncryptionConfig_v23200, version) - 12usize];
    ["Offset of field: ncclEncryptionConfig_v23200::mode"]
        [::core::mem::offset_of!(ncclEncryptionConfig_v23200, mode) - 16usize];
    ["Offset of field: ncclEncryptionConfig_v23200::psk"]
        [::core::mem::offset_of!(ncclEncryptionConfig_v23200, psk) - 24usize];
};
pub type ncclEncryptionConfig_t = ncclEncryptionConfig_v23200;
#[repr(C)]
#[derive(Debug)]
pub struct ncclParamHandle {
    _unused: [u8; 0],
}
pub type ncclParamHandle_t = *mut ncclParamHandle;
pub struct NcclSymbols {
    __library: ::libloading::Library,
    pub ncclMemAlloc: Result<
        unsafe extern "C" fn(ptr: *mut *mut ::core::ffi::c_void, size: usize) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclMemFree:
        Result<unsafe extern "C" fn(ptr: *mut ::core::ffi::c_void) -> ncclResult_t, ::libloading::Error>,
    pub ncclGetVersion:
        Result<unsafe extern "C" fn(version: *mut ::core::ffi::c_int) -> ncclResult_t, ::libloading::Error>,
    pub ncclGetUniqueId:
        Result<unsafe extern "C" fn(uniqueId: *mut ncclUniqueId) -> ncclResult_t, ::libloading::Error>,
    pub ncclCommInitRankConfig: Result<
        unsafe extern "C" fn(
            comm: *mut ncclComm_t,
            nranks: ::core::ffi::c_int,
            commId: ncclUniqueId,
            rank: ::core::ffi::c_int,
            config: *mut ncclConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommInitRank: Result<
        unsafe extern "C" fn(
            comm: *mut ncclComm_t,
            nranks: ::core::ffi::c_int,
            commId: ncclUniqueId,
            rank: ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommInitAll: Result<
        unsafe extern "C" fn(
            comm: *mut ncclComm_t,
            ndev: ::core::ffi::c_int,
            devlist: *const ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommFinalize: Result<unsafe extern "C" fn(comm: ncclComm_t) -> ncclResult_t, ::libloading::Error>,
    pub ncclCommDestroy: Result<unsafe extern "C" fn(comm: ncclComm_t) -> ncclResult_t, ::libloading::Error>,
    pub ncclCommAbort: Result<unsafe extern "C" fn(comm: ncclComm_t) -> ncclResult_t, ::libloading::Error>,
    pub ncclCommRevoke: Result<
        unsafe extern "C" fn(comm: ncclComm_t, revokeFlags: ::core::ffi::c_int) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommSplit: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            color: ::core::ffi::c_int,
            key: ::core::ffi::c_int,
            newcomm: *mut ncclComm_t,
            config: *mut ncclConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommShrink: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            excludeRanksList: *mut ::core::ffi::c_int,
            excludeRanksCount: ::core::ffi::c_int,
            newcomm: *mut ncclComm_t,
            config: *mut ncclConfig_t,
            shrinkFlags: ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommGetUniqueId: Result<
        unsafe extern "C" fn(comm: ncclComm_t, uniqueId: *mut ncclUniqueId) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommGrow: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            nRanks: ::core::ffi::c_int,
            uniqueId: *const ncclUniqueId,
            rank: ::core::ffi::c_int,
            newcomm: *mut ncclComm_t,
            config: *mut ncclConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommInitRankScalable: Result<
        unsafe extern "C" fn(
            newcomm: *mut ncclComm_t,
            nranks: ::core::ffi::c_int,
            myrank: ::core::ffi::c_int,
            nId: ::core::ffi::c_int,
            commIds: *mut ncclUniqueId,
            config: *mut ncclConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclGetErrorString:
        Result<unsafe extern "C" fn(result: ncclResult_t) -> *const ::core::ffi::c_char, ::libloading::Error>,
    pub ncclGetLastError:
        Result<unsafe extern "C" fn(comm: ncclComm_t) -> *const ::core::ffi::c_char, ::libloading::Error>,
    pub ncclCommGetAsyncError: Result<
        unsafe extern "C" fn(comm: ncclComm_t, asyncError: *mut ncclResult_t) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommCount: Result<
        unsafe extern "C" fn(comm: ncclComm_t, count: *mut ::core::ffi::c_int) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommCuDevice: Result<
        unsafe extern "C" fn(comm: ncclComm_t, device: *mut ::core::ffi::c_int) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommUserRank: Result<
        unsafe extern "C" fn(comm: ncclComm_t, rank: *mut ::core::ffi::c_int) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommRegister: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            buff: *mut ::core::ffi::c_void,
            size: usize,
            handle: *mut *mut ::core::ffi::c_void,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommDeregister: Result<
        unsafe extern "C" fn(comm: ncclComm_t, handle: *mut ::core::ffi::c_void) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommSuspend: Result<
        unsafe extern "C" fn(comm: ncclComm_t, flags: ::core::ffi::c_int) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommResume: Result<unsafe extern "C" fn(comm: ncclComm_t) -> ncclResult_t, ::libloading::Error>,
    pub ncclCommMemStats: Result<
        unsafe extern "C" fn(comm: ncclComm_t, stat: ncclCommMemStat_t, value: *mut u64) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommWindowRegister: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            buff: *mut ::core::ffi::c_void,
            size: usize,
            win: *mut ncclWindow_t,
            winFlags: ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommWindowDeregister: Result<
        unsafe extern "C" fn(comm: ncclComm_t, win: ncclWindow_t) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclWinGetUserPtr: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            win: ncclWindow_t,
            outUserPtr: *mut *mut ::core::ffi::c_void,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclRedOpCreatePreMulSum: Result<
        unsafe extern "C" fn(
            op: *mut ncclRedOp_t,
            scalar: *mut ::core::ffi::c_void,
            datatype: ncclDataType_t,
            residence: ncclScalarResidence_t,
            comm: ncclComm_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclRedOpDestroy:
        Result<unsafe extern "C" fn(op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t, ::libloading::Error>,
    pub ncclReduce: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            op: ncclRedOp_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclBcast: Result<
        unsafe extern "C" fn(
            buff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclBroadcast: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclAllReduce: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            op: ncclRedOp_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclReduceScatter: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            recvcount: usize,
            datatype: ncclDataType_t,
            op: ncclRedOp_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclAllGather: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            sendcount: usize,
            datatype: ncclDataType_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclAlltoAll: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclGather: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclScatter: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclAllReduceConfig: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            op: ncclRedOp_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
            config: *const ncclCollConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclBroadcastConfig: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
            config: *const ncclCollConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclReduceConfig: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            op: ncclRedOp_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
            config: *const ncclCollConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclAllGatherConfig: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            sendcount: usize,
            datatype: ncclDataType_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
            config: *const ncclCollConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclReduceScatterConfig: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            recvcount: usize,
            datatype: ncclDataType_t,
            op: ncclRedOp_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
            config: *const ncclCollConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclAlltoAllConfig: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
            config: *const ncclCollConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclGatherConfig: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
            config: *const ncclCollConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclScatterConfig: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
            config: *const ncclCollConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclSend: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            peer: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclRecv: Result<
        unsafe extern "C" fn(
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            peer: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclPutSignal: Result<
        unsafe extern "C" fn(
            localbuff: *const ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            peer: ::core::ffi::c_int,
            peerWin: ncclWindow_t,
            peerWinOffset: usize,
            sigIdx: ::core::ffi::c_int,
            ctx: ::core::ffi::c_int,
            flags: ::core::ffi::c_uint,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclSignal: Result<
        unsafe extern "C" fn(
            peer: ::core::ffi::c_int,
            sigIdx: ::core::ffi::c_int,
            ctx: ::core::ffi::c_int,
            flags: ::core::ffi::c_uint,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclWaitSignal: Result<
        unsafe extern "C" fn(
            nDesc: ::core::ffi::c_int,
            signalDescs: *mut ncclWaitSignalDesc_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclGroupStart: Result<unsafe extern "C" fn() -> ncclResult_t, ::libloading::Error>,
    pub ncclGroupEnd: Result<unsafe extern "C" fn() -> ncclResult_t, ::libloading::Error>,
    pub ncclGroupSimulateEnd:
        Result<unsafe extern "C" fn(simInfo: *mut ncclSimInfo_t) -> ncclResult_t, ::libloading::Error>,
    pub ncclSetEncryption: Result<
        unsafe extern "C" fn(config: *const ncclEncryptionConfig_t) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclParamBind: Result<
        unsafe extern "C" fn(out: *mut ncclParamHandle_t, key: *const ::core::ffi::c_char) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclParamGetI8:
        Result<unsafe extern "C" fn(h: ncclParamHandle_t, out: *mut i8) -> ncclResult_t, ::libloading::Error>,
    pub ncclParamGetI16: Result<
        unsafe extern "C" fn(h: ncclParamHandle_t, out: *mut i16) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclParamGetI32: Result<
        unsafe extern "C" fn(h: ncclParamHandle_t, out: *mut i32) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclParamGetI64: Result<
        unsafe extern "C" fn(h: ncclParamHandle_t, out: *mut i64) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclParamGetU8:
        Result<unsafe extern "C" fn(h: ncclParamHandle_t, out: *mut u8) -> ncclResult_t, ::libloading::Error>,
    pub ncclParamGetU16: Result<
        unsafe extern "C" fn(h: ncclParamHandle_t, out: *mut u16) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclParamGetU32: Result<
        unsafe extern "C" fn(h: ncclParamHandle_t, out: *mut u32) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclParamGetU64: Result<
        unsafe extern "C" fn(h: ncclParamHandle_t, out: *mut u64) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclParamGetStr: Result<
        unsafe extern "C" fn(h: ncclParamHandle_t, out: *mut *const ::core::ffi::c_char) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclParamGet: Result<
        unsafe extern "C" fn(
            h: ncclParamHandle_t,
            out: *mut ::core::ffi::c_void,
            maxLen: ::core::ffi::c_int,
            len: *mut ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclParamGetParameter: Result<
        unsafe extern "C" fn(
            key: *const ::core::ffi::c_char,
            value: *mut *const ::core::ffi::c_char,
            valueLen: *mut ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclParamGetAllParameterKeys: Result<
        unsafe extern "C" fn(
            table: *mut *mut *const ::core::ffi::c_char,
            tableLen: *mut ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclParamDumpAll: Result<unsafe extern "C" fn(), ::libloading::Error>,
}
impl NcclSymbols {
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
        let ncclMemAlloc = unsafe { __library.get(b"ncclMemAlloc\0") }.map(|sym| *sym);
        let ncclMemFree = unsafe { __library.get(b"ncclMemFree\0") }.map(|sym| *sym);
        let ncclGetVersion = unsafe { __library.get(b"ncclGetVersion\0") }.map(|sym| *sym);
        let ncclGetUniqueId = unsafe { __library.get(b"ncclGetUniqueId\0") }.map(|sym| *sym);
        let ncclCommInitRankConfig = unsafe { __library.get(b"ncclCommInitRankConfig\0") }.map(|sym| *sym);
        let ncclCommInitRank = unsafe { __library.get(b"ncclCommInitRank\0") }.map(|sym| *sym);
        let ncclCommInitAll = unsafe { __library.get(b"ncclCommInitAll\0") }.map(|sym| *sym);
        let ncclCommFinalize = unsafe { __library.get(b"ncclCommFinalize\0") }.map(|sym| *sym);
        let ncclCommDestroy = unsafe { __library.get(b"ncclCommDestroy\0") }.map(|sym| *sym);
        let ncclCommAbort = unsafe { __library.get(b"ncclCommAbort\0") }.map(|sym| *sym);
        let ncclCommRevoke = unsafe { __library.get(b"ncclCommRevoke\0") }.map(|sym| *sym);
        let ncclCommSplit = unsafe { __library.get(b"ncclCommSplit\0") }.map(|sym| *sym);
        let ncclCommShrink = unsafe { __library.get(b"ncclCommShrink\0") }.map(|sym| *sym);
        let ncclCommGetUniqueId = unsafe { __library.get(b"ncclCommGetUniqueId\0") }.map(|sym| *sym);
        let ncclCommGrow = unsafe { __library.get(b"ncclCommGrow\0") }.map(|sym| *sym);
        let ncclCommInitRankScalable =
            unsafe { __library.get(b"ncclCommInitRankScalable\0") }.map(|sym| *sym);
        let ncclGetErrorString = unsafe { __library.get(b"ncclGetErrorString\0") }.map(|sym| *sym);
        let ncclGetLastError = unsafe { __library.get(b"ncclGetLastError\0") }.map(|sym| *sym);
        let ncclCommGetAsyncError = unsafe { __library.get(b"ncclCommGetAsyncError\0") }.map(|sym| *sym);
        let ncclCommCount = unsafe { __library.get(b"ncclCommCount\0") }.map(|sym| *sym);
        let ncclCommCuDevice = unsafe { __library.get(b"ncclCommCuDevice\0") }.map(|sym| *sym);
        let ncclCommUserRank = unsafe { __library.get(b"ncclCommUserRank\0") }.map(|sym| *sym);
        let ncclCommRegister = unsafe { __library.get(b"ncclCommRegister\0") }.map(|sym| *sym);
        let ncclCommDeregister = unsafe { __library.get(b"ncclCommDeregister\0") }.map(|sym| *sym);
        let ncclCommSuspend = unsafe { __library.get(b"ncclCommSuspend\0") }.map(|sym| *sym);
        let ncclCommResume = unsafe { __library.get(b"ncclCommResume\0") }.map(|sym| *sym);
        let ncclCommMemStats = unsafe { __library.get(b"ncclCommMemStats\0") }.map(|sym| *sym);
        let ncclCommWindowRegister = unsafe { __library.get(b"ncclCommWindowRegister\0") }.map(|sym| *sym);
        let ncclCommWindowDeregister =
            unsafe { __library.get(b"ncclCommWindowDeregister\0") }.map(|sym| *sym);
        let ncclWinGetUserPtr = unsafe { __library.get(b"ncclWinGetUserPtr\0") }.map(|sym| *sym);
        let ncclRedOpCreatePreMulSum =
            unsafe { __library.get(b"ncclRedOpCreatePreMulSum\0") }.map(|sym| *sym);
        let ncclRedOpDestroy = unsafe { __library.get(b"ncclRedOpDestroy\0") }.map(|sym| *sym);
        let ncclReduce = unsafe { __library.get(b"ncclReduce\0") }.map(|sym| *sym);
        let ncclBcast = unsafe { __library.get(b"ncclBcast\0") }.map(|sym| *sym);
        let ncclBroadcast = unsafe { __library.get(b"ncclBroadcast\0") }.map(|sym| *sym);
        let ncclAllReduce = unsafe { __library.get(b"ncclAllReduce\0") }.map(|sym| *sym);
        let ncclReduceScatter = unsafe { __library.get(b"ncclReduceScatter\0") }.map(|sym| *sym);
        let ncclAllGather = unsafe { __library.get(b"ncclAllGather\0") }.map(|sym| *sym);
        let ncclAlltoAll = unsafe { __library.get(b"ncclAlltoAll\0") }.map(|sym| *sym);
        let ncclGather = unsafe { __library.get(b"ncclGather\0") }.map(|sym| *sym);
        let ncclScatter = unsafe { __library.get(b"ncclScatter\0") }.map(|sym| *sym);
        let ncclAllReduceConfig = unsafe { __library.get(b"ncclAllReduceConfig\0") }.map(|sym| *sym);
        let ncclBroadcastConfig = unsafe { __library.get(b"ncclBroadcastConfig\0") }.map(|sym| *sym);
        let ncclReduceConfig = unsafe { __library.get(b"ncclReduceConfig\0") }.map(|sym| *sym);
        let ncclAllGatherConfig = unsafe { __library.get(b"ncclAllGatherConfig\0") }.map(|sym| *sym);
        let ncclReduceScatterConfig = unsafe { __library.get(b"ncclReduceScatterConfig\0") }.map(|sym| *sym);
        let ncclAlltoAllConfig = unsafe { __library.get(b"ncclAlltoAllConfig\0") }.map(|sym| *sym);
        let ncclGatherConfig = unsafe { __library.get(b"ncclGatherConfig\0") }.map(|sym| *sym);
        let ncclScatterConfig = unsafe { __library.get(b"ncclScatterConfig\0") }.map(|sym| *sym);
        let ncclSend = unsafe { __library.get(b"ncclSend\0") }.map(|sym| *sym);
        let ncclRecv = unsafe { __library.get(b"ncclRecv\0") }.map(|sym| *sym);
        let ncclPutSignal = unsafe { __library.get(b"ncclPutSignal\0") }.map(|sym| *sym);
        let ncclSignal = unsafe { __library.get(b"ncclSignal\0") }.map(|sym| *sym);
        let ncclWaitSignal = unsafe { __library.get(b"ncclWaitSignal\0") }.map(|sym| *sym);
        let ncclGroupStart = unsafe { __library.get(b"ncclGroupStart\0") }.map(|sym| *sym);
        let ncclGroupEnd = unsafe { __library.get(b"ncclGroupEnd\0") }.map(|sym| *sym);
        let ncclGroupSimulateEnd = unsafe { __library.get(b"ncclGroupSimulateEnd\0") }.map(|sym| *sym);
        let ncclSetEncryption = unsafe { __library.get(b"ncclSetEncryption\0") }.map(|sym| *sym);
        let ncclParamBind = unsafe { __library.get(b"ncclParamBind\0") }.map(|sym| *sym);
        let ncclParamGetI8 = unsafe { __library.get(b"ncclParamGetI8\0") }.map(|sym| *sym);
        let ncclParamGetI16 = unsafe { __library.get(b"ncclParamGetI16\0") }.map(|sym| *sym);
        let ncclParamGetI32 = unsafe { __library.get(b"ncclParamGetI32\0") }.map(|sym| *sym);
        let ncclParamGetI64 = unsafe { __library.get(b"ncclParamGetI64\0") }.map(|sym| *sym);
        let ncclParamGetU8 = unsafe { __library.get(b"ncclParamGetU8\0") }.map(|sym| *sym);
        let ncclParamGetU16 = unsafe { __library.get(b"ncclParamGetU16\0") }.map(|sym| *sym);
        let ncclParamGetU32 = unsafe { __library.get(b"ncclParamGetU32\0") }.map(|sym| *sym);
        let ncclParamGetU64 = unsafe { __library.get(b"ncclParamGetU64\0") }.map(|sym| *sym);
        let ncclParamGetStr = unsafe { __library.get(b"ncclParamGetStr\0") }.map(|sym| *sym);
        let ncclParamGet = unsafe { __library.get(b"ncclParamGet\0") }.map(|sym| *sym);
        let ncclParamGetParameter = unsafe { __library.get(b"ncclParamGetParameter\0") }.map(|sym| *sym);
        let ncclParamGetAllParameterKeys =
            unsafe { __library.get(b"ncclParamGetAllParameterKeys\0") }.map(|sym| *sym);
        let ncclParamDumpAll = unsafe { __library.get(b"ncclParamDumpAll\0") }.map(|sym| *sym);
        Ok(NcclSymbols {
            __library,
            ncclMemAlloc,
            ncclMemFree,
            ncclGetVersion,
            ncclGetUniqueId,
            ncclCommInitRankConfig,
            ncclCommInitRank,
            ncclCommInitAll,
            ncclCommFinalize,
            ncclCommDestroy,
            ncclCommAbort,
            ncclCommRevoke,
            ncclCommSplit,
            ncclCommShrink,
            ncclCommGetUniqueId,
            ncclCommGrow,
            ncclCommInitRankScalable,
            ncclGetErrorString,
            ncclGetLastError,
            ncclCommGetAsyncError,
            ncclCommCount,
            ncclCommCuDevice,
            ncclCommUserRank,
            ncclCommRegister,
            ncclCommDeregister,
            ncclCommSuspend,
            ncclCommResume,
            ncclCommMemStats,
            ncclCommWindowRegister,
            ncclCommWindowDeregister,
            ncclWinGetUserPtr,
            ncclRedOpCreatePreMulSum,
            ncclRedOpDestroy,
            ncclReduce,
            ncclBcast,
            ncclBroadcast,
            ncclAllReduce,
            ncclReduceScatter,
            ncclAllGather,
            ncclAlltoAll,
            ncclGather,
            ncclScatter,
            ncclAllReduceConfig,
            ncclBroadcastConfig,
            ncclReduceConfig,
            ncclAllGatherConfig,
            ncclReduceScatterConfig,
            ncclAlltoAllConfig,
            ncclGatherConfig,
            ncclScatterConfig,
            ncclSend,
            ncclRecv,
            ncclPutSignal,
            ncclSignal,
            ncclWaitSignal,
            ncclGroupStart,
            ncclGroupEnd,
            ncclGroupSimulateEnd,
            ncclSetEncryption,
            ncclParamBind,
            ncclParamGetI8,
            ncclParamGetI16,
            ncclParamGetI32,
            ncclParamGetI64,
            ncclParamGetU8,
            ncclParamGetU16,
            ncclParamGetU32,
            ncclParamGetU64,
            ncclParamGetStr,
            ncclParamGet,
            ncclParamGetParameter,
            ncclParamGetAllParameterKeys,
            ncclParamDumpAll,
        })
    }
    pub unsafe fn ncclMemAlloc(&self, ptr: *mut *mut ::core::ffi::c_void, size: usize) -> ncclResult_t {
        unsafe { (self.ncclMemAlloc.as_ref().expect("Expected function, got error."))(ptr, size) }
    }
    pub unsafe fn ncclMemFree(&self, ptr: *mut ::core::ffi::c_void) -> ncclResult_t {
        unsafe { (self.ncclMemFree.as_ref().expect("Expected function, got error."))(ptr) }
    }
    pub unsafe fn ncclGetVersion(&self, version: *mut ::core::ffi::c_int) -> ncclResult_t {
        unsafe { (self.ncclGetVersion.as_ref().expect("Expected function, got error."))(version) }
    }
    pub unsafe fn ncclGetUniqueId(&self, uniqueId: *mut ncclUniqueId) -> ncclResult_t {
        unsafe { (self.ncclGetUniqueId.as_ref().expect("Expected function, got error."))(uniqueId) }
    }
    pub unsafe fn ncclCommInitRankConfig(
        &self,
        comm: *mut ncclComm_t,
        nranks: ::core::ffi::c_int,
        commId: ncclUniqueId,
        rank: ::core::ffi::c_int,
        config: *mut ncclConfig_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclCommInitRankConfig.as_ref().expect("Expected function, got error."))(
                comm, nranks, commId, rank, config,
            )
        }
    }
    pub unsafe fn ncclCommInitRank(
        &self,
        comm: *mut ncclComm_t,
        nranks: ::core::ffi::c_int,
        commId: ncclUniqueId,
        rank: ::core::ffi::c_int,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclCommInitRank.as_ref().expect("Expected function, got error."))(
                comm, nranks, commId, rank,
            )
        }
    }
    pub unsafe fn ncclCommInitAll(
        &self,
        comm: *mut ncclComm_t,
        ndev: ::core::ffi::c_int,
        devlist: *const ::core::ffi::c_int,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclCommInitAll.as_ref().expect("Expected function, got error."))(comm, ndev, devlist)
        }
    }
    pub unsafe fn ncclCommFinalize(&self, comm: ncclComm_t) -> ncclResult_t {
        unsafe { (self.ncclCommFinalize.as_ref().expect("Expected function, got error."))(comm) }
    }
    pub unsafe fn ncclCommDestroy(&self, comm: ncclComm_t) -> ncclResult_t {
        unsafe { (self.ncclCommDestroy.as_ref().expect("Expected function, got error."))(comm) }
    }
    pub unsafe fn ncclCommAbort(&self, comm: ncclComm_t) -> ncclResult_t {
        unsafe { (self.ncclCommAbort.as_ref().expect("Expected function, got error."))(comm) }
    }
    pub unsafe fn ncclCommRevoke(&self, comm: ncclComm_t, revokeFlags: ::core::ffi::c_int) -> ncclResult_t {
        unsafe { (self.ncclCommRevoke.as_ref().expect("Expected function, got error."))(comm, revokeFlags) }
    }
    pub unsafe fn ncclCommSplit(
        &self,
        comm: ncclComm_t,
        color: ::core::ffi::c_int,
        key: ::core::ffi::c_int,
        newcomm: *mut ncclComm_t,
        config: *mut ncclConfig_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclCommSplit.as_ref().expect("Expected function, got error."))(
                comm, color, key, newcomm, config,
            )
        }
    }
    pub unsafe fn ncclCommShrink(
        &self,
        comm: ncclComm_t,
        excludeRanksList: *mut ::core::ffi::c_int,
        excludeRanksCount: ::core::ffi::c_int,
        newcomm: *mut ncclComm_t,
        config: *mut ncclConfig_t,
        shrinkFlags: ::core::ffi::c_int,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclCommShrink.as_ref().expect("Expected function, got error."))(
                comm,
                excludeRanksList,
                excludeRanksCount,
                newcomm,
                config,
                shrinkFlags,
            )
        }
    }
    pub unsafe fn ncclCommGetUniqueId(&self, comm: ncclComm_t, uniqueId: *mut ncclUniqueId) -> ncclResult_t {
        unsafe { (self.ncclCommGetUniqueId.as_ref().expect("Expected function, got error."))(comm, uniqueId) }
    }
    pub unsafe fn ncclCommGrow(
        &self,
        comm: ncclComm_t,
        nRanks: ::core::ffi::c_int,
        uniqueId: *const ncclUniqueId,
        rank: ::core::ffi::c_int,
        newcomm: *mut ncclComm_t,
        config: *mut ncclConfig_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclCommGrow.as_ref().expect("Expected function, got error."))(
                comm, nRanks, uniqueId, rank, newcomm, config,
            )
        }
    }
    pub unsafe fn ncclCommInitRankScalable(
        &self,
        newcomm: *mut ncclComm_t,
        nranks: ::core::ffi::c_int,
        myrank: ::core::ffi::c_int,
        nId: ::core::ffi::c_int,
        commIds: *mut ncclUniqueId,
        config: *mut ncclConfig_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclCommInitRankScalable.as_ref().expect("Expected function, got error."))(
                newcomm, nranks, myrank, nId, commIds, config,
            )
        }
    }
    pub unsafe fn ncclGetErrorString(&self, result: ncclResult_t) -> *const ::core::ffi::c_char {
        unsafe { (self.ncclGetErrorString.as_ref().expect("Expected function, got error."))(result) }
    }
    pub unsafe fn ncclGetLastError(&self, comm: ncclComm_t) -> *const ::core::ffi::c_char {
        unsafe { (self.ncclGetLastError.as_ref().expect("Expected function, got error."))(comm) }
    }
    pub unsafe fn ncclCommGetAsyncError(
        &self,
        comm: ncclComm_t,
        asyncError: *mut ncclResult_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclCommGetAsyncError.as_ref().expect("Expected function, got error."))(comm, asyncError)
        }
    }
    pub unsafe fn ncclCommCount(&self, comm: ncclComm_t, count: *mut ::core::ffi::c_int) -> ncclResult_t {
        unsafe { (self.ncclCommCount.as_ref().expect("Expected function, got error."))(comm, count) }
    }
    pub unsafe fn ncclCommCuDevice(&self, comm: ncclComm_t, device: *mut ::core::ffi::c_int) -> ncclResult_t {
        unsafe { (self.ncclCommCuDevice.as_ref().expect("Expected function, got error."))(comm, device) }
    }
    pub unsafe fn ncclCommUserRank(&self, comm: ncclComm_t, rank: *mut ::core::ffi::c_int) -> ncclResult_t {
        unsafe { (self.ncclCommUserRank.as_ref().expect("Expected function, got error."))(comm, rank) }
    }
    pub unsafe fn ncclCommRegister(
        &self,
        comm: ncclComm_t,
        buff: *mut ::core::ffi::c_void,
        size: usize,
        handle: *mut *mut ::core::ffi::c_void,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclCommRegister.as_ref().expect("Expected function, got error."))(comm, buff, size, handle)
        }
    }
    pub unsafe fn ncclCommDeregister(
        &self,
        comm: ncclComm_t,
        handle: *mut ::core::ffi::c_void,
    ) -> ncclResult_t {
        unsafe { (self.ncclCommDeregister.as_ref().expect("Expected function, got error."))(comm, handle) }
    }
    pub unsafe fn ncclCommSuspend(&self, comm: ncclComm_t, flags: ::core::ffi::c_int) -> ncclResult_t {
        unsafe { (self.ncclCommSuspend.as_ref().expect("Expected function, got error."))(comm, flags) }
    }
    pub unsafe fn ncclCommResume(&self, comm: ncclComm_t) -> ncclResult_t {
        unsafe { (self.ncclCommResume.as_ref().expect("Expected function, got error."))(comm) }
    }
    pub unsafe fn ncclCommMemStats(
        &self,
        comm: ncclComm_t,
        stat: ncclCommMemStat_t,
        value: *mut u64,
    ) -> ncclResult_t {
        unsafe { (self.ncclCommMemStats.as_ref().expect("Expected function, got error."))(comm, stat, value) }
    }
    pub unsafe fn ncclCommWindowRegister(
        &self,
        comm: ncclComm_t,
        buff: *mut ::core::ffi::c_void,
        size: usize,
        win: *mut ncclWindow_t,
        winFlags: ::core::ffi::c_int,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclCommWindowRegister.as_ref().expect("Expected function, got error."))(
                comm, buff, size, win, winFlags,
            )
        }
    }
    pub unsafe fn ncclCommWindowDeregister(&self, comm: ncclComm_t, win: ncclWindow_t) -> ncclResult_t {
        unsafe { (self.ncclCommWindowDeregister.as_ref().expect("Expected function, got error."))(comm, win) }
    }
    pub unsafe fn ncclWinGetUserPtr(
        &self,
        comm: ncclComm_t,
        win: ncclWindow_t,
        outUserPtr: *mut *mut ::core::ffi::c_void,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclWinGetUserPtr.as_ref().expect("Expected function, got error."))(comm, win, outUserPtr)
        }
    }
    pub unsafe fn ncclRedOpCreatePreMulSum(
        &self,
        op: *mut ncclRedOp_t,
        scalar: *mut ::core::ffi::c_void,
        datatype: ncclDataType_t,
        residence: ncclScalarResidence_t,
        comm: ncclComm_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclRedOpCreatePreMulSum.as_ref().expect("Expected function, got error."))(
                op, scalar, datatype, residence, comm,
            )
        }
    }
    pub unsafe fn ncclRedOpDestroy(&self, op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t {
        unsafe { (self.ncclRedOpDestroy.as_ref().expect("Expected function, got error."))(op, comm) }
    }
    pub unsafe fn ncclReduce(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        root: ::core::ffi::c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclReduce.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, count, datatype, op, root, comm, stream,
            )
        }
    }
    pub unsafe fn ncclBcast(
        &self,
        buff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        root: ::core::ffi::c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclBcast.as_ref().expect("Expected function, got error."))(
                buff, count, datatype, root, comm, stream,
            )
        }
    }
    pub unsafe fn ncclBroadcast(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        root: ::core::ffi::c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclBroadcast.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, count, datatype, root, comm, stream,
            )
        }
    }
    pub unsafe fn ncclAllReduce(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclAllReduce.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, count, datatype, op, comm, stream,
            )
        }
    }
    pub unsafe fn ncclReduceScatter(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        recvcount: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclReduceScatter.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, recvcount, datatype, op, comm, stream,
            )
        }
    }
    pub unsafe fn ncclAllGather(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        sendcount: usize,
        datatype: ncclDataType_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclAllGather.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, sendcount, datatype, comm, stream,
            )
        }
    }
    pub unsafe fn ncclAlltoAll(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclAlltoAll.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, count, datatype, comm, stream,
            )
        }
    }
    pub unsafe fn ncclGather(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        root: ::core::ffi::c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclGather.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, count, datatype, root, comm, stream,
            )
        }
    }
    pub unsafe fn ncclScatter(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        root: ::core::ffi::c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclScatter.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, count, datatype, root, comm, stream,
            )
        }
    }
    pub unsafe fn ncclAllReduceConfig(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
        config: *const ncclCollConfig_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclAllReduceConfig.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, count, datatype, op, comm, stream, config,
            )
        }
    }
    pub unsafe fn ncclBroadcastConfig(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        root: ::core::ffi::c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
        config: *const ncclCollConfig_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclBroadcastConfig.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, count, datatype, root, comm, stream, config,
            )
        }
    }
    pub unsafe fn ncclReduceConfig(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        root: ::core::ffi::c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
        config: *const ncclCollConfig_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclReduceConfig.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, count, datatype, op, root, comm, stream, config,
            )
        }
    }
    pub unsafe fn ncclAllGatherConfig(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        sendcount: usize,
        datatype: ncclDataType_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
        config: *const ncclCollConfig_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclAllGatherConfig.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, sendcount, datatype, comm, stream, config,
            )
        }
    }
    pub unsafe fn ncclReduceScatterConfig(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        recvcount: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
        config: *const ncclCollConfig_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclReduceScatterConfig.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, recvcount, datatype, op, comm, stream, config,
            )
        }
    }
    pub unsafe fn ncclAlltoAllConfig(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
        config: *const ncclCollConfig_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclAlltoAllConfig.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, count, datatype, comm, stream, config,
            )
        }
    }
    pub unsafe fn ncclGatherConfig(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        root: ::core::ffi::c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
        config: *const ncclCollConfig_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclGatherConfig.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, count, datatype, root, comm, stream, config,
            )
        }
    }
    pub unsafe fn ncclScatterConfig(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        recvbuff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        root: ::core::ffi::c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
        config: *const ncclCollConfig_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclScatterConfig.as_ref().expect("Expected function, got error."))(
                sendbuff, recvbuff, count, datatype, root, comm, stream, config,
            )
        }
    }
    pub unsafe fn ncclSend(
        &self,
        sendbuff: *const ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        peer: ::core::ffi::c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclSend.as_ref().expect("Expected function, got error."))(
                sendbuff, count, datatype, peer, comm, stream,
            )
        }
    }
    pub unsafe fn ncclRecv(
        &self,
        recvbuff: *mut ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        peer: ::core::ffi::c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclRecv.as_ref().expect("Expected function, got error."))(
                recvbuff, count, datatype, peer, comm, stream,
            )
        }
    }
    pub unsafe fn ncclPutSignal(
        &self,
        localbuff: *const ::core::ffi::c_void,
        count: usize,
        datatype: ncclDataType_t,
        peer: ::core::ffi::c_int,
        peerWin: ncclWindow_t,
        peerWinOffset: usize,
        sigIdx: ::core::ffi::c_int,
        ctx: ::core::ffi::c_int,
        flags: ::core::ffi::c_uint,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclPutSignal.as_ref().expect("Expected function, got error."))(
                localbuff,
                count,
                datatype,
                peer,
                peerWin,
                peerWinOffset,
                sigIdx,
                ctx,
                flags,
                comm,
                stream,
            )
        }
    }
    pub unsafe fn ncclSignal(
        &self,
        peer: ::core::ffi::c_int,
        sigIdx: ::core::ffi::c_int,
        ctx: ::core::ffi::c_int,
        flags: ::core::ffi::c_uint,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclSignal.as_ref().expect("Expected function, got error."))(
                peer, sigIdx, ctx, flags, comm, stream,
            )
        }
    }
    pub unsafe fn ncclWaitSignal(
        &self,
        nDesc: ::core::ffi::c_int,
        signalDescs: *mut ncclWaitSignalDesc_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclWaitSignal.as_ref().expect("Expected function, got error."))(
                nDesc,
                signalDescs,
                comm,
                stream,
            )
        }
    }
    pub unsafe fn ncclGroupStart(&self) -> ncclResult_t {
        unsafe { (self.ncclGroupStart.as_ref().expect("Expected function, got error."))() }
    }
    pub unsafe fn ncclGroupEnd(&self) -> ncclResult_t {
        unsafe { (self.ncclGroupEnd.as_ref().expect("Expected function, got error."))() }
    }
    pub unsafe fn ncclGroupSimulateEnd(&self, simInfo: *mut ncclSimInfo_t) -> ncclResult_t {
        unsafe { (self.ncclGroupSimulateEnd.as_ref().expect("Expected function, got error."))(simInfo) }
    }
    pub unsafe fn ncclSetEncryption(&self, config: *const ncclEncryptionConfig_t) -> ncclResult_t {
        unsafe { (self.ncclSetEncryption.as_ref().expect("Expected function, got error."))(config) }
    }
    pub unsafe fn ncclParamBind(
        &self,
        out: *mut ncclParamHandle_t,
        key: *const ::core::ffi::c_char,
    ) -> ncclResult_t {
        unsafe { (self.ncclParamBind.as_ref().expect("Expected function, got error."))(out, key) }
    }
    pub unsafe fn ncclParamGetI8(&self, h: ncclParamHandle_t, out: *mut i8) -> ncclResult_t {
        unsafe { (self.ncclParamGetI8.as_ref().expect("Expected function, got error."))(h, out) }
    }
    pub unsafe fn ncclParamGetI16(&self, h: ncclParamHandle_t, out: *mut i16) -> ncclResult_t {
        unsafe { (self.ncclParamGetI16.as_ref().expect("Expected function, got error."))(h, out) }
    }
    pub unsafe fn ncclParamGetI32(&self, h: ncclParamHandle_t, out: *mut i32) -> ncclResult_t {
        unsafe { (self.ncclParamGetI32.as_ref().expect("Expected function, got error."))(h, out) }
    }
    pub unsafe fn ncclParamGetI64(&self, h: ncclParamHandle_t, out: *mut i64) -> ncclResult_t {
        unsafe { (self.ncclParamGetI64.as_ref().expect("Expected function, got error."))(h, out) }
    }
    pub unsafe fn ncclParamGetU8(&self, h: ncclParamHandle_t, out: *mut u8) -> ncclResult_t {
        unsafe { (self.ncclParamGetU8.as_ref().expect("Expected function, got error."))(h, out) }
    }
    pub unsafe fn ncclParamGetU16(&self, h: ncclParamHandle_t, out: *mut u16) -> ncclResult_t {
        unsafe { (self.ncclParamGetU16.as_ref().expect("Expected function, got error."))(h, out) }
    }
    pub unsafe fn ncclParamGetU32(&self, h: ncclParamHandle_t, out: *mut u32) -> ncclResult_t {
        unsafe { (self.ncclParamGetU32.as_ref().expect("Expected function, got error."))(h, out) }
    }
    pub unsafe fn ncclParamGetU64(&self, h: ncclParamHandle_t, out: *mut u64) -> ncclResult_t {
        unsafe { (self.ncclParamGetU64.as_ref().expect("Expected function, got error."))(h, out) }
    }
    pub unsafe fn ncclParamGetStr(
        &self,
        h: ncclParamHandle_t,
        out: *mut *const ::core::ffi::c_char,
    ) -> ncclResult_t {
        unsafe { (self.ncclParamGetStr.as_ref().expect("Expected function, got error."))(h, out) }
    }
    pub unsafe fn ncclParamGet(
        &self,
        h: ncclParamHandle_t,
        out: *mut ::core::ffi::c_void,
        maxLen: ::core::ffi::c_int,
        len: *mut ::core::ffi::c_int,
    ) -> ncclResult_t {
        unsafe { (self.ncclParamGet.as_ref().expect("Expected function, got error."))(h, out, maxLen, len) }
    }
    pub unsafe fn ncclParamGetParameter(
        &self,
        key: *const ::core::ffi::c_char,
        value: *mut *const ::core::ffi::c_char,
        valueLen: *mut ::core::ffi::c_int,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclParamGetParameter.as_ref().expect("Expected function, got error."))(
                key, value, valueLen,
            )
        }
    }
    pub unsafe fn ncclParamGetAllParameterKeys(
        &self,
        table: *mut *mut *const ::core::ffi::c_char,
        tableLen: *mut ::core::ffi::c_int,
    ) -> ncclResult_t {
        unsafe {
            (self.ncclParamGetAllParameterKeys.as_ref().expect("Expected function, got error."))(
                table, tableLen,
            )
        }
    }
    pub unsafe fn ncclParamDumpAll(&self) {
        unsafe { (self.ncclParamDumpAll.as_ref().expect("Expected function, got error."))() }
    }
}
