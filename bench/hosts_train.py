#!/usr/bin/env python3
"""Measures training on hosts, which are namespaces of this machine, beside PyTorch's DDP over gloo; and its bytes on the network.

    MGPU_DATA=mnist bench/hosts_train.py [NET…] [--layout 2x1] [--rounds 3] [--steps N] [--only speed,bytes] [--tbf RATE]
                                         [--out FILE.json]
    hosts_train.py --table FILE.json

- speed: images/s of lenet5, deep and conv6 (or those named), 128 images a step over all ranks, one thread a rank. The two sides take
  turns; figures are medians of the rounds.
- bytes: what all interfaces send in a step, with headers: gradients in f32 and bf16, with replicated and with sharded optimizer
  state, and PyTorch's. The difference of two runs of unequal length leaves out what is sent at the start and at the end.

It needs root, target/release with `mgpurun` and `train_mnist`, and the folder of MNIST in MGPU_DATA. PyTorch is that of the Python in
TORCH ($MGPU_PEERS/v/bin/python); without it ours runs alone. Writes bench/results/hosts-train-<date>-<machine>.json after every run.
"""

import argparse
import json
import os
import sys

import launchers
import markdown
import provenance
import summarise_train
from hosts_collectives import layout, rate, torch
from namespaces import Hosts
from train import HERE, IMAGES, LIMIT_S, STEPS, WARM_UP

NETS = ["lenet5", "deep", "conv6"]
OURS, THEIRS = "ours", "pytorch"
# Networks and steps of the two runs whose bytes are subtracted.
BYTES_NETS, BYTES_STEPS = ["lenet5", "deep"], (10, 40)
# Flags by the name of a row. Sharded optimizer state means a reduce-scatter, then the fused update + all-gather of parameters in f32.
REPLICATED, SHARDED = ["--shard-optimizer", "off"], ["--shard-optimizer", "on"]
WAYS = {
    "f32": REPLICATED,
    "bf16": [*REPLICATED, "--gradients", "bf16"],
    "f32, fused update + all-gather": SHARDED,
    "bf16, fused update + all-gather": [*SHARDED, "--gradients", "bf16"],
}


