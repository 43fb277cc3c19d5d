#!/usr/bin/env python3
"""Trains an ensemble of two networks at once, one on each group of ranks, and writes the test accuracy of each and of the average
of their predictions.

    MGPU_DATA=…/mnist bench/ensemble.py [--ranks 2] [--epochs 2] [--out FILE.json]

Needs `cargo build --release`, or the folder of the programs in BIN. Writes bench/results/ensemble-<date>-<machine>.json, from
which `bench/readme.py` makes a table of docs/src/placements.md. An epoch takes two minutes on two cores.
"""

import argparse
import os
import re
import subprocess
import sys
import time

import provenance

LINE = re.compile(r"^(.+): test accuracy ([\d.]+)%$", re.MULTILINE)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", help="result file [default: bench/results/ensemble-<date>-<machine>.json]")
    options = parser.parse_args()
    if not os.environ.get("MGPU_DATA"):
        parser.error("MGPU_DATA should name the folder of the four MNIST files")
    folder = os.path.abspath(os.environ.get("BIN") or os.path.join(provenance.ROOT, "target/release"))
    for program in ("mgpurun", "ensemble"):
        if not os.access(f"{folder}/{program}", os.X_OK):
            sys.exit(f"ensemble.py: there is no {program} in BIN or target/release: run cargo build --release")
    # The networks, and their order, are the program's defaults.
    flags = ["--epochs", str(options.epochs)]
    started = time.monotonic()
    done = subprocess.run([f"{folder}/mgpurun", "-n", str(options.ranks), "--backend", "cpu", "--no-prefix",
                           f"{folder}/ensemble", *flags], stdout=subprocess.PIPE, text=True)
    accuracies = LINE.findall(done.stdout)
    if done.returncode != 0 or not accuracies:
        sys.exit(f"ensemble.py: exit code {done.returncode}\n{done.stdout}")
    if "; MNIST " not in done.stdout.splitlines()[0]:
        sys.exit(f"ensemble.py: not trained on MNIST: {done.stdout.splitlines()[0]}; check MGPU_DATA")
    result = {
        "what": "accuracy on the test images of MNIST, in per cent, of networks trained at once on groups of ranks, and of the "
                "average of their predictions",
        **provenance.record(), "ranks": options.ranks, "flags": " ".join(flags), "seconds": round(time.monotonic() - started, 1),
        "rows": [{"of": name, "test_accuracy": float(accuracy)} for name, accuracy in accuracies],
    }
    path = options.out or provenance.result_path("ensemble")
    provenance.write(path, result)
    for row in result["rows"]:
        print(f"{row['of']}: {row['test_accuracy']:.2f}%")
    print(f"written to {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
