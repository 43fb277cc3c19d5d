#!/usr/bin/env python3
"""Measures the training of lenet5 with more ranks than cores, beside one rank on each core.

    many_ranks.py [--ranks 8,16] [--batches 128,256,512,1024] [--rounds 5] [--epochs 3] [--out FILE.json]

--batches are images of a step of all ranks together. Each rank has one thread. In every round each batch and number of ranks
runs once, so that a noisy minute hits all of them; the figures are medians, and ratios those of the same round. MGPU_DATA
names the folder with the four MNIST files. Run it on a quiet machine, after `cargo build --release`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

import provenance

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAMS = os.path.join(ROOT, "target", "release")


def images_per_s(ranks, batch, epochs):
    """The speed of the ranks together, without the first epoch."""
    command = [os.path.join(PROGRAMS, "mgpurun"), "-n", str(ranks), "--backend", "cpu", "--no-prefix"]
    command += [os.path.join(PROGRAMS, "train_mnist"), "--global-batch", str(batch), "--epochs", str(epochs), "--json"]
    done = subprocess.run(command, env={**os.environ, "MGPU_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"many_ranks.py: exit code {done.returncode} of {' '.join(command)}")
    return json.loads(done.stdout.strip().splitlines()[-1])["images_per_s"]


def numbers(text):
    return [int(number) for number in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=numbers, default=[8, 16])
    parser.add_argument("--batches", type=numbers, default=[128, 256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default=provenance.result_path("many-ranks"))
    args = parser.parse_args()
    origin = provenance.record()
    cores = len(os.sched_getaffinity(0))
    speeds = {(batch, ranks): [] for batch in args.batches for ranks in [cores, *args.ranks]}
    for number in range(args.rounds):
        for (batch, ranks), of_rounds in speeds.items():
            of_rounds.append(images_per_s(ranks, batch, args.epochs))
            print(f"round {number + 1}, {ranks} ranks, batch {batch}: {of_rounds[-1]:.0f} images/s", flush=True)
    figures = []
    for (batch, ranks), of_rounds in speeds.items():
        ratios = [many / few for many, few in zip(of_rounds, speeds[batch, cores])]
        figures.append({"batch": batch, "ranks": ranks, "images_per_s": round(statistics.median(of_rounds)),
                        "ratio": round(statistics.median(ratios), 3), "rounds": [round(speed) for speed in of_rounds]})
        print(f"{ranks} ranks, batch {batch}: {figures[-1]['ratio']:.2f} of the speed of {cores} ranks")
    result = {"what": "lenet5 with more ranks than cores; ratio is that to one rank on each core", **origin,
              "cores": cores, "epochs": args.epochs, "figures": figures}
    provenance.write(args.out, result)


if __name__ == "__main__":
    main()
