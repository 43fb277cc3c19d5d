"""Checks and benchmarks on a machine with a GPU. Each part has a time limit; a failing part does not stop the others.

    gpu_check.sh [--fake FOLDER] [--limit SECONDS] [--deadline SECONDS] [--out FOLDER] [--nets A,B] [--steps N] [PART...]

A, B and C stand for parts that fit into nine minutes each on an H100: A is correctness on one rank, B is speed, C is the
rest. Parts, in their default order:
  kernels      gpu_check: every CUDA kernel against the CPU
  golden       golden_check of every network, precision and choice of kernels
  nccl         NCCL with one rank, and with 2 and 4 ranks that share the GPU: collectives, training, a killed peer
  parallel     options of a step: golden runs with each flag, and weights of world-size-invariant runs
  bandwidth    memory bandwidth, the optimizer's share of it, large matrix products
  throughput   training of every network beside PyTorch (eager, compiled, graphed)
  profile      every kernel of a training step with ncu: time and memory traffic
  accuracy     conv6, deep and keras trained to the end, in bf16
  sanitizer    compute-sanitizer, if the toolkit has it

Folders: MGPU_DATA (the four MNIST files), MGPU_GOLDEN (golden runs), BIN (the programs); without these variables
data/mnist, golden and the programs beside this script. NVIDIA's libraries may be in a Python environment: activate it.

Prints a line for every run and a table at the end. Writes gpu-<date>-<device>.json and the programs' output. On the tests'
fake GPU (--fake FOLDER, or detected by its name) runs are small and labelled, and nothing is timed.
Exit code: 1 if something failed.
"""
import argparse
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time

import provenance

HERE = os.path.dirname(os.path.abspath(__file__))
FAKE = "FAKE GPU"
LETTERS = {"A": ["kernels", "golden", "accuracy"], "B": ["bandwidth", "throughput", "profile"],
           "C": ["nccl", "parallel", "sanitizer"]}
NETS = ["conv6", "keras", "deep", "layers", "ensemble2400", "ensemble4800", "lenet5"]
PRECISIONS = ["bf16", "tf32", "f32"]
PROGRAMS = ["mgpurun", "train_mnist", "golden_check", "gpu_check", "allreduce_perf"]


def folder(variable, beside):
    """The folder in a variable, or the one beside this script, if it exists."""
    path = os.environ.get(variable) or beside
    return os.path.abspath(path) if os.path.isdir(path) else None


