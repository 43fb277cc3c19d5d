"""PyTorch's FSDP2 (fully_shard): the sharded steps are those of one process on all data."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from check import batches, model, report, train_alone

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
sharded = model()
for layer in sharded:
    if isinstance(layer, torch.nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
for module in sharded.modules():
    if isinstance(module, FSDPModule):
        # gloo has no average, and sums where FSDP2 asks for one (PyTorch 2.8).
        module.set_force_sum_reduction_for_comms(True)
optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
for inputs, targets in batches(rank):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(sharded(inputs), targets).backward()
    optimizer.step()
deviation = max((ours.full_tensor() - alone).abs().max().item()
                for ours, alone in zip(sharded.parameters(), train_alone(world).parameters()))
report(rank, world, deviation)
dist.destroy_process_group()
