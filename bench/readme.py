#!/usr/bin/env python3
"""Writes the figures of README.md and docs from the files in bench/results, or checks them.

    readme.py            writes every figure and table anew
    readme.py --check    changes nothing; prints each difference as FILE:LINE, exit code 1 if there is one

Two kinds of marks, both HTML comments, so that a reader does not see them:

    8.7<!-- figure: FILE.json KEY.PATH round=1 -->    the number before the comment is the value at that path
    <!-- table: NAME -->  …  <!-- /table -->          everything between is made by the function of that name below

A path has keys with dots between them; KEY[a=b,c=d] is the last element of a list whose members have these values.
`round` is the number of decimals (0 by default), `times` a factor, such as 100 for per cent. Standard library only.
"""

import functools
import json
import pathlib
import re
import sys

sys.dont_write_bytecode = True
import gpu_next  # noqa: E402
import hosts_collectives  # noqa: E402
import hosts_model  # noqa: E402
import hosts_train  # noqa: E402
import summarise_placements  # noqa: E402
import summarise_train  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "bench/README.md", *sorted(ROOT.glob("docs/src/*.md"))]
FIGURE = re.compile(r"([-\d.,]*\d)<!--\s+figure:\s+(\S+)\s+(\S+)((?:\s+\w+=\S+)*)\s+-->")
TABLE = re.compile(r"(?<=<!-- table: )([\w-]+)( -->\n)(.*?)(?=<!-- /table -->)", re.DOTALL)
OPENED = re.compile(r"<!--\s+(?:figure|table):")


@functools.cache
def result(name):
    return json.loads((RESULTS / name).read_text())


def pick(entries, **wanted):
    """The last entry with these values: a configuration that was measured again counts as it was last."""
    found = [entry for entry in entries if all(str(entry.get(key)) == str(value) for key, value in wanted.items())]
    return found[-1] if found else sys.exit(f"readme.py: no entry has {wanted}")


def look_up(name, path):
    value = result(name)
    for key, condition in re.findall(r"([^.\[\]]+)(?:\[([^\]]*)\])?", path):
        value = value[key]
        if condition:
            value = pick(value, **dict(part.split("=", 1) for part in condition.split(",")))
    return value


