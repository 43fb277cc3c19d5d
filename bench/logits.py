#!/usr/bin/env python3
"""Trains every network for some steps, loads the checkpoint into PyTorch and compares logits of 100 test images.

    MGPU_DATA=…/mnist bench/logits.py [NET…] [--steps 20] [--batch 16] [--python target/peers/v/bin/python]

The comparison is examples/python/load_in_torch.py, run by a Python that has torch, safetensors and numpy. Writes
bench/results/logits-<date>-<machine>.json and prints a table. Needs `cargo build --release`. It measures no times, so the
machine may be busy.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import provenance

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NETS = ["lenet5", "deep", "keras", "ensemble2400", "ensemble4800", "layers", "conv6"]


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def compare(options, net, folder):
    checkpoints, logits = f"{folder}/checkpoints", f"{folder}/logits.json"
    train = [f"{ROOT}/target/release/train_mnist", "--net", net, "--steps", str(options.steps), "--batch", str(options.batch),
             "--checkpoint-dir", checkpoints, "--logits", logits, "--skip-test", "--json"]
    if not os.environ.get("MGPU_DATA"):
        train.append("--synthetic")
    data = json.loads(output(*train).splitlines()[-1])["data"].split(" from ")[0]  # not where it lies
    script = f"{ROOT}/examples/python/load_in_torch.py"
    newest = f"{checkpoints}/step-{options.steps:08}"
    return data, json.loads(output(options.python, script, newest, logits, "--json"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", metavar="NET", help="networks to compare [default: all]")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--python", default=sys.executable, help="a Python with torch, safetensors and numpy")
    options = parser.parse_args()
    versions = "import torch, safetensors; print(torch.__version__, safetensors.__version__)"
    torch, safetensors = output(options.python, "-c", versions).split()
    lines = []
    for net in options.nets or NETS:
        with tempfile.TemporaryDirectory() as folder:
            data, line = compare(options, net, folder)
        lines.append(line)
        print("| `{net}` | {deviation:.2e} | {largest_logit:.2f} | {same_digit} of {images} |".format(**line), flush=True)
    path = provenance.result_path("logits")
    result = {
        "what": "largest deviation of a logit of PyTorch, with the weights of a checkpoint of train_mnist, from train_mnist's own",
        **provenance.record(versions={"torch": torch, "safetensors": safetensors}),
        "data": data, "steps": options.steps, "batch": options.batch, "lines": lines,
    }
    provenance.write(path, result)
    print(f"written to {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
