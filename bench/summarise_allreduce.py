"""Summarises the lines of many runs: medians, ratios and a table. Standard library only.

    summarise_allreduce.py LINES.jsonl OUT.json --provenance JSON --rounds N [--version NAME=V]... [--skipped TEXT]...
"""

import argparse
import json
import statistics
from collections import defaultdict

import provenance

OURS = "mgpu"
# An earlier state of ours.
BEFORE = "before"


def summarise(lines):
    """One entry for each collective and number of ranks, or layout of hosts, with ascending sizes; our implementation comes first."""
    times = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    bounds = defaultdict(lambda: defaultdict(list))
    for line in lines:
        key = (line["collective"], line["ranks"], line.get("layout"))
        times[key][line["bytes"]][line["impl"]].append(line["us_p50"])
        if "bound_us" in line:
            bounds[key][line["bytes"]].append(line["bound_us"])
    figures = []
    for key, sizes in times.items():
        collective, ranks, layout = key
        names = {name for of_size in sizes.values() for name in of_size}
        contenders = sorted(names, key=lambda name: (name != OURS, name != BEFORE, name))
        figure = {"collective": collective, "ranks": ranks, "contenders": contenders, "sizes": []}
        if layout:
            figure["layout"] = layout
        for size in sorted(sizes):
            measured = {name: sizes[size][name] for name in contenders if name in sizes[size]}
            medians = {name: round(statistics.median(rounds), 2) for name, rounds in measured.items()}
            ranges = {name: [min(rounds), max(rounds)] for name, rounds in measured.items()}
            entry = {"bytes": size, "us": medians, "us_range": ranges}
            if bounds[key][size]:
                entry["bound_us"] = round(statistics.median(bounds[key][size]), 4)
            peers = {name: time for name, time in medians.items() if name not in (OURS, BEFORE)}
            if peers and OURS in medians:
                entry["best_peer"] = min(peers, key=peers.get)
                entry["ratio"] = round(peers[entry["best_peer"]] / medians[OURS], 3)
            figure["sizes"].append(entry)
        figures.append(figure)
    return figures


def size_name(size):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def print_tables(figures):
    for figure in figures:
        heading = f"{figure['collective']} on {figure['ranks']} rank{'s' if figure['ranks'] > 1 else ''}"
        print(f"\n{heading}: microseconds; ratio is the best peer's time by ours")
        columns = [*figure["contenders"], "memory"]
        print(f"{'size':>10}" + "".join(f"{name:>12}" for name in columns) + f"{'ratio':>8}")
        for entry in figure["sizes"]:
            times = [entry["us"].get(name) for name in figure["contenders"]]
            cells = [f"{'-':>12}" if time is None else f"{time:12.2f}" for time in times]
            cells.append(f"{entry['bound_us']:12.2f}" if "bound_us" in entry else f"{'-':>12}")
            cells.append(f"{entry['ratio']:8.2f} {entry['best_peer']}" if "ratio" in entry else f"{'-':>8}")
            print(f"{size_name(entry['bytes']):>10}" + "".join(cells))
    ratios = [entry["ratio"] for figure in figures for entry in figure["sizes"] if "ratio" in entry]
    if ratios:
        ahead = sum(ratio > 1 for ratio in ratios)
        print(f"\nahead of the best peer in {ahead} of {len(ratios)} figures; geometric mean of the ratios "
              f"{statistics.geometric_mean(ratios):.2f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("lines")
    parser.add_argument("out")
    parser.add_argument("--provenance", type=json.loads, required=True, help="what provenance.py prints")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--version", action="append", default=[])
    parser.add_argument("--skipped", action="append", default=[])
    args = parser.parse_args()
    with open(args.lines) as lines:
        figures = summarise([json.loads(line) for line in lines])
    result = {
        "what": "p50 of an operation in microseconds, f32 sum in place, the median of several rounds",
        **args.provenance,
        "rounds": args.rounds,
        "versions": dict(version.split("=", 1) for version in args.version),
        "skipped": args.skipped,
        "figures": figures,
    }
    provenance.write(args.out, result)
    print_tables(figures)


if __name__ == "__main__":
    main()
