"""Under `mgpurun -n 3`: all collectives, on memory of several kinds."""

import array
import ctypes
import os
import sys
import types

import mgpurun

assert os.path.isdir(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))
world = mgpurun.init()
assert "TORCHELASTIC_ERROR_FILE" not in os.environ
assert world is mgpurun.init() and world.size == 3 and world.is_launched
rank, size = world.rank, world.size
assert (mgpurun.rank(), mgpurun.world_size()) == (rank, size)
assert world.threads >= 1 and world.local_size == 3 and world.restart_count == 0
assert world.notices == ()


def check_buffers():
    values = array.array("d", [rank + 1.0] * 5)
    assert mgpurun.all_reduce(values) is values
    assert list(values) == [6.0] * 5
    assert list(mgpurun.all_reduce(array.array("q", [rank]), "max")) == [2]
    assert list(mgpurun.all_reduce(array.array("i", [rank + 1]), op="prod")) == [6]
    octets = bytearray([rank] * 6)
    assert mgpurun.all_gather(octets) == bytes([0, 0, 1, 1, 2, 2])
    assert mgpurun.all_gather(bytearray([rank] * 4), counts=[3, 0, 1]) == bytes([0, 0, 0, 2])
    assert mgpurun.broadcast(bytearray([rank]), root=2)[0] == 2
    reduced = mgpurun.reduce(array.array("f", [1.0, 2.0]), root=1, op="avg")
    assert list(reduced) == [1.0, 2.0]
    part = mgpurun.shard(7, size, rank)
    assert [mgpurun.shard(7, 3, r) for r in range(3)] == [slice(0, 3), slice(3, 6), slice(6, 7)]
    summed = mgpurun.reduce_scatter(array.array("d", [rank + 1.0] * 7))
    assert list(summed[part]) == [6.0] * len(summed[part])
    assert list(mgpurun.all_to_all(array.array("i", [rank] * 3))) == [0, 1, 2]
    received = array.array("i", [-1] * 6)
    sent = array.array("i", [rank] * (3 * (rank + 1)))
    mgpurun.all_to_all_v(sent, [rank + 1] * 3, received, [1, 2, 3])
    assert list(received) == [0, 1, 1, 2, 2, 2]
    gathered = mgpurun.gather(array.array("i", [rank] * 3), root=0)
    assert list(gathered) == ([0, 1, 2] if rank == 0 else [rank] * 3)
    scattered = mgpurun.scatter(array.array("i", [rank * 10, rank * 10 + 1, rank * 10 + 2]), root=1)
    assert scattered[rank] == 10 + rank
    if rank == 0:
        mgpurun.send(b"hello", to=2)
    if rank == 2:
        assert mgpurun.receive(bytearray(5), source=0) == b"hello"
    assert mgpurun.all_reduce(array.array("f")) == array.array("f")
    mgpurun.barrier()


def check_groups():
    group = mgpurun.split(None if rank == 1 else 4, key=-rank)
    assert (group is None) == (rank == 1)
    if group is not None:
        assert group.world_rank(0) == 2 and group.rank == (0 if rank == 2 else 1)
        assert list(group.all_reduce(array.array("d", [rank]))) == [2.0]
        group.close()
        try:
            group.barrier()
            raise AssertionError("a closed communicator was used")
        except mgpurun.ArgumentError as error:
            assert "`comm` is null" in str(error)


def check_shared_memory():
    memory = world.comm.allocate(400_000)
    assert len(memory) == 400_000 and not any(memory[:100])
    values = (ctypes.c_float * 100_000).from_buffer(memory)
    values[:] = [float(rank)] * 100_000
    mgpurun.all_reduce(memory.cast("f"), "sum")
    assert values[0] == values[99_999] == 3.0