class Session:
    def __init__(self, options):
        self.options = options
        self.skipped, self.failed = [], False
        self.torch, version = torch()
        self.sides = [OURS] + [THEIRS] * bool(version)
        if not version:
            self.skip("PyTorch: no torch in the Python that TORCH names")
        self.origin = provenance.record(versions={"torch": version} if version else {})

    def skip(self, what):
        print(f"skipped: {what}", file=sys.stderr)
        self.skipped.append(what)

    def start(self, side, hosts, net, steps, flags):
        (count, ranks), data = self.options.layout, self.options.data
        batch = ["--data", data, "--net", net, "--batch", str(IMAGES // (count * ranks)), "--threads", "1"]
        if side == OURS:
            program = [os.path.join(launchers.BIN, "train_mnist"), *batch, "--steps", str(steps + WARM_UP), "--skip-test", "--json"]
            return launchers.start_mgpurun(hosts, ranks, [*program, *flags], ["--no-prefix", "--backend", "cpu"])
        program = [os.path.join(HERE, "peers/train_torch.py"), *batch, "--steps", str(steps), "--warm", str(WARM_UP)]
        return launchers.start_torchrun(hosts, ranks, program, [self.torch, "-m", "torch.distributed.run"],
                                        {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"})

    def run(self, side, net, steps, flags=()):
        """The line of JSON of a run, and the bytes that it has sent; None for a run that failed."""
        with Hosts(self.options.layout[0], self.options.tbf) as hosts:
            before = sum(hosts.sent_bytes())
            codes, texts = launchers.finish(self.start(side, hosts, net, steps, flags), LIMIT_S)
            sent = sum(hosts.sent_bytes()) - before
        lines = [line for line in texts[0].splitlines() if line.startswith("{") and line.endswith("}")]
        if any(code != 0 for code in codes) or not lines:
            self.skip(f"{side}, {net} {' '.join(flags)}: exit codes {codes}")
            print("\n".join(text[-800:] for text in texts), file=sys.stderr)
            self.failed |= side == OURS
            return None
        return json.loads(lines[-1]), sent

    def speeds(self, result):
        lines = []
        for turn in range(self.options.rounds):
            for net in self.options.nets:
                for side in self.sides if turn % 2 == 0 else self.sides[::-1]:
                    steps = self.options.steps or STEPS[net]
                    found = self.run(side, net, steps)
                    if found:
                        print(f"round {turn + 1}: {net} {side}: {found[0]['images_per_s']:,.0f} images/s", file=sys.stderr)
                        lines.append(self.line(side, turn, net, steps, found[0]))
                        result["figures"] = [without_memory(figure) for figure in summarise_train.summarise(lines, {})]
                        self.write(result)

    def line(self, side, turn, net, steps, found):
        count, ranks = self.options.layout
        return {"who": side, "round": turn, "net": net, "dtype": "f32", "ranks": count * ranks, "threads": 1, "steps": steps,
                "images_per_s": found["images_per_s"], "ms_per_step": found["ms_per_step"],
                **dict.fromkeys(("memory_mib", "training_mib", "file_mib"))}

    def bytes(self, result):
        result["bytes_per_step"] = rows = []
        for net in [net for net in self.options.nets if net in BYTES_NETS] or self.options.nets:
            ways = [(name, OURS, flags) for name, flags in WAYS.items()] + [("PyTorch, f32", THEIRS, [])] * (THEIRS in self.sides)
            for name, side, flags in ways:
                runs = [self.run(side, net, steps, flags) for steps in BYTES_STEPS]
                if None in runs:
                    continue
                per_step = (runs[1][1] - runs[0][1]) / (BYTES_STEPS[1] - BYTES_STEPS[0])
                rows.append({"net": net, "way": name, "bytes": round(per_step), "gradients": 4 * summarise_train.work(net)[1]})
                print(f"{net}, {name}: {per_step:,.0f} bytes a step", file=sys.stderr)
                self.write(result)

    def write(self, result):
        result["skipped"] = self.skipped
        provenance.write(self.options.out, result)


def without_memory(figure):
    """A figure without what is not measured here."""
    absent = ("memory_mib", "training_mib", "file_mib", "peak_share")
    return {key: {name: entry for name, entry in value.items() if name not in absent} if isinstance(value, dict) else value
            for key, value in figure.items()}


def speed_rows(result):
    rows = [["network", "mgpurun, images/s", "PyTorch, images/s", "ratio"]]
    for figure in result.get("figures", []):
        cells = [f"{figure[side]['images_per_s']:,.0f}" if side in figure else "–" for side in (OURS, THEIRS)]
        rows.append([f"`{figure['net']}`", *cells, f"{figure['ratio']:.2f}" if "ratio" in figure else "–"])
    return rows


def bytes_rows(result):
    """Bytes that all hosts send in a step, and how many times the f32 gradients of a rank that is."""
    rows = [["network", "gradients", "bytes sent in a step", "× gradients in f32"]]
    for row in result.get("bytes_per_step", []):
        rows.append([f"`{row['net']}`", row["way"], f"{row['bytes']:,}", f"{row['bytes'] / row['gradients']:.2f}"])
    return rows


def table(result):
    return "\n\n".join(markdown.table(rows) for rows in (speed_rows(result), bytes_rows(result)) if len(rows) > 1)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", metavar="NET")
    parser.add_argument("--layout", type=layout, default="2x1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", default="speed,bytes")
    parser.add_argument("--tbf", metavar="RATE", type=rate)
    parser.add_argument("--out")
    parser.add_argument("--table", metavar="FILE.json")
    options = parser.parse_args()
    options.nets = options.nets or NETS
    if unknown := set(options.nets) - set(STEPS):
        parser.error(f"there is no network {', '.join(unknown)}; there are {', '.join(STEPS)}")
    if unknown := set(options.only.split(",")) - {"speed", "bytes"}:
        parser.error(f"--only is speed, bytes or both, not {', '.join(unknown)}")
    if IMAGES % (options.layout[0] * options.layout[1]):
        parser.error(f"{IMAGES} images should divide among the ranks")
    options.data = os.environ.get("MGPU_DATA")
    if not options.table and not options.data:
        parser.error("MGPU_DATA should name the folder of MNIST")
    # A command in other namespaces starts in the root folder.
    options.data = options.data and os.path.abspath(options.data)
    options.out = options.out or provenance.result_path("hosts-train")
    return options


def main():
    options = parse()
    if options.table:
        with open(options.table) as file:
            return print(table(json.load(file)))
    session = Session(options)
    count, ranks = options.layout
    result = {"what": f"training on {count} hosts × {ranks}, {IMAGES} images a step in all; medians of the rounds; ratio is ours by "
                      "PyTorch's; bytes are those that all hosts send, with headers",
              **session.origin, "layout": f"{count}x{ranks}", "tbf": options.tbf, "rounds": options.rounds}
    for part in options.only.split(","):
        {"speed": session.speeds, "bytes": session.bytes}[part](result)
    session.write(result)
    print(table(result))
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
