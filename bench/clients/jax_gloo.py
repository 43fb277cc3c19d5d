"""JAX with gloo on CPUs: a sum over the devices of all ranks."""

import json
import os
import sys

import jax
import numpy

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", world, rank)
mesh = jax.sharding.Mesh(numpy.array(jax.devices()), ("ranks",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
own = numpy.full((1, 4), float(rank + 1), numpy.float32)
parts = jax.make_array_from_process_local_data(sharding, own)
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
total = jax.jit(lambda array: array.sum(axis=0), out_shardings=everywhere)(parts)
deviation = float(abs(numpy.asarray(total.addressable_data(0)) - world * (world + 1) / 2).max())
if rank == 0:
    print(json.dumps({"ranks": jax.process_count(), "deviation": deviation}), flush=True)
jax.distributed.shutdown()
sys.exit(deviation != 0)
