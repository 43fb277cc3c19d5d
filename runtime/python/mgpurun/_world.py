"""The run, as this rank sees it."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import numbers
import os
import sys
import threading
from typing import Iterator, Optional

from ._communicator import Communicator, close_all
from ._errors import ArgumentError, RendezvousError
from ._library import WorldInfo, lib

_PHASES = {"start": 0, "step": 1, "evaluation": 2, "checkpoint": 3, "finalise": 4}


class World:
    """This rank and its run. `mgpurun.init()` creates it."""

    rank: int
    """Rank of this process, from 0."""
    size: int
    """Number of ranks."""
    local_rank: int
    """Rank among the ranks on this host."""
    local_size: int
    """Number of ranks on this host."""
    restart_count: int
    """How often the launcher has restarted the ranks."""
    threads: int
    """Number of threads with which this rank should compute: `torch.set_num_threads(world.threads)`."""
    is_launched: bool
    """Whether a launcher has started this process."""
    notices: tuple[str, ...]
    """What the user should know about the run, for instance that the ranks have set a variable of NCCL: sentences without a
    full stop, the same on all ranks, so that one of them can print them."""

    def __init__(self, timeout: Optional[float] = None) -> None:
        """Use `mgpurun.init` instead: a process joins once."""
        self._handle: Optional[int] = None
        self._process = os.getpid()
        self._default: Optional[Communicator] = None
        self._lock = threading.Lock()
        self._handle = _join()
        info = WorldInfo(struct_size=ctypes.sizeof(WorldInfo))
        lib.mgpu_world_get_info(self._handle, info)
        self.rank, self.size = info.rank, info.size
        self.local_rank, self.local_size = info.local_rank, info.local_size
        self.restart_count, self.threads = info.restart_count, info.threads
        self.is_launched = bool(info.is_launched)
        self.notices = tuple(_notices(self._handle))
        if timeout is not None:
            lib.mgpu_world_set_timeout(self._handle, float(timeout))

    def __repr__(self) -> str:
        return f"<mgpurun.World: rank {self.rank} of {self.size}>"

    def communicator(self) -> Communicator:
        """A new communicator of all ranks. Collective: all ranks create them in the same order.

        Threads that call collectives at the same time need a communicator each.
        """
        handle = ctypes.c_void_p()
        lib.mgpu_interrupt_on_sigint()
        lib.mgpu_comm_create(self._handle, handle)
        assert handle.value is not None
        return Communicator(handle.value)

    @property
    def comm(self) -> Communicator:
        """The communicator of the module's own functions, such as `mgpurun.all_reduce`. Collective at its first use."""
        with self._lock:
            if self._default is None:
                self._default = self.communicator()
            return self._default

    def report_step(self, step: int) -> None:
        """Tells the launcher that training step `step` (from 1) begins."""
        lib.mgpu_report_step(self._handle, step)

    def report_samples(self, samples: int) -> None:
        """Tells the launcher that this rank has processed `samples` more."""
        lib.mgpu_report_samples(self._handle, samples)

    def report_phase(self, phase: str) -> None:
        """Tells the launcher that another phase begins: "evaluation", "checkpoint", "step", "start" or "finalise"."""
        if phase not in _PHASES:
            raise ArgumentError(f"no phase {phase!r}: known are {', '.join(_PHASES)}")
        lib.mgpu_report_phase(self._handle, _PHASES[phase])

    def stop_requested(self) -> bool:
        """Whether the ranks should save their work and exit with `mgpurun.EXIT_STOPPED`.

        All ranks ask equally often, for instance before each step: the n-th call returns the same on all of them.
        """
        stop = ctypes.c_int32()
        lib.mgpu_interrupt_on_sigint()
        lib.mgpu_stop_requested(self._handle, stop)
        return bool(stop.value)

    def request_stop(self) -> None:
        """Asks all ranks to stop. They learn it from their next `stop_requested`."""
        lib.mgpu_request_stop(self._handle)

    def close(self) -> None:
        """Leaves the run. Called when the interpreter ends, unless an exception has ended the program."""
        if self._process != os.getpid():
            return
        close_all()
        handle, self._handle = self._handle, None
        if handle:
            lib.mgpu_finalize(handle)


def _notices(handle: int) -> Iterator[str]:
    for index in itertools.count():
        notice = ctypes.c_char_p()
        lib.mgpu_world_notice(handle, index, notice)
        if notice.value is None:
            return
        yield notice.value.decode()


def _join() -> int:
    """Joins the run. In another thread, so that Ctrl-C works while other ranks are awaited."""
    handle = ctypes.c_void_p()
    errors: list[BaseException] = []

    def join() -> None:
        try:
            lib.mgpu_init(handle)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=join, name="mgpurun-join", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if errors:
        raise errors[0]
    assert handle.value is not None
    return handle.value


# Durations have 64 bits of seconds, and nanoseconds.
_SHORTEST, _LONGEST = 1e-9, 2.0**64


def _check_timeout(timeout: float) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise ArgumentError(f"a timeout of {timeout!r}: pass a positive number of seconds")
    if not _SHORTEST <= timeout < _LONGEST:
        raise ArgumentError(f"a timeout of {timeout} s: pass a positive number of seconds")


_world: Optional[World] = None
# Held by the thread that joins.
_joining = threading.RLock()
_is_joining = False


def init(timeout: Optional[float] = None) -> World:
    """Joins the run that the environment describes: under mgpurun, torchrun, mpirun or srun; else a world of one.

    Returns when all ranks have joined. Later calls return the same world. `timeout` is the time in seconds that an operation
    waits for a rank that makes no progress (default: MGPU_TIMEOUT, or 300); one that is not positive is an `ArgumentError`
    before this rank joins.
    """
    global _world, _is_joining
    if timeout is not None:
        _check_timeout(timeout)
    # Without the lock: a signal handler may be called while this thread holds it.
    if _world is not None:
        return _world
    with _joining:
        if _is_joining:
            raise RendezvousError("a signal handler cannot use the run before mgpurun.init() has returned")
        if _world is None:
            _is_joining = True
            try:
                _world = World(timeout)
            finally:
                _is_joining = False
            _forget_error_file()
            atexit.register(_leave)
        return _world


def _forget_error_file() -> None:
    # For PyTorch's `@record`. The file is in the folder of mgpurun's rendezvous, which is removed once all ranks have joined.
    if "MGPU_RENDEZVOUS" in os.environ:
        os.environ.pop("TORCHELASTIC_ERROR_FILE", None)


def _leave() -> None:
    # After an exception the launcher should see how the process has ended, and not that it has left in good order.
    failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if _world is not None and failed is None:
        _world.close()
