"""PyTorch's DistributedDataParallel: the averaged steps are those of one process on all data."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from check import batches, model, report, train_alone

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert rank == int(os.environ["RANK"])
parallel = DistributedDataParallel(model())
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
for inputs, targets in batches(rank):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(parallel(inputs), targets).backward()
    optimizer.step()
deviation = max((ours - alone).abs().max().item()
                for ours, alone in zip(parallel.module.parameters(), train_alone(world).parameters()))
report(rank, world, deviation)
dist.destroy_process_group()
