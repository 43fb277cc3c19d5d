#!/usr/bin/env python3
"""Measures the share of training time spent in communication on this machine's processor, by network and bucket size.

    MGPU_DATA=…/mnist bench/communication.py [NET…] [--ranks 2] [--batch 64] [--buckets 0.25,1,1+overlap,4,25] [--rounds 3]

Every rank has one thread and, with `+overlap`, another one for reductions. In every round each network runs once with each
bucket size (in MiB), so that background load does not hit one size alone; figures are medians of the rounds. `communication` is
the share of the steps' time in collectives (or waiting for the reduction thread), including synchronised batch normalisation;
`waiting` is the part of it spent waiting for the last rank. Both are means over ranks.
Writes bench/results/communication-<date>-<machine>.json after every run and prints a table.
Run it on a quiet machine after `cargo build --release`: ranks that share cores with other programs wait for each other.
"""

import argparse
import json
import os
import statistics
import subprocess

import provenance

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Steps of a run: a few seconds on two cores.
STEPS = {"lenet5": 600, "deep": 40, "keras": 12, "ensemble2400": 60, "ensemble4800": 45, "layers": 15, "conv6": 8}
OVERLAP = "+overlap"
KEYS = ("communication", "waiting", "ms_per_step")


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def train(options, net, bucket):
    command = [f"{ROOT}/target/release/mgpurun", "-n", str(options.ranks), "--no-prefix", "train_mnist", "--net", net,
               "--steps", str(options.steps or STEPS[net]), "--batch", str(options.batch), "--threads", "1",
               "--bucket", bucket.removesuffix(OVERLAP), "--skip-test", "--json"]
    if bucket.endswith(OVERLAP):
        command.append("--overlap")
    if not os.environ.get("MGPU_DATA"):
        command.append("--synthetic")
    return json.loads(output(*command).splitlines()[-1])


def medians(rounds):
    return {key: round(statistics.median(one[key] for one in rounds), 3) for key in KEYS}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", metavar="NET", help="networks to measure [default: all]")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="batch size of each rank, in images")
    parser.add_argument("--buckets", default="0.25,1,1+overlap,4,25", help="bucket sizes in MiB, each with or without +overlap")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps of each run [default: a few seconds]")
    parser.add_argument("--note", help="a note to store with the figures")
    options = parser.parse_args()
    if unknown := set(options.nets) - set(STEPS):
        parser.error(f"there is no network {', '.join(unknown)}; there are {', '.join(STEPS)}")
    if options.ranks < 2:
        parser.error("alone there is nobody to communicate with: --ranks 2 at least")
    nets, buckets = options.nets or list(STEPS), options.buckets.split(",")
    path = provenance.result_path("communication")
    rounds = {(net, bucket): [] for net in nets for bucket in buckets}
    result = {
        **provenance.record(),
        "ranks": options.ranks, "threads": 1, "batch": options.batch,
    }
    if options.note:
        result["note"] = options.note
    for _ in range(options.rounds):
        for (net, bucket), done in rounds.items():
            line = train(options, net, bucket)
            done.append({key: line[key] for key in KEYS})
            result["load"] = os.getloadavg()
            result["lines"] = [
                {"net": net, "bucket_mib": float(bucket.removesuffix(OVERLAP)), "overlap": bucket.endswith(OVERLAP), **medians(done), "rounds": done}
                for (net, bucket), done in rounds.items() if done
            ]
            result["data"] = line["data"].split(" from ")[0]  # not where it lies
            provenance.write(path, result)
    print("| network | " + " | ".join(f"{bucket} (MiB)" for bucket in buckets) + " |\n|---|" + "---|" * len(buckets))
    for net in nets:
        cells = []
        for bucket in buckets:
            share = medians(rounds[net, bucket])
            cells.append("{communication:.1%} ({waiting:.1%} waiting), {ms_per_step:.4g} ms".format(**share))
        print(f"| `{net}` | " + " | ".join(cells) + " |")
    print(f"written to {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
