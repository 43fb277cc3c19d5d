"""Summarises the runs of train.py, and prints the README's table and missed targets of a result. Standard library only.

    summarise_train.py RESULT.json
"""

import json
import statistics
import sys
from collections import defaultdict

from train_work import work

# Our throughput divided by PyTorch's, in f32, in each mode.
RATIOS = {"lenet5": 2.0, "conv6": 2.0, "keras": 1.6, "deep": 1.5, "layers": 1.5, "ensemble2400": 1.4}
BF16_RATIO = 1.3
# Networks that are also measured in bf16.
BF16 = ("deep", "keras", "layers", "ensemble2400", "conv6")
# Two ranks with half of the cores each, divided by one rank with all of them.
RANKS_RATIO = 0.97


def of_side(runs, flop, peak):
    rates = [run["images_per_s"] for run in runs]
    rate = statistics.median(rates)

    def most(key):
        return max((run[key] for run in runs if run[key] is not None), default=None)

    return {
        "images_per_s": round(rate, 1),
        "rounds": rates,
        "ms_per_step": round(statistics.median(run["ms_per_step"] for run in runs), 3),
        "memory_mib": most("memory_mib"),
        "training_mib": most("training_mib"),
        "file_mib": most("file_mib"),
        "gflops": round(rate * flop / 1e9, 1),
        "peak_share": round(rate * flop / 1e9 / peak, 3) if peak else None,
    }


def summarise(lines, profiles):
    """One figure for each network, dtype and mode, in the order of the measurements.

    The peak is what `train_mnist --profile` reports for one rank with all cores, in f32: there is no share of it in bf16.
    """
    groups = defaultdict(lambda: defaultdict(list))
    for line in lines:
        groups[line["net"], line["dtype"], line["ranks"], line["threads"], line["steps"]][line["who"]].append(line)
    figures = []
    for (net, dtype, ranks, threads, steps), sides in groups.items():
        flop = work(net)[0]
        peak = profiles.get(net, {}).get("peak_gflops") if dtype == "f32" else None
        figure = {"net": net, "dtype": dtype, "ranks": ranks, "threads": threads, "steps": steps, "flop_per_image": flop}
        figure |= {side: of_side(sides[side], flop, peak) for side in ("ours", "pytorch") if side in sides}
        if "ours" in figure and "pytorch" in figure:
            theirs = {run["round"]: run["images_per_s"] for run in sides["pytorch"]}
            ratios = [run["images_per_s"] / theirs[run["round"]] for run in sides["ours"] if run["round"] in theirs]
            figure["ratio"] = round(figure["ours"]["images_per_s"] / figure["pytorch"]["images_per_s"], 3)
            # Each side may have failed in different rounds.
            figure["ratio_range"] = [round(min(ratios), 3), round(max(ratios), 3)] if ratios else None
        figures.append(figure)
    return figures


def table(result):
    """The README's table; figures of several modes share a cell, separated by dots."""
    figures = {(f["net"], f["dtype"], f["ranks"], f["threads"]): f for f in result["figures"]}
    modes = list(dict.fromkeys((f["ranks"], f["threads"]) for f in result["figures"]))

    def cell(net, dtype, show):
        shown = [show(figures.get((net, dtype, *mode), {})) for mode in modes]
        return " · ".join(shown) if any(text != "–" for text in shown) else "–"

    def value(side, key, form):
        def show(figure):
            found = figure.get(side, {}).get(key)
            return "–" if found is None else format(found, form)
        return show

    def ratio(figure):
        return f"{figure['ratio']:.2f}" if "ratio" in figure else "–"

    def memory(figure):
        return f"{value('ours', 'memory_mib', ',.0f')(figure)} / {value('pytorch', 'memory_mib', ',.0f')(figure)}"

    written = " · ".join(f"{ranks} rank{'s' if ranks > 1 else ''} × {threads} thread{'s' if threads > 1 else ''}"
                         for ranks, threads in modes)
    lines = [
        f"Images a second, {written}; peak memory of all ranks in MiB, ours / PyTorch's:",
        "",
        "| network | ours | PyTorch | ratio | bf16 ratio | memory | of the peak |",
        "|---|---|---|---|---|---|---|",
    ]
    for net in dict.fromkeys(f["net"] for f in result["figures"]):
        cells = [cell(net, "f32", value(side, "images_per_s", ",.0f")) for side in ("ours", "pytorch")]
        cells += [cell(net, "f32", ratio), cell(net, "bf16", ratio), cell(net, "f32", memory)]
        cells.append(cell(net, "f32", value("ours", "peak_share", ".0%")))
        lines.append(f"| `{net}` | {' | '.join(cells)} |")
    return lines


def unmeasured(result):
    """Requested comparisons without figures."""
    there = {(f["net"], f["dtype"], f"{f['ranks']}x{f['threads']}") for f in result["figures"] if "ratio" in f}
    return [f"{net} {dtype} {mode}" for net in result["nets"] for dtype in result["dtypes"] for mode in result["modes"]
            if (dtype == "f32" or net in BF16) and (net, dtype, mode) not in there]


def misses(result):
    """Measured figures below their targets, one line each."""
    found = []
    by_net = defaultdict(dict)
    for figure in result["figures"]:
        net, dtype, ranks = figure["net"], figure["dtype"], figure["ranks"]
        name = f"{net} {dtype} {ranks}x{figure['threads']}"
        target = BF16_RATIO if dtype == "bf16" else RATIOS.get(net)
        if target and "ratio" in figure and figure["ratio"] < target:
            span = figure["ratio_range"]
            rounds = f", rounds {span[0]:.2f} to {span[1]:.2f}" if span else ""
            found.append(f"{name}: {figure['ratio']:.2f} of PyTorch's speed{rounds}; target {target}")
        for key, when in (("memory_mib", "at the peak"), ("training_mib", "while training")):
            ours, theirs = (figure.get(side, {}).get(key) for side in ("ours", "pytorch"))
            if ours and theirs and ours > theirs:
                found.append(f"{name}: {ours:,.0f} MiB {when} where PyTorch takes {theirs:,.0f}")
        if "ours" in figure:
            by_net[net, dtype][ranks, ranks * figure["threads"]] = figure["ours"]["images_per_s"]
    for (net, dtype), rates in by_net.items():
        for (ranks, cores), rate in rates.items():
            alone = rates.get((1, cores))
            if ranks == 2 and alone and rate < RANKS_RATIO * alone:
                found.append(f"{net} {dtype}: two ranks make {rate / alone:.2f} of one rank's speed; target {RANKS_RATIO}")
    return found


def report(result):
    print("\n".join(table(result)))
    missed = misses(result)
    print(f"\n{len(missed)} targets missed" + (":" if missed else ""))
    for line in missed:
        print(f"  MISSED {line}")
    for name in unmeasured(result):
        print(f"  NOT MEASURED {name}")
    for line in result["skipped"]:
        print(f"  skipped {line}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    with open(sys.argv[1]) as file:
        report(json.load(file))
