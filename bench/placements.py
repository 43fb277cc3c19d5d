#!/usr/bin/env python3
"""Measures the placements of a training on this machine's processor, by network and number of ranks: images/s, memory, bytes that
cross between ranks, share of communication.

    MGPU_DATA=…/mnist bench/placements.py [NET…] [--ranks 1,2,4] [--rounds 3] [--minutes 12] [--quick] [--out FILE.json]

Every run trains 128 images per step in total, with one thread per rank, so that 2 ranks have twice the processor of one.
`layers` has a stage on each rank, `layers:2` on 4 ranks is a grid of 2 stages × 2 replicas; both train 8 micro-batches per step.
On one rank nothing can be placed: placements other than `replicated` run there in the first round only.

In every round each cell (network × ranks × placement) runs once, so that background load does not hit one cell alone; figures
have the median, the least and the greatest of the rounds. A run that fails, or is refused, leaves its reason in the cell. No run
begins after `--minutes`. The result, bench/results/placements-<date>-<machine>.json, is rewritten after every run;
`bench/readme.py` makes the tables of docs/src/placements.md from the newest one.

`--quick` runs two small networks once, with few steps: a test of the script, whose figures say nothing.
Needs `cargo build --release`, or the folder of the programs in BIN. Run it on a quiet machine: ranks that share cores with other
programs wait for each other. Exit code: 1 if a cell has no figures.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time

import provenance
from train_work import NETS, outputs, work

IMAGES = 128
MICRO_BATCHES = 8
# Timed steps of a run: one to five seconds on one core. train_mnist leaves WARM_UP more out.
STEPS = {"lenet5": 200, "deep": 10, "keras": 4, "ensemble2400": 20, "ensemble4800": 14, "layers": 4, "conv6": 3}
WARM_UP = 3
QUICK = {"lenet5": 6, "deep": 2}
# Time limit of a run.
LIMIT_S = 180
FLOAT = 4
# Keys of `train_mnist --json` that are single numbers.
KEYS = ("images_per_s", "ms_per_step", "communication", "waiting", "idle", "bytes_per_step")


def cells(nets, all_ranks):
    """Network, number of ranks and placement of each cell."""
    for net in nets:
        for ranks in all_ranks:
            for placement in ("replicated", "shared", "host", "layers", "layers:2"):
                if placement != "layers:2" or ranks == 4:
                    yield net, ranks, placement


def replicas(ranks, placement):
    """The number of copies of the network."""
    if placement.startswith("layers"):
        stages = int(placement.partition(":")[2] or ranks)
        return ranks // stages
    return ranks


def formula(net, ranks, placement, cuts):
    """Bytes that cross between ranks in a step.

    Gradients and parameters of S bytes cross n − 1 times each between n copies, whether all ranks reduce them, rank 0, or the
    owners of their shards. At each cut, activations cross in the forward pass and their gradients in the backward pass.
    """
    copies = 2 * (replicas(ranks, placement) - 1) * FLOAT * work(net)[1]
    return copies + sum(2 * IMAGES * outputs(net)[cut - 1] * FLOAT for cut in cuts)


def command(options, net, ranks, placement):
    batch = IMAGES // replicas(ranks, placement)
    words = [f"{options.bin}/mgpurun", "-n", str(ranks), "--backend", "cpu", "--no-prefix", f"{options.bin}/train_mnist",
             "--net", net, "--placement", placement, "--batch", str(batch), "--threads", "1",
             "--steps", str(options.steps[net] + WARM_UP), "--skip-test", "--json"]
    if placement.startswith("layers"):
        words += ["--accumulate", str(MICRO_BATCHES)]
    return words if os.environ.get("MGPU_DATA") else words + ["--synthetic"]


def run(words):
    """The summary of a training, or the reason why there is none."""
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        # The launcher ends its ranks.
        process.send_signal(signal.SIGTERM)
        process.communicate()
        return None, f"stopped after {LIMIT_S} s"
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.communicate()
        raise
    if process.returncode == 0:
        return json.loads(out.splitlines()[-1]), None
    said = [line.removeprefix("error: ") for line in errors.splitlines() if line.strip()]
    own = next((line for line in said if line.startswith("train_mnist: ")), said[0] if said else "no message")
    return None, f"exit code {process.returncode}: {own.removeprefix('train_mnist: ')}"


def spread(values):
    return {"median": round(statistics.median(values), 3), "min": min(values), "max": max(values)}


def figure(net, ranks, placement, rounds):
    """The entry of a cell: figures of its successful runs, and the reason of the last other one."""
    entry = {"net": net, "ranks": ranks, "placement": placement, "batch": IMAGES // replicas(ranks, placement),
             "runs": len(rounds)}
    done = [summary for summary, _ in rounds if summary]
    reasons = [reason for _, reason in rounds if reason]
    if reasons:
        entry["reason"] = reasons[-1]
    if not done:
        return entry
    for key in KEYS:
        if values := [summary[key] for summary in done if summary.get(key) is not None]:
            entry[key] = spread(values)
    entry["rank_rss_mib"] = [round(statistics.median(values), 1) for values in zip(*(one["rank_rss_mib"] for one in done))]
    # The last run's number of micro-batches whose activations each stage kept, and the memory of these.
    for key in ("rank_in_flight", "rank_activations_mib"):
        if done[-1].get(key):
            entry[key] = done[-1][key]
    # Chosen anew by each run, from measured times.
    all_cuts = [summary.get("cuts") or [] for summary in done]
    if any(all_cuts):
        entry["cuts"] = all_cuts
    # The formula belongs to the run whose bytes are compared with it: cuts may differ from run to run.
    entry["bytes"] = [{"measured": summary.get("bytes_per_step"), "formula": formula(net, ranks, placement, cuts)}
                      for summary, cuts in zip(done, all_cuts)]
    return entry


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", metavar="NET", help="networks to measure [default: all]")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, separated by commas [default: 1,2,4]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="timed steps of each run [default: one to five seconds]")
    parser.add_argument("--minutes", type=float, default=12, help="no run begins later [default: 12]")
    parser.add_argument("--quick", action="store_true", help="two networks, one round, few steps: a test of this script")
    parser.add_argument("--out", help="result file [default: bench/results/placements-<date>-<machine>.json]")
    options = parser.parse_args()
    if unknown := [net for net in options.nets if net not in NETS]:
        parser.error(f"there is no network {unknown[0]}; known are {', '.join(NETS)}")
    try:
        options.ranks = [int(ranks) for ranks in options.ranks.split(",")]
    except ValueError:
        parser.error("--ranks: write numbers with commas between them, such as 1,2,4")
    if any(ranks < 1 or IMAGES % ranks for ranks in options.ranks):
        parser.error(f"--ranks: each number must divide the {IMAGES} images of a step")
    options.nets = options.nets or list(QUICK if options.quick else NETS)
    options.rounds = 1 if options.quick else options.rounds
    options.steps = {net: options.steps or (QUICK.get(net, 2) if options.quick else STEPS[net]) for net in options.nets}
    options.bin = os.path.abspath(os.environ.get("BIN") or os.path.join(provenance.ROOT, "target/release"))
    for program in ("mgpurun", "train_mnist"):
        if not os.access(f"{options.bin}/{program}", os.X_OK):
            sys.exit(f"placements.py: there is no {program} in BIN or target/release: run cargo build --release")
    options.out = options.out or provenance.result_path("placements")
    return options


def main():
    options = parse()
    # Like Ctrl-C, it ends the current run, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rounds = {cell: [] for cell in cells(options.nets, options.ranks)}
    result = {
        "what": "placements: where weights and optimizer state are kept. Figures of a cell have the median, least and greatest of "
                "its runs; bytes_per_step is of all ranks together; communication, waiting (for other ranks, a part of it) and "
                "idle (of a pipeline's stages) are shares of the step's time, means over ranks",
        **provenance.record(), "images_per_step": IMAGES, "threads": 1, "micro_batches": MICRO_BATCHES,
        "rounds": options.rounds, "quick": options.quick,
    }
    deadline = time.monotonic() + 60 * options.minutes
    for round_ in range(options.rounds):
        for (net, ranks, placement), done in rounds.items():
            if time.monotonic() > deadline:
                break
            if round_ and ranks == 1 and placement != "replicated":
                continue
            summary, reason = run(command(options, net, ranks, placement))
            done.append((summary, reason))
            said = reason or f"{summary['images_per_s']:,.0f} images/s"
            print(f"round {round_ + 1}: {net}, ranks: {ranks}, {placement}: {said}", file=sys.stderr, flush=True)
            if summary:
                result["data"] = summary["data"].split(" from ")[0]  # not where it lies
            result["load"] = os.getloadavg()
            result["figures"] = [figure(*cell, runs) for cell, runs in rounds.items() if runs]
            provenance.write(options.out, result)
    absent = [cell for cell, runs in rounds.items() if not any(summary for summary, _ in runs)]
    for cell in absent:
        reasons = [reason for _, reason in rounds[cell]]
        print("{}, ranks: {}, {}: ".format(*cell) + (reasons[-1] if reasons else "not begun in time"), file=sys.stderr)
    print(f"written to {os.path.relpath(options.out)}")
    sys.exit(1 if absent else 0)


if __name__ == "__main__":
    main()
