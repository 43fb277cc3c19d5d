"""Hugging Face's transformers: its Trainer, with weights that are equal on all ranks after training.

    python -m trainer FOLDER
"""

import sys

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from check import batches, model, report


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = model()

    def forward(self, inputs, labels):
        outputs = self.body(inputs)
        return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}


def main():
    examples = [{"inputs": inputs[row], "labels": targets[row]}
                for inputs, targets in batches(0) for row in range(len(inputs))]
    arguments = TrainingArguments(output_dir=sys.argv[1], use_cpu=True, max_steps=6, per_device_train_batch_size=4,
                                  learning_rate=0.01, report_to=[], save_strategy="no", disable_tqdm=True)
    trainer = Trainer(model=Regression(), args=arguments, train_dataset=examples)
    before = torch.cat([tensor.detach().flatten() for tensor in trainer.model.parameters()]).clone()
    trainer.train()
    rank, world = dist.get_rank(), dist.get_world_size()
    after = torch.cat([tensor.detach().flatten() for tensor in trainer.model.parameters()])
    assert not torch.equal(before, after)
    all_of_them = [torch.empty_like(after) for _ in range(world)]
    dist.all_gather(all_of_them, after)
    report(rank, world, max((other - after).abs().max().item() for other in all_of_them))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
