"""A small problem, its solution without any launcher, and what the scripts print."""

import json
import sys

import torch

STEPS = 8
# Sums of floats depend on their order.
BOUND = 1e-4


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def batches(rank, steps=STEPS):
    """The batches of a rank: 8 inputs and targets each."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return [(torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(steps)]


def train_alone(world, steps=STEPS, lr=0.1):
    """The model after these steps on the batches of all ranks, in one process."""
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=lr)
    for step in zip(*(batches(rank, steps) for rank in range(world))):
        optimizer.zero_grad()
        inputs, targets = (torch.cat(part) for part in zip(*step))
        torch.nn.functional.mse_loss(alone(inputs), targets).backward()
        optimizer.step()
    return alone


def report(rank, world, deviation, bound=BOUND):
    """Prints one JSON object from rank 0. Fails if the deviation from one process is too large."""
    if rank == 0:
        print(json.dumps({"ranks": world, "deviation": deviation}), flush=True)
    if not deviation <= bound:
        sys.exit(f"rank {rank}: the deviation from one process is {deviation}")
