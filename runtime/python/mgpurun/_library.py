"""The C library, loaded with ctypes, which releases the interpreter's lock during calls."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

from ._errors import BY_STATUS, Error


class WorldInfo(ctypes.Structure):
    """`mgpu_world_info`."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_uint32),
        ("size", c_uint32),
        ("local_rank", c_uint32),
        ("local_size", c_uint32),
        ("restart_count", c_uint32),
        ("threads", c_uint32),
        ("uses_gpus", c_uint32),
        ("is_launched", c_uint32),
    ]


# Arguments of every function that returns a status.
_STATUS_FUNCTIONS = {
    "mgpu_init": [POINTER(c_void_p)],
    "mgpu_world_get_info": [c_void_p, POINTER(WorldInfo)],
    "mgpu_world_notice": [c_void_p, c_size_t, POINTER(c_char_p)],
    "mgpu_world_set_timeout": [c_void_p, c_double],
    "mgpu_report_step": [c_void_p, c_uint64],
    "mgpu_report_samples": [c_void_p, c_uint64],
    "mgpu_report_phase": [c_void_p, c_int32],
    "mgpu_stop_requested": [c_void_p, POINTER(c_int32)],
    "mgpu_request_stop": [c_void_p],
    "mgpu_comm_create": [c_void_p, POINTER(c_void_p)],
    "mgpu_comm_split": [c_void_p, c_int64, c_int32, POINTER(c_void_p)],
    "mgpu_comm_rank": [c_void_p, POINTER(c_uint32)],
    "mgpu_comm_size": [c_void_p, POINTER(c_uint32)],
    "mgpu_comm_world_rank": [c_void_p, c_uint32, POINTER(c_uint32)],
    "mgpu_comm_set_oversubscribed": [c_void_p],
    "mgpu_allocate": [c_void_p, c_size_t, POINTER(c_void_p)],
    "mgpu_free": [c_void_p],
    "mgpu_shard": [c_size_t, c_uint32, c_uint32, POINTER(c_size_t), POINTER(c_size_t)],
    "mgpu_barrier": [c_void_p],
    "mgpu_all_reduce": [c_void_p, c_void_p, c_size_t, c_int32, c_int32],
    "mgpu_reduce": [c_void_p, c_void_p, c_size_t, c_int32, c_int32, c_uint32],
    "mgpu_reduce_scatter": [c_void_p, c_void_p, c_size_t, c_int32, c_int32],
    "mgpu_all_gather": [c_void_p, c_void_p, c_size_t, c_int32],
    "mgpu_all_gather_v": [c_void_p, c_void_p, c_size_t, c_int32, POINTER(c_size_t)],
    "mgpu_broadcast": [c_void_p, c_void_p, c_size_t, c_int32, c_uint32],
    "mgpu_gather": [c_void_p, c_void_p, c_size_t, c_int32, c_uint32],
    "mgpu_scatter": [c_void_p, c_void_p, c_size_t, c_int32, c_uint32],
    "mgpu_all_to_all": [c_void_p, c_void_p, c_size_t, c_int32],
    "mgpu_all_to_all_v": [c_void_p, c_void_p, POINTER(c_size_t), c_void_p, POINTER(c_size_t), c_int32],
    "mgpu_send": [c_void_p, c_void_p, c_size_t, c_int32, c_uint32],
    "mgpu_receive": [c_void_p, c_void_p, c_size_t, c_int32, c_uint32],
}


def _path() -> str:
    # For programs in a checkout, where the library is in cargo's folder.
    return os.environ.get("MGPU_C_LIBRARY") or str(Path(__file__).with_name("libmgpu_c.so"))


def _load() -> ctypes.CDLL:
    path = _path()
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        hint = "install the package with pip, or set MGPU_C_LIBRARY to libmgpu_c.so"
        raise ImportError(f"cannot load {path}: {error}; {hint}") from error
    for name, arguments in _STATUS_FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int32
        function.errcheck = _check
    library.mgpu_last_error.restype = c_char_p
    library.mgpu_last_error_rank.restype = c_int64
    library.mgpu_version.restype = c_char_p
    for name in ("mgpu_finalize", "mgpu_comm_free"):
        function = getattr(library, name)
        function.argtypes = [c_void_p]
        function.restype = None
    # Before every call that may wait, so without a check: it cannot fail for SIGINT.
    library.mgpu_interrupt_on_sigint.argtypes = []
    library.mgpu_interrupt_on_sigint.restype = None
    return library


def _check(status: int, _function: object, _arguments: object) -> int:
    if status != 0:
        text = lib.mgpu_last_error().decode(errors="replace")
        rank = lib.mgpu_last_error_rank()
        raise BY_STATUS.get(status, Error)(text, None if rank < 0 else rank)
    return status


lib = _load()
