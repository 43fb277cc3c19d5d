"""What the items of gpu_check.py's parts have in common: command lines, judgements, and tools of the CUDA toolkit.

Standard library only.
"""
import dataclasses
import os
import re
import shutil
from typing import Callable

NETS = ["conv6", "keras", "deep", "lenet5", "layers", "ensemble2400", "ensemble4800"]


@dataclasses.dataclass
class Item:
    group: str
    name: str
    # Expected duration.
    seconds: float
    work: Callable
    # Items before it leave its time to it.
    required: bool = False


def launcher(s, ranks):
    share = ["--share-gpus"] if ranks > 1 else []
    return [s.program("mgpurun"), "-n", str(ranks), *share, "--backend", "nccl", "--no-prefix"]


def digits(s):
    return ["--data", s.data] if s.data else ["--synthetic"]


def train(s, ranks, *flags, graph=True):
    no_graph = [] if graph else ["--no-graph"]
    return [*launcher(s, ranks), s.program("train_mnist"), *digits(s), *no_graph, *map(str, flags)]


def on_gpu(result):
    """Finds problems in the summary of a training."""
    return None if (result or {}).get("device") == "cuda" else "it did not run on the GPU"


def weights_of(run):
    return ((run or {}).get("result") or {}).get("weights")


def is_equal(expected, what):
    """Judges a training by its weights."""
    def judge(result):
        same = expected and (result or {}).get("weights") == expected
        return on_gpu(result) or (None if same else f"the weights are not those of {what}")
    return judge


def tool(name):
    """A tool of a CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    paths = [shutil.which(name)] + [os.path.join(home, "bin", name) for home in homes if home]
    return next((path for path in paths if path and os.path.exists(path)), None)


def working_tool(s, name, *arguments):
    """The tool, if this machine has it and lets it work; otherwise says why not. Sandboxes refuse some tools."""
    path = tool(name)
    if s.fake or not path:
        return s.skip(" ".join([name, *arguments]), "not on a fake GPU" if s.fake else "not installed")
    limit = max(min(60, s.left()), 1)
    code, output = s.attempt(f"{name}, trial", [path, *arguments, s.program("gpu_check"), "--quick", "--only", "gelu forward"],
                             limit)
    if code is None:
        return s.skip(name, f"a trial did not end within {limit:.0f} s")
    refused = re.search("ERR_NVGPUCTRPERM|.*(not supported|[Uu]nable to|[Ff]ailed to).*", output)
    if code or refused:
        lines = output.strip().splitlines() or ["no output"]
        return s.skip(name, f"refused here: {refused[0].strip() if refused else lines[-1]}")
    return path
