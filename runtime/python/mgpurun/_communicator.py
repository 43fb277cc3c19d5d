"""Collectives of some ranks. They work in place, on arrays and tensors of the CPU."""

from __future__ import annotations

import ctypes
import itertools
import operator
import os
import sys
import threading
import weakref
from typing import Any, Callable, Optional, Sequence, TypeVar

from ._errors import ArgumentError
from ._library import lib
from ._memory import memory_of

Array = TypeVar("Array")

# All that are not closed, by the order of their creation.
_open: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_numbers = itertools.count()

_OPERATIONS = {"sum": 0, "avg": 1, "mean": 1, "min": 2, "max": 3, "prod": 4}


def _number(value: Any, name: str, end: int = 2**32, begin: int = 0) -> int:
    """An integer of `begin` to `end` - 1: ctypes would drop the bits that do not fit."""
    number = operator.index(value)
    if not begin <= number < end:
        raise ArgumentError(f"{name} is {number}: pass a number from {begin} to {end - 1}")
    return number


def _operation(name: str) -> int:
    number = _OPERATIONS.get(name)
    if number is None:
        raise ArgumentError(f"no reduction {name!r}: known are {', '.join(_OPERATIONS)}")
    return number


def _sizes(counts: Sequence[int], size: int, name: str) -> Any:
    if len(counts) != size or any(count < 0 for count in counts):
        raise ArgumentError(f"{name} has one number of elements for each of {size} ranks, not {list(counts)}")
    return (ctypes.c_size_t * size)(*counts)


def shard(count: int, ranks: int, rank: int) -> slice:
    """The elements of `rank`, if `count` elements are divided among `ranks` ranks."""
    count, ranks, rank = _number(count, "count", 2**64), _number(ranks, "ranks"), _number(rank, "rank")
    begin, end = ctypes.c_size_t(), ctypes.c_size_t()
    lib.mgpu_shard(count, ranks, rank, begin, end)
    return slice(begin.value, end.value)


