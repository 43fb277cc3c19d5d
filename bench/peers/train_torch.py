"""Training throughput of a network in PyTorch, on one rank or with DistributedDataParallel, on the CPU or on GPUs.

    train_torch.py --net conv6 --batch 128 --data MNIST
    torchrun --nproc-per-node 2 train_torch.py --net conv6 --batch 64 --threads 1 --data MNIST
    train_torch.py --net conv6 --batch 1024 --device cuda --dtype bf16 --graph --data MNIST

The counterpart of `train_mnist --skip-test --json`: rank 0 prints one JSON object. Tensors are channels-last. On a GPU the
data set is resident, TF32 and cuDNN's benchmark mode are on, and Adam is fused. `--compile` adds torch.compile, `--graph`
captures the step as a CUDA graph (one rank). Each step picks a random batch and runs forward, backward and optimizer; with
several ranks DDP reduces gradients. Batch normalisation is not synchronised over ranks: PyTorch can do that on GPUs only.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from nets_torch import LAYERS, build, optimizer, training_set

LAYOUT = torch.channels_last


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=LAYERS, default="lenet5")
    parser.add_argument("--batch", type=int, default=128, help="images per step on each rank")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--warm", type=int, default=3, help="steps before that")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="bf16 is autocast")
    parser.add_argument("--threads", type=int, help="threads of each rank [default: PyTorch's own choice]")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--data", default=os.environ.get("MGPU_DATA"), help="folder with MNIST's gzipped files [$MGPU_DATA]")
    options = parser.parse_args()
    if options.data is None:
        parser.error("name the folder of MNIST with --data or MGPU_DATA")
    if options.graph and (options.device == "cpu" or "RANK" in os.environ):
        parser.error("--graph needs --device cuda and a single rank")
    return options


class Training:
    """The model, and the data that batches are taken from."""

    def __init__(self, options, device, rank, is_parallel):
        self.options, self.device = options, device
        torch.manual_seed(1)
        model = build(options.net).to(device, memory_format=LAYOUT)
        self.parameters = sum(tensor.numel() for tensor in model.parameters())
        if is_parallel:
            model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        self.optimizer = optimizer(options.net, model.parameters(), device.type == "cuda", options.graph)
        self.forward = torch.compile(model, mode="max-autotune-no-cudagraphs") if options.compile else model
        images, labels = training_set(options.data)
        self.images, self.labels = images.to(device, memory_format=LAYOUT), labels.to(device)
        self.random = torch.Generator(device=device).manual_seed(rank + 1)

    def batch(self):
        picked = torch.randint(len(self.images), (self.options.batch,), generator=self.random, device=self.device)
        return self.images[picked].contiguous(memory_format=LAYOUT), self.labels[picked]

    def step(self, images, labels):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.dtype == "bf16"):
            loss = cross_entropy(self.forward(images), labels)
        # A graph writes into the same gradients every time.
        self.optimizer.zero_grad(set_to_none=not self.options.graph)
        loss.backward()
        self.optimizer.step()
        return loss

    def captured(self):
        """The step as a CUDA graph: a function that makes one step and returns its loss."""
        images, labels = self.batch()
        # Nothing on the default stream may be alive when the step is captured.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                self.step(images, labels)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.step(images, labels)

        def replay():
            for place, value in zip((images, labels), self.batch()):
                place.copy_(value)
            graph.replay()
            return loss

        return replay


def main():
    options = parse()
    on_gpu, is_parallel = options.device == "cuda", "RANK" in os.environ
    if options.threads:
        torch.set_num_threads(options.threads)
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    if is_parallel:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_parallel else (0, 1)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    training = Training(options, device, rank, is_parallel)

    def wait():
        if on_gpu:
            torch.cuda.synchronize()

    step = training.captured() if options.graph else lambda: training.step(*training.batch())
    for _ in range(options.warm):
        step()
    wait()
    started = time.perf_counter()
    for _ in range(options.steps):
        loss = step()
    wait()
    seconds = time.perf_counter() - started
    if rank == 0:
        print(json.dumps({
            "impl": "torch", "net": options.net, "ranks": ranks, "batch": options.batch, "device": options.device,
            "dtype": options.dtype, "compile": options.compile, "graph": options.graph,
            "images_per_s": round(options.batch * ranks * options.steps / seconds, 1),
            "ms_per_step": round(seconds / options.steps * 1e3, 3), "loss": round(loss.item(), 4),
            "params": training.parameters,
            "max_gpu_mib": round(torch.cuda.max_memory_allocated() / (1 << 20)) if on_gpu else None,
        }), flush=True)
    if is_parallel:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
