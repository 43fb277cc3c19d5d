"""The cost of an all-reduce over hosts, on paper. Pure functions; standard library only.

H hosts have L ranks each, n = H·L; every rank has S bytes. Four parameters describe machine and network:

    α  latency: from the start of a message to its arrival, without its bytes
    o  overhead: what each message costs the rank that handles it
    β  seconds per byte of a host's link, in each direction; the ranks of a host share the link
    γ  seconds per byte that a rank reads and adds

A cost is linear in them as long as it is known what a pipeline waits for, its link or its sums; so `fit` is linear least squares.

**Raw.** A small payload goes from every rank to every other in one go: α + (n−1)·o + L²·(H−1)·S·β + n·S·γ. A host sends L ranks'
payloads to each of the (H−1)·L ranks elsewhere.

**Chain.** Rank l of each host owns shard l, S/L bytes, in blocks of b bytes. A block visits the hosts in order; each adds its L ranks'
parts; the last host's result goes back along the chain. The L chains of a host share its link and run at the same time, so a hop
of a block in all of them takes α + o + L·b·β, and the sums of a host L·b·γ. The first block needs 2·(H−1) hops and H sums. The
others follow at the pace of the busiest part: a host in the middle sends 2·S bytes and receives as many, with two hosts each sends
S. So with c = 1 for H = 2 and c = 2 beyond, after the arrival of all ranks, α + (n−1)·o:

    2·(H−1)·(α + o + L·b·β) + H·L·b·γ + (S − L·b)·max(c·β, γ)

**Tree.** Two binary trees over the hosts, each with half of the bytes, up and down: 2·⌈log₂ H⌉ hops, in which two children share a
link. The pace is that of the chain: every host is inside one tree and a leaf of the other.

**Ring, halving.** A reduce-scatter over the hosts and an all-gather: 2·(H−1) steps around a ring, or 2·⌈log₂ H⌉ steps between hosts at
doubling distances, with 2·(H−1)/H·S·β for the bytes and S·γ for the sums. The order of the sums then depends on the element.
"""

import collections
import math

Parameters = collections.namedtuple("Parameters", "alpha overhead beta gamma")
# Sizes up to this one are exchanged raw; blocks of the chain, in bytes.
RAW_BYTES = 16 << 10
BLOCK_BYTES = 256 << 10
ALTERNATIVES = ("tree", "ring", "halving")


def plus(*costs):
    return Parameters(*map(sum, zip(*costs)))


def times(factor, cost):
    return Parameters(*(factor * part for part in cost))


def dot(cost, parameters):
    """The seconds of a cost."""
    return sum(a * b for a, b in zip(cost, parameters))


# Costs have the form of Parameters: how often each of them counts.
HOP = Parameters(1, 1, 0, 0)


def arrival(hosts, ranks):
    """Every rank tells every other that it has come."""
    return Parameters(1, hosts * ranks - 1, 0, 0)


def raw(hosts, ranks, size):
    own = Parameters(0, 0, ranks * ranks * (hosts - 1) * size, hosts * ranks * size)
    return plus(arrival(hosts, ranks), own)


def pipelined(hops, sums, hop_bytes, block, size, pace):
    """A first block of `block` bytes over all ranks, then the rest at `pace`."""
    hop = plus(HOP, Parameters(0, 0, hop_bytes, 0))
    return plus(times(hops, hop), Parameters(0, 0, 0, sums * block), times(size - block, pace))


def pace(hosts, parameters):
    """The cost of a byte in a full pipeline."""
    busiest = 1 if hosts == 2 else 2
    by_link = busiest * parameters.beta >= parameters.gamma
    return Parameters(0, 0, busiest, 0) if by_link else Parameters(0, 0, 0, 1)


def chain(hosts, ranks, size, parameters, block=BLOCK_BYTES):
    of_all = min(ranks * block, size)
    steps = pipelined(2 * (hosts - 1), hosts, of_all, of_all, size, pace(hosts, parameters))
    return plus(arrival(hosts, ranks), steps)


def tree(hosts, ranks, size, parameters, block=BLOCK_BYTES):
    of_all, depth = min(ranks * block, size), math.ceil(math.log2(hosts))
    hop_bytes = of_all if hosts == 2 else 2 * of_all
    steps = pipelined(2 * depth, depth + 1, hop_bytes, of_all, size, pace(hosts, parameters))
    return plus(arrival(hosts, ranks), steps)