def short(value):
    """Two digits that count, or all before the point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def rows(*lines):
    """A table from its cells; the first line is the head."""
    head, *body = [f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |") for cells in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body]) + "\n"


CPU = "train-cpu-2026-11-29-epyc-2c.json"
LAUNCH = "launch-2026-11-23-xeon-2c.json"
ALLREDUCE = "allreduce-2026-11-21-xeon-2c.json"
# On private buffers, by the number of ranks.
ALLREDUCE_PRIVATE = {2: "allreduce-private-2026-11-29-epyc-2c.json", 4: "allreduce-private-4-ranks-2026-11-29-epyc-2c.json"}
# On private buffers that begin at byte 16 of a page.
COLLECTIVES_OFFSET = "collectives-offset16-2026-11-28-epyc-avx2-2c.json"
COLLECTIVES_SMALL = "collectives-small-2026-11-28-epyc-avx2-2c.json"


def gpu_file(*sections):
    """The newest result file of a real GPU that has these sections. Parts of a check may have been run on different days."""
    files = sorted((path.name for path in RESULTS.glob("gpu-*.json")), key=lambda name: (result(name)["date"], name))
    def has(name, section):
        entries = gpu_next.measurements(result(name)).get(section, [])
        # A file may have throughput in other precisions only.
        is_rate = section in ("throughput", "torch")
        return any(not is_rate or entry.get("precision") == "bf16" and "images_per_s" in entry for entry in entries)
    real = [name for name in files if not result(name).get("fake") and all(has(name, section) for section in sections)]
    return real[-1] if real else sys.exit(f"readme.py: no result file of a GPU has {', '.join(sections)}")


def gpu_measured(*sections):
    return gpu_next.measurements(result(gpu_file(*sections)))


def gpu_figure(section, net, batch, **wanted):
    """Images/s, of the last run with these settings; None if there was none."""
    entries = gpu_measured("throughput", "torch")[section]
    wanted = {"net": net, "batch": batch, "precision": "bf16", **wanted}
    found = [entry for entry in entries if all(entry.get(key) == value for key, value in wanted.items())]
    return next((entry["images_per_s"] for entry in reversed(found) if "images_per_s" in entry), None)


def gpu_origin(*sections):
    """A sentence that says where a table of figures comes from."""
    name = gpu_file(*sections)
    return f"On an {result(name)['machine']['device']}, {result(name)['date']} (`bench/results/{name}`):\n\n"


def gpu_name(name):
    """`H100`, from `NVIDIA H100 80GB HBM3`."""
    words = result(name)["machine"]["device"].split()
    return next((word for word in words if re.fullmatch(r"[A-Z]+\d+\w*", word)), words[-1])


def headline():
    ms = result(LAUNCH)["ms"]
    deep = pick(result(CPU)["figures"], net="deep", dtype="f32", ranks=2)
    ours = gpu_figure("throughput", "conv6", 1024, kernels="auto", mode="graph")
    torch = gpu_figure("torch", "conv6", 1024, mode="graphed")
    return rows(
        ["", "mgpurun", "PyTorch", "measured on"],
        ["start 8 processes and see them end", f"{short(ms['mgpurun']['median'])} ms",
         f"{short(ms['torchrun']['median'])} ms (`torchrun`)", "2 CPU cores"],
        ["train `conv6`, bf16, batch 1,024", f"{ours:,.0f} images/s", f"{torch:,.0f} images/s (CUDA graphs)",
         f"one {gpu_name(gpu_file('throughput', 'torch'))}"],
        ["train `deep`, f32, 2 ranks", f"{deep['ours']['images_per_s']:,.0f} images/s",
         f"{deep['pytorch']['images_per_s']:,.0f} images/s (DDP)", "2 CPU cores"],
    )


def gpu():
    cases = [(net, 1024) for net in ("conv6", "keras", "deep", "layers", "lenet5", "ensemble2400", "ensemble4800")]
    cases += [(net, 128) for net in ("conv6", "keras", "deep", "layers", "lenet5", "ensemble2400", "ensemble4800")]
    content = result(gpu_file("throughput", "torch"))
    version = (content["machine"].get("torch") or content["versions"]["torch"]).split("+")[0]
    version = ".".join(version.split(".")[:2])
    lines = [["network", "batch", "mgpurun", "mgpurun, `--kernels builtin`", f"PyTorch {version}, CUDA graphs",
              "mgpurun / PyTorch"]]
    shown = lambda rate: "not measured" if rate is None else f"{rate:,.0f}"
    for net, batch in cases:
        ours, builtin = [gpu_figure("throughput", net, batch, kernels=kernels, mode="graph") for kernels in ("auto", "builtin")]
        torch = gpu_figure("torch", net, batch, mode="graphed")
        ratio = f"{ours / torch:.2f}" if ours and torch else "not measured"
        if ours or builtin or torch:
            lines.append([f"`{net}`", f"{batch:,}", shown(ours), shown(builtin), shown(torch), ratio])
    return gpu_origin("throughput", "torch") + rows(*lines)


def gpu_accuracy():
    measured = gpu_measured("accuracy")
    # The script of 2026-11-23 has left an accuracy below its bound out of `accuracy`.
    runs = [run["result"] for run in measured.get("runs", []) if run["group"] == "accuracy"]
    found = [{**run, "test_accuracy": run["test_acc"]} for run in runs if run] or measured["accuracy"]
    lines = [[f"`{run['net']}`", f"{run['batch']:,}", run["epochs"], f"{run['steps']:,}", f"{run['test_accuracy']:.2%}"]
             for run in found]
    return gpu_origin("accuracy") + rows(["network", "batch", "epochs", "steps", "test accuracy"], *lines)


def gpu_steps():
    """Steps with this project's kernels, beside the least possible."""
    name = newest("gpu-kernels")
    lines = [["network", "batch", "kernels", "MB", "least MB", "least, µs", "µs", "µs before"]]
    lines += [[f"`{step['net']}`", f"{step['batch']:,}", step["kernels"], short(step["megabytes"]), short(step["least_megabytes"]),
               f"{step['least_us']:,}", f"{step['seen_us']:,}", f"{step['seen_before_us']:,}"] for step in result(name)["steps"]]
    return f"On an {result(name)['machine']['device']}, {result(name)['date']} (`bench/results/{name}`):\n\n" + rows(*lines)


