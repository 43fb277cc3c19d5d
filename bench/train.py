"""Measures training on the processor, ours and PyTorch's, alternating. Started by bench/train.sh; standard library only.

Every run is a process, or a launcher with its ranks, that trains one network for some steps on real MNIST and prints its
throughput: 128 images per step in all, on one rank with all cores or on two ranks with half of them each. Meanwhile this program
polls the ranks' memory. summarise_train.py computes the figures.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import provenance
import summarise_train
from summarise_train import BF16
from train_work import NETS, work

HERE = os.path.dirname(os.path.abspath(__file__))
# Timed steps of a run on two cores: 5 to 10 s for PyTorch. More cores make more steps.
STEPS = {"lenet5": 600, "deep": 40, "keras": 12, "ensemble2400": 60, "ensemble4800": 45, "layers": 15, "conv6": 8}
IMAGES = 128
# Warm-up steps: train_mnist's own number, also passed to train_torch.py.
WARM_UP = 3
# Time limit of a run.
LIMIT_S = 300
# Exit code of a program that does not know a flag, or refuses a precision.
WRONG_USAGE = 2


def status(pid):
    """Peak and current resident memory of a process, and the part mapped from files, in KiB."""
    found = {}
    with open(f"/proc/{pid}/status") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name in ("VmHWM", "VmRSS", "RssFile"):
                found[name] = int(value.split()[0])
    return [found.get(name, 0) for name in ("VmHWM", "VmRSS", "RssFile")]


def is_rank(pid):
    """Whether this process has a RANK variable. Launchers and their guardians have none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as variables:
            return any(variable.startswith(b"RANK=") for variable in variables.read().split(b"\0"))
    except OSError:
        return False


def ranks_below(pid):
    """The ranks among the descendants of a launcher, without the ranks' own children."""
    found, parents = [], [pid]
    while parents:
        parent = parents.pop()
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as children:
                    for child in map(int, children.read().split()):
                        (found if is_rank(child) else parents).append(child)
        except OSError:
            continue  # It has just ended.
    return found