def scattered(hosts, ranks, size, steps):
    moved = Parameters(0, 0, 2 * (hosts - 1) / hosts * size, size)
    return plus(arrival(hosts, ranks), times(steps, HOP), moved)


def ring(hosts, ranks, size, _=None):
    return scattered(hosts, ranks, size, 2 * (hosts - 1))


def halving(hosts, ranks, size, _=None):
    return scattered(hosts, ranks, size, 2 * math.ceil(math.log2(hosts)))


def all_reduce(hosts, ranks, size, parameters, block=BLOCK_BYTES):
    """The cost of what mgpurun does."""
    return raw(hosts, ranks, size) if size <= RAW_BYTES else chain(hosts, ranks, size, parameters, block)


def seconds(algorithm, hosts, ranks, size, parameters, **options):
    return dot(algorithm(hosts, ranks, size, parameters, **options), parameters)


def best_block(algorithm, hosts, ranks, size, parameters):
    """The power of two from 1 KiB that is the fastest block, and its seconds."""
    blocks = [1 << power for power in range(10, 31) if 1 << power < 2 * max(size / ranks, 1 << 10)]
    timed = [(seconds(algorithm, hosts, ranks, size, parameters, block=block), block) for block in blocks]
    return min(timed)[::-1]


def in_buckets(size, bucket, time_of):
    """Seconds of one all-reduce for each bucket of gradients; `time_of` gives the seconds of one."""
    whole, rest = divmod(size, bucket)
    return whole * time_of(bucket) + (time_of(rest) if rest else 0)


def crossover(alternative, ranks, size, parameters, most=1 << 16):
    """The fewest hosts from which on (up to `most`) the alternative takes less time than the chain; None if there are none."""
    found = None
    hosts = most
    while hosts >= 2:
        if seconds(alternative, hosts, ranks, size, parameters) >= seconds(chain, hosts, ranks, size, parameters):
            break
        found = hosts
        hosts -= 1 if hosts <= 256 else max(1, hosts // 256)
    return found


def solve(matrix, right):
    """The solution of a small system of linear equations, by elimination with pivots."""
    rows = [[*row, value] for row, value in zip(matrix, right)]
    for column in range(len(rows)):
        pivot = max(range(column, len(rows)), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < 1e-300:
            raise ValueError("the measurements do not determine the parameters")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(len(rows)):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column])]
    return [row[-1] / row[index] for index, row in enumerate(rows)]


def least_squares(rows, right):
    """Parameters not below 0 with the least squares; a parameter that would be negative is 0."""
    used = list(range(len(rows[0])))
    while used:
        normal = [[sum(row[a] * row[b] for row in rows) for b in used] for a in used]
        found = solve(normal, [sum(row[a] * value for row, value in zip(rows, right)) for a in used])
        if min(found) >= 0:
            return [found[used.index(index)] if index in used else 0.0 for index in range(len(rows[0]))]
        used.remove(used[found.index(min(found))])
    return [0.0] * len(rows[0])


def fit(points, gamma, block=BLOCK_BYTES):
    """The parameters, of which γ is known, from points (hosts, ranks, size, seconds); relative errors are made small.

    The links must be slower than the sums. Parameters are scaled to numbers of about 1, so that equations stay well conditioned.
    """
    slow, scale = Parameters(0, 0, 1, 0), (1e-6, 1e-6, 1e-9)
    rows, right = [], []
    for hosts, ranks, size, measured in points:
        cost = all_reduce(hosts, ranks, size, slow, block)
        rows.append([part * unit / measured for part, unit in zip(cost, scale)])
        right.append(1 - cost.gamma * gamma / measured)
    return Parameters(*(value * unit for value, unit in zip(least_squares(rows, right), scale)), gamma)


def deviations(points, parameters, block=BLOCK_BYTES):
    """(hosts, ranks, size, measured, predicted, relative deviation) of each point."""
    for hosts, ranks, size, measured in points:
        predicted = dot(all_reduce(hosts, ranks, size, parameters, block), parameters)
        yield hosts, ranks, size, measured, predicted, predicted / measured - 1
