#!/usr/bin/env python3
"""What a step costs once a network knows its training set by heart: images/s by epoch, and instructions with subnormal numbers.

    long_training.py [--before COMMIT=FOLDER] [--net lenet5] [--images 6000] [--epochs 150] [--segments 6] [--batch 32] [--out FILE.json]

Trains on the first --images images of MNIST in MGPU_DATA, on one rank with one thread and a constant learning rate. After each
segment of epochs it counts the instructions of 20 further steps that have a subnormal operand or result (`subnormal_traps.c`; x86-64
and gcc). With --before, the `train_mnist` in FOLDER, built from that commit, trains too: the two take turns, segment by segment.

Speeds depend on the processor and on its load: some are no slower with subnormal numbers. The counts depend on neither.
"""

import argparse
import gzip
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile

import provenance

BIN = os.environ.get("BIN", os.path.join(provenance.ROOT, "target/release"))
STEPS = 20


def first_images(count, folder):
    """Writes the beginning of MNIST's training set, and its test set, to `folder`."""
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        path = os.path.join(os.environ["MGPU_DATA"], name)
        with (gzip.open(path + ".gz") if os.path.exists(path + ".gz") else open(path, "rb")) as file:
            content = file.read()
        head = 4 + 4 * content[3]
        of_all, = struct.unpack(">I", content[4:8])
        kept = count if name.startswith("train") else of_all
        end = head + (len(content) - head) // of_all * kept
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content[:4] + struct.pack(">I", kept) + content[8:end])


class Training:
    """A training that goes on segment by segment, with the `train_mnist` in a folder."""

    def __init__(self, options, binaries, data, work):
        self.options, self.binaries, self.data, self.work = options, binaries, data, work
        self.checkpoints = os.path.join(work, "checkpoints")
        self.segments = []

    def run(self, steps, checkpoints, flags=(), environment=None):
        command = [os.path.join(self.binaries, "train_mnist"), "--data", self.data, "--net", self.options.net, "--batch",
                   str(self.options.batch), "--steps", str(steps), "--threads", "1", "--schedule", "constant", "--checkpoint-dir",
                   checkpoints, "--resume", "--skip-test", *flags]
        done = subprocess.run(command, env={**os.environ, **(environment or {})}, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{command}: {done.stderr}")

    def traps(self, steps, library):
        """Instructions per step with a subnormal operand, and others with a subnormal result, in the steps after `steps`."""
        copy, out = os.path.join(self.work, f"copy-{steps}"), os.path.join(self.work, "traps")
        shutil.copytree(self.checkpoints, copy)
        self.run(steps + STEPS, copy, environment={"LD_PRELOAD": library, "TRAPS_OUT": out})
        with open(out) as file:
            return [round(int(count) / STEPS, 1) for count in file.read().split()]

    def segment(self, epochs, steps, library):
        metrics = os.path.join(self.work, f"{epochs}.jsonl")
        self.run(steps, self.checkpoints, ["--metrics", metrics])
        with open(metrics) as file:
            lines = [json.loads(line) for line in file]
        operands, results = self.traps(steps, library)
        speed = statistics.median(line["images_per_s"] for line in lines)
        self.segments.append({"epochs": epochs, "steps": steps, "images_per_s": round(speed), "train_loss": lines[-1]["train_loss"],
                              "subnormal_operands_per_step": operands, "subnormal_results_per_step": results})
        print(json.dumps(self.segments[-1]), file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT=FOLDER")
    parser.add_argument("--net", default="lenet5")
    parser.add_argument("--out")
    for name, default in (("images", 6000), ("epochs", 150), ("segments", 6), ("batch", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if not os.environ.get("MGPU_DATA"):
        sys.exit("long_training.py: MGPU_DATA must name the folder of MNIST")
    result = {**provenance.record(), "net": options.net, "images": options.images, "batch": options.batch}
    with tempfile.TemporaryDirectory() as work:
        library, data = os.path.join(work, "traps.so"), os.path.join(work, "data")
        source = os.path.join(provenance.HERE, "subnormal_traps.c")
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
        os.mkdir(data)
        first_images(options.images, data)
        trainings = {}
        commit, _, folder = (options.before or "").partition("=")
        for name, binaries in [("before", folder)] * bool(folder) + [("now", BIN)]:
            os.mkdir(os.path.join(work, name))
            trainings[name] = Training(options, binaries, data, os.path.join(work, name))
        if folder:
            result["before_commit"] = commit
        # A segment that ends within an epoch would time an incomplete one.
        steps_per_epoch = options.images // options.batch
        for index in range(options.segments):
            epochs = options.epochs * (index + 1) // options.segments
            for training in trainings.values():
                training.segment(epochs, epochs * steps_per_epoch, library)
        result |= {name: training.segments for name, training in trainings.items()}
    provenance.write(options.out or provenance.result_path("long-training"), result)


if __name__ == "__main__":
    main()
