"""PyTorch's DistributedDataParallel on CPUs, with gradients reduced by this library in place of gloo.

    model = torch.nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(None, mgpurun.torch.ddp_comm_hook)

DDP calls the hook for each bucket of gradients. A thread reduces the buckets, in that order, while the backward pass
continues; it does not hold the interpreter's lock. A bucket is copied into memory that all ranks access in place, and
the averages are copied back.
"""

# Annotations are objects here, not texts: DDP compares those of the hook.

import atexit
import ctypes
import queue
import threading
from typing import Any, Optional

import torch
import torch.distributed as dist

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


class _BucketReducer:
    """The thread that reduces the buckets of models, and the memory of their averages."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        # The threads of the backward pass need the cores.
        comm.set_oversubscribed()
        # By index, number and type of the elements: after the first step DDP makes other buckets.
        self.arenas: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="mgpurun-ddp", daemon=True)
        self.thread.start()
        atexit.register(self._stop)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        if gradients.device.type != "cpu":
            raise ArgumentError(f"the gradients are on {gradients.device}: this hook is for models on the CPU")
        future: torch.futures.Future[Any] = torch.futures.Future()
        self.tasks.put((bucket.index(), gradients, future))
        return future.then(_unwrap)

    def _work(self) -> None:
        while (task := self.tasks.get()) is not None:
            index, gradients, future = task
            try:
                result: Any = self._average(index, gradients)
            except BaseException as error:
                result = _Failure(error)
            # The gradients belong to DDP again.
            del task, gradients
            future.set_result(result)
            del future, result

    def _average(self, index: int, gradients: torch.Tensor) -> torch.Tensor:
        if self.comm.size == 1:
            return gradients
        key = (index, gradients.numel(), gradients.dtype)
        averages = self.arenas.get(key)
        if averages is None:
            # All ranks have the same buckets in the same order.
            self.arenas = {known: arena for known, arena in self.arenas.items() if known[0] != index}
            memory = self.comm.allocate(max(1, gradients.numel() * gradients.element_size()))
            averages = torch.frombuffer(memory, dtype=gradients.dtype, count=gradients.numel())
            self.arenas[key] = averages
        nbytes = gradients.numel() * gradients.element_size()
        ctypes.memmove(averages.data_ptr(), gradients.data_ptr(), nbytes)
        self.comm.all_reduce(averages, "avg")
        # Another model may use the arena before DDP reads the averages, at the end of the backward pass.
        ctypes.memmove(gradients.data_ptr(), averages.data_ptr(), nbytes)
        return gradients

    def _stop(self) -> None:
        self.tasks.put(None)
        self.thread.join(1)


_reducers: dict[Optional[Communicator], _BucketReducer] = {}
_creating = threading.Lock()


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
