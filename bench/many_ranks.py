#!/usr/bin/env python3
"""Measures the training of lenet5 with more ranks than cores, beside one rank on each core, by `mgpurun sweep`.

    many_ranks.py [--ranks 8,16] [--batches 128,256,512,1024] [--rounds 5] [--epochs 3] [--out FILE.json]

--batches are images of a step of all ranks together. Each rank has one thread. A ratio compares medians. MGPU_DATA names the
folder with the four MNIST files. Run it on a quiet machine, after `cargo build --release`.
"""

import argparse
import json
import os
import subprocess
import sys

import provenance

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAMS = os.path.join(ROOT, "target", "release")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,16")
    parser.add_argument("--batches", default="128,256,512,1024")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default=provenance.result_path("many-ranks"))
    args = parser.parse_args()
    origin = provenance.record()
    cores = len(os.sched_getaffinity(0))
    command = [os.path.join(PROGRAMS, "mgpurun"), "sweep", "-n", f"{cores},{args.ranks}", "--oversubscribe", "--json"]
    command += ["--launch-option=--backend=cpu", f"--vary=--global-batch={args.batches}", "--repeat", str(args.rounds), "--"]
    command += [os.path.join(PROGRAMS, "train_mnist"), "--json", "--epochs", str(args.epochs)]
    done = subprocess.run(command, env={**os.environ, "MGPU_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"many_ranks.py: exit code {done.returncode} of {' '.join(command)}")
    figures = []
    for event in map(json.loads, done.stdout.splitlines()):
        if event["event"] == "row":
            speed = event["figures"]["images_per_s"]
            figures.append({
                "batch": int(event["vary"]["--global-batch"]), "ranks": event["ranks"],
                "images_per_s": round(speed["median"]), "min": round(speed["min"]), "max": round(speed["max"]),
                "ratio": round(speed["percent"] / 100, 4),
            })
    result = {"what": "lenet5 with more ranks than cores; ratio is that to one rank on each core", **origin,
              "cores": cores, "rounds": args.rounds, "epochs": args.epochs, "figures": figures}
    provenance.write(args.out, result)


if __name__ == "__main__":
    main()
