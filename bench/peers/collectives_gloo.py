"""Benchmarks gloo's collectives through torch.distributed: float32, sum, in place. Prints one JSON object per line.

    torchrun --nproc-per-node 2 -- collectives_gloo.py [--collective NAME] [--min BYTES] [--max BYTES]

The counterpart of `allreduce_perf`, with the rules of `collectives_mpi.c`. The bare `--` keeps torchrun from parsing the
options as its own.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist

LIMIT_SECONDS = 3.0
COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]


def is_sharded(collective):
    return collective in ("reduce_scatter", "all_gather")


def bus_factor(collective, ranks):
    others = (ranks - 1) / ranks
    return 2 * others if collective == "all_reduce" else others if is_sharded(collective) else 1.0


def operation(collective, data, rank, ranks):
    """A closure that runs the operation on `data`."""
    own = data.chunk(ranks)[rank] if is_sharded(collective) else None
    return {
        "all_reduce": lambda: dist.all_reduce(data),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, data),
        "all_gather": lambda: dist.all_gather_into_tensor(data, own),
        "broadcast": lambda: dist.broadcast(data, 0),
        "reduce": lambda: dist.reduce(data, 0),
    }[collective]


def pattern(rank, count):
    """Small whole numbers with exact sums."""
    return ((torch.arange(count) + 3 * rank) % 61).to(torch.float32)


def verify(collective, data, rank, ranks):
    count = data.numel()
    data.copy_(pattern(rank, count))
    operation(collective, data, rank, ranks)()
    inputs = [pattern(of, count) for of in range(ranks)]
    total = torch.stack(inputs).sum(0)
    if collective == "all_reduce" or (collective == "reduce" and rank == 0):
        found, right = data, total
    elif collective == "reduce_scatter":
        found, right = data.chunk(ranks)[rank], total.chunk(ranks)[rank]
    elif collective == "all_gather":
        found, right = data, torch.cat([inputs[of].chunk(ranks)[of] for of in range(ranks)])
    elif collective == "broadcast":
        found, right = data, inputs[0]
    else:  # What a reduction leaves on the other ranks is not defined.
        return
    if not torch.equal(found, right):
        raise SystemExit(f"collectives_gloo: rank {rank}: wrong result of {collective} of {count} elements")


def largest_of_ranks(values):
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def measure(run, size):
    """The time of the slowest rank in seconds for each run after the warm-up, ascending."""
    runs = 2000 if size <= 65536 else 200 if size <= 4 << 20 else 20
    warm_up = runs // 10 + 2
    seconds = []
    begin = time.perf_counter()
    while len(seconds) < warm_up + runs:
        dist.barrier()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
        # All ranks stop together, by the slowest clock.
        if len(seconds) % (runs // 20) == 0:
            if largest_of_ranks([time.perf_counter() - begin])[0] > LIMIT_SECONDS:
                break
    seconds = largest_of_ranks(seconds)
    return sorted(seconds[min(warm_up, len(seconds) // 2) :])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--collective", choices=COLLECTIVES, default="all_reduce")
    parser.add_argument("--min", type=int, default=4)
    parser.add_argument("--max", type=int, default=64 << 20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    unit = 4 * (ranks if is_sharded(args.collective) else 1)
    wanted, before = max(args.min, 1), 0
    while wanted <= args.max:
        size = -(-wanted // unit) * unit
        wanted *= 4
        if size == before:
            continue
        before = size
        data = torch.zeros(size // 4)
        verify(args.collective, data, rank, ranks)
        data.zero_()
        seconds = measure(operation(args.collective, data, rank, ranks), size)
        if rank == 0:
            p50 = seconds[len(seconds) // 2]
            line = {
                "impl": "gloo",
                "ranks": ranks,
                "bytes": size,
                "us_p50": round(p50 * 1e6, 2),
                "us_min": round(seconds[0] * 1e6, 2),
                "busbw_gbps": round(size / p50 / 1e9 * bus_factor(args.collective, ranks), 3),
                "collective": args.collective,
            }
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
