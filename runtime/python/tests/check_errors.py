"""Under `mgpurun -n 2`: one error, by name.

mismatch, lost: what rank 0 gets. interrupt: another thread interrupts. ctrl_c: waits for the test's signal.
"""

import array
import signal
import sys
import threading

import mgpurun

case = sys.argv[1]
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
if case == "interrupt":
    if world.rank == 0:
        ended = threading.Event()

        def interrupt():
            # An interruption before the wait begins has no effect.
            while not ended.wait(0.05):
                mgpurun.interrupt()

        threading.Thread(target=interrupt).start()
        try:
            comm.receive(values, source=1)
            raise AssertionError("no error")
        except mgpurun.Interrupted as error:
            print("interrupted:", error)
        finally:
            ended.set()
        sys.exit(6)
    # Sends nothing.
    signal.pause()
if case == "ctrl_c":
    if world.rank == 0:
        try:
            print("waiting", flush=True)
            comm.receive(values, source=1)
        except KeyboardInterrupt:
            print("KeyboardInterrupt after the wait", flush=True)
            sys.exit(130)
    else:
        # Sends nothing.
        signal.pause()
