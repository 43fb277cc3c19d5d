"""Under `mgpurun -n 2`, with PyTorch: DDP with the hook trains what DDP trains with gloo."""

import sys

try:
    import torch
    import torch.distributed as dist
    import mgpurun.torch
    from torch.nn.parallel import DistributedDataParallel
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(0)

import mgpurun

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


def train(hook, dtype=torch.float32, **options):
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10)
    ).to(dtype)
    # Several buckets.
    model = DistributedDataParallel(net, bucket_cap_mb=0.2, **options)
    if hook:
        model.register_comm_hook(None, mgpurun.torch.ddp_comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(12):
        images = torch.randn(16, 64, generator=generator).to(dtype)
        labels = torch.randint(10, (16,), generator=generator)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == 5:
            # Gradients are accumulated, and not reduced.
            with model.no_sync():
                torch.nn.functional.cross_entropy(model(images), labels).backward()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
    (expected_losses, expected), (losses, weights) = train(False, **options), train(True, **options)
    assert losses == expected_losses, (options, losses, expected_losses)
    # Two ranks: there is one order of a sum.
    assert torch.equal(weights, expected), (options, (weights - expected).abs().max())
losses, weights = train(True, torch.bfloat16)
assert weights.dtype == torch.bfloat16 and losses[-1] == losses[-1]
same = weights.clone()
mgpurun.broadcast(same)
assert torch.equal(same, weights), "ranks have different weights"

# A rank fails in the middle of a backward pass: the other one's backward raises an error that says so.
if len(sys.argv) > 1 and sys.argv[1] == "fail":
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(64, 10))
    model.register_comm_hook(None, mgpurun.torch.ddp_comm_hook)
    model(torch.randn(4, 64)).sum().backward()
    output = model(torch.randn(4, 64)).sum()
    if rank == 1:
        raise RuntimeError("rank 1 has no more data")
    output.backward()
if rank == 0:
    print("DDP with the hook trains the same")
dist.destroy_process_group()
