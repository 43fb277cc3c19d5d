"""Part C of gpu_check.py: NCCL, faults, checkpoints, and what other parts leave out. Standard library only."""
import csv
import glob
import os
import re
import shutil
import signal
import time

from gpu_commands import Item, digits, is_equal, launcher, on_gpu, train, weights_of, working_tool
from gpu_host import speed, tiles
from gpu_session import end_group
from gpu_speed import pytorch, throughput


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
    weights = weights_of(plain)
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
                                            "--factor", "32", "--max", str(most)], limit=90)
    flags = ["--batch", 8 if s.fake else 32, "--steps", steps, "--skip-test", "--json"]
    first = s.run("2 ranks, training", train(s, 2, *flags), limit=60, judge=on_gpu)
    weights = weights_of(first)
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


def kill_after_checkpoint(s, name, command, folder, rank, limit):
    """Starts a training that saves to `folder`, and kills one rank once a checkpoint is there. Returns the exit code, seconds
    from the kill to the end of the launcher and to that of all processes, and the output; None for what did not happen."""
    child, log = s.start(name, command)
    end = time.monotonic() + limit
    code = ended = gone = None
    try:
        while time.monotonic() < end and child.poll() is None and not glob.glob(folder + "/step-*"):
            time.sleep(0.005)
        processes = family(child.pid)
        victim = next((pid for pid in processes if variable(pid, "RANK") == str(rank)), None)
        if victim and child.poll() is None:
            os.kill(victim, signal.SIGKILL)
            at = time.monotonic()
            while time.monotonic() < end and gone is None:
                if ended is None and child.poll() is not None:
                    ended, code = time.monotonic() - at, child.returncode
                if ended is not None and not any(map(is_alive, processes)):
                    gone = time.monotonic() - at
                time.sleep(0.005)
    finally:
        end_group(child)
    return code, ended, gone, s.text_of(log)


def killed(s):
    """A rank is killed while two ranks train: how long until the launcher has ended, and until no process is left."""
    folder = os.path.join(s.scratch, "killed")
    shutil.rmtree(folder, ignore_errors=True)
    name, start = "2 ranks, one is killed", time.monotonic()
    command = train(s, 2, "--batch", 8 if s.fake else 32, "--steps", 100000, "--schedule", "constant", "--skip-test",
                    "--checkpoint-dir", folder, "--checkpoint-every", 4)
    code, ended, gone, text = kill_after_checkpoint(s, name, command, folder, 1, min(90, s.left()))
    problem = None
    if ended is None:
        problem = "no checkpoint was written, or the launcher did not end after the kill"
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
    # Several seconds, so that the kill comes before the end.
    net, batch, steps, every = ("lenet5", 8, 60, 4) if s.fake else ("conv6", 256, 4000, 500)
    flags = ["--net", net, "--batch", batch, "--steps", steps, "--precision", "bf16", "--skip-test", "--json"]
    whole = s.run("uninterrupted", train(s, 1, *flags), limit=60, judge=on_gpu)
    folder = os.path.join(s.scratch, "resumed")
    shutil.rmtree(folder, ignore_errors=True)
    saving = train(s, 1, *flags, "--checkpoint-dir", folder, "--checkpoint-every", every)
    name, start = "killed after a checkpoint", time.monotonic()
    code, ended, _, text = kill_after_checkpoint(s, name, saving, folder, 0, min(60, s.left()))
    problem = None if code == 137 else "it was not killed in time" if ended is None else f"exit code {code} instead of 137"
    s.record(name, saving, time.monotonic() - start, code, problem, None, text)
    weights = weights_of(whole)
    s.run("resumed", [*saving, "--resume"], limit=60, contains="resum", judge=is_equal(weights, "an uninterrupted training"))


def program_of_tests(s, name, what):
    """A program of the tests, if it travels with the others; otherwise says how to build it."""
    program = s.program(name)
    if os.path.exists(program):
        return program
    return s.skip(what, f"{name} is not among the programs: build it with `cargo build -p mgpu-tests`")


def uneven(s):
    """Ranks with different amounts of data, which join."""
    program = program_of_tests(s, "t-device-step", "uneven data")
    for ranks in [1, 2] if program else []:
        s.run(f"{ranks} ranks, uneven data", [*launcher(s, ranks), program, "uneven"], limit=60)


def groups(s):
    """Groups of ranks, which split NCCL's communicators: rows and columns on device memory, dropped in different orders; a
    killed rank, while others are in operations of its groups."""
    program = program_of_tests(s, "t-groups", "groups")
    if not program:
        return
    for ranks in [2, 4]:
        for body in ["grid", "drops"]:
            s.run(f"{ranks} ranks, groups, {body}", [*launcher(s, ranks), program, body], limit=60)
    s.run("4 ranks, groups, one is killed", [*launcher(s, 4), program, "kill", "1", "device"], limit=60, expect=137,
          contains=r"rank 1 was killed by SIGKILL")