def gpu_layers():
    """Passes of layers with this project's kernels and with libraries."""
    name = newest("gpu-kernels")
    passes = [entry for entry in result(name)["layers"] if entry["warps_us"] >= 100]
    time = lambda value: "none" if value is None else f"{value:,.0f}"
    lines = [["layer, 1,024 images", "pass", "built in, by warps", "built in", "library", "least"]]
    lines += [[entry["layer"].removeprefix("1024x"), entry["pass"], time(entry["warps_us"]), time(entry["built_in_us"]),
               time(entry["library_us"]), time(entry["bound_us"])] for entry in passes]
    return rows(*lines)


def gpu_what_next():
    name = gpu_file("throughput", "torch", "layers", "profile")
    return gpu_next.markdown(name, result(name))


def train_cpu():
    """One row for each network and mode."""
    measured = result(CPU)
    version = ".".join(measured["versions"]["torch"].split(".")[:2])
    lines = [["network", "ranks × threads", "mgpurun, images/s", f"PyTorch {version}, images/s", "ratio", "ratio in bf16",
              "mgpurun, MiB", "PyTorch, MiB"]]
    modes = list(dict.fromkeys((figure["ranks"], figure["threads"]) for figure in measured["figures"]))
    for net in measured["nets"]:
        for ranks, threads in modes:
            figure = pick(measured["figures"], net=net, dtype="f32", ranks=ranks, threads=threads)
            sides = [figure[side] for side in ("ours", "pytorch")]
            ratio = f"{figure['ratio']:.1f}"
            if len(figure["pytorch"]["rounds"]) < measured["rounds"]:
                ratio += f" ({len(figure['pytorch']['rounds'])} of {measured['rounds']} rounds)"
            bf16 = "not measured"
            if net in summarise_train.BF16:
                bf16 = f"{pick(measured['figures'], net=net, dtype='bf16', ranks=ranks, threads=threads)['ratio']:.1f}"
            lines.append([f"`{net}`", f"{ranks} × {threads}", *[f"{side['images_per_s']:,.0f}" for side in sides], ratio,
                          bf16, *[f"{side['memory_mib']:,.0f}" for side in sides]])
    return rows(*lines)


def train_cpu_misses():
    """The figures that miss a target of bench/README.md, as a list."""
    return "".join(f"- {line}\n" for line in summarise_train.misses(result(CPU))) or "None.\n"


def times_of(program, times):
    """The cells of one program, from the times of all programs at each size."""
    return [short(time[program]) for time in times]


def best_other(times):
    """The cells of the fastest of the others."""
    return [short(min(us for name, us in time.items() if name not in ("mgpu", "before"))) for time in times]


def allreduce_rows(sizes, files):
    """All-reduces at these sizes, from the file for each number of ranks."""
    lines = [["program", *sizes]]
    for ranks, name in files.items():
        measured = pick(result(name)["figures"], collective="all_reduce", ranks=ranks)["sizes"]
        times = [pick(measured, bytes=size)["us"] for size in sizes.values()]
        lines.append([f"mgpurun, {ranks} ranks", *times_of("mgpu", times)])
        lines.append([f"best of Intel MPI, MPICH, Open MPI, gloo, {ranks} ranks", *best_other(times)])
    return rows(*lines)


