#!/usr/bin/env python3
"""PyTorch's DDP on CPUs: the hook of mgpurun beside gloo, on a residual network.

    mgpurun -n 2 bench/ddp.py [--net resnet50] [--image 64] [--batch 4] [--rounds 5] [--out FILE.json]

Three models with the same start take turns, a few steps each, so that a busy machine disturbs all alike: with gloo, with the
hook, and without communication (no_sync). Prints one JSON line for each: images/s of all ranks, the median step in
milliseconds, the share of a step that is communication (what it takes longer than without), and the loss after the last
step. Rank 0 adds them to a result file, by default bench/results/ddp-<date>-<machine>.json. Needs torch and mgpurun.
"""

import argparse
import contextlib
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import mgpurun
import mgpurun.torch
import provenance

LAUNCHER_VARIABLES = ["MGPU_BACKEND", "MGPU_RENDEZVOUS", "MGPU_RESTART_COUNT", "MGPU_RUN_ID", "MGPU_THREADS"]
BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}


def convolution(inputs, outputs, size, stride=1):
    layers = [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """A residual block: two 3×3 convolutions, or a bottleneck."""

    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        outputs = width * (4 if bottleneck else 1)
        if bottleneck:
            layers = [convolution(inputs, width, 1), nn.ReLU(), convolution(width, width, 3, stride), nn.ReLU()]
            layers.append(convolution(width, outputs, 1))
        else:
            layers = [convolution(inputs, width, 3, stride), nn.ReLU(), convolution(width, outputs, 3)]
        self.body = nn.Sequential(*layers)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def network(name):
    bottleneck = name != "resnet18"
    layers, inputs = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for stage, count in enumerate(BLOCKS[name]):
        for block in range(count):
            width = 64 << stage
            layers.append(Block(inputs, width, 2 if stage and not block else 1, bottleneck))
            inputs = width * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Training:
    """A model that is trained in turns with others."""

    def __init__(self, mode, args):
        torch.manual_seed(1)
        self.mode, self.args = mode, args
        self.model = DistributedDataParallel(
            network(args.net), broadcast_buffers=False, gradient_as_bucket_view=args.bucket_view
        )
        if mode == "mgpu":
            self.model.register_comm_hook(None, mgpurun.torch.ddp_comm_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.data = torch.Generator().manual_seed(dist.get_rank())
        self.times, self.loss = [], 0.0

    def step(self, timed):
        shape = (self.args.batch, 3, self.args.image, self.args.image)
        images = torch.randn(shape, generator=self.data)
        labels = torch.randint(1000, (self.args.batch,), generator=self.data)
        mgpurun.barrier()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        with self.model.no_sync() if self.mode == "none" else contextlib.nullcontext():
            loss = cross_entropy(self.model(images), labels)
            loss.backward()
        self.optimizer.step()
        if timed:
            self.times.append(time.perf_counter() - begin)
        self.loss = loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=list(BLOCKS), default="resnet50")
    parser.add_argument("--image", type=int, default=64, help="height and width in pixels")
    parser.add_argument("--batch", type=int, default=4, help="images of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each model in a round")
    parser.add_argument("--bucket-view", action="store_true", help="DDP's gradient_as_bucket_view")
    parser.add_argument("--out", metavar="FILE.json", help="result file")
    args = parser.parse_args()
    world = mgpurun.init()
    torch.set_num_threads(world.threads)
    dist.init_process_group("gloo")
    trainings = {mode: Training(mode, args) for mode in ("gloo", "mgpu", "none")}
    for training in trainings.values():
        # DDP makes its buckets in the first two steps.
        for _ in range(3):
            training.step(timed=False)
    for _ in range(args.rounds):
        for training in trainings.values():
            for _ in range(args.steps):
                training.step(timed=True)
    alone = statistics.median(trainings["none"].times)
    results = []
    for mode, training in trainings.items():
        step = statistics.median(training.times)
        losses = torch.tensor([training.loss])
        mgpurun.all_reduce(losses, "avg")
        if world.rank == 0:
            parameters = sum(parameter.numel() for parameter in training.model.parameters())
            result = {
                "mode": mode,
                "net": args.net,
                "gradients_mb": round(parameters * 4e-6, 1),
                "ranks": world.size,
                "batch": args.batch,
                "image": args.image,
                "bucket_view": args.bucket_view,
                "images_per_s": round(args.batch * world.size / step, 2),
                "ms_per_step": round(step * 1e3, 1),
                "fastest_ms": round(min(training.times) * 1e3, 1),
                "communication": round(max(0.0, 1 - alone / step), 3),
                "loss": round(losses.item(), 6),
            }
            print(json.dumps(result), flush=True)
            results.append(result)
    if world.rank == 0:
        add(results, args.out)
    dist.destroy_process_group()


def kind_of(row):
    return row["net"], row["ranks"], row.get("bucket_view", False)


def add(results, path=None):
    """Adds results to a file, where they replace those of the same network, number of ranks and kind of gradients."""
    # What a rank is told is no setting of the measurement, and the number of its threads not that of the machine's cores.
    for name in ("OMP_NUM_THREADS", *LAUNCHER_VARIABLES):
        os.environ.pop(name, None)
    path = path or provenance.result_path("ddp")
    rows = []
    if os.path.exists(path):
        with open(path) as file:
            rows = json.load(file)["rows"]
    kind = {kind_of(result) for result in results}
    rows = [row for row in rows if kind_of(row) not in kind] + results
    versions = {"torch": torch.__version__, "mgpurun": mgpurun.__version__}
    provenance.write(path, {**provenance.record(versions=versions), "rows": rows})


if __name__ == "__main__":
    main()