class Session:
    """Runs programs and keeps their results."""

    def __init__(self, options):
        self.options = options
        self.env = dict(os.environ)
        # NVIDIA's libraries may be packages of this interpreter.
        self.env.setdefault("VIRTUAL_ENV", sys.prefix)
        self.end = time.monotonic() + options.deadline if options.deadline else float("inf")
        self.runs, self.skipped, self.torch, self.part, self.deadline = [], [], [], None, 0.0
        binaries = [HERE, os.path.join(HERE, "../target/release")]
        self.bin = next(
            (path for path in [os.environ.get("BIN"), *binaries]
             if path and os.path.exists(os.path.join(path, "gpu_check"))), None)
        if self.bin is None:
            sys.exit("gpu_check.py: no gpu_check in BIN, beside this script or in target/release")
        self.data = folder("MGPU_DATA", os.path.join(HERE, "data/mnist"))
        self.golden = folder("MGPU_GOLDEN", os.path.join(HERE, "golden"))
        if options.fake:
            paths = [os.path.abspath(options.fake), self.env.get("LD_LIBRARY_PATH", "")]
            self.env["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
            self.env["MGPU_CACHE_DIR"] = os.path.join(os.path.abspath(options.fake), "kernels")
        self.scratch = tempfile.mkdtemp(prefix="gpu-check-")
        self.logs = os.path.join(self.scratch, "logs")
        os.mkdir(self.logs)
        self.versions = {}
        self.origin = provenance.record()
        self.machine = self.find_machine()
        self.fake = FAKE in self.machine["device"]

    def program(self, name):
        return os.path.join(self.bin, name)

    def find_machine(self):
        path = os.path.join(self.scratch, "machine.json")
        # No check has this name, so only the machine is printed.
        done = subprocess.run([self.program("gpu_check"), "--only", "no check", "--json", path], env=self.env,
                              capture_output=True, text=True, timeout=120)
        if not os.path.exists(path):
            sys.exit("gpu_check.py: no GPU: " + (done.stderr.strip() or done.stdout.strip()))
        with open(path) as file:
            keys = ["device", "architecture", "multiprocessors", "driver", "compiler", "version"]
            result = json.load(file)
        return {**self.origin["machine"], **{key: result[key] for key in keys}}

    def begin(self, part):
        self.part, self.deadline = part, min(time.monotonic() + self.options.limit, self.end)
        print(f"\n=== {part}", flush=True)

    def skip(self, what, why):
        self.skipped.append({"part": self.part, "what": what, "why": why})
        print(f"skipped {what}: {why}", flush=True)

    def run(self, name, command, limit=180, expect=0, contains=None, env=None, judge=None, keep=None, feed=None):
        """Runs one program, with `feed` as its input. Its last line of JSON, if any, is the result; `judge` may find a problem
        in it. Lines that match `keep` are kept."""
        left = self.deadline - time.monotonic()
        if left < 5:
            self.skip(name, "no time left")
            return None
        limit = min(limit, left)
        start = time.monotonic()
        log = os.path.join(self.logs, re.sub("[^a-zA-Z0-9]+", "-", f"{self.part} {name}") + ".log")
        with open(log, "w+") as output, tempfile.TemporaryFile("w+") as source:
            source.write(feed or "")
            source.seek(0)
            child = subprocess.Popen(command, env={**self.env, **(env or {})}, stdout=output, stderr=subprocess.STDOUT,
                                     stdin=source, start_new_session=True, cwd=self.scratch)
            try:
                code = child.wait(limit)
            except subprocess.TimeoutExpired:
                # mgpurun cleans up when it receives SIGTERM.
                child.terminate()
                try:
                    child.wait(10)
                except subprocess.TimeoutExpired:
                    pass
                code = None
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.wait()
            output.seek(0)
            text = output.read()
        # Paths of a user's machine are private.
        for path, shown in [(self.data, "DATA"), (self.golden, "GOLDEN"), (os.path.abspath(self.bin), "BIN")]:
            text = text.replace(path, shown) if path else text
        result = None
        for line in text.splitlines():
            # mgpurun may have put the rank prefix before it.
            at = line.find("{")
            if at >= 0 and line.rstrip().endswith("}"):
                try:
                    result = json.loads(line[at:])
                except ValueError:
                    pass
        problem = None
        if code is None:
            problem = f"stopped after {limit:.0f} s"
        elif code != expect:
            problem = f"exit code {code} instead of {expect}"
        elif contains and not re.search(contains, text):
            problem = f"it does not say {contains!r}"
        elif judge:
            problem = judge(result)
        seconds = round(time.monotonic() - start, 1)
        words = [os.path.basename(word) if os.path.isabs(word) else word for word in command]
        tail = text.splitlines()[-12:] if problem else []
        run = {"part": self.part, "name": name, "command": " ".join(words), "seconds": seconds, "code": code,
               "problem": problem, "result": result, "tail": tail}
        if keep:
            lines = [" ".join(line.split()) for line in text.splitlines() if re.search(keep, line)]
            run["lines"] = [re.sub(r" [0-9.]+ ms", "", line) for line in lines] if self.fake else lines
        self.runs.append(run)
        print(f"{'FAILED' if problem else 'ok    '} {name:<60} {'' if self.fake else f'{seconds:7.1f} s'}  {problem or self.figure(run)}", flush=True)
        for line in tail:
            print("       | " + line, flush=True)
        self.write()
        return run

    def figure(self, run):
        """The figures to print for a run; no times on a fake GPU."""
        result = run["result"] or {}
        words = []
        if "images_per_s" in result and not self.fake:
            words.append(f"{result['images_per_s']:,.0f} images/s")
        if result.get("test_acc") is not None and not self.fake:
            words.append(f"{100 * result['test_acc']:.2f}%")
        return ", ".join(words)

    def path(self):
        slug = re.sub("[^a-z0-9]+", "-", self.machine["device"].lower()).strip("-")
        return os.path.join(self.options.out, f"gpu-{self.origin['date']}-{slug}.json")

    def write(self):
        """Writes the file after every run, so that an interrupted session keeps its results."""
        runs = self.runs
        if self.fake:
            # Times of a fake GPU must not be mistaken for figures.
            timed = ("seconds", "images_per_s", "ms_per_step", "train_s", "test_s", "us_p50", "us_min", "busbw_gbps",
                     "algbw_gbps", "images_per_second")
            runs = [{**run, "seconds": None, "result": {key: value for key, value in (run["result"] or {}).items()
                                                       if key not in timed}} for run in runs]
        provenance.write(self.path(), {**self.origin, "machine": self.machine, "versions": self.versions, "fake": self.fake,
                                       "runs": runs, "skipped": self.skipped})


def kernels(s):
    """Every kernel; on a fake GPU the quick checks."""
    path = os.path.join(s.scratch, "kernels.json")
    quick = ["--quick"] if s.fake else []
    run = s.run("gpu_check", [s.program("gpu_check"), *quick, "--json", path], limit=900)
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


def golden(s):
    if not (s.golden and s.data):
        return s.skip("golden runs", "MGPU_GOLDEN and MGPU_DATA are needed")
    nets = ["lenet5"] if s.fake else s.options.nets
    for net in nets:
        file = os.path.join(s.golden, net + ".json")
        if not os.path.exists(file):
            s.skip(net, "no golden run of it")
            continue
        for precision in ["f32", "tf32", "bf16"]:
            for choice in ["builtin", "auto"]:
                s.run(f"{net} {precision} {choice}", [
                    *launcher(s, 1), s.program("golden_check"), "--data", s.data, "--precision", precision, "--kernels", choice,
                    file], limit=120, contains="on " + re.escape(s.machine["device"]), keep=" deviation .* bound ")


def launcher(s, ranks):
    share = ["--share-gpus"] if ranks > 1 else []
    return [s.program("mgpurun"), "-n", str(ranks), *share, "--backend", "nccl", "--no-prefix"]


def on_gpu(result):
    """Finds problems in the summary of a training."""
    return None if (result or {}).get("device") == "cuda" else "it did not run on the GPU"


def digits(s):
    return ["--data", s.data] if s.data else ["--synthetic"]


def nccl(s):
    """Correctness only: ranks that share a GPU say nothing about speed."""
    # Ranks on one GPU alternate in time slices of milliseconds, so large collectives take minutes.
    most = 1 << 14 if s.fake else 1 << 22
    weights = {}
    for ranks in [1, 2, 4]:
        for dtype in ["f32", "bf16"]:
            s.run(f"{ranks} ranks, sums of {dtype}", [*launcher(s, ranks), s.program("allreduce_perf"), "--check", "--dtype",
                                                      dtype, "--factor", "32", "--max", str(most)], limit=120)
        batch = 64 // ranks
        run = s.run(f"{ranks} ranks, training", [*launcher(s, ranks), s.program("train_mnist"), *digits(s), "--batch",
                                                 str(batch), "--steps", "6" if s.fake else "50", "--skip-test", "--json"],
                    judge=on_gpu)
        weights[ranks] = (run or {}).get("result")
    s.run("2 ranks, training, again", [*launcher(s, 2), s.program("train_mnist"), *digits(s), "--batch", "32", "--steps",
                                       "6" if s.fake else "50", "--skip-test", "--json"],
          judge=lambda now: None if now and weights[2] and now.get("weights") == weights[2].get("weights")
          else "two equal runs end with different weights")
    for fault, code in [("sigkill", 137), ("exit:7", 7)]:
        s.run(f"2 ranks, rank 1 ends by {fault}", [
            s.program("mgpurun"), "-n", "2", "--share-gpus", "--backend", "nccl", "--inject",
            f"rank=1,step=4,fault={fault}", s.program("train_mnist"), *digits(s), "--steps", "100000", "--skip-test",
        ], limit=90, expect=code, contains=r"rank 1")


def parallel(s):
    """Correctness only, as above."""
    files = [os.path.join(s.golden or "", net + ".json") for net in (["lenet5"] if s.fake else ["lenet5", "deep"])]
    if s.data and all(map(os.path.exists, files)):
        for ranks in [1, 2]:
            for flags in ["--accumulate 4", "--gradients bf16", "--shard-optimizer on", "--world-size-invariant 8"]:
                s.run(f"{ranks} ranks, golden, {flags}", [*launcher(s, ranks), s.program("golden_check"), "--data", s.data,
                                                          *flags.split(), *files], limit=120, keep=" deviation .* bound ")
    else:
        s.skip("golden runs with flags", "MGPU_GOLDEN and MGPU_DATA are needed")
    weights = {}
    for ranks in [1, 2, 4]:
        s.run(f"{ranks} ranks that make no difference", [
            *launcher(s, ranks), s.program("train_mnist"), *digits(s), "--net", "lenet5" if s.fake else "keras", "--batch",
            str(16 // ranks if s.fake else 128 // ranks), "--steps", "5" if s.fake else "30", "--world-size-invariant", "4",
            "--clip-norm", "1", "--skip-test", "--json",
        ], judge=lambda now: on_gpu(now) or (None if now["weights"] == weights.setdefault(1, now["weights"])
                                             else "the weights are not those of one rank"))
    s.run("2 ranks, a non-finite loss", [
        *launcher(s, 2), s.program("train_mnist"), *digits(s), "--batch", "8", "--steps", "40", "--lr", "1e30", "--skip-test",
    ], limit=60, expect=1, contains=re.escape("non-finite gradients (NaN or Inf) in tensor"))


def bandwidth(s):
    if s.fake:
        return s.skip("bandwidth", "a fake GPU is not measured")
    path = os.path.join(s.scratch, "bandwidth.json")
    run = s.run("gpu_check --bandwidth", [s.program("gpu_check"), "--bandwidth", "--json", path])
    if run and os.path.exists(path):
        with open(path) as file:
            run["result"] = json.load(file)
        for figure in run["result"][1]:
            print(f"       {figure['what']}: {figure['value']:.0f} {figure['unit']}")


def throughput(s):
    nets = ["lenet5"] if s.fake else s.options.nets
    batches = [16] if s.fake else [128, 1024]
    # PyTorch's version, and those of its libraries; none if it does not see the GPU.
    versions = """import json, torch
assert torch.cuda.is_available()
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}))"""
    torch = s.data and not s.fake and provenance.output(sys.executable, "-c", versions)
    if torch:
        s.versions = json.loads(torch)
    else:
        s.skip("PyTorch", "a fake GPU is not measured" if s.fake else "no MNIST folder, or no torch that sees the GPU")

    def steps(batch):
        return s.options.steps or (3 if s.fake else 1500 if batch < 1024 else 400)

    made = set()

    def ours(net, batch, precision, choice, graph):
        if (net, batch, precision, choice, graph) in made:
            return
        made.add((net, batch, precision, choice, graph))
        name = f"{net} {batch} {precision} ours {choice} {'graph' if graph else 'eager'}"
        s.run(name, [*launcher(s, 1), s.program("train_mnist"), *digits(s), "--net", net, "--batch", str(batch), "--steps",
                     str(steps(batch)), "--precision", precision, "--kernels", choice, *([] if graph else ["--no-graph"]),
                     "--skip-test", "--show-kernels", "--json"], limit=240, judge=on_gpu, keep="^(conv|dense) ")

    # The most important first, in case time runs out: bf16 and graphs, then everything else.
    for batch in reversed(batches):
        for net in nets:
            ours(net, batch, "bf16", "auto", True)
    modes = [(net, batch, "bf16", "graphed") for batch in reversed(batches) for net in nets]
    modes += [(net, batches[-1], "bf16", "eager") for net in nets]
    modes += [(net, batches[-1], precision, "graphed") for precision in ["tf32", "f32"] for net in nets[:2]]
    modes += [(net, batches[-1], "bf16", "compiled") for net in nets[:2]]
    modes = [mode for mode in modes if mode[0] != "ensemble4800"]
    if torch:
        # One process for all configurations, because its start takes seconds.
        run = s.run("torch", [sys.executable, os.path.join(HERE, "torch_throughput.py"), s.data],
                    limit=240, feed="".join(" ".join(map(str, mode)) + "\n" for mode in modes), keep=r'^\{"net"')
        s.torch = [json.loads(line) for line in (run or {}).get("lines", [])]
        for figure in s.torch:
            print("       " + " ".join(f"{key} {value}" for key, value in figure.items()), flush=True)
    for batch in reversed(batches):
        for net in nets:
            ours(net, batch, "bf16", "builtin", True)
    for precision in ["tf32", "f32"]:
        for net in nets[:2]:
            ours(net, batches[-1], precision, "auto", True)
    for net in nets:
        ours(net, batches[0], "bf16", "auto", False)
    # The rest, while there is time.
    for graph in [True, False]:
        for precision in PRECISIONS:
            for batch in batches:
                for net in nets:
                    for choice in ["auto", "builtin"]:
                        ours(net, batch, precision, choice, graph)


def profile(s):
    """Times of the separate kernels of a training step; their sum is more than the step of a graph."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    tools = [shutil.which("ncu")] + [os.path.join(home, "bin/ncu") for home in homes if home]
    tool = next((path for path in tools if path and os.path.exists(path)), None)
    if s.fake or not tool:
        return s.skip("profile", "a fake GPU is not measured" if s.fake else "ncu is not installed")
    metrics = ["gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"]
    units = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1.0, "Gbyte": 1e3}
    for net in s.options.nets:
        # Without a launcher: the environment selects the GPU backend.
        run = s.run(net, [tool, "--clock-control", "none", "--cache-control", "none", "--csv", "--metrics", ",".join(metrics),
                          s.program("train_mnist"), *digits(s), "--net", net, "--batch", "1024", "--steps", "3", "--precision",
                          "bf16", "--skip-test", "--no-graph"], env={"MGPU_BACKEND": "nccl"}, keep='^"')
        kernels = {}
        for row in csv.DictReader((run or {}).pop("lines", [])):
            kernel = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"][:90]})
            if row["Metric Unit"] in units:
                kernel[row["Metric Name"]] = float(row["Metric Value"].replace(",", "")) * units[row["Metric Unit"]]
        kernels = list(kernels.values())
        ends = [index for index, kernel in enumerate(kernels) if kernel["kernel"].startswith("optimizer_update")]
        if len(ends) < 2:
            continue
        step = [{"kernel": kernel["kernel"], "us": round(kernel.get(metrics[0], 0.0), 1),
                 "megabytes": round(kernel.get(metrics[1], 0.0) + kernel.get(metrics[2], 0.0), 1)}
                for kernel in kernels[ends[-2] + 1:ends[-1] + 1]]
        run["result"] = {"step": step}
        for kernel in sorted(step, key=lambda kernel: -kernel["us"])[:12]:
            print(f"       {kernel['us']:8.1f} us {kernel['megabytes']:8.1f} MB  {kernel['kernel'][:80]}", flush=True)
        s.write()


def accuracy(s):
    if s.fake:
        return s.skip("accuracy", "a fake GPU would need days")
    if not s.data:
        return s.skip("accuracy", "MGPU_DATA is needed")
    for net, reach, flags in [
        ("conv6", 0.989, ["--epochs", "10", "--batch", "1024"]),
        ("deep", 0.990, ["--steps", "2000", "--batch", "256"]),
        ("keras", 0.989, ["--epochs", "12"]),
    ]:
        def judge(result):
            reached = max((result or {}).get("test_acc") or 0.0, (result or {}).get("test_acc_average") or 0.0)
            return None if reached >= reach else f"accuracy {100 * reached:.2f}%, below {100 * reach:.1f}%"
        s.run(f"{net} {' '.join(flags)}", [*launcher(s, 1), s.program("train_mnist"), "--data", s.data, "--net", net,
                                           "--precision", "bf16", *flags, "--json"], limit=600, judge=judge)


def sanitizer(s):
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    tools = [shutil.which("compute-sanitizer")] + [os.path.join(home, "bin/compute-sanitizer") for home in homes if home]
    tool = next((path for path in tools if path and os.path.exists(path)), None)
    if s.fake or not tool:
        return s.skip("compute-sanitizer", "not on a fake GPU" if s.fake else "not installed")
    for kind in ["memcheck", "racecheck", "synccheck", "initcheck"]:
        s.run(kind, [tool, "--tool", kind, "--error-exitcode", "9", s.program("gpu_check"), "--quick", "--seed", "1"],
              limit=600)


PARTS = [kernels, golden, nccl, parallel, bandwidth, throughput, profile, accuracy, sanitizer]


def table(s):
    """Prints training throughput for each network, batch and precision; then failures and skipped runs."""
    print(f"\n=== {s.machine['device']}, driver for CUDA {s.machine['driver']}")
    if s.fake:
        print(f"{FAKE}: no figures of a real GPU; times are omitted")
    columns = ["ours auto graph", "ours builtin graph", "ours auto eager", "ours builtin eager", "torch graphed",
               "torch compiled", "torch eager"]
    rows = {}
    for run in s.runs:
        ours = run["part"] == "throughput" and run["name"] != "torch"
        if ours and not run["problem"] and run["result"] and not s.fake:
            net, batch, precision, rest = run["name"].split(" ", 3)
            rows.setdefault((net, batch, precision), {})[rest] = run["result"]["images_per_s"]
    for figure in s.torch:
        if "images_per_s" in figure:
            row = rows.setdefault((figure["net"], str(figure["batch"]), figure["precision"]), {})
            row["torch " + figure["mode"]] = figure["images_per_s"]
    if rows:
        print("images/s".ljust(24) + "".join(column.rjust(20) for column in columns) + "   best of ours / of torch")
        for key, row in rows.items():
            cells = "".join((f"{row[column]:,.0f}" if column in row else "-").rjust(20) for column in columns)
            best = [max((row[c] for c in row if c.startswith(who)), default=None) for who in ("ours", "torch")]
            ratio = f"{best[0] / best[1]:.2f}" if all(best) else "-"
            print(" ".join(key).ljust(24) + cells + ratio.rjust(12))
    for part in PARTS:
        runs = [run for run in s.runs if run["part"] == part.__name__]
        failed = [run for run in runs if run["problem"]]
        left_out = [entry for entry in s.skipped if entry["part"] == part.__name__]
        if runs or left_out:
            print(f"{part.__name__:<12} {len(runs):4} runs, {len(failed)} failed, {len(left_out)} left out")
        for run in failed:
            print(f"    FAILED {run['name']}: {run['problem']}")
        for entry in left_out[:6]:
            print(f"    left out {entry['what']}: {entry['why']}")
    print(f"wrote {s.path()}")


def main():
    names = [*LETTERS, *(part.__name__ for part in PARTS)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="one of " + ", ".join(names) + " [default: all]")
    parser.add_argument("--fake", metavar="FOLDER", help="folder of the tests' fake libraries")
    parser.add_argument("--limit", type=float, default=1500, metavar="SECONDS", help="time limit of each part [default: 1500]")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="time limit of all parts [default: 520 with A, B or C]")
    parser.add_argument("--out", default=os.environ.get("OUT", "."), metavar="FOLDER", help="output folder [default: $OUT, or the current folder]")
    parser.add_argument("--nets", type=lambda text: text.split(","), default=NETS, help="networks, separated by commas")
    parser.add_argument("--steps", type=int, help="steps of each throughput run")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in names]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; known are {', '.join(names)}")
    if set(options.parts) & set(LETTERS):
        options.deadline = options.deadline or 520
        options.parts = [part for name in options.parts for part in LETTERS.get(name, [name])]
    session = Session(options)
    print(f"{session.machine['device']}, compute capability {session.machine['architecture']}")
    for part in PARTS:
        if not options.parts or part.__name__ in options.parts:
            session.begin(part.__name__)
            part(session)
            session.write()
    table(session)
    with tarfile.open(os.path.join(options.out, "gpu-check-logs.tgz"), "w:gz") as logs:
        logs.add(session.logs, "logs")
    shutil.rmtree(session.scratch, ignore_errors=True)
    sys.exit(1 if any(run["problem"] for run in session.runs) else 0)


if __name__ == "__main__":
    main()
