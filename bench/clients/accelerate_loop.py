"""Hugging Face's accelerate: the averaged steps are those of one process on all data."""

import torch
from accelerate import Accelerator

from check import batches, model, report, train_alone

accelerator = Accelerator(cpu=True)
rank, world = accelerator.process_index, accelerator.num_processes
parallel, optimizer = model(), None
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
parallel, optimizer = accelerator.prepare(parallel, optimizer)
for inputs, targets in batches(rank):
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(parallel(inputs), targets))
    optimizer.step()
own = accelerator.unwrap_model(parallel)
deviation = max((ours - alone).abs().max().item()
                for ours, alone in zip(own.parameters(), train_alone(world).parameters()))
assert accelerator.gather(torch.tensor([rank])).tolist() == list(range(world))
report(rank, world, deviation)
accelerator.end_training()
