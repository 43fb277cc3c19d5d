"""Data-parallel training on several CPUs or GPUs: collectives on NumPy arrays and CPU tensors, without copies.

    import mgpurun, numpy as np

    world = mgpurun.init()                 # under `mgpurun -n 4 program.py`, torchrun, mpirun or srun
    values = np.full(1000, world.rank, np.float32)
    mgpurun.all_reduce(values)             # in place; the same bits on all ranks

For PyTorch's DDP on CPUs see `mgpurun.torch`.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

from ._communicator import Array, Communicator, shard
from ._errors import (
    ArgumentError,
    Disagreement,
    Diverged,
    EnvironmentVariableError,
    Error,
    Forked,
    GpuError,
    Interrupted,
    LibraryDefect,
    Mismatch,
    NotFinite,
    PeerLost,
    Poisoned,
    RankTimeout,
    RendezvousError,
    SystemRefusal,
)
from ._library import lib as _lib
from ._world import World, init

__version__: str = _lib.mgpu_version().decode()

EXIT_STOPPED = 74
"""Exit code of a program that was asked to stop and has saved its work."""


def rank() -> int:
    """Rank of this process, from 0."""
    return init().rank


def world_size() -> int:
    """Number of ranks."""
    return init().size


def stop_requested() -> bool:
    """As `World.stop_requested`."""
    return init().stop_requested()


def request_stop() -> None:
    """As `World.request_stop`."""
    init().request_stop()


def report_step(step: int) -> None:
    """As `World.report_step`."""
    init().report_step(step)


def interrupt() -> None:
    """Ends the waits of all calls that are running, from another thread: they raise `Interrupted`."""
    _lib.mgpu_interrupt()


def barrier() -> None:
    """As `Communicator.barrier`."""
    init().comm.barrier()


def all_reduce(array: Array, op: str = "sum") -> Array:
    """As `Communicator.all_reduce`."""
    return init().comm.all_reduce(array, op)


def reduce(array: Array, root: int = 0, op: str = "sum") -> Array:
    """As `Communicator.reduce`."""
    return init().comm.reduce(array, root, op)


def reduce_scatter(array: Array, op: str = "sum") -> Array:
    """As `Communicator.reduce_scatter`."""
    return init().comm.reduce_scatter(array, op)


def all_gather(array: Array, counts: Optional[Sequence[int]] = None) -> Array:
    """As `Communicator.all_gather`."""
    return init().comm.all_gather(array, counts)


def broadcast(array: Array, root: int = 0) -> Array:
    """As `Communicator.broadcast`."""
    return init().comm.broadcast(array, root)


def gather(array: Array, root: int = 0) -> Array:
    """As `Communicator.gather`."""
    return init().comm.gather(array, root)


def scatter(array: Array, root: int = 0) -> Array:
    """As `Communicator.scatter`."""
    return init().comm.scatter(array, root)


def all_to_all(array: Array) -> Array:
    """As `Communicator.all_to_all`."""
    return init().comm.all_to_all(array)


def all_to_all_v(send: Any, send_counts: Sequence[int], receive: Array, receive_counts: Sequence[int]) -> Array:
    """As `Communicator.all_to_all_v`."""
    return init().comm.all_to_all_v(send, send_counts, receive, receive_counts)


def send(array: Any, to: int) -> None:
    """As `Communicator.send`."""
    init().comm.send(array, to)


def receive(array: Array, source: int) -> Array:
    """As `Communicator.receive`."""
    return init().comm.receive(array, source)


def split(colour: Optional[int], key: int = 0) -> Optional[Communicator]:
    """As `Communicator.split`."""
    return init().comm.split(colour, key)