def allreduce():
    sizes = {"4 B": 4, "1 KiB": 1 << 10, "16 KiB": 1 << 14, "256 KiB": 1 << 18, "4 MiB": 1 << 22, "64 MiB": 1 << 26}
    return allreduce_rows(sizes, {ranks: ALLREDUCE for ranks in (2, 4)})


def allreduce_private():
    sizes = {"256 B": 256, "4 KiB": 1 << 12, "16 KiB": 1 << 14, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24,
             "64 MiB": 1 << 26}
    return allreduce_rows(sizes, ALLREDUCE_PRIVATE)


def before_and_after(name, collectives, sizes):
    """Collectives on 2 ranks at these sizes. Of each, the fastest round: the cores share a cache at some times only."""
    lines = [["collective", "program", *sizes]]
    for collective in collectives:
        measured = pick(result(name)["figures"], collective=collective, ranks=2)["sizes"]
        ranges = [pick(measured, bytes=size)["us_range"] for size in sizes.values()]
        times = [{name: fastest for name, (fastest, _) in each.items()} for each in ranges]
        lines.append([collective.replace("_", "-"), "mgpurun", *times_of("mgpu", times)])
        lines.append(["", "mgpurun before", *times_of("before", times)])
        lines.append(["", "best of Intel MPI, MPICH, Open MPI", *best_other(times)])
    return rows(*lines)


def collectives_offset():
    sizes = {"16 KiB": 1 << 14, "64 KiB": 1 << 16, "256 KiB": 1 << 18, "1 MiB": 1 << 20, "4 MiB": 1 << 22}
    return before_and_after(COLLECTIVES_OFFSET, ["broadcast", "all_gather", "all_reduce"], sizes)


def collectives_small():
    sizes = {"16 B": 16, "64 B": 64, "256 B": 256, "1 KiB": 1 << 10, "4 KiB": 1 << 12}
    return before_and_after(COLLECTIVES_SMALL, ["all_reduce", "reduce_scatter", "all_gather", "broadcast"], sizes)


def launch():
    names = {"mgpurun": "mgpurun", "mpich": "MPICH's mpiexec", "openmpi": "Open MPI's mpiexec",
             "intel-mpi": "Intel MPI's mpiexec", "torchrun": "torchrun"}
    ms = result(LAUNCH)["ms"]
    lines = [[name, short(ms[key]['median']), short(ms[key]['ratio'])] for key, name in names.items()]
    return rows(["launcher", "median, ms", "times mgpurun's"], *lines)


def quiet():
    processes = result("quiet-2026-11-21-xeon-2c.json")["processes"]
    return rows(["process", "share of a core", "memory (PSS)"], *[
        [name, f"{of['processor_percent']:.3f}%", f"{of['memory_kib']['pss'] / 1024:.1f} MiB"]
        for name, of in processes.items()])


def chaos():
    what = {"death": "a rank dies", "early": "a rank dies before it joins", "silence": "a rank makes no progress (timeout: 1 s)",
            "leak": "a rank leaves a child behind", "launcher": "the launcher gets a signal",
            "guardian": "the guardian gets a signal", "interrupt": "the whole run gets a signal",
            "wrapped": "no fault; ranks are started by wrappers", "limits": "low limits on open files or file sizes",
            "flood": "a rank floods connections or output", "mixed": "ranks disagree on steps, rank or world size"}
    made = result("chaos-2026-11-22-epyc-2c.json")["seconds"]
    lines = [[what[kind], times["runs"], *[f"{times[key]:.3f}" for key in ("median", "max")]] for kind, times in made.items()]
    return rows(["fault", "jobs", "median, s", "longest, s"], *lines)


