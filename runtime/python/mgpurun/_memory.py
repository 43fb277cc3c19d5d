"""From an array or a tensor to the address, the number and the type of its elements, without a copy.

Accepted are, in this order: PyTorch's tensors, what has `__array_interface__` (NumPy), what has `__dlpack__`, and what has
the buffer protocol (`bytearray`, `array.array`, `memoryview`). The memory must be contiguous, and on the CPU.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

from ._errors import ArgumentError

F32, F64, F16, BF16, I32, I64, U8 = range(7)
SIZES = (4, 8, 2, 2, 4, 8, 1)
NAMES = {"float32": F32, "float64": F64, "float16": F16, "bfloat16": BF16, "int32": I32, "int64": I64, "uint8": U8}

# By kind and size of `__array_interface__`; of the buffer protocol's letters.
_TYPE_STRINGS = {"f4": F32, "f8": F64, "f2": F16, "i4": I32, "i8": I64, "u1": U8}
_LETTERS = {"f": F32, "d": F64, "e": F16, "i": I32, "l": I64, "q": I64, "B": U8, "c": U8}
# By code and bits of DLPack.
_DLPACK = {(2, 32): F32, (2, 64): F64, (2, 16): F16, (4, 16): BF16, (0, 32): I32, (0, 64): I64, (1, 8): U8}


class Memory(NamedTuple):
    """The elements of an array. `owner` keeps them alive."""

    address: int
    count: int
    element: int
    owner: Any


def _refusal(value: Any, problem: str) -> ArgumentError:
    return ArgumentError(f"{type(value).__name__}: {problem}")


def memory_of(value: Any, writable: bool = True) -> Memory:
    """The memory of an array or a tensor."""
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        return _of_torch(value)
    interface = getattr(value, "__array_interface__", None)
    if interface is not None:
        return _of_interface(value, interface, writable)
    if hasattr(value, "__dlpack__"):
        return _of_dlpack(value, writable)
    return _of_buffer(value, writable)


def _of_torch(value: Any) -> Memory:
    if value.device.type != "cpu" or value.layout != sys.modules["torch"].strided:
        raise _refusal(value, f"is on {value.device} with layout {value.layout}; pass a dense tensor on the CPU")
    if not value.is_contiguous():
        raise _refusal(value, "is not contiguous; pass tensor.contiguous()")
    if value.is_conj() or value.is_neg():
        raise _refusal(value, "is a lazy conjugate or negative; pass tensor.clone()")
    element = NAMES.get(str(value.dtype)[6:])
    if element is None:
        raise _unknown(value, value.dtype)
    return Memory(value.data_ptr(), value.numel(), element, value)


def _unknown(value: Any, dtype: Any) -> ArgumentError:
    return _refusal(value, f"has elements of {dtype}; known are {', '.join(NAMES)}")


def _of_interface(value: Any, interface: dict[str, Any], writable: bool) -> Memory:
    text = interface["typestr"]
    dtype = getattr(value, "dtype", text)
    # The byte order: `=` and `|` do not occur where it matters, `<` is this machine's.
    element = _TYPE_STRINGS.get(text[1:]) if text[0] in "<|" else None
    if element is None and str(dtype) == "bfloat16":
        element = BF16
    if element is None:
        raise _unknown(value, dtype)
    count = 1
    for extent in interface["shape"]:
        count *= extent
    if interface.get("strides") is not None and count > 1:
        raise _refusal(value, "is not contiguous; pass numpy.ascontiguousarray(array)")
    address, read_only = interface["data"]
    if read_only and writable:
        raise _refusal(value, "is read-only")
    return Memory(address, count, element, value)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    """Of DLPack 1.0 and later."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_READ_ONLY = 1

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.restype = ctypes.c_int
_is_capsule.argtypes = [ctypes.py_object, ctypes.c_char_p]

# kDLCPU and kDLCUDAHost (pinned).
_ON_HOST = (1, 3)


def _of_dlpack(value: Any, writable: bool) -> Memory:
    # The capsule frees what it refers to when it is dropped unused.
    try:
        capsule = value.__dlpack__(max_version=(1, 0))
    except TypeError:
        capsule = value.__dlpack__()
    if _is_capsule(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        tensor, read_only = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    else:
        # Without such a flag.
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        read_only = _is_of_jax(value) or _has_read_only_buffer(value)
    if read_only and writable:
        raise _refusal(value, "is read-only")
    if tensor.device_type not in _ON_HOST:
        raise _refusal(value, f"is on device type {tensor.device_type} of DLPack; pass memory of the CPU")
    element = _DLPACK.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if element is None:
        raise _unknown(value, f"DLPack's type {tensor.code} of {tensor.bits} bits in {tensor.lanes} lanes")
    count = 1
    for axis in reversed(range(tensor.ndim)):
        extent = tensor.shape[axis]
        if tensor.strides and extent > 1 and tensor.strides[axis] != count:
            raise _refusal(value, "is not contiguous")
        count *= extent
    return Memory((tensor.data or 0) + tensor.byte_offset, count, element, (value, capsule))


def _is_of_jax(value: Any) -> bool:
    """JAX's arrays never change. They have a read-only buffer, but not one of bfloat16."""
    jax_array = getattr(sys.modules.get("jax"), "Array", None)
    return isinstance(jax_array, type) and isinstance(value, jax_array)


def _has_read_only_buffer(value: Any) -> bool:
    try:
        return memoryview(value).readonly
    except Exception:  # It has no such buffer, whatever its library raises then.
        return False


def _of_buffer(value: Any, writable: bool) -> Memory:
    try:
        view = memoryview(value)
    except TypeError:
        raise _refusal(value, "is no array: pass one of NumPy, a tensor, or memory of the buffer protocol") from None
    letter = view.format.lstrip("@=<") if sys.byteorder == "little" else view.format.lstrip("@=>")
    element = _LETTERS.get(letter)
    if element is None or view.itemsize != SIZES[element]:
        raise _unknown(value, f"the format {view.format!r}")
    if not view.c_contiguous:
        raise _refusal(value, "is not contiguous")
    count = view.nbytes // view.itemsize
    if count == 0:
        return Memory(0, 0, element, view)
    if view.readonly:
        if writable:
            raise _refusal(value, "is read-only")
        # ctypes takes the address of writable memory only.
        copied = ctypes.create_string_buffer(view.tobytes(), view.nbytes)
        return Memory(ctypes.addressof(copied), count, element, copied)
    array = (ctypes.c_char * view.nbytes).from_buffer(view.cast("B"))
    return Memory(ctypes.addressof(array), count, element, array)
