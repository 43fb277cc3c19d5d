"""The cost of an all-reduce over hosts, on paper. Pure functions; standard library only.

H hosts have L ranks each, n = H·L; every rank has S bytes. Four parameters describe machine and network:

    α  latency: from the start of a message to its arrival, without its bytes
    o  overhead: what each message costs the rank that handles it
    β  seconds per byte of payload of a host's link, in each direction; the ranks of a host share the link
    γ  seconds per byte that a rank reads and adds

A cost is linear in them as long as it is known what a pipeline waits for, its link or its sums; so `fit` is linear least squares.
Hosts that are namespaces of one machine share its cores: there the overhead of a message to all counts n / cores times.

A link also carries headers and acknowledgements, which are part of β. For TCP over Ethernet with an MTU of 1,500 bytes a frame of 1,514
bytes has 1,448 of payload, and every second one is acknowledged by a frame of 66 bytes on the other direction, which has payload to
carry, too: (1,514 + 33) / 1,448 = 1.07 times the payload. `WIRE_BYTES` is this factor.

A token bucket filter, which gives a link its rate, lets a bucket of bytes pass at once after a pause. So it hides a part of each pause:
on the way of the first block of a chain the first H hops, over links that were idle, are shorter by a bucket each, and the pauses at the
end of a direct exchange are, too. `bucket` is 0 for links of cables.

All of them begin with the arrival of all ranks. The first rank of a host sends the arrivals of its host to those of the other hosts in
one message; with more than three hosts, messages are passed on in ⌈log₂ H⌉ steps. What differs from rank to rank is exchanged by all
ranks instead:

    A = α + (H−1)·o, with more than three hosts ⌈log₂ H⌉·(α + o)        E = α + (n−1)·o

mgpurun takes the first for up to 16 KiB, and the chain beyond if hosts have several ranks; if each has one, shards up to 16 KiB each, or
256 KiB in all, and the direct exchange beyond.

**Raw.** A small payload goes to every rank with the arrival: A + L·(H−1)·S·β + n·S·γ.

**Shards.** Each rank gets the contributions to its shard with the arrivals, and sends the result to all. The link is idle if a stream is
late, as in the direct exchange: 2·E + 2·(H−1)/H·S·β + (H−2)/H·S·β + S·γ.

**Chain.** Rank l of each host owns part l, S/L bytes, in blocks of b bytes. A block visits the hosts in order; each adds its L ranks'
contributions; the last host's result goes back along the chain. The L chains of a host work at the same time, and their blocks pass its
link one after the other; where TCP mixes them, a hop takes longer, up to L·b·β. The first block needs 2·(H−1) hops of α + o + b·β and H
sums of L·b·γ. The others follow at the pace of what is slowest, the link, a rank's sums or its messages: a host in the middle sends 2·S
bytes and receives as many, with two hosts each sends S. At the end the ranks of a host meet at a barrier, B = α + (L−1)·o, or 0 for one
rank. So with c = 1 for H = 2 and c = 2 beyond:

    A + 2·(H−1)·(α + o + b·β) + H·L·b·γ + (S − b)·max(c·β, γ, c·o/(L·b)) + B

b = √(S/L · 64 KiB / (2·(H−1))), between 4 and 128 KiB and at most a part of a chunk of 1 MiB. This is for buffers in memory that the
ranks of a host share; others are copied, and each chunk waits for the one before.

**Direct.** Each of the n ranks owns a part, S/n bytes, gets the contributions to it from all others, sums them in rank order, and sends
the result to every host. That is (L + 1)·(H−1)/H·S bytes for a link: the contributions of a host's ranks cannot be added up before
those of the hosts before it. A part is cut into k pieces of p bytes, a quarter of it, between 128 and 256 KiB. Contributions of two
turns are ahead of the piece that is summed, so the link never waits for a sum or an answer, except at the end: the last
results leave when the contributions of the slowest stream have come. TCP does not divide a link evenly among its streams; the last term
is the idle time if one stream is behind by a piece for each of the H − 2 other hosts. A turn takes (L + 1)·L·(H−1)·p·β, n·p·γ or
2·(n−1)·o:

    A + 2·E + (L + 1)·L·(H−1)·p·β + n·p·γ + (k−1)·max(of these three) + L²·(H−2)·p·β

**Tree.** Two binary trees over the hosts, each with half of the bytes, up and down: 2·⌈log₂ H⌉ hops, in which two children share a
link. The pace is that of the chain: every host is inside one tree and a leaf of the other.

**Ring, halving.** A reduce-scatter over the hosts and an all-gather: 2·(H−1) steps around a ring, or 2·⌈log₂ H⌉ steps between hosts at
doubling distances, with 2·(H−1)/H·S·β for the bytes and S·γ for the sums.

Chain and direct keep the order of sums, 0…n−1. The others do not: there the order depends on the number of hosts or on the element.
"""

