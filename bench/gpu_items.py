"""The items of gpu_check.py's three parts: A is correctness, B is speed, C is the rest.

Items stand in the order of their worth, each with the seconds that it is expected to take on an H100: one that does not fit
before the deadline is skipped, and a shorter one after it may still run. On a fake GPU everything is small. Standard library
only.
"""
import csv
import dataclasses
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Callable

import provenance
from gpu_session import HERE, end_group

NETS = ["conv6", "keras", "deep", "lenet5", "layers", "ensemble2400", "ensemble4800"]
# Training starts slowly: libraries are loaded, algorithms are tried. Then a figure takes SECONDS after WARM_UP seconds.
WARM_UP, SECONDS = 0.5, 2.0
MNIST = 60_000
# Images per second that decide the number of epochs of a run: about those of an H100 in bf16, at 1,024 and 128 images.
RATES = {"conv6": (215e3, 160e3), "keras": (245e3, 180e3), "deep": (860e3, 350e3), "lenet5": (2.9e6, 820e3),
         "layers": (530e3, 190e3), "ensemble2400": (1.2e6, 440e3), "ensemble4800": (1.1e6, 350e3)}
# What slower choices take of these rates.
SLOWER = {"builtin": 2.5, "tf32": 2.2, "f32": 12.0}


@dataclasses.dataclass
class Item:
    group: str
    name: str
    # Expected duration.
    seconds: float
    work: Callable


# ---- Commands ----

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