class Communicator:
    """The ranks of a world, or of a group. All of them call the same operations in the same order.

    Arrays are changed in place and returned. Operations do not hold the interpreter's lock.
    """

    rank: int
    """This rank."""
    size: int
    """Number of ranks."""

    def __init__(self, handle: int, parent: Optional[Communicator] = None) -> None:
        """Use `World.communicator` or `split` instead."""
        self._handle: Optional[int] = handle
        # Is not freed before this one.
        self._parent = parent
        self._in_use = threading.Lock()
        self._number = next(_numbers)
        _open[self._number] = self
        number = ctypes.c_uint32()
        lib.mgpu_comm_rank(handle, number)
        self.rank = number.value
        lib.mgpu_comm_size(handle, number)
        self.size = number.value

    def __repr__(self) -> str:
        return f"<mgpurun.Communicator: rank {self.rank} of {self.size}>"

    def _call(self, function: Callable[..., int], *arguments: Any) -> None:
        # Nobody frees the handle meanwhile.
        with self._in_use:
            # The program, or asyncio, may have replaced the handler since the last call.
            lib.mgpu_interrupt_on_sigint()
            function(self._handle, *arguments)

    def close(self) -> None:
        """Frees it, unless another thread uses it. Afterwards every call is an error."""
        if not self._in_use.acquire(blocking=False):
            return
        handle, self._handle = self._handle, None
        if handle:
            lib.mgpu_comm_free(handle)
        _open.pop(self._number, None)
        self._in_use.release()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) and not sys.is_finalizing():
            self.close()

    def world_rank(self, rank: int) -> int:
        """The rank in the world of rank `rank` of this communicator."""
        number = ctypes.c_uint32()
        self._call(lib.mgpu_comm_world_rank, _number(rank, "rank"), number)
        return number.value

    def split(self, colour: Optional[int], key: int = 0) -> Optional[Communicator]:
        """A communicator for the ranks with the same colour, in the order of their keys; None without a colour."""
        group = -1 if colour is None else _number(colour, "colour")
        handle = ctypes.c_void_p()
        self._call(lib.mgpu_comm_split, group, _number(key, "key", 2**31, -(2**31)), handle)
        return Communicator(handle.value, self) if handle.value else None

    def allocate(self, nbytes: int) -> memoryview:
        """Zeroed bytes that the other ranks access in place: operations on arrays in them need no copy. In an operation either
        all ranks pass the same part of the same allocation, or all pass memory of their own.

        `numpy.frombuffer` and `torch.frombuffer` make an array of them. They are freed with the last array. Collective.
        """
        address = ctypes.c_void_p()
        nbytes = _number(nbytes, "nbytes", 2**63)
        self._call(lib.mgpu_allocate, nbytes, address)
        members = {"_type_": ctypes.c_char, "_length_": nbytes, "_process": os.getpid()}
        arena = type("Arena", (_Arena,), members)
        return memoryview(arena.from_address(address.value)).cast("B")

    def set_oversubscribed(self) -> None:
        """Declares that other threads compute on the ranks' cores. All ranks call it."""
        self._call(lib.mgpu_comm_set_oversubscribed)

    def barrier(self) -> None:
        """Returns once all ranks have called it."""
        self._call(lib.mgpu_barrier)

    def all_reduce(self, array: Array, op: str = "sum") -> Array:
        """Every rank's array becomes the sum (avg, min, max, prod) of all ranks'. The same bits on all ranks."""
        memory = memory_of(array)
        self._call(lib.mgpu_all_reduce, memory.address, memory.count, memory.element, _operation(op))
        return array

    def reduce(self, array: Array, root: int = 0, op: str = "sum") -> Array:
        """The array of rank `root` becomes the sum of all ranks'; the others are unchanged."""
        memory = memory_of(array)
        self._call(lib.mgpu_reduce, memory.address, memory.count, memory.element, _operation(op), _number(root, "root"))
        return array

    def reduce_scatter(self, array: Array, op: str = "sum") -> Array:
        """Shard r (`shard`) of rank r becomes the sum of all ranks' shards r; the others are unspecified."""
        memory = memory_of(array)
        self._call(lib.mgpu_reduce_scatter, memory.address, memory.count, memory.element, _operation(op))
        return array

    def all_gather(self, array: Array, counts: Optional[Sequence[int]] = None) -> Array:
        """Shard r (`shard`) of every rank becomes that of rank r. With `counts`, part r has `counts[r]` elements."""
        memory = memory_of(array)
        if counts is None:
            self._call(lib.mgpu_all_gather, memory.address, memory.count, memory.element)
        else:
            sizes = _sizes(counts, self.size, "counts")
            self._call(lib.mgpu_all_gather_v, memory.address, memory.count, memory.element, sizes)
        return array

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Every rank's array becomes a copy of that of rank `root`."""
        memory = memory_of(array)
        self._call(lib.mgpu_broadcast, memory.address, memory.count, memory.element, _number(root, "root"))
        return array

    def gather(self, array: Array, root: int = 0) -> Array:
        """Shard r (`shard`) of rank `root` becomes that of rank r."""
        memory = memory_of(array)
        self._call(lib.mgpu_gather, memory.address, memory.count, memory.element, _number(root, "root"))
        return array

    def scatter(self, array: Array, root: int = 0) -> Array:
        """Shard r (`shard`) of rank r becomes that of rank `root`."""
        memory = memory_of(array)
        self._call(lib.mgpu_scatter, memory.address, memory.count, memory.element, _number(root, "root"))
        return array

    def all_to_all(self, array: Array) -> Array:
        """Shard q of rank r becomes what shard r of rank q was. Shards have the same length."""
        memory = memory_of(array)
        self._call(lib.mgpu_all_to_all, memory.address, memory.count, memory.element)
        return array

    def all_to_all_v(
        self, send: Any, send_counts: Sequence[int], receive: Array, receive_counts: Sequence[int]
    ) -> Array:
        """Sends the next `send_counts[r]` elements of `send` to rank r, and receives the next `receive_counts[r]`."""
        sent, received = memory_of(send, writable=False), memory_of(receive)
        send_sizes = _sizes(send_counts, self.size, "send_counts")
        receive_sizes = _sizes(receive_counts, self.size, "receive_counts")
        for memory, counts, name in ((sent, send_counts, "send"), (received, receive_counts, "receive")):
            if memory.count != sum(counts):
                raise ArgumentError(f"{name} has {memory.count} elements, and its counts add up to {sum(counts)}")
        if sent.element != received.element:
            raise ArgumentError("send and receive have different types of elements")
        self._call(lib.mgpu_all_to_all_v, sent.address, send_sizes, received.address, receive_sizes, sent.element)
        return receive

    def send(self, array: Any, to: int) -> None:
        """Sends the array to rank `to`, which calls `receive`."""
        memory = memory_of(array, writable=False)
        self._call(lib.mgpu_send, memory.address, memory.count, memory.element, _number(to, "to"))

    def receive(self, array: Array, source: int) -> Array:
        """Fills the array with the next message of rank `source`, of the same type and length."""
        memory = memory_of(array)
        self._call(lib.mgpu_receive, memory.address, memory.count, memory.element, _number(source, "source"))
        return array


def close_all() -> None:
    """Closes all communicators, the latest first: groups before what they were split from, in the same order on all ranks."""
    for _, communicator in sorted(_open.items(), reverse=True):
        communicator.close()


class _Arena(ctypes.Array):
    """Memory of `mgpu_allocate`, freed with the object."""

    _type_ = ctypes.c_char
    _length_ = 0
    _process = 0

    def __del__(self) -> None:
        # A forked child leaves it to the kernel: another thread may have held a lock of the library.
        if not sys.is_finalizing() and self._process == os.getpid():
            lib.mgpu_free(ctypes.addressof(self))
