"""Lightning: its Trainer with strategy ddp, and steps that are those of one process on all data."""

import os

import lightning
import torch
import torch.distributed as dist

from check import STEPS, batches, model, report, train_alone


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = model()

    def training_step(self, batch, index):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.body(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
trainer = lightning.Trainer(accelerator="cpu", devices=world, strategy="ddp", max_steps=STEPS, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False)
# Each rank has batches of its own.
module = Regression()
trainer.fit(module, torch.utils.data.DataLoader(batches(rank), batch_size=None))
assert (trainer.global_rank, trainer.world_size) == (rank, world)
deviation = max((ours - alone).abs().max().item()
                for ours, alone in zip(module.body.parameters(), train_alone(world).parameters()))
report(rank, world, deviation)
if dist.is_initialized():
    dist.destroy_process_group()