def communication():
    """One row for each network."""
    measured = result("communication-2026-11-22-xeon-2c.json")["lines"]
    lines = [["network", "in collectives", "of these: waiting for the other rank", "in collectives, with `--overlap`",
              "longer step with `--overlap`"]]
    for net in dict.fromkeys(line["net"] for line in measured):
        plain, overlap = [pick(measured, net=net, overlap=overlap, bucket_mib=1.0) for overlap in (False, True)]
        longer = overlap["ms_per_step"] / plain["ms_per_step"] - 1
        lines.append([f"`{net}`", f"{plain['communication']:.1%}", f"{plain['waiting']:.1%}",
                      f"{overlap['communication']:.1%}", f"{longer:.1%}"])
    return rows(*lines)


def logits():
    lines = [[f"`{line['net']}`", f"{line['deviation']:.1e}", f"{line['largest_logit']:.1f}",
              f"{line['same_digit']} of {line['images']}"] for line in result("logits-2026-11-22-xeon-2c.json")["lines"]]
    return rows(["network, after 20 steps", "largest deviation of a logit", "largest logit", "same digit"], *lines)


def accuracy():
    files = sorted((path.name for path in RESULTS.glob("accuracy-*.json")), key=lambda name: (result(name)["date"], name))
    if not files:
        return "No result file has accuracies yet: `bench/accuracy.py` measures them.\n"
    made = result(files[-1])
    groups = {}
    for row in made["rows"]:
        groups.setdefault((row["flags"], row["ranks"], row["precision"]), []).append(row)
    averaged = any("test_accuracy_average" in row for row in made["rows"])
    lines = [["flags", "ranks", "precision", "seeds", "test accuracy"] + ["with averaged weights"] * averaged]
    for (flags, ranks, precision), entries in groups.items():
        cells = [", ".join(f"{row[key]:.2f}%" for row in entries if key in row)
                 for key in ("test_accuracy", "test_accuracy_average")]
        seeds = ", ".join(str(row["seed"]) for row in entries)
        lines.append([f"`{flags}`", ranks, precision, seeds, *cells[:1 + averaged]])
    machine = made["machine"]
    return (f"Measured on {made['date']} on {machine['cores']} cores ({machine['processor']}), "
            f"`bench/results/{files[-1]}`:\n\n") + rows(*lines)


def newest(kind):
    """The name of the newest result file of a kind; None without one."""
    files = sorted((path.name for path in RESULTS.glob(f"{kind}-*.json")), key=lambda name: (result(name)["date"], name))
    files = [name for name in files if not result(name).get("quick")]
    return files[-1] if files else None


def placements():
    name = newest("placements")
    return name and summarise_placements.Figures(result(name))


def one_gpu():
    rate = lambda net, batch: gpu_figure("throughput", net, batch, kernels="auto", mode="graph")
    return summarise_placements.Gpu(gpu_name(gpu_file("throughput", "torch")), rate)


def placement_table(summarise, with_origin=False):
    """A table of measured placements; a sentence without a result file."""
    name = newest("placements")
    if not name:
        return "No result file has these figures yet: `bench/placements.py` measures them.\n"
    made, figures = result(name), placements()
    table = rows(*summarise(figures))
    if not with_origin:
        return table
    return (f"Measured on {made['date']} on {figures.cores} cores ({made['machine']['processor']}), `bench/results/{name}`. "
            f"The median of {made['rounds']} rounds; the widest range of a cell is {summarise_placements.widest(figures):.0%} "
            f"of its median.\n\n") + table


def gpu_placement_table(summarise):
    return rows(*summarise(result(newest("gpu-placements"))["placements"]))