def is_equal(wanted, what):
    """Judges a training by its weights, which `wanted` returns."""
    def judge(result):
        expected = wanted()
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
    try:
        done = subprocess.run([path, *arguments, s.program("gpu_check"), "--quick", "--only", "gelu forward"], env=s.env,
                              capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return s.skip(name, "a trial did not end within 60 s")
    output = done.stdout + done.stderr
    refused = re.search("ERR_NVGPUCTRPERM|.*(not supported|[Uu]nable to|[Ff]ailed to).*", output)
    if done.returncode or refused:
        lines = output.strip().splitlines() or ["no output"]
        return s.skip(name, f"refused here: {refused[0].strip() if refused else lines[-1]}")
    return path


# ---- A ----

def doctor(s):
    """`mgpurun doctor`, and which libraries a training really loads: all that are installed must be."""
    run = s.run("doctor", [s.program("mgpurun"), "doctor", "--json"], limit=30)
    report = (run or {}).get("result") or {}
    sections = report.get("sections", [])
    if run:
        # Paths, and the ids of GPUs, stay on the machine.
        run["result"] = {"verdict": report.get("verdict")}
    installed = {item["name"]: item for section in sections for item in section["items"] if item.get("file")}
    trace = os.path.join(s.scratch, "loaded")
    flags = ["--net", "lenet5", "--batch", 8, "--steps", 4, "--precision", "bf16", "--skip-test", "--json"]
    # The system's loader writes down what every process loads. With an empty cache the kernels are compiled.
    run = s.run("libraries", train(s, 1, *flags), limit=90, judge=on_gpu,
                env={"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": trace, "MGPU_NCCL": "always",
                     "MGPU_CACHE_DIR": os.path.join(s.scratch, "cache")})
    if run is None:
        return
    texts = []
    for path in glob.glob(trace + ".*"):
        with open(path, errors="replace") as file:
            texts.append(file.read())
    text = "".join(texts)
    loaded = {os.path.basename(path): path for path in re.findall(r"calling init: (\S+)", text)}
    requested = {os.path.basename(path) for path in re.findall(r"file=(\S+) \[\d+\];\s+dynamically loaded", text)}
    versions = {"libcuda.so": s.machine["driver"] and f"CUDA {s.machine['driver']}",
                "libnvrtc.so": s.machine["compiler"]}
    libraries, missing = [], []
    for stem in ["libcuda.so", "libnvrtc.so", "libnccl.so", "libcudnn.so", "libcublasLt.so"]:
        name = next((name for name in installed if name.startswith(stem)), None)
        # On a fake GPU all names are links to one file, which is loaded once.
        paths = [path for name, path in loaded.items() if name.startswith(stem)]
        paths = paths or [name for name in requested if s.fake and name.startswith(stem)]
        found = installed.get(name, {})
        libraries.append({"library": stem, "loaded": provenance.without_machine(paths[0]) if paths else None,
                          "found": provenance.without_machine(found["file"]) if found else None,
                          "version": found.get("version") or versions.get(stem)})
        if not paths and (found or s.fake):
            missing.append(stem)
        print(f"       {stem:<16} {libraries[-1]['version'] or 'unknown version':<20} {libraries[-1]['loaded'] or 'not loaded'}")
    run["result"] = {**(run["result"] or {}), "libraries": libraries}
    if missing:
        run["problem"] = run["problem"] or f"installed but not loaded: {', '.join(missing)}"
        print(f"FAILED libraries: {run['problem']}", flush=True)
    s.write()


def kernels(s, name, command, limit):
    path = os.path.join(s.scratch, "kernels.json")
    if os.path.exists(path):
        os.remove(path)
    run = s.run(name, [*command, "--json", path], limit=limit)
    if run and os.path.exists(path):
        with open(path) as file:
            found = json.load(file)
        checks = found.pop("checks")
        found["checks"] = len(checks)
        found["failures"] = [check for check in checks if not check["ok"]]
        # The error closest to its bound, by operation and precision.
        nearest = {}
        for check in checks:
            if check["error"] is not None and check["bound"] > 0:
                key = f"{check['name']} {check['precision']}"
                nearest[key] = max(nearest.get(key, 0.0), round(check["error"] / check["bound"], 4))
        found["largest_share_of_bound"] = nearest
        run["result"] = found
        s.write()


def memcheck(s):
    path = working_tool(s, "compute-sanitizer", "--tool", "memcheck")
    if path:
        command = [path, "--tool", "memcheck", "--error-exitcode", "9", s.program("gpu_check"), "--quick", "--seed", "1"]
        kernels(s, "quick, memcheck", command, 120)


def all_kernels(s):
    quick = ["--quick", "--only", "gelu"] if s.fake else []
    kernels(s, "all", [s.program("gpu_check"), *quick], 200)


def library_kernels(s):
    quick = ["--quick"] if s.fake else []
    kernels(s, "of libraries", [s.program("gpu_check"), *quick, "--only", "layers"], 90)


def accuracy(s, net, reach, *flags):
    if not s.data:
        return s.skip(net, "MGPU_DATA is needed")
    if s.fake:
        # No accuracy, but the same path of the script.
        net, reach, flags = "lenet5", 0.0, ["--steps", 3, "--batch", 8]
    def judge(result):
        reached = max((result or {}).get("test_acc") or 0.0, (result or {}).get("test_acc_average") or 0.0)
        return None if reached >= reach else f"accuracy {100 * reached:.2f}%, below {100 * reach:.1f}%"
    skip = ["--skip-test"] if s.fake else []
    run = s.run(" ".join(map(str, [net, *flags])), train(s, 1, "--net", net, "--precision", "bf16", *flags, *skip, "--json"),
                limit=120, judge=judge)
    result = (run or {}).get("result")
    if result and not run["problem"] and not s.fake:
        s.add("accuracy", [{"net": net, "batch": result["batch"], "epochs": result["epochs"], "steps": result["steps"],
                            "precision": "bf16", "test_accuracy": result["test_acc"]}])


def golden(s, net, precision, choice):
    file = os.path.join(s.golden or "", net + ".json")
    if not (s.golden and s.data and os.path.exists(file)):
        return s.skip(f"{net} {precision} {choice}", "MGPU_DATA, MGPU_GOLDEN and a golden run of it are needed")
    s.run(f"{net} {precision} {choice}", [
        *launcher(s, 1), s.program("golden_check"), "--data", s.data, "--precision", precision, "--kernels", choice, file,
    ], limit=60, contains="on " + re.escape(s.machine["device"]), keep=" deviation .* bound ")


def part_a(s):
    yield Item("doctor", "doctor, libraries", 25, doctor)
    yield Item("kernels", "quick, memcheck", 90, memcheck)
    yield Item("kernels", "all", 90, all_kernels)
    yield Item("accuracy", "conv6", 15, lambda s: accuracy(s, "conv6", 0.989, "--epochs", 10, "--batch", 1024))
    first, rest = (["lenet5"], []) if s.fake else (NETS[:5], NETS[5:])
    for nets, precisions in [(first, ["f32", "bf16"]), (rest, ["f32", "bf16"]), (first + rest, ["tf32"])]:
        for net in nets:
            for precision in precisions:
                for choice in ["auto", "builtin"]:
                    yield Item("golden", f"{net} {precision} {choice}", 5,
                               lambda s, case=(net, precision, choice): golden(s, *case))
    yield Item("kernels", "of libraries", 60, library_kernels)
    if not s.fake:
        yield Item("accuracy", "keras", 30, lambda s: accuracy(s, "keras", 0.989, "--epochs", 12))
        yield Item("accuracy", "deep", 10, lambda s: accuracy(s, "deep", 0.990, "--steps", 2000, "--batch", 256))


# ---- B ----

def bandwidth(s):
    if s.fake:
        return s.skip("bandwidth", "a fake GPU is not measured")
    path = os.path.join(s.scratch, "bandwidth.json")
    run = s.run("bandwidth", [s.program("gpu_check"), "--bandwidth", "--json", path], limit=60)
    if run and os.path.exists(path):
        with open(path) as file:
            run["result"] = json.load(file)
        s.add("bandwidth", run["result"][1])
        for figure in run["result"][1]:
            print(f"       {figure['what']}: {figure['value']:.0f} {figure['unit']}")


def layers(s, batch):
    """Every layer of every network, pass and precision, with the time of every candidate."""
    if not s.supports("gpu_check", "--layers"):
        return s.skip(f"layers at {batch} images", "this gpu_check has no --layers")
    path, limit = os.path.join(s.scratch, f"layers-{batch}.json"), min(150, s.left())
    # It ends in time by itself, and rewrites its file after every pass.
    budget = ["--budget", f"{max(limit - 15, 1):.0f}"] if s.supports("gpu_check", "--budget") else []
    only = ["--only", "lenet5"] if s.fake else []
    run = s.run(f"layers at {batch} images", [s.program("gpu_check"), "--layers", "--batch", str(batch), *budget, *only,
                                              "--json", path], limit=limit)
    if run and os.path.exists(path):
        with open(path) as file:
            header, rows = json.load(file)
        run["result"] = {"passes": len(rows), "left_out": header["left_out"]}
        if header["peaks"]:
            s.add("peaks", [header["peaks"]])
        s.add("layers", map(of_layer, rows))


def of_layer(row):
    """A row of `gpu_check --layers` without what follows from the rest."""
    us = lambda ms: None if ms is None else round(1e3 * ms, 3)
    candidates = [{"name": entry["name"], "form": entry["form"], "us": us(entry["ms"]), "selected": entry["selected"],
                   "rejected": entry["rejected"]} for entry in row["candidates"]]
    kept = {key: row[key] for key in ("networks", "layer", "batch", "precision", "pass", "bound_by", "notes", "error")}
    return {**kept, "bound_us": us(row["bound_ms"]),
            "candidates": [{key: value for key, value in entry.items() if value is not None} for entry in candidates]}


def steady(path):
    """Images per second in the epochs after the warm-up: the median, the whole range relative to it, and the seconds."""
    with open(path) as file:
        epochs = [json.loads(line) for line in file]
    warm, kept = 0.0, []
    for epoch in epochs:
        if warm < WARM_UP:
            warm += epoch["train_s"]
        else:
            kept.append(epoch)
    kept = kept or epochs[-1:]
    rates = sorted(epoch["images_per_s"] for epoch in kept)
    median = rates[len(rates) // 2]
    return {"images_per_s": round(median, 1), "spread": round((rates[-1] - rates[0]) / median, 4), "epochs": len(kept),
            "seconds": round(sum(epoch["train_s"] for epoch in kept), 2)}


def throughput(s, net, batch, precision, choice, attempt=1, ranks=1):
    """Every figure is the median of whole epochs, so that the work between epochs is not part of it."""
    name = f"{net} {batch} {precision} {choice}" + (f", run {attempt}" if attempt > 1 else "")
    metrics = os.path.join(s.scratch, "metrics.jsonl")
    if os.path.exists(metrics):
        os.remove(metrics)
    rate = RATES[net][batch < 1024] / SLOWER.get(choice, 1.0) / SLOWER.get(precision, 1.0)
    # Half as much again: this GPU may be faster.
    epochs = max(2, round(1.5 * (WARM_UP + SECONDS) * rate / MNIST) + 1)
    length = ["--steps", 3] if s.fake else ["--epochs", epochs]
    run = s.run(name, train(s, ranks, "--net", net, "--batch", batch, *length, "--precision", precision, "--kernels", choice,
                            "--skip-test", "--show-kernels", "--metrics", metrics, "--json"),
                limit=60, judge=on_gpu, keep="^(conv|dense) ")
    if not run or run["problem"] or s.fake:
        return
    result, figure = run["result"], steady(metrics)
    result["images_per_s_whole_run"], result["images_per_s"] = result["images_per_s"], figure["images_per_s"]
    s.add("throughput", [{"net": net, "batch": batch, "precision": precision, "kernels": choice, "mode": "graph", **figure,
                          "ms_per_step": round(1e3 * batch / figure["images_per_s"], 4),
                          "gpu_mib": result["max_gpu_mib"], "layers": run["lines"]}])
    print(f"       {figure['images_per_s']:,.0f} images/s in {figure['seconds']} s, range {figure['spread']:.1%}", flush=True)


def pytorch(s, modes):
    """One process for all configurations, because its start takes seconds."""
    # PyTorch's version, and those of its libraries; none if it does not see the GPU.
    script = """import json, torch
assert torch.cuda.is_available()
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}))"""
    versions = s.data and not s.fake and provenance.output(sys.executable, "-c", script)
    if not versions:
        return s.skip("PyTorch", "a fake GPU is not measured" if s.fake else "no MNIST folder, or no torch that sees the GPU")
    s.versions = json.loads(versions)
    limit = min(160, s.left())
    run = s.run("PyTorch " + modes[0][2], [
        sys.executable, os.path.join(HERE, "torch_throughput.py"), s.data, "--seconds", f"{limit - 10:.0f}",
    ], limit=limit, feed="".join(" ".join(map(str, mode)) + "\n" for mode in modes), keep=r'^\{"net"')
    figures = [json.loads(line) for line in (run or {}).get("lines", [])]
    s.add("torch", figures)
    for figure in figures:
        print("       " + " ".join(f"{key} {value}" for key, value in figure.items()), flush=True)


def profile(s, what):
    """Time by stage (--profile), or a timeline (--timeline), of conv6; both are young on GPUs."""
    net, length = ("lenet5", ["--batch", 8, "--steps", 4]) if s.fake else ("conv6", ["--batch", 1024, "--steps", 100])
    trace = os.path.join(s.logs, f"timeline-{net}.json")
    flags = ["--profile"] if what == "profile" else ["--timeline", trace, "--timeline-steps", "2-4"]
    command = train(s, 1, "--net", net, *length, "--precision", "bf16", "--skip-test", *flags, "--json")
    child, log = s.start(what + ", trial", train(s, 1, "--net", net, "--batch", 8, "--steps", 1, "--skip-test", *flags))
    try:
        code = child.wait(min(60, s.left()))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end_group(child)
    text = s.text_of(log)
    if code and re.search("CPU only|on the CPU|not .*GPU", text):
        return s.skip(what, "this train_mnist has none on GPUs")
    run = s.run(f"{what} of {net}", command, limit=60, judge=on_gpu)
    stages = ((run or {}).get("result") or {}).get("profile")
    if what == "profile" and run and not run["problem"] and not stages:
        s.skip("profile by stage", "this train_mnist has none on GPUs")
    elif stages:
        result = run["result"]
        s.add("profile", [{"net": net, "batch": result["batch"], "precision": "bf16", "stages": stages,
                           "rest": result.get("profile_ms")}])


def part_b(s):
    def ours(nets, batch, choice="auto"):
        for net in nets:
            yield Item("throughput", f"{net} {batch} bf16 {choice}", 11,
                       lambda s, net=net: throughput(s, net, batch, "bf16", choice))

    nets, large, small = (["lenet5"], 16, 8) if s.fake else (NETS, 1024, 128)
    layer_batches = [2] if s.fake else [large, small]
    graphed = [(net, batch, "bf16", "graphed") for batch in (large, small) for net in nets if net != "ensemble4800"]
    compiled = [(net, large, "bf16", "compiled") for net in nets[:2]]
    modes = [(net, batch, precision, mode) for net, batch, precision, mode in graphed + compiled]
    yield Item("bandwidth", "bandwidth", 15, bandwidth)
    yield from ours(nets, large)
    yield Item("torch", "PyTorch", 90, lambda s: pytorch(s, modes))
    yield Item("layers", f"layers at {layer_batches[0]} images", 90, lambda s: layers(s, layer_batches[0]))
    yield from ours(nets, small)
    yield Item("profile", "profile", 15, lambda s: profile(s, "profile"))
    yield Item("profile", "timeline", 15, lambda s: profile(s, "timeline"))
    yield from ours(nets, large, "builtin")
    for net, batch in [(nets[0], large), (nets[0] if s.fake else "deep", small)]:
        yield Item("throughput", f"{net} {batch} bf16 auto, run 2", 11,
                   lambda s, case=(net, batch): throughput(s, *case, "bf16", "auto", attempt=2))
    for batch in layer_batches[1:]:
        yield Item("layers", f"layers at {batch} images", 40, lambda s, batch=batch: layers(s, batch))
    yield from ours(nets, small, "builtin")


# ---- C ----

def nccl_alone(s):
    """NCCL with one rank: initialisation, operations in groups, capture and replay, finalisation."""
    most, steps = (1 << 12, 14) if s.fake else (1 << 22, 200)
    trace = os.path.join(s.scratch, "nccl-calls")
    env = {"MGPU_NCCL": "always", "NCCL_DEBUG": "INFO", "FAKE_NCCL_TRACE": trace}
    wanted = None if s.fake else "NCCL version|Init COMPLETE"
    run = s.run("1 rank, sums through NCCL", [*launcher(s, 1), s.program("allreduce_perf"), "--check", "--factor", "32",
                                              "--max", str(most)], limit=60, env=env, contains=wanted)
    flags = ["--batch", 8 if s.fake else 64, "--steps", steps, "--clip-norm", 1, "--skip-test", "--json"]
    plain = s.run("1 rank, training without NCCL", train(s, 1, *flags), limit=60, judge=on_gpu)
    weights = lambda: ((plain or {}).get("result") or {}).get("weights")
    for mode, graph in [("graphs", True), ("no graphs", False)]:
        run = s.run(f"1 rank, training through NCCL, {mode}", train(s, 1, *flags, graph=graph), limit=60, env=env,
                    contains=wanted, judge=is_equal(weights, "a training without NCCL"))
    if s.fake and run:
        with open(trace) as file:
            calls = set(file.read().split("\n"))
        needed = {"ncclCommInitRankConfig", "ncclGroupEnd", "ncclAllReduce", "ncclAllReduce captured", "ncclCommFinalize"}
        if needed - calls:
            run["problem"] = f"no call of {', '.join(needed - calls)}"


def nccl_shared(s):
    """Two ranks on one GPU: correctness only, they alternate in time slices of milliseconds."""
    most, steps = (1 << 12, 6) if s.fake else (1 << 22, 60)
    for dtype in ["f32", "bf16"]:
        s.run(f"2 ranks, sums of {dtype}", [*launcher(s, 2), s.program("allreduce_perf"), "--check", "--dtype", dtype,
                                            "--factor", "32", "--max", str(most)], limit=60)
    flags = ["--batch", 8 if s.fake else 32, "--steps", steps, "--skip-test", "--json"]
    first = s.run("2 ranks, training", train(s, 2, *flags), limit=60, judge=on_gpu)
    weights = lambda: ((first or {}).get("result") or {}).get("weights")
    s.run("2 ranks, training, again", train(s, 2, *flags), limit=60, judge=is_equal(weights, "an equal run"))
    s.run("2 ranks, training without graphs", train(s, 2, *flags, graph=False), limit=60,
          judge=is_equal(weights, "a training in graphs"))


def stat(pid):
    """State, parent and session of a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[3])


def family(root):
    """A process, its descendants, and the other processes of their session."""
    found = {int(name): stat(name) for name in os.listdir("/proc") if name.isdigit()}
    members = {root}
    while True:
        more = {pid for pid, entry in found.items() if entry and (entry[1] in members or entry[2] == root)} - members
        if not more:
            return members
        members |= more


def variable(pid, name):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    return next((entry.split(b"=", 1)[1].decode() for entry in entries if entry.startswith(name.encode() + b"=")), None)


def is_alive(pid):
    entry = stat(pid)
    return entry is not None and entry[0] not in "ZX"


def killed(s):
    """A rank is killed while two ranks train: how long until the launcher has ended, and until no process is left."""
    folder = os.path.join(s.scratch, "killed")
    shutil.rmtree(folder, ignore_errors=True)
    command = [word for word in train(s, 2, "--batch", 8 if s.fake else 32, "--steps", 100000, "--schedule", "constant",
                                      "--skip-test", "--checkpoint-dir", folder, "--checkpoint-every", 4)
               if word != "--no-prefix"]
    limit, name = min(90, s.left()), "2 ranks, one is killed"
    child, log = s.start(name, command)
    start = time.monotonic()
    code = gone = ended = None
    try:
        # A checkpoint: both ranks train.
        while time.monotonic() < start + limit and child.poll() is None and not glob.glob(folder + "/step*"):
            time.sleep(0.05)
        processes = family(child.pid)
        victim = next((pid for pid in processes if variable(pid, "RANK") == "1"), None)
        if victim and child.poll() is None:
            os.kill(victim, signal.SIGKILL)
            at = time.monotonic()
            while time.monotonic() < start + limit and (ended is None or gone is None):
                if ended is None and child.poll() is not None:
                    ended, code = time.monotonic() - at, child.returncode
                if child.poll() is not None and not any(map(is_alive, processes)):
                    gone = time.monotonic() - at
                time.sleep(0.005)
    finally:
        end_group(child)
    text = s.text_of(log)
    problem = None
    if ended is None:
        problem = "the launcher did not end after the kill" if glob.glob(folder + "/step*") else "no checkpoint was written"
    elif gone is None:
        problem = "processes are left"
    elif code != 137 or not re.search(r"rank 1\b", text):
        problem = f"exit code {code} instead of 137, or rank 1 is not named"
    rounded = lambda seconds: None if seconds is None else round(seconds, 3)
    result = {"launcher_ended_s": rounded(ended), "all_gone_s": rounded(gone)}
    s.record(name, command, time.monotonic() - start, code, problem, result, text)
    if not problem and not s.fake:
        print(f"       the launcher ended after {ended:.2f} s, all processes after {gone:.2f} s", flush=True)


def resumed(s):
    """A training on the GPU is killed after a checkpoint and resumed: the weights are those of one that was not."""
    net, batch, steps, every = ("lenet5", 8, 12, 4) if s.fake else ("conv6", 256, 300, 100)
    flags = ["--net", net, "--batch", batch, "--steps", steps, "--precision", "bf16", "--skip-test", "--json"]
    whole = s.run("uninterrupted", train(s, 1, *flags), limit=60, judge=on_gpu)
    folder = os.path.join(s.scratch, "resumed")
    shutil.rmtree(folder, ignore_errors=True)
    saving = ["--checkpoint-dir", folder, "--checkpoint-every", every]
    at = train(s, 1, *flags, *saving)
    inject = ["--inject", f"rank=0,step={every + every // 2},fault=sigkill"]
    s.run("killed after a checkpoint", [*at[:3], *inject, *at[3:]], limit=60, expect=137)
    weights = lambda: ((whole or {}).get("result") or {}).get("weights")
    s.run("resumed", train(s, 1, *flags, *saving, "--resume"), limit=60,
          judge=is_equal(weights, "an uninterrupted training"))


def uneven(s):
    """Ranks with different amounts of data, which join; the tests' program, if it travels with the others."""
    program = s.program("t-device-step")
    if not os.path.exists(program):
        return s.skip("uneven data", "t-device-step is not among the programs: build it with `cargo build -p mgpu-tests`")
    for ranks in [1, 2]:
        s.run(f"{ranks} ranks, uneven data", [*launcher(s, ranks), program, "uneven"], limit=60)


def gelu(s):
    length = ["--steps", 3, "--batch", 8, "--skip-test"] if s.fake else ["--epochs", 3]
    reach = 0.0 if s.fake else 0.95
    for precision in ["f32", "bf16"]:
        def judge(result):
            accuracy = (result or {}).get("test_acc") or 0.0
            return on_gpu(result) or (None if accuracy >= reach else f"accuracy {accuracy:.2%}, below {reach:.0%}")
        s.run(f"mlp-gelu {precision}", train(s, 1, "--net", "mlp-gelu", *length, "--precision", precision, "--json"),
              limit=60, judge=judge)


def sanitizer(s, kind):
    path = working_tool(s, "compute-sanitizer", "--tool", kind)
    if path:
        s.run(kind, [path, "--tool", kind, "--error-exitcode", "9", s.program("gpu_check"), "--quick", "--seed", "1"],
              limit=120)


METRICS = {"us": "gpu__time_duration.sum", "read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum",
           "busy_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed", "registers": "launch__registers_per_thread"}
UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1.0, "Gbyte": 1e3}
KERNELS = "conv_first_forward|conv_forward_bf16|conv_backward_weights_bf16|optimizer_update"


def ncu(s):
    """Four of our own kernels in a step of conv6: time, memory traffic, use of the multiprocessors."""
    path = working_tool(s, "ncu", "--metrics", METRICS["us"])
    if not path:
        return
    # Without a launcher: the environment selects the GPU backend.
    run = s.run("four kernels", [
        path, "--clock-control", "none", "--csv", "--metrics", ",".join(METRICS.values()), "--kernel-name", f"regex:{KERNELS}",
        "--launch-skip", "16", "--launch-count", "16", s.program("train_mnist"), *digits(s), "--net", "conv6", "--batch", "1024",
        "--steps", "3", "--precision", "bf16", "--kernels", "builtin", "--no-graph", "--skip-test",
    ], limit=120, env={"MGPU_BACKEND": "nccl"}, keep='^"')
    rows = list(csv.DictReader(run["lines"])) if run and run.get("lines") else []
    launches = {}
    for row in rows:
        name = next((name for name, metric in METRICS.items() if metric == row.get("Metric Name")), None)
        if name:
            launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"].split("(")[0]})
            launch[name] = round(float(row["Metric Value"].replace(",", "")) * UNITS.get(row["Metric Unit"], 1.0), 3)
    if run:
        run["lines"], run["result"] = None, {"kernels": list(launches.values())}
        s.write()


def part_c(s):
    yield Item("nccl", "NCCL with one rank", 25, nccl_alone)
    yield Item("nccl", "2 ranks on one GPU", 50, nccl_shared)
    yield Item("killed", "a killed rank", 15, killed)
    yield Item("resume", "a resumed training", 20, resumed)
    yield Item("gelu", "GELU", 10, gelu)
    yield Item("uneven", "uneven data", 15, uneven)
    if not s.fake:
        for precision in ["tf32", "f32"]:
            for net in ["conv6", "keras"]:
                yield Item("throughput", f"{net} 1024 {precision} auto", 14,
                           lambda s, case=(net, 1024, precision): throughput(s, *case, "auto"))
    modes = [(net, 1024, precision, "graphed") for precision in ("tf32", "f32") for net in ("conv6", "keras")]
    yield Item("torch", "PyTorch, TF32 and f32", 30, lambda s: pytorch(s, modes))
    yield Item("ncu", "ncu", 40, ncu)
    for kind in ["racecheck", "synccheck"]:
        yield Item("sanitizer", kind, 90, lambda s, kind=kind: sanitizer(s, kind))


# By letter: the items, and the seconds that all of them may take.
PARTS = {"A": (part_a, 470), "B": (part_b, 530), "C": (part_c, 470)}
