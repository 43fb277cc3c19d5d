"""PyTorch's DistributedDataParallel on CPUs, with gradients reduced by this library in place of gloo.

    model = torch.nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(None, mgpurun.torch.ddp_comm_hook)

DDP calls the hook for each bucket of gradients. A thread reduces the buckets, in that order, while the backward pass
continues; it does not hold the interpreter's lock.

Each bucket has memory that all ranks access in place, an arena. When a bucket is reduced for the first time, its storage is
moved into its arena: DDP's tensors and their views stay, and refer to the arena from then on. So later reductions copy
nothing. Whether a bucket is in its arena is a matter of each rank alone: all ranks reduce the arena, once for each bucket.
A PyTorch that cannot exchange the memory of a storage copies each bucket into its arena.

The reverse, arenas in the place of the storage's own pages (`adopt_in_place` in Rust), does not fit here. All ranks would
have to agree on it, but a bucket's address changes on some of them (`join`). It must end before the memory is freed and while
nobody writes to it, but nothing tells when DDP, or who has kept a gradient, is done with it. And what a forked child frees,
the C library would use again, in memory that the parent shares.
"""

# Annotations are objects here, not texts: DDP compares those of the hook.

import atexit
import ctypes
import mmap
import os
import queue
import threading
import weakref
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ._communicator import Communicator
from ._errors import ArgumentError
from ._world import init