def ensemble():
    name = newest("ensemble")
    if not name:
        return "No result file has these accuracies yet: `bench/ensemble.py` measures them.\n"
    made = result(name)
    lines = [["", "test accuracy"], *([f"`{row['of']}`" if row["of"].startswith("ensemble") else row["of"],
                                       f"{row['test_accuracy']:.2f}%"] for row in made["rows"])]
    return (f"`mgpurun -n {made['ranks']} ensemble {made['flags']}`, {made['seconds']:.0f} s in total "
            f"(`bench/results/{name}`):\n\n") + rows(*lines)


def ddp():
    """Steps of PyTorch's DDP with gloo and with the hook."""
    name = newest("ddp")
    if not name:
        return "No result file has these figures yet: `mgpurun -n 2 bench/ddp.py` measures them.\n"
    made = result(name)
    lines = [["network", "gradients", "ranks", "gloo", "hook", "without communication", "communication: gloo", "hook"]]
    kind_of = lambda row: (row["net"], row["ranks"], row.get("bucket_view", False))  # noqa: E731
    for kind in dict.fromkeys(map(kind_of, made["rows"])):
        steps = {row["mode"]: row for row in made["rows"] if kind_of(row) == kind}
        net, ranks, is_view = kind
        times = [f"{steps[mode]['ms_per_step']:.0f} ms" for mode in ("gloo", "mgpu", "none")]
        shares = [f"{100 * steps[mode]['communication']:.0f} %" for mode in ("gloo", "mgpu")]
        gradients = f"{steps['mgpu']['gradients_mb']:.0f} MB" + (", views of buckets" if is_view else "")
        lines.append([f"`{net}`", gradients, ranks, *times, *shares])
    machine = made["machine"]
    return (f"Median time of a step, measured on {made['date']} on {machine['cores']} cores ({machine['processor']}) with PyTorch "
            f"{made['versions']['torch']}, `bench/results/{name}`:\n\n") + rows(*lines)


def hosts_table(kind, script, make_rows):
    """A table of the newest result file of a kind; a sentence without one."""
    name = newest(kind)
    if not name:
        return f"No result file has these figures yet: `bench/{script}` measures them.\n"
    made = result(name)
    machine = made["machine"]
    return (f"Measured on {made['date']} with hosts that are namespaces of one machine of {machine['cores']} cores "
            f"({machine['processor']}), `bench/results/{name}`:\n\n") + rows(*make_rows(made))


HOSTS_SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]


def hosts_misses():
    name = newest("hosts-collectives")
    missed = hosts_collectives.misses(result(name)) if name else []
    return "".join(f"- {line}\n" for line in missed) or "None.\n"


def hosts_fit():
    """What was fitted and how well it predicts, then the predictions."""
    name = newest("hosts-model")
    table = hosts_table("hosts-model", "hosts_model.py", hosts_model.check_rows)
    return table if not name else f"{table}\n{hosts_model.verdict(result(name))}\n"


def hosts_paper(make_rows, *of_link):
    """A table of the model, which needs the measured time of a sum."""
    name = newest("hosts-model")
    if not name:
        return "No result file has the time of a sum yet: `bench/hosts_model.py` measures it.\n"
    gamma = result(name)["gamma"]
    origin = "".join(f"With {hosts_model.parameter_words(hosts_model.link(gbits, gamma))}:\n\n" for gbits in of_link)
    return origin + rows(*make_rows(*of_link, gamma))


