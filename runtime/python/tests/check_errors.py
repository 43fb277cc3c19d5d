"""Under `mgpurun -n 2`: one error, by name.

mismatch, lost: what rank 0 gets. interrupt, connect: another thread interrupts. ctrl_c HANDLER: waits for the test's signal.
timeout: wrong timeouts. close: the order in which communicators are freed.
"""

import array
import asyncio
import gc
import math
import signal
import sys
import threading

import mgpurun
from mgpurun._library import lib


def signal_is(field):
    """Whether SIGINT is in this set of the process: ignored (SigIgn) or with a handler (SigCgt)."""
    with open("/proc/self/status") as status:
        words = dict(line.split(":", 1) for line in status)
    return bool(int(words[field], 16) >> (signal.SIGINT - 1) & 1)


case = sys.argv[1]
if case == "timeout":
    # Before this rank has joined, so that the next attempt can join.
    for wrong in (0, 0.0, -1, math.nan, math.inf, 1e-30, 10**400, "5", True):
        try:
            mgpurun.init(timeout=wrong)
            raise AssertionError(wrong)
        except mgpurun.ArgumentError as error:
            assert "pass a positive number of seconds" in str(error), error
    for wrong in ((-1, 2, 0), (10, 2, 2), (10, 2**32 + 2, 0), (2**64 - 1, 2, 0)):
        try:
            mgpurun.shard(*wrong)
            raise AssertionError(wrong)
        except mgpurun.ArgumentError:
            pass
    world = mgpurun.init(timeout=60)
    assert mgpurun.all_reduce(array.array("d", [1.0]))[0] == world.size
    print("refused before joining")
    sys.exit(0)
world = mgpurun.init()
comm = world.comm
values = array.array("d", [1.0] * 100_000)

if case == "mismatch":
    try:
        if world.rank == 0:
            comm.all_reduce(values)
        else:
            comm.broadcast(values)
        raise AssertionError("no error")
    except mgpurun.Mismatch as error:
        print(f"rank {world.rank}: fault of rank {error.rank}: {error}")
        assert error.rank == 1 - world.rank
    try:
        comm.barrier()
        raise AssertionError("no error")
    except mgpurun.Poisoned as error:
        print("then:", error)
    sys.exit(5)
if case == "lost":
    if world.rank == 1:
        raise RuntimeError("rank 1 has no more data")
    try:
        comm.all_reduce(values)
        raise AssertionError("no error")
    except mgpurun.PeerLost as error:
        print(f"fault of rank {error.rank}: {error}")
        raise
if case in ("interrupt", "connect"):
    if world.rank == 0:
        ended = threading.Event()

        def interrupt():
            # An interruption before the wait begins has no effect.
            while not ended.wait(0.05):
                mgpurun.interrupt()

        threading.Thread(target=interrupt).start()
        try:
            if case == "connect":
                world.communicator()
            else:
                comm.receive(values, source=1)
            raise AssertionError("no error")
        except mgpurun.Interrupted as error:
            print("interrupted:", error)
        finally:
            ended.set()
        sys.exit(6)
    # Sends nothing, and creates no other communicator.
    signal.pause()
if case == "ctrl_c":
    # After one wait the handler is replaced: the next one must be ended all the same.
    comm.barrier()
    handled = []
    if sys.argv[2] == "asyncio":
        asyncio.run(asyncio.sleep(0))
        comm.barrier()
        asyncio.run(asyncio.sleep(0))
    elif sys.argv[2] == "handler":
        signal.signal(signal.SIGINT, lambda *_: handled.append("own handler"))
        comm.barrier()
    elif sys.argv[2] == "again":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        comm.barrier()
        # Neither ignoring nor the default is taken away.
        assert signal_is("SigIgn")
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        comm.barrier()
        assert not signal_is("SigIgn") and not signal_is("SigCgt")
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if world.rank == 0:
        try:
            print("waiting", flush=True)
            comm.receive(values, source=1)
        except KeyboardInterrupt:
            print("KeyboardInterrupt after the wait", flush=True)
            sys.exit(130)
        except mgpurun.Interrupted:
            print("Interrupted after", *handled, flush=True)
            sys.exit(130)
    else:
        # Sends nothing.
        signal.pause()
if case == "close":
    # The same order on all ranks: groups before what they were split from.
    groups = world.communicator().split(0, key=-world.rank)
    rows, columns = groups.split(0), comm.split(world.rank)
    gc.collect()
    assert rows.split(0).all_reduce(array.array("d", [1.0]))[0] == 2
    names = {groups._handle: "groups", rows._handle: "rows", columns._handle: "columns", comm._handle: "comm"}
    names[groups._parent._handle] = "parent"
    free, order = lib.mgpu_comm_free, []
    lib.mgpu_comm_free = lambda handle: (order.append(names[handle]), free(handle))
    world.close()
    print(f"rank {world.rank} freed {order}")
    try:
        rows.barrier()
    except mgpurun.ArgumentError as error:
        print("closed:", error)