class Memory:
    """Resident memory of the ranks of a run, polled; launchers are not counted.

    Both sides are measured alike. `memory_mib` is the peak: the sum over ranks of VmHWM. The kernel maintains it, so polling
    misses only a process's last moments. The peak may be at the start: train_torch.py briefly holds the data set three times while
    it converts it to floats. So `training_mib` is the maximum over all ranks in one poll during the second half of the run. Pages
    that are shared by ranks or mapped from files count in every rank; `file_mib` is the latter part (programs and libraries).
    """

    def __init__(self, process, ranks):
        self.process, self.ranks = process, ranks
        self.peaks, self.samples = {}, []

    def poll(self):
        if self.ranks == 1:
            pids = [self.process.pid]
        else:
            # Searching for ranks costs more than polling them, and takes time from them.
            pids = list(self.peaks) if len(self.peaks) == self.ranks else ranks_below(self.process.pid)
        held = 0
        for pid in pids:
            try:
                peak, resident, files = status(pid)
            except OSError:
                continue
            before = self.peaks.get(pid, (0, 0))
            self.peaks[pid] = max(peak, before[0]), max(files, before[1])
            held += resident
        self.samples.append(held)

    def mib(self):
        """The figures of a line; none if a rank was never polled."""
        if len(self.peaks) != self.ranks:
            return {"memory_mib": None, "training_mib": None, "file_mib": None}
        peaks, files = (sum(kib) for kib in zip(*self.peaks.values()))
        kib = {"memory_mib": peaks, "training_mib": max(self.samples[len(self.samples) // 2:]), "file_mib": files}
        return {name: round(amount / 1024, 1) for name, amount in kib.items()}


def stop(process, ranks):
    """Sends SIGTERM, so that a launcher ends its ranks; then kills what is left of this run."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        for rank in ranks:
            if is_rank(rank):
                os.kill(rank, signal.SIGKILL)
        process.wait()


def run(command, ranks):
    """Runs to the end. Returns the exit code (None after the time limit), the last line of JSON, all output, and the memory."""
    env = {name: value for name, value in os.environ.items()
           if name not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MGPU_THREADS")}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
                                   start_new_session=True)
        memory, end = Memory(process, ranks), time.monotonic() + LIMIT_S
        code = None
        try:
            while process.poll() is None and time.monotonic() < end:
                memory.poll()
                time.sleep(0.05)
            code = process.poll()
        finally:
            if process.poll() is None:
                stop(process, list(memory.peaks))
        out.seek(0)
        errors.seek(0)
        said, complaints = out.read(), errors.read()
    lines = [line for line in said.splitlines() if line.startswith("{") and line.endswith("}")]
    result = json.loads(lines[-1]) if code == 0 and lines else None
    return code, result, said + complaints, memory.mib()


class Session:
    def __init__(self, options):
        self.options = options
        self.lines, self.profiles, self.skipped, self.absent = [], {}, [], set()
        self.torch = os.path.join(options.peers, "v/bin") if options.peers else None
        self.versions, self.failed = {}, False
        self.origin = provenance.record(["bench/train.sh", *sys.argv[1:]])
        if options.peers is None:
            self.skip("PyTorch: there is no v/bin/torchrun in MGPU_PEERS or target/peers")
        else:
            asked = subprocess.run([f"{self.torch}/python", "-c", "import torch; print(torch.__version__)"],
                                   capture_output=True, text=True, check=True)
            self.versions["torch"] = asked.stdout.strip()

    def skip(self, what):
        if what not in self.skipped:
            print(f"skipped: {what}", file=sys.stderr)
            self.skipped.append(what)

    def steps(self, net):
        return self.options.steps or max(1, round(STEPS[net] * self.options.cores / 2))

    def ours(self, net, ranks, threads, dtype, *flags):
        # The machine may have GPUs.
        launcher = [f"{self.options.bin}/mgpurun", "-n", str(ranks), "--backend", "cpu", "--no-prefix"] if ranks > 1 else []
        data = ["--data", self.options.data] if self.options.data else ["--synthetic"]
        precision = [] if dtype == "f32" else ["--precision", dtype]
        return run([*launcher, f"{self.options.bin}/train_mnist", *data, "--net", net, "--batch", str(IMAGES // ranks),
                    "--threads", str(threads), "--steps", str(self.steps(net) + WARM_UP), *precision, "--skip-test",
                    "--json", *flags], ranks)

    def pytorch(self, net, ranks, threads, dtype):
        # A separate rendezvous, so that concurrent runs do not conflict.
        launcher = [f"{self.torch}/torchrun", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else \
            [f"{self.torch}/python"]
        return run([*launcher, os.path.join(HERE, "peers/train_torch.py"), "--data", self.options.data, "--net", net,
                    "--batch", str(IMAGES // ranks), "--threads", str(threads), "--steps", str(self.steps(net)), "--warm",
                    str(WARM_UP), "--dtype", dtype], ranks)

    def measure(self, who, round_, net, mode, dtype):
        """One run of one side; keeps its line. False if there is no peer to compare with."""
        ranks, threads = mode
        name = f"{net} {dtype} {ranks}x{threads}"
        code, result, said, memory = getattr(self, who)(net, ranks, threads, dtype)
        if who == "ours" and dtype != "f32" and code == WRONG_USAGE:
            self.absent.add(dtype)
            self.skip(f"{dtype}: train_mnist refuses it on the CPU")
            return False
        if result is None:
            tail = " / ".join(said.strip().splitlines()[-3:])
            how = f"stopped after {LIMIT_S} s" if code is None else f"ended with exit code {code}"
            self.skip(f"round {round_ + 1}: {who}, {name}, {how}: {tail}")
            self.failed |= who == "ours"
            return who != "ours"
        counted = re.search(r"\((\d+) parameters\)", said)
        parameters = int(counted[1]) if counted else result.get("params")
        if parameters != work(net)[1]:
            sys.exit(f"train.py: {who} has {parameters} parameters in {net}, the shapes in train_work.py {work(net)[1]}")
        self.lines.append({
            "who": who, "round": round_, "net": net, "dtype": dtype, "ranks": ranks, "threads": threads,
            "steps": self.steps(net), "images_per_s": result["images_per_s"], "ms_per_step": result["ms_per_step"],
            **memory,
        })
        print(f"round {round_ + 1}: {name:<24} {who:<7} {result['images_per_s']:>10,.1f} images/s "
              f"{memory['memory_mib']} MiB",
              file=sys.stderr)
        return True

    def profile(self, net):
        """The profile of a step by layer and kernel, and the peak for comparison."""
        code, result, said, _ = self.ours(net, 1, self.options.cores, "f32", "--profile")
        if result and "profile" in result:
            self.profiles[net] = {key: result.get(key) for key in ("peak_gflops", "profile")}
        elif code in (0, WRONG_USAGE):
            self.skip("profiles: train_mnist has no --profile")
        else:
            self.skip(f"profile of {net}: exit code {code}: {' / '.join(said.strip().splitlines()[-3:])}")

    def write(self):
        options = self.options
        result = {
            "what": "training on the processor, 128 images a step in all; medians of the rounds; ratio is ours by PyTorch's",
            "memory": "memory_mib: VmHWM of every rank's process, the sum over ranks, without launchers; training_mib: the "
                      "most that the ranks held together in the second half of a run; file_mib: of it, mapped from files. "
                      "What ranks share counts once in each. train_torch.py holds MNIST as f32 (179 MiB a rank), "
                      "train_mnist as bytes",
            "work": "FLOP of forward pass, weight gradients and input gradients (none for the first layer), a convolution "
                    "counted as a sum over its taps",
            "data": "MNIST" if options.data else "generated digits",
            **self.origin, "rounds": options.rounds,
            "cores": options.cores, "modes": [f"{ranks}x{threads}" for ranks, threads in options.modes],
            "nets": options.nets, "dtypes": options.dtypes, "versions": self.versions, "skipped": self.skipped,
            "figures": summarise_train.summarise(self.lines, self.profiles), "profiles": self.profiles,
        }
        provenance.write(options.out, result)
        return result


def parse():
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="bench/train.sh", description=__doc__)
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"one of {', '.join(NETS)} [default: all]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", help="ranks x threads of each rank, a comma-separated list [default: 1xCORES and 2xHALF OF THEM]")
    parser.add_argument("--dtypes", default="f32,bf16", help=f"bf16 only for {', '.join(BF16)} [default: f32,bf16]")
    parser.add_argument("--steps", type=int, help="timed steps of a run [default: 5 to 10 s of PyTorch's]")
    parser.add_argument("--no-profile", action="store_true", help="skip train_mnist --profile")
    parser.add_argument("--out", help="result file [default: bench/results/train-cpu-<date>-<machine>.json]")
    parser.add_argument("--bin", default=os.path.join(HERE, "../target/release"), help="folder of the programs [default: target/release]")
    options = parser.parse_args()
    for net in options.nets:
        if net not in NETS:
            parser.error(f"there is no network {net}; known are {', '.join(NETS)}")
    options.nets = options.nets or list(NETS)
    options.out = options.out or provenance.result_path("train-cpu")
    for program in ("mgpurun", "train_mnist"):
        if not os.access(os.path.join(options.bin, program), os.X_OK):
            sys.exit(f"train.py: there is no {program} in {options.bin}: run cargo build --release")
    options.cores = cores
    modes = options.modes or ("1x1" if cores == 1 else f"1x{cores},2x{cores // 2}")
    if not re.fullmatch(r"([1-9]\d*x[1-9]\d*)(,[1-9]\d*x[1-9]\d*)*", modes):
        parser.error("modes are written RANKSxTHREADS, with commas between them")
    options.modes = [tuple(int(number) for number in mode.split("x")) for mode in modes.split(",")]
    if any(IMAGES % ranks for ranks, _ in options.modes):
        parser.error(f"{IMAGES} images should divide among the ranks")
    options.dtypes = options.dtypes.split(",")
    options.data = os.environ.get("MGPU_DATA")
    peers = os.path.abspath(os.environ.get("MGPU_PEERS") or os.path.join(HERE, "../target/peers"))
    options.peers = peers if os.path.exists(os.path.join(peers, "v/bin/torchrun")) else None
    if options.peers and not options.data:
        parser.error("train_torch.py trains on real MNIST: MGPU_DATA should name its folder")
    return options


def main():
    options = parse()
    session = Session(options)
    for round_ in range(options.rounds):
        for dtype in options.dtypes:
            for net in options.nets:
                for mode in options.modes:
                    if dtype in session.absent or (dtype != "f32" and net not in BF16):
                        continue
                    if session.measure("ours", round_, net, mode, dtype) and session.torch:
                        session.measure("pytorch", round_, net, mode, dtype)
                    session.write()
    if not options.no_profile:
        for net in options.nets:
            session.profile(net)
    summarise_train.report(session.write())
    print(f"wrote {options.out}", file=sys.stderr)
    sys.exit(1 if session.failed else 0)


if __name__ == "__main__":
    main()