TABLES = {
    "accuracy": accuracy, "headline": headline, "gpu": gpu, "gpu-accuracy": gpu_accuracy,
    "gpu-steps": gpu_steps, "gpu-layers": gpu_layers, "gpu-next": gpu_what_next, "train-cpu": train_cpu,
    "train-cpu-misses": train_cpu_misses, "allreduce": allreduce, "allreduce-private": allreduce_private,
    "collectives-offset": collectives_offset, "collectives-small": collectives_small,
    "launch": launch, "quiet": quiet, "chaos": chaos,
    "communication": communication, "logits": logits, "ensemble": ensemble,
    "document-000": lambda: rows(*summarise_placements.document_000(placements(), one_gpu())),
    "document-001": lambda: rows(*summarise_placements.document_001(placements(), one_gpu())),
    "document-003": lambda: rows(*summarise_placements.document_003(placements(), one_gpu())),
    "document-004": lambda: rows(*summarise_placements.document_004(placements(), one_gpu())),
    "document-004-test": lambda: rows(*summarise_placements.document_004_test()),
    "hosts-collectives": lambda: hosts_table("hosts-collectives", "hosts_collectives.py",
                                             lambda made: hosts_collectives.rows_of(made, HOSTS_SIZES)),
    "hosts-collectives-misses": hosts_misses,
    "hosts-rate": lambda: hosts_table("hosts-rate", "hosts_collectives.py --tbf 1gbit",
                                      lambda made: hosts_collectives.rows_of(made, HOSTS_SIZES)),
    "hosts-train": lambda: hosts_table("hosts-train", "hosts_train.py", hosts_train.speed_rows),
    "hosts-bytes": lambda: hosts_table("hosts-train", "hosts_train.py", hosts_train.bytes_rows),
    "hosts-model": hosts_fit,
    "hosts-model-25": lambda: hosts_paper(hosts_model.paper_rows, 25),
    "hosts-model-400": lambda: hosts_paper(hosts_model.paper_rows, 400),
    "hosts-model-crossover": lambda: hosts_paper(hosts_model.crossover_rows),
    "ddp": ddp,
    "placements-speed": lambda: placement_table(summarise_placements.speed, with_origin=True),
    "placements-bytes": lambda: placement_table(summarise_placements.traffic),
    "placements-memory": lambda: placement_table(summarise_placements.memory),
    "placements-gpu-speed": lambda: gpu_placement_table(summarise_placements.gpu_speed),
    "placements-gpu-memory": lambda: gpu_placement_table(summarise_placements.gpu_memory),
    "placements-shares": lambda: placement_table(summarise_placements.shares),
}


def renew(path, problems):
    """The text of a page with all figures as they should be."""
    text = path.read_text()
    marks = 0

    def complain(match, expected, found):
        line = text.count("\n", 0, match.start()) + 1
        problems.append(f"{path.relative_to(ROOT)}:{line}: expected {expected}, found {found}")

    def figure(match):
        nonlocal marks
        marks += 1
        found, name, key, options = match.groups()
        options = dict(option.split("=") for option in options.split())
        value = look_up(name, key) * float(options.get("times", 1))
        expected = f"{value:,.{int(options.get('round', 0))}f}"
        if found != expected:
            complain(match, f"{expected} ({name} {key})", found)
        return expected + match[0][len(found):]

    def table(match):
        nonlocal marks
        marks += 1
        name, end, found = match.groups()
        expected = f"\n{TABLES[name]()}\n"
        if found != expected:
            pairs = zip([*expected.splitlines(), "the end"], [*found.splitlines(), "the end"])
            wanted, there = next(pair for pair in pairs if pair[0] != pair[1])
            complain(match, f"in table {name}: {wanted}", there)
        return name + end + expected

    renewed = TABLE.sub(table, FIGURE.sub(figure, text))
    if marks != len(OPENED.findall(text)):
        problems.append(f"{path.relative_to(ROOT)}: a mark is malformed: {len(OPENED.findall(text))} begin, {marks} are whole")
    for name in re.findall(r"bench/results/([\w.-]+\.(?:json|svg|txt))\b", text):
        if not (RESULTS / name).exists():
            problems.append(f"{path.relative_to(ROOT)}: there is no bench/results/{name}")
    return text, renewed


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    problems = []
    for path in PAGES:
        text, renewed = renew(path, problems)
        if renewed != text and not sys.argv[1:]:
            path.write_text(renewed)
            print(f"{path.relative_to(ROOT)}: written anew")
    if sys.argv[1:] and problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
