#!/usr/bin/env python3
"""Trains networks on MNIST on this machine's processor and writes their test accuracies.

    MGPU_DATA=…/mnist bench/accuracy.py [--rows lenet5,deep] [--list] [--out FILE.json]

Needs `cargo build --release`, or the folder of the programs in BIN. Writes bench/results/accuracy-<date>-<machine>.json after
every training: flags, ranks, precision, seed, test accuracy in per cent, seconds. If the file exists and has the same commit,
rows that are not trained now are kept. Accuracies depend on the number of threads of a rank, so on the number of cores; the
machine may be busy. The larger rows take up to an hour on two cores.

`bench/readme.py` makes the table of docs/src/training.md from the newest file. Exit code: 1 if a training failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time

import provenance

# Flags, numbers of ranks, precisions and seeds, by name. Each combination is one training.
ROWS = {
    "lenet5": ("--net lenet5 --epochs 3", [1, 2, 4], ["f32"], [1, 2, 3]),
    "ensemble2400": ("--net ensemble2400 --batch 64 --epochs 4", [2], ["f32"], [1]),
    "layers": ("--net layers --batch 1024 --steps 200", [2], ["f32"], [1]),
    "deep": ("--net deep --batch 128 --schedule constant --steps 2000", [2], ["f32", "bf16"], [1]),
    "keras": ("--net keras --batch 64 --epochs 4", [2], ["bf16"], [1]),
    "conv6": ("--net conv6 --batch 512 --epochs 1", [2], ["f32", "bf16"], [1]),
}


def trainings(names):
    """The trainings of these rows: what identifies each of them in the result file."""
    for name in names:
        flags, all_ranks, precisions, seeds = ROWS[name]
        for ranks in all_ranks:
            for precision in precisions:
                for seed in seeds:
                    yield {"row": name, "flags": flags, "ranks": ranks, "precision": precision, "seed": seed}


def describe(training):
    return "{flags}, {precision}, seed {seed}, ranks: {ranks}".format(**training)


def train(folder, training):
    """The entry of one training, or None if it failed."""
    command = [f"{folder}/mgpurun", "-n", str(training["ranks"]), "--no-prefix", f"{folder}/train_mnist",
               *training["flags"].split(), "--precision", training["precision"], "--seed", str(training["seed"]), "--json"]
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - started
    if done.returncode != 0:
        print(f"accuracy.py: {describe(training)}: exit code {done.returncode}", file=sys.stderr)
        return None
    summary = json.loads(done.stdout.splitlines()[-1])
    if not summary["data"].startswith("MNIST"):
        sys.exit(f"accuracy.py: the training used {summary['data']}, not MNIST: check MGPU_DATA")
    entry = {**training, "threads": summary["threads"], "test_accuracy": round(100 * summary["test_acc"], 2)}
    if summary.get("test_acc_average") is not None:
        # With the moving average of the weights.
        entry["test_accuracy_average"] = round(100 * summary["test_acc_average"], 2)
    return {**entry, "seconds": round(seconds, 1)}


def identity(entry):
    return tuple(entry[key] for key in ("row", "flags", "ranks", "precision", "seed"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="names of rows, separated by commas [default: all]")
    parser.add_argument("--list", action="store_true", help="print the rows and their trainings, and train nothing")
    parser.add_argument("--out", help="result file [default: bench/results/accuracy-<date>-<machine>.json]")
    options = parser.parse_args()
    names = options.rows.split(",") if options.rows else list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"there is no row {unknown[0]}; known are {', '.join(ROWS)}")
    if options.list:
        for training in trainings(names):
            print(f"{training['row']:<14}{describe(training)}")
        return
    if not os.environ.get("MGPU_DATA"):
        parser.error("MGPU_DATA should name the folder of the four MNIST files")
    folder = os.path.abspath(os.environ.get("BIN") or os.path.join(provenance.ROOT, "target/release"))
    for program in ("mgpurun", "train_mnist"):
        if not os.access(f"{folder}/{program}", os.X_OK):
            sys.exit(f"accuracy.py: there is no {program} in BIN or target/release: run cargo build --release")
    path = options.out or provenance.result_path("accuracy")
    result = {"what": "accuracy on the test images of MNIST after training, in per cent", **provenance.record(), "rows": []}
    if os.path.exists(path):
        with open(path) as file:
            before = json.load(file)
        if before.get("commit") != result.get("commit"):
            sys.exit(f"accuracy.py: {os.path.relpath(path)} is of commit {before.get('commit')}: remove it, or choose another --out")
        result["rows"] = before["rows"]
    failed = False
    for training in trainings(names):
        entry = train(folder, training)
        if entry is None:
            failed = True
            continue
        print(f"{describe(training)}: {entry['test_accuracy']:.2f}% in {entry['seconds']:.0f} s", flush=True)
        rows = [row for row in result["rows"] if identity(row) != identity(entry)] + [entry]
        # In the order of ROWS, with rows that are no longer there at the end.
        order = [identity(known) for known in trainings(ROWS)]
        result["rows"] = sorted(rows, key=lambda row: order.index(identity(row)) if identity(row) in order else len(order))
        provenance.write(path, result)
    print(f"written to {os.path.relpath(path)}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