def check_numpy():
    try:
        import numpy as np
    except ImportError:
        print("skipped: no numpy")
        return
    for kind in ("float32", "float64", "float16", "int32", "int64", "uint8"):
        values = np.arange(30_000).astype(kind).reshape(3, 100, 100) % 50
        expected = values * 3
        assert (mgpurun.all_reduce(values) == expected).all(), kind
    # A row is contiguous, a column is not.
    grid = np.full((4, 4), float(rank + 1))
    mgpurun.all_reduce(grid[1])
    assert grid[1].tolist() == [6.0] * 4 and grid[0].tolist() == [rank + 1.0] * 4
    for wrong, text in [
        (grid[:, 1], "not contiguous"),
        (np.zeros(3, complex), "complex128"),
        (np.zeros(3, ">f4"), "elements of >f4"),
        (np.array(["a"]), "elements of"),
        (np.broadcast_to(np.zeros(1), (4,)), ""),
    ]:
        try:
            mgpurun.all_reduce(wrong)
            raise AssertionError(f"{wrong!r} was accepted")
        except mgpurun.ArgumentError as error:
            assert text in str(error), error
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    try:
        mgpurun.all_reduce(frozen)
        raise AssertionError("read-only memory was accepted")
    except ValueError as error:
        assert "read-only" in str(error)

    class Exporter:
        """Something that only has DLPack."""

        def __init__(self, values):
            self.values = values

        def __dlpack__(self, **options):
            return self.values.__dlpack__()

    values = np.full((2, 3), rank, np.float32)
    mgpurun.all_reduce(Exporter(values))
    assert values.tolist() == [[3.0] * 3] * 2
    try:
        mgpurun.all_reduce(Exporter(np.zeros((4, 4), np.float32).T[:2]))
        raise AssertionError("memory that is not contiguous was accepted")
    except mgpurun.ArgumentError as error:
        assert "not contiguous" in str(error)
    fixed = np.zeros(3, np.float32)
    fixed.flags.writeable = False

    class Fixed(Exporter):
        """Whose capsule says that it is read-only, or whose buffer does."""

        def __dlpack__(self, **options):
            return self.values.__dlpack__(**options)

    try:
        mgpurun.all_reduce(Fixed(fixed))
        raise AssertionError("read-only memory was accepted")
    except (mgpurun.ArgumentError, BufferError) as error:
        # Versions of NumPy before 2.1 do not export it.
        assert "read" in str(error), error
    # An array of JAX without a buffer, as those of bfloat16.
    sys.modules["jax"] = types.SimpleNamespace(Array=Exporter)
    try:
        mgpurun.all_reduce(Exporter(values))
        raise AssertionError("an array of JAX was accepted")
    except mgpurun.ArgumentError as error:
        assert "read-only" in str(error), error
    finally:
        del sys.modules["jax"]
    shared = np.frombuffer(world.comm.allocate(8 * 1000), np.float64)
    shared += rank
    assert mgpurun.all_reduce(shared, "avg").tolist() == [1.0] * 1000


def check_torch():
    try:
        import torch
    except ImportError:
        print("skipped: no torch")
        return
    for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        values = torch.full((50, 60), rank + 1).to(kind)
        address = values.data_ptr()
        assert (mgpurun.all_reduce(values) == 6).all() and values.data_ptr() == address, kind
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    assert mgpurun.broadcast(parameter, root=1).tolist() == [1.0] * 3
    for wrong, text in [
        (torch.zeros(3, 4).T, "not contiguous"),
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
        (torch.zeros(3, device="meta"), "meta"),
        (torch.eye(3).to_sparse(), "sparse"),
    ]:
        try:
            mgpurun.all_reduce(wrong)
            raise AssertionError(f"{wrong!r} was accepted")
        except mgpurun.ArgumentError as error:
            assert text in str(error), error


def check_arguments():
    for wrong, text in [(b"abc", "read-only"), (7, "is no array"), ("abc", "is no array"), (memoryview(bytearray(8))[::2], "contiguous")]:
        try:
            mgpurun.all_reduce(wrong)
            raise AssertionError(f"{wrong!r} was accepted")
        except mgpurun.ArgumentError as error:
            assert text in str(error), error
    for call, text in [
        (lambda: mgpurun.all_reduce(bytearray(1), "median"), "no reduction 'median'"),
        (lambda: mgpurun.broadcast(bytearray(1), root=3), "broadcast"),
        (lambda: mgpurun.all_gather(bytearray(3), counts=[3]), "one number of elements for each"),
        (lambda: mgpurun.all_to_all_v(bytearray(3), [1, 1, 1], bytearray(2), [1, 1, 1]), "receive has 2 elements"),
        (lambda: world.report_phase("lunch"), "no phase 'lunch'"),
        (lambda: mgpurun.split(-3), "colour is -3: pass a number from 0 to 4294967295"),
    ]:
        try:
            call()
            raise AssertionError(text)
        except mgpurun.ArgumentError as error:
            assert text in str(error), error


check_buffers()
check_groups()
check_shared_memory()
check_numpy()
check_torch()
check_arguments()
world.report_step(1)
world.report_samples(10)
world.report_phase("evaluation")
assert not mgpurun.stop_requested()
if rank == 1:
    mgpurun.request_stop()
mgpurun.barrier()
while not mgpurun.stop_requested():
    pass
mgpurun.barrier()
if rank == 0:
    print("all collectives are right")
sys.exit(mgpurun.EXIT_STOPPED)
