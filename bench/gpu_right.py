"""Part A of gpu_check.py: is everything right? Standard library only."""
import glob
import json
import os
import re

import provenance
from gpu_commands import NETS, Item, launcher, on_gpu, train, working_tool


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


def trial(s):
    """`mgpurun doctor --test`: shared memory, copies, peer access and NCCL of this machine, with figures."""
    run = s.run("doctor --test", [s.program("mgpurun"), "doctor", "--test", "--json"], limit=30)
    report = (run or {}).get("result") or {}
    if run:
        # The other sections are those of `doctor`, with paths.
        tests = [section for section in report.get("sections", []) if section["title"].startswith("Test ")]
        run["result"] = {"verdict": report.get("verdict"), "tests": tests}
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
        # It stays on the machine.
        found.pop("uuid", None)
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
    # An accuracy below the bound is a figure, too.
    if result and result.get("test_acc") is not None and not s.fake:
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
    yield Item("doctor", "doctor, libraries", 25, doctor, required=True)
    yield Item("doctor", "doctor --test", 20, trial)
    yield Item("kernels", "quick, memcheck", 90, memcheck)
    yield Item("kernels", "all", 90, all_kernels, required=True)
    yield Item("accuracy", "conv6", 15, lambda s: accuracy(s, "conv6", 0.989, "--epochs", 10, "--batch", 1024),
               required=True)
    first, rest = (["lenet5"], []) if s.fake else (NETS[:5], NETS[5:])
    narrower = ["tf32"] if s.fake else ["tf32", "fp16"]
    for nets, precisions in [(first, ["f32", "bf16"]), (rest, ["f32", "bf16"]), (first + rest, narrower)]:
        for net in nets:
            for precision in precisions:
                for choice in ["auto", "builtin"]:
                    yield Item("golden", f"{net} {precision} {choice}", 5,
                               lambda s, case=(net, precision, choice): golden(s, *case),
                               required=net in first and precision not in narrower)
    yield Item("kernels", "of libraries", 60, library_kernels)
    if not s.fake:
        yield Item("accuracy", "keras", 30, lambda s: accuracy(s, "keras", 0.989, "--epochs", 12))
        # H100s have reached 98.97%. Bits, and so a few of the 10,000 test images, depend on the algorithms that were the fastest:
        # the bound is more than twice the standard deviation of a count of 100 errors away from that. A training that has learned
        # only what this one knows after 4 of its 9 epochs (98.6%) does not reach it.
        yield Item("accuracy", "deep", 10, lambda s: accuracy(s, "deep", 0.987, "--steps", 2000, "--batch", 256))