def ddp_comm_hook(state: Optional[Communicator], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over the ranks of `state`, a communicator; None: all ranks.

    For `DistributedDataParallel.register_comm_hook`. A communicator that is passed must not be used for anything else.
    """
    return _reducer(state).reduce(bucket)


class _Failure:
    """The exception of a reduction, as the result of a future."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _unwrap(future: torch.futures.Future[Any]) -> torch.Tensor:
    result = future.value()
    if isinstance(result, _Failure):
        raise result.error
    return result


def _can_exchange() -> bool:
    """Whether the memory of a storage can be exchanged, also for the views that exist."""
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        return False
    old, new = torch.zeros(4), torch.ones(4)
    view = old[1:]
    old.untyped_storage()._swap_data_ptr_(new.untyped_storage())
    return view.tolist() == [1.0] * 3 and new.tolist() == [0.0] * 4


_exchanges = _can_exchange()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _are_views(bucket: torch.Tensor, parameters: list[Any]) -> bool:
    """Whether gradients of parameters are views of the bucket: DDP's `gradient_as_bucket_view`."""
    begin, end = bucket.data_ptr(), bucket.data_ptr() + _nbytes(bucket)
    gradients = (parameter.grad for parameter in parameters)
    return any(gradient is not None and begin <= gradient.data_ptr() < end for gradient in gradients)


def _storage_at(address: int, nbytes: int, keep: list[Any]) -> torch.UntypedStorage:
    """A storage in memory of others. What is in `keep` lives as long as the storage does."""
    view = type("View", (ctypes.c_char * nbytes,), {}).from_address(address)
    view.keep = keep
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


class _BucketArena:
    """Memory that all ranks access in place, for one bucket of a model."""

    def __init__(self, comm: Communicator, gradients: torch.Tensor, first: "weakref.ref[torch.Tensor]") -> None:
        self.kind = (gradients.numel(), gradients.dtype)
        # The bucket's first parameter tells the buckets of all models apart. Its address would not: it may be used again, on
        # some ranks only.
        self.first = first
        self.memory = comm.allocate(max(1, _nbytes(gradients)))
        self.values = torch.frombuffer(self.memory, dtype=gradients.dtype, count=gradients.numel())
        # The storage whose averages are here: its memory is this one, or DDP reads them here.
        self.tenant: Optional[StorageWeakRef] = None
        # Whether gradients of parameters are views of that storage.
        self.has_views = False

    def belongs_to(self, gradients: torch.Tensor, first: torch.Tensor) -> bool:
        return self.kind == (gradients.numel(), gradients.dtype) and self.first() is first

    def is_free_for(self, storage: torch.UntypedStorage) -> bool:
        return self.tenant is None or self.tenant.expired() or self.tenant == StorageWeakRef(storage)

    def holds(self, gradients: torch.Tensor) -> bool:
        return gradients.data_ptr() == self.values.data_ptr()

    def move_in(self, gradients: torch.Tensor, has_views: bool) -> bool:
        """Moves the storage of a bucket into this memory, if that is possible.

        Nobody else uses the bucket between the call of the hook and the end of its future.
        """
        storage, nbytes = gradients.untyped_storage(), _nbytes(gradients)
        if not (_exchanges and self.is_free_for(storage) and storage.nbytes() == nbytes == len(self.memory)):
            return False
        ctypes.memmove(self.values.data_ptr(), gradients.data_ptr(), nbytes)
        keep: list[Any] = [self.memory]
        exchanged = _storage_at(self.values.data_ptr(), nbytes, keep)
        # First of all, for a thread that forks.
        self.tenant, self.has_views = StorageWeakRef(storage), has_views
        storage._swap_data_ptr_(exchanged)
        if has_views:
            # The address of a gradient may be known elsewhere: to an array of NumPy.
            keep.append(exchanged)
        return True

    def move_out(self) -> None:
        """Gives the tenant private memory: after a failure, because a rank that has not noticed it may still write here, and
        in a forked child, because the parent would see what it writes.
        """
        tenant = self.tenant and torch.UntypedStorage._new_with_weak_ptr(self.tenant.cdata)
        self.tenant = None
        if tenant is None or tenant.data_ptr() != self.values.data_ptr():
            return
        # Without the threads of PyTorch's own functions, which do not survive a fork. Without views, nobody reads a bucket
        # before DDP has filled it again.
        private = mmap.mmap(-1, len(self.memory), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(private))
        if self.has_views:
            ctypes.memmove(address, self.values.data_ptr(), len(self.memory))
        tenant._swap_data_ptr_(_storage_at(address, len(self.memory), [private, self.memory]))


class _BucketReducer:
    """The thread that reduces the buckets of models, and their arenas."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        # The threads of the backward pass need the cores.
        comm.set_oversubscribed()
        # By the identity of the bucket's first parameter.
        self.arenas: dict[int, _BucketArena] = {}
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="mgpurun-ddp", daemon=True)
        self.thread.start()
        atexit.register(self._stop)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        if gradients.device.type != "cpu":
            raise ArgumentError(f"the gradients are on {gradients.device}: this hook is for models on the CPU")
        future: torch.futures.Future[Any] = torch.futures.Future()
        self.tasks.put((gradients, bucket.parameters(), future))
        return future.then(_unwrap)

    def _work(self) -> None:
        while (task := self.tasks.get()) is not None:
            gradients, parameters, future = task
            try:
                result: Any = self._average(gradients, parameters)
            except BaseException as error:
                result = _Failure(error)
            # They belong to DDP again.
            del task, gradients, parameters
            future.set_result(result)
            del future, result

    def _average(self, gradients: torch.Tensor, parameters: list[Any]) -> torch.Tensor:
        if self.comm.size == 1:
            return gradients
        arena = self.arenas.get(id(parameters[0]))
        if arena is None or not arena.belongs_to(gradients, parameters[0]):
            arena = self._allocate(gradients, parameters)
        try:
            return self._reduce(arena, gradients, parameters)
        except BaseException:
            arena.move_out()
            raise

    def _reduce(self, arena: _BucketArena, gradients: torch.Tensor, parameters: list[Any]) -> torch.Tensor:
        if arena.holds(gradients):
            return self.comm.all_reduce(gradients, "avg")
        has_views = _are_views(gradients, parameters)
        if arena.move_in(gradients, has_views):
            return self.comm.all_reduce(gradients, "avg")
        values, storage, nbytes = arena.values, gradients.untyped_storage(), _nbytes(gradients)
        is_free = arena.is_free_for(storage)
        # Another storage has this memory: on a rank that has no more data (DDP's `join`) and reduces zeros.
        kept = None if is_free else values.clone()
        ctypes.memmove(values.data_ptr(), gradients.data_ptr(), nbytes)
        self.comm.all_reduce(values, "avg")
        if is_free and not has_views:
            # DDP copies gradients from what the hook returns.
            arena.tenant = StorageWeakRef(storage)
            return values
        ctypes.memmove(gradients.data_ptr(), values.data_ptr(), nbytes)
        if kept is not None:
            ctypes.memmove(values.data_ptr(), kept.data_ptr(), nbytes)
        return gradients

    def _allocate(self, gradients: torch.Tensor, parameters: list[Any]) -> _BucketArena:
        """A new arena. All ranks come here for the same buckets in the same order."""
        arenas, key = self.arenas, id(parameters[0])

        def forget(first: "weakref.ref[torch.Tensor]") -> None:
            arena = arenas.get(key)
            if arena is not None and arena.first is first:
                arenas.pop(key, None)

        # After the first step DDP makes other buckets of the same parameters.
        for parameter in parameters:
            arenas.pop(id(parameter), None)
        arenas[key] = _BucketArena(self.comm, gradients, weakref.ref(parameters[0], forget))
        return arenas[key]

    def _stop(self) -> None:
        self.tasks.put(None)
        self.thread.join(1)


_reducers: dict[Optional[Communicator], _BucketReducer] = {}
_creating = threading.Lock()
# In a forked child: what its parent uses.
_of_parent: list[_BucketReducer] = []


def _reducer(state: Optional[Communicator]) -> _BucketReducer:
    found = _reducers.get(state)
    if found is not None:
        return found
    with _creating:
        if state not in _reducers:
            _reducers[state] = _BucketReducer(_communicator_of_all() if state is None else state)
        return _reducers[state]


def _communicator_of_all() -> Communicator:
    world = init()
    if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
        raise ArgumentError(
            f"this is rank {world.rank} of {world.size} of the launcher, and rank {dist.get_rank()} of "
            f"{dist.get_world_size()} of torch.distributed: pass a communicator of DDP's ranks as the hook's state"
        )
    return world.communicator()


def _after_fork() -> None:
    """In a forked child: its gradients are its own, and it has no thread that reduces."""
    global _creating
    _creating = threading.Lock()
    _of_parent.extend(_reducers.values())
    for reducer in _reducers.values():
        for arena in list(reducer.arenas.values()):
            arena.move_out()
    _reducers.clear()


os.register_at_fork(after_in_child=_after_fork)
