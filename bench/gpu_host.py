"""The processor of a machine with a GPU, for part C of gpu_check.py: servers with GPUs often have Xeons with AMX, which multiply
bf16 in matrix tiles. Standard library only.
"""
import importlib.util
import os
import sys

from gpu_commands import digits, weights_of
from gpu_session import HERE

# Layers of this kind are in both; small, because the emulation is slow.
EMULATED = [("mlp-gelu", 32, 5), ("deep", 8, 2), ("layers", 4, 1)]
# Two cores, as in bench/train.sh: 128 images a step in all, for two to ten seconds.
CORES, IMAGES = "0,1", 128
TIMED = [("conv6", 30), ("keras", 30), ("deep", 100), ("layers", 40)]


def has_tiles():
    try:
        with open("/proc/cpuinfo") as file:
            return " amx_bf16" in file.read()
    except OSError:
        return False


def on_host(s, ranks, *flags):
    """A training on the processor."""
    return [s.program("mgpurun"), "-n", str(ranks), "--backend", "cpu", "--no-prefix", s.program("train_mnist"), *digits(s),
            *map(str, flags), "--precision", "bf16", "--skip-test", "--show-kernels", "--json"]


def tiles(s):
    """AMX has the bits of its emulation."""
    if not has_tiles() and not s.fake:
        return s.skip("AMX", "the processor has no amx_bf16")
    for net, batch, steps in EMULATED[:1] if s.fake else EMULATED:
        flags = ["--net", net, "--batch", batch, "--steps", steps, "--threads", 2]
        emulated = s.run(f"{net}, AMX emulated", on_host(s, 1, *flags), limit=60, env={"MGPU_SIMD": "amx-emulated"},
                         contains="bf16 by amx-emulated")
        if has_tiles():
            weights = weights_of(emulated)
            def judge(result):
                same = weights and (result or {}).get("weights") == weights
                return None if same else "the weights are not those of the emulation"
            s.run(f"{net}, AMX", on_host(s, 1, *flags), limit=60, contains="bf16 by amx\n", judge=judge)


def speed(s):
    """Training on two cores in bf16, on one rank with two threads and on two ranks; and PyTorch's autocast."""
    if s.fake or not has_tiles():
        return s.skip("AMX, speed", "a fake GPU is not measured" if s.fake else "the processor has no amx_bf16")
    pinned = ["taskset", "-c", CORES]
    for net, steps in TIMED:
        for ranks in [1, 2]:
            s.run(f"{net}, AMX, {ranks} x {2 // ranks}", [
                *pinned, *on_host(s, ranks, "--net", net, "--batch", IMAGES // ranks, "--steps", steps, "--threads", 2 // ranks),
            ], limit=60)
        if s.data and importlib.util.find_spec("torch"):
            s.run(f"{net}, PyTorch, 1 x 2", [
                *pinned, sys.executable, os.path.join(HERE, "peers/train_torch.py"), "--net", net, "--batch", str(IMAGES),
                "--steps", str(steps), "--threads", "2", "--dtype", "bf16", "--data", s.data,
            ], limit=60)
