"""DeepSpeed with ZeRO stage 1 on the CPU: the steps are those of one process on all data."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist

from check import batches, model, report, train_alone

deepspeed.init_distributed(dist_backend="gloo")
rank, world = dist.get_rank(), dist.get_world_size()
own = model()
engine, *_ = deepspeed.initialize(model=own, optimizer=torch.optim.SGD(own.parameters(), lr=0.1), config={
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
})
for inputs, targets in batches(rank):
    engine.backward(torch.nn.functional.mse_loss(engine(inputs), targets))
    engine.step()
deviation = max((ours - alone).abs().max().item()
                for ours, alone in zip(own.parameters(), train_alone(world).parameters()))
# 8e-4 was seen on 2 ranks, and not explained. A sum in place of an average deviates by a factor.
report(rank, world, deviation, bound=5e-3)
dist.destroy_process_group()