import collections
import math

Parameters = collections.namedtuple("Parameters", "alpha overhead beta gamma")
# Bytes on a link per byte of payload, see above.
WIRE_BYTES = (1514 + 66 / 2) / 1448
# Sizes up to this one are exchanged raw (hosts/frame.rs), if several ranks of a host have memory for those of all (hosts/board.rs).
RAW_BYTES, SHEET_BYTES = 16 << 10, 1 << 20
# Shards (hosts/gathering.rs and hosts/frame.rs): the most bytes that arrive for a rank, and from each other one.
PARTS_BYTES, ARRIVAL_BYTES = 256 << 10, 128 << 10
# The most hosts of which each sends its arrival to all others (hosts/dissemination.rs).
FEW_HOSTS = 3
# The chain (hosts/chain.rs): limits of a block, the bytes that cost as much as a message, and the size of a chunk.
MIN_BLOCK, MAX_BLOCK, MESSAGE_COST, CHUNK_BYTES = 4 << 10, 128 << 10, 64 << 10, 1 << 20
# The direct exchange (hosts/direct.rs): pieces of a part, their limits, the memory for contributions, and for how many turns.
TURNS, MIN_PIECE, MAX_PIECE, MEMORY, TURNS_IN_MEMORY = 4, 128 << 10, 256 << 10, 8 << 20, 3
# Sizes up to this one show latency and overhead.
TINY_BYTES = 256
ALTERNATIVES = ("direct", "tree", "ring", "halving")


def plus(*costs):
    return Parameters(*map(sum, zip(*costs)))


def times(factor, cost):
    return Parameters(*(factor * part for part in cost))


def dot(cost, parameters):
    """The seconds of a cost."""
    return sum(a * b for a, b in zip(cost, parameters))


# Costs have the form of Parameters: how often each of them counts.
HOP = Parameters(1, 1, 0, 0)


def crowd(hosts, ranks, cores=None):
    """How many ranks share a core. `cores` are those that all hosts share, if they do."""
    return max(1, hosts * ranks / cores) if cores else 1


def meeting(ranks, crowd=1):
    """Every rank sends to every other one of `ranks`; nothing for one rank."""
    return Parameters(1, (ranks - 1) * crowd, 0, 0) if ranks > 1 else Parameters(0, 0, 0, 0)


def exchange(hosts, ranks, cores=None):
    return meeting(hosts * ranks, crowd(hosts, ranks, cores))


def arrival(hosts, ranks, cores=None):
    shared = crowd(hosts, ranks, cores)
    if hosts <= FEW_HOSTS:
        return meeting(hosts, shared)
    steps = math.ceil(math.log2(hosts))
    return Parameters(steps, steps * shared, 0, 0)


def raw(hosts, ranks, size, cores=None):
    own = Parameters(0, 0, ranks * (hosts - 1) * size, hosts * ranks * size)
    return plus(arrival(hosts, ranks, cores), own)


def late(streams, piece, bucket):
    """The bytes of an idle link if one stream is behind by a piece for each of the others; it is idle before the last results and after
    them."""
    return max(0, streams * piece - 2 * bucket)


def shards(hosts, size, cores=None, bucket=0):
    """For one rank a host."""
    moved = 2 * (hosts - 1) / hosts * size + late(hosts - 2, size / hosts, bucket)
    return plus(times(2, exchange(hosts, 1, cores)), Parameters(0, 0, moved, size))


