"""PyTorch's distributed checkpoints: sharded weights are saved and loaded.

    dcp.py FOLDER
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from check import model, report

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
whole = {name: tensor.detach() for name, tensor in model().named_parameters()}
state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
dcp.save(state, checkpoint_id=sys.argv[1])
loaded = {name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)]) for name, tensor in whole.items()}
dcp.load(loaded, checkpoint_id=sys.argv[1])
deviation = max((loaded[name].full_tensor() - tensor).abs().max().item() for name, tensor in whole.items())
report(rank, world, deviation)
dist.destroy_process_group()