def collectives(s):
    """Every collective on host buffers, in several groups at once."""
    program = program_of_tests(s, "t-collectives", "collectives in groups")
    counts = [3] if s.fake else [2, 3, 4]
    for ranks in counts if program else []:
        s.run(f"{ranks} ranks, collectives in groups", [*launcher(s, ranks), program, "groups"], limit=90)


def chosen_gpus(s):
    """`--gpus`: NVML numbers the GPUs, and the launcher reserves the chosen ones."""
    flags = ["--batch", 8, "--steps", 4 if s.fake else 50, "--skip-test", "--json"]
    weights = weights_of(s.run("without --gpus", train(s, 1, *flags), limit=60, judge=on_gpu))
    # A fake GPU is not reserved on this machine.
    env = {"MGPU_LOCK_DIR": os.path.join(s.scratch, "reservations")} if s.fake else {}
    for choice in ["0", "free"]:
        command = [s.program("mgpurun"), "-n", "1", "--gpus", choice, "--no-prefix", s.program("train_mnist"), *digits(s)]
        s.run(f"--gpus {choice}", [*command, *map(str, flags)], limit=60, env=env,
              judge=is_equal(weights, "a training without --gpus"))


def summed_and_evaluated(s):
    """Two ranks that add gradients up train the weights of the mean, bit for bit. Their checkpoint is evaluated on one rank."""
    length = ["--batch", 8, "--steps", 4] if s.fake else ["--batch", 128, "--epochs", 1]
    weights = weights_of(s.run("2 ranks, mean", train(s, 2, *length, "--skip-test", "--json"), limit=60, judge=on_gpu))
    folder = os.path.join(s.scratch, "evaluated")
    shutil.rmtree(folder, ignore_errors=True)
    run = s.run("2 ranks, --reduction sum", train(s, 2, *length, "--reduction", "sum", "--checkpoint-dir", folder, "--json"),
                limit=60, judge=is_equal(weights, "the mean"))
    trained = (run or {}).get("result") or {}
    def same_accuracy(result):
        found, expected = [each.get("test_acc") for each in ((result or {}), trained)]
        # Other batches may round differently: one image in a thousand.
        same = found is not None and expected is not None and abs(found - expected) < 1e-3
        return is_equal(weights, "the training")(result) or (None if same else f"test accuracy {found} instead of {expected}")
    s.run("1 rank, --evaluate", [*launcher(s, 1), s.program("train_mnist"), *digits(s), "--evaluate", folder, "--json"],
          limit=60, judge=same_accuracy)