def slowest(parameters, link, sums, messages):
    """What a full pipeline waits for: bytes on the link, bytes to add, or messages to handle."""
    costs = Parameters(0, 0, link, 0), Parameters(0, 0, 0, sums), Parameters(0, messages, 0, 0)
    return max(costs, key=lambda cost: dot(cost, parameters))


def block_bytes(part, hops):
    """The size of a block on the way of `part` bytes over so many hops, there and back."""
    best = math.isqrt(int(part * MESSAGE_COST / hops))
    return min(max(best, MIN_BLOCK), MAX_BLOCK) // 64 * 64


def first_block(ranks, size, hops, block=None):
    """`block`, or the one of mgpurun, at most a part."""
    if block is None:
        block = min(block_bytes(size / ranks, hops), CHUNK_BYTES / ranks)
    return min(block, size / ranks)


def pipelined(hosts, ranks, size, parameters, block, hops, sums, hop_blocks, bucket=0):
    """A first block takes `hops` hops, in which `hop_blocks` blocks share a link, and `sums` sums; the others follow at their pace."""
    first = first_block(ranks, size, hops, block)
    hop = plus(HOP, Parameters(0, 0, hop_blocks * first, 0))
    busiest = 1 if hosts == 2 else 2
    pace = slowest(parameters, link=busiest, sums=1, messages=busiest / (ranks * first))
    hidden = Parameters(0, 0, -hosts * min(bucket, first), 0)
    return plus(times(hops, hop), hidden, Parameters(0, 0, 0, sums * ranks * first), times(size - first, pace))


def chain(hosts, ranks, size, parameters, block=None, cores=None, bucket=0):
    """`block` is what mgpurun takes unless it is given."""
    steps = pipelined(hosts, ranks, size, parameters, block, 2 * (hosts - 1), sums=hosts, hop_blocks=1, bucket=bucket)
    return plus(arrival(hosts, ranks, cores), steps, meeting(ranks, crowd(hosts, ranks, cores)))


