"""Under `mgpurun -n 2`, with PyTorch: DDP with the hook trains what DDP trains with gloo."""

import gc
import os
import sys
import weakref

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


def arenas():
    """The arenas whose tenants live, and how many of these tenants' memory is in them."""
    found = [arena for arena in mgpurun.torch._reducers[None].arenas.values() if not arena.tenant.expired()]
    storages = [torch.UntypedStorage._new_with_weak_ptr(arena.tenant.cdata) for arena in found]
    return len(found), sum(storage.data_ptr() == arena.values.data_ptr() for storage, arena in zip(storages, found))


def linear(seed, inputs=64, outputs=200, hook=True, **options):
    torch.manual_seed(seed)
    model = DistributedDataParallel(torch.nn.Linear(inputs, outputs), **options)
    if hook:
        model.register_comm_hook(None, mgpurun.torch.ddp_comm_hook)
    return model


def check_two_models_in_one_pass(**options):
    """Buckets of the same sizes; both are reduced before the gradients of one are read."""
    gradients = []
    for hook in (False, True):
        models = [linear(seed, hook=hook, **options) for seed in (3, 4)]
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            images = torch.randn(8, 64, generator=generator)
            for model in models:
                model.zero_grad()
            (models[0](images) * models[1](images)).sum().backward()
        gradients.append([parameter.grad.clone() for model in models for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients)), options


def check_uneven_numbers_of_batches(**options):
    """A rank that has no more batches reduces zeros (`join`); its own gradients stay."""
    gradients = []
    for hook in (False, True):
        model = linear(5, hook=hook, **options)
        generator = torch.Generator().manual_seed(rank)
        with model.join():
            for _ in range(3 + 2 * rank):
                model.zero_grad()
                model(torch.randn(8, 64, generator=generator)).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients)), options


def check_fork(**options):
    """A child's gradients are its own. Without views the bucket's contents do not matter."""
    model = linear(6, **options)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = [gradient.clone() for gradient in gradients]
    child = os.fork()
    if child == 0:
        same = all(torch.equal(gradient, value) for gradient, value in zip(gradients, before))
        for gradient in gradients:
            gradient.fill_(-1)
        os._exit(0 if same and mgpurun.torch._reducers == {} else 1)
    assert os.waitpid(child, 0)[1] == 0, options
    assert all(torch.equal(gradient, value) for gradient, value in zip(gradients, before)), options


def check_addresses_that_are_known():
    """An array of NumPy that was made before the bucket moved into its arena keeps its memory."""
    try:
        import numpy
    except ImportError:
        print("no numpy")
        return
    arrays, copies = [], []

    def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        arrays.append(bucket.buffer().numpy())
        copies.append(arrays[-1].copy())
        return mgpurun.torch.ddp_comm_hook(state, bucket)

    model = linear(7, 1000, 3000, hook=False, gradient_as_bucket_view=True, find_unused_parameters=True)
    model.register_comm_hook(None, hook)
    for _ in range(3):
        model(torch.full((2, 1000), rank + 1.0)).sum().backward()
    del model
    gc.collect()
    others = [torch.full((3000, 1001), 7.0) for _ in range(20)]
    if mgpurun.torch._exchanges:
        first, last = (array.__array_interface__["data"][0] for array in (arrays[0], arrays[-1]))
        assert first != last and numpy.array_equal(arrays[0], copies[0])
    assert numpy.isfinite(arrays[-1]).all() and len(others) == 20


def check_training():
    kinds = ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True})
    for options in kinds:
        (expected_losses, expected), (losses, weights) = train(False, **options), train(True, **options)
        assert losses == expected_losses, (options, losses, expected_losses)
        # Two ranks: there is one order of a sum.
        assert torch.equal(weights, expected), (options, (weights - expected).abs().max())
    losses, weights = train(True, torch.bfloat16)
    assert weights.dtype == torch.bfloat16 and losses[-1] == losses[-1]
    same = weights.clone()
    mgpurun.broadcast(same)
    assert torch.equal(same, weights), "ranks have different weights"


def check_failure():
    """A rank fails in the middle of a backward pass: the other one's backward raises an error that says so."""
    model = linear(1, gradient_as_bucket_view=True)
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
    if mgpurun.torch._exchanges:
        assert arenas() == (1, 1), arenas()
    output = model(torch.randn(4, 64)).sum()
    if rank == 1:
        raise RuntimeError("rank 1 has no more data")
    addresses = [parameter.grad.data_ptr() for parameter in model.parameters()]
    try:
        output.backward()
    finally:
        # A rank that has not noticed cannot write to the gradients any more.
        after = [parameter.grad.data_ptr() for parameter in model.parameters()]
        assert not mgpurun.torch._exchanges or not set(addresses) & set(after), (addresses, after)
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


if sys.argv[1:] == ["fail"]:
    check_failure()
exchanges = mgpurun.torch._exchanges
# Also as with a PyTorch that cannot exchange the memory of a storage.
for mgpurun.torch._exchanges in {exchanges, False}:
    check_training()
    for views in (False, True):
        check_two_models_in_one_pass(gradient_as_bucket_view=views)
        check_uneven_numbers_of_batches(gradient_as_bucket_view=views)
        check_fork(gradient_as_bucket_view=views)
    check_addresses_that_are_known()
    model = linear(8, gradient_as_bucket_view=True)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
    gc.collect()
    # Models that are gone leave nothing behind.
    assert len(mgpurun.torch._reducers[None].arenas) == 1
    if mgpurun.torch._exchanges:
        assert arenas() == (1, 1), arenas()
    memory = [weakref.ref(arena.memory) for arena in mgpurun.torch._reducers[None].arenas.values()]
    del model
    gc.collect()
    assert memory[0]() is None, "the memory of a model that is gone is still there"
if rank == 0:
    print("DDP with the hook trains the same")
dist.destroy_process_group()