def parallel(s):
    """What a step can do besides averaging: golden runs with each flag, world-size-invariant weights, a non-finite loss."""
    files = [os.path.join(s.golden or "", net + ".json") for net in (["lenet5"] if s.fake else ["lenet5", "deep"])]
    if s.data and all(map(os.path.exists, files)):
        for ranks in [1, 2]:
            for flags in ["--accumulate 4", "--gradients bf16", "--shard-optimizer on", "--world-size-invariant 8",
                          "--placement shared", "--placement host"]:
                s.run(f"{ranks} ranks, golden, {flags}", [*launcher(s, ranks), s.program("golden_check"), "--data", s.data,
                                                          *flags.split(), *files], limit=60, keep=" deviation .* bound ")
    else:
        s.skip("golden runs with flags", "MGPU_GOLDEN and MGPU_DATA are needed")
    weights, (net, batch, steps) = None, ("lenet5", 16, 5) if s.fake else ("keras", 128, 30)
    for ranks in [1, 2, 4]:
        flags = ["--net", net, "--batch", batch // ranks, "--steps", steps, "--world-size-invariant", 4, "--clip-norm", 1]
        run = s.run(f"{ranks} ranks that make no difference", train(s, ranks, *flags, "--skip-test", "--json"), limit=60,
                    judge=is_equal(weights, "one rank") if ranks > 1 else on_gpu)
        weights = weights or weights_of(run)
    s.run("2 ranks, a non-finite loss", train(s, 2, "--batch", 8, "--steps", 40, "--lr", "1e30", "--skip-test"), limit=60,
          expect=1, contains=re.escape("non-finite gradients (NaN or Inf) in tensor"))


def placements(s):
    """Where the weights are: the weights of two ranks that share the GPU (a sum of two has only one order), and speed."""
    nets, batch, steps = (["lenet5"], 4, 2) if s.fake else (["lenet5", "deep", "keras", "mlp-gelu"], 64, 20)
    for net in nets:
        flags = ["--net", net, "--kernels", "builtin", "--batch", batch, "--steps", steps, "--skip-test", "--json"]
        weights = weights_of(s.run(f"2 ranks, {net}", train(s, 2, *flags), limit=60, judge=on_gpu))
        s.run(f"2 ranks, {net}, shared", train(s, 2, *flags, "--placement", "shared"), limit=60,
              judge=is_equal(weights, "copies"))
        # The CPU's update may round otherwise.
        s.run(f"2 ranks, {net}, host", train(s, 2, *flags, "--placement", "host"), limit=60, judge=on_gpu)
        flags += ["--accumulate", 2]
        weights = weights_of(s.run(f"1 rank, {net}, 2 micro-batches", train(s, 1, *flags), limit=60, judge=on_gpu))
        s.run(f"2 ranks, {net}, layers", train(s, 2, *flags, "--placement", "layers"), limit=60,
              judge=is_equal(weights, "one rank"))
    for net in [] if s.fake else ["conv6", "keras", "deep", "lenet5", "layers", "ensemble2400", "ensemble4800"]:
        for placement, steps in [("replicated", 600), ("shared", 600), ("host", 100)]:
            s.run(f"1 rank, {net} 1024 bf16, {placement}",
                  train(s, 1, "--net", net, "--precision", "bf16", "--batch", 1024, "--steps", steps, "--schedule", "constant",
                        "--placement", placement, "--skip-test", "--json"), limit=60, judge=on_gpu)


def copied_images(s):
    """Images that are copied to the GPU for each step: the weights of images that stay there, and the speed of both."""
    for net, batch, steps in [("lenet5", 8, 25)] if s.fake else [("lenet5", 128, 3000), ("conv6", 1024, 300)]:
        flags = ["--net", net, "--precision", "bf16", "--batch", batch, "--steps", steps, "--skip-test", "--json"]
        weights = weights_of(s.run(f"{net}, images on the GPU", train(s, 1, *flags, "--data-on", "device"), limit=60, judge=on_gpu))
        s.run(f"{net}, images on the host", train(s, 1, *flags, "--data-on", "host"), limit=60,
              judge=is_equal(weights, "images on the GPU"))


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
    if run:
        run["result"] = {"kernels": launches(run.pop("lines"))}
        s.write()


def launches(lines):
    """One entry for each launch, from ncu's table, which has a row for each metric."""
    found = {}
    for row in csv.DictReader(lines):
        name = next((name for name, metric in METRICS.items() if metric == row.get("Metric Name")), None)
        if name:
            launch = found.setdefault(row["ID"], {"kernel": row["Kernel Name"].split("(")[0]})
            launch[name] = round(float(row["Metric Value"].replace(",", "")) * UNITS.get(row["Metric Unit"], 1.0), 3)
    return list(found.values())


def part_c(s):
    yield Item("nccl", "NCCL with one rank", 25, nccl_alone, required=True)
    yield Item("nccl", "2 ranks on one GPU", 50, nccl_shared, required=True)
    yield Item("killed", "a killed rank", 10, killed, required=True)
    yield Item("groups", "groups", 40, groups, required=True)
    yield Item("resume", "a resumed training", 25, resumed)
    yield Item("images", "images on the host", 20, copied_images)
    yield Item("evaluate", "--reduction sum, --evaluate", 25, summed_and_evaluated)
    yield Item("gpus", "--gpus", 15, chosen_gpus)
    yield Item("gelu", "GELU", 5, gelu)
    yield Item("uneven", "uneven data", 20, uneven)
    yield Item("groups", "collectives in groups", 60, collectives)
    yield Item("parallel", "options of a step", 45, parallel)
    yield Item("amx", "AMX", 15, tiles)
    yield Item("amx", "AMX, speed", 120, speed)
    yield Item("placements", "placements", 100, placements)
    # A process for each, because cuDNN's benchmark of PyTorch takes a minute or more in f32.
    for precision, ours, torch in [("tf32", 12, 30), ("f32", 15, 60)]:
        for net in ["conv6", "keras"]:
            if not s.fake:
                yield Item("throughput", f"{net} 1024 {precision} auto", ours,
                           lambda s, case=(net, 1024, precision): throughput(s, *case, "auto"))
            yield Item("torch", f"PyTorch, {net} in {precision}", torch,
                       lambda s, mode=(net, 1024, precision, "graphed"): pytorch(s, [mode], most=120))
    yield Item("ncu", "ncu", 20, ncu)
    for kind, seconds in [("racecheck", 50), ("synccheck", 10)]:
        yield Item("sanitizer", kind, seconds, lambda s, kind=kind: sanitizer(s, kind))