def piece_bytes(part, ranks):
    """The size of a piece of the direct exchange."""
    most = min(max(MEMORY // TURNS_IN_MEMORY // ranks, 64), MAX_PIECE)
    return min(part, min(max(part // TURNS, MIN_PIECE), most) // 64 * 64)


def direct(hosts, ranks, size, parameters, cores=None, bucket=0):
    everyone = hosts * ranks
    part = size / everyone
    piece = piece_bytes(part, everyone)
    link, sums = (ranks + 1) * ranks * (hosts - 1) * piece, everyone * piece
    turn = slowest(parameters, link, sums, messages=2 * (everyone - 1))
    idle = Parameters(0, 0, late(ranks * ranks * (hosts - 2), piece, bucket), 0)
    steps = plus(Parameters(0, 0, link, sums), times(part / piece - 1, turn), idle)
    return plus(arrival(hosts, ranks, cores), times(2, exchange(hosts, ranks, cores)), steps)


def tree(hosts, ranks, size, parameters, block=None):
    depth, children = math.ceil(math.log2(hosts)), 1 if hosts == 2 else 2
    steps = pipelined(hosts, ranks, size, parameters, block, hops=2 * depth, sums=depth + 1, hop_blocks=children)
    return plus(arrival(hosts, ranks), steps, meeting(ranks))


def scattered(hosts, ranks, size, steps):
    moved = Parameters(0, 0, 2 * (hosts - 1) / hosts * size, size)
    return plus(arrival(hosts, ranks), times(steps, HOP), moved, meeting(ranks))


def ring(hosts, ranks, size, _=None):
    return scattered(hosts, ranks, size, 2 * (hosts - 1))


def halving(hosts, ranks, size, _=None):
    return scattered(hosts, ranks, size, 2 * math.ceil(math.log2(hosts)))


def all_reduce(hosts, ranks, size, parameters, cores=None, bucket=0):
    """The cost of what mgpurun does."""
    if size <= (RAW_BYTES if ranks == 1 else min(SHEET_BYTES // (hosts * ranks), RAW_BYTES)):
        return raw(hosts, ranks, size, cores)
    if ranks > 1:
        return chain(hosts, ranks, size, parameters, cores=cores, bucket=bucket)
    if size / hosts <= min(max(PARTS_BYTES / hosts, RAW_BYTES), ARRIVAL_BYTES):
        return shards(hosts, size, cores, bucket)
    return direct(hosts, ranks, size, parameters, cores=cores, bucket=bucket)


def seconds(algorithm, hosts, ranks, size, parameters, **options):
    return dot(algorithm(hosts, ranks, size, parameters, **options), parameters)


def best_block(algorithm, hosts, ranks, size, parameters):
    """The power of two from 4 KiB that is the fastest block, and its seconds."""
    blocks = [1 << power for power in range(12, 31) if 1 << power < 2 * max(size / ranks, 1 << 12)]
    timed = [(seconds(algorithm, hosts, ranks, size, parameters, block=block), block) for block in blocks]
    return min(timed)[::-1]


def bucket_sizes(tensors, first, rest):
    """Bytes of the buckets of gradients (runtime/src/bucket.rs): tensors of these bytes, the last one first, are never split; a bucket
    takes them until it has `first` bytes (the first one) or `rest` bytes."""
    buckets = []
    for tensor in reversed(tensors):
        if not buckets or buckets[-1] >= (rest if len(buckets) > 1 else first):
            buckets.append(0)
        buckets[-1] += tensor
    return buckets


def crossover(alternative, chain_seconds, most, share=0.9):
    """The fewest hosts from which on, up to `most`, the alternative takes at most this share of the chain's time; None if none do.

    Both are functions from the number of hosts to seconds. Above 64 hosts not every number is tried.
    """
    found, hosts = None, most
    while hosts >= 2 and alternative(hosts) <= share * chain_seconds(hosts):
        found = hosts
        hosts -= max(1, hosts // 64)
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
    if not rows:
        raise ValueError("the measurements do not determine the parameters")
    used = list(range(len(rows[0])))
    while used:
        normal = [[sum(row[a] * row[b] for row in rows) for b in used] for a in used]
        found = solve(normal, [sum(row[a] * value for row, value in zip(rows, right)) for a in used])
        if min(found) >= 0:
            return [found[used.index(index)] if index in used else 0.0 for index in range(len(rows[0]))]
        used.remove(used[found.index(min(found))])
    return [0.0] * len(rows[0])


def fit(points, gamma, cores=None, bucket=0):
    """The parameters, of which γ is known, from points (hosts, ranks, size, seconds); relative errors are made small.

    Tiny sizes give latency and overhead, those above RAW_BYTES give β, and each needs what the other gives: a few turns
    settle that. The links must be slower than the sums.
    """
    slow, found = Parameters(0, 0, 1, 0), Parameters(0.0, 0.0, 0.0, gamma)
    costs = [(size, measured, all_reduce(hosts, ranks, size, slow, cores, bucket)) for hosts, ranks, size, measured in points]
    tiny = [(measured, cost) for size, measured, cost in costs if size <= TINY_BYTES]
    large = [(measured, cost) for size, measured, cost in costs if size > RAW_BYTES]
    for _ in range(20):
        found = refitted(tiny, found, ("alpha", "overhead"))
        found = refitted(large, found, ("beta",))
    return found


def refitted(timed, parameters, names):
    """The parameters with the named ones fitted to (seconds, cost) by least squares of the relative errors."""
    # In nanoseconds, so that the equations stay well conditioned.
    rest = parameters._replace(**dict.fromkeys(names, 0.0))
    rows = [[getattr(cost, name) * 1e-9 / measured for name in names] for measured, cost in timed]
    right = [1 - dot(cost, rest) / measured for measured, cost in timed]
    return rest._replace(**{name: value * 1e-9 for name, value in zip(names, least_squares(rows, right))})


def deviations(points, parameters, cores=None, bucket=0):
    """(hosts, ranks, size, measured, predicted, relative deviation) of each point."""
    for hosts, ranks, size, measured in points:
        predicted = dot(all_reduce(hosts, ranks, size, parameters, cores, bucket), parameters)
        yield hosts, ranks, size, measured, predicted, predicted / measured - 1
