#!/usr/bin/env python3
"""Tests of the model of all-reduce over hosts: its formulas against schedules that are played out, and the fit. Standard library only."""

import math
import pathlib
import random
import re
import sys
import unittest

sys.dont_write_bytecode = True
import cost_model as model  # noqa: E402
import namespaces  # noqa: E402
from cost_model import Parameters  # noqa: E402

SLOW = Parameters(50e-6, 5e-6, 80e-9, 0.2e-9)


def played(hosts, blocks, hop, sums, link):
    """The time of a chain by hand: `blocks` blocks, each hop and each sum of a block in order, one block at a time on a link.

    `link` is the part of a hop for which it occupies its sender's link. A link sends results before accumulators.
    """
    free, done = [0.0] * hosts, []
    events = [(0.0, block, 0) for block in range(blocks)]  # (time, block, hops behind it)
    last = 2 * (hosts - 1)
    while events:
        events.sort(key=lambda event: (max(event[0], free[place(event[2], hosts)]), -event[2], event[1]))
        time, block, hops = events.pop(0)
        if hops == last:
            done.append(time)
            continue
        host = place(hops, hosts)
        start = max(time + (sums if hops < hosts else 0), free[host])
        free[host] = start + link
        events.append((start + hop, block, hops + 1))
    return max(done)


def place(hops, hosts):
    """The host that has a block after so many hops: forth and back along the chain."""
    return hops if hops < hosts else 2 * (hosts - 1) - hops


def exchanged(hosts, size, parameters):
    """The time of a direct exchange by hand, one rank a host, in which all hosts do the same at the same time.

    A link carries what is posted, in order. Contributions of three turns are posted, then those of another one for each that is summed.
    """
    part = size / hosts
    piece = model.piece_bytes(part, hosts)
    turns = [min(piece, part - at) for at in range(0, math.ceil(part), int(piece))]
    link = model.dot(model.arrival(hosts, 1), parameters)  # when it has sent what was posted so far, after the arrival
    posted = link + parameters.alpha
    arrived = []
    for turn in range(len(turns) + 2):
        if turn < len(turns):
            link = max(link, posted) if turn > 2 else link
            link += (hosts - 1) * turns[turn] * parameters.beta
            arrived.append(link + parameters.alpha)
        if turn >= 2:
            posted = arrived[turn - 2] + size / len(turns) * parameters.gamma
            link = max(link, posted) + (hosts - 1) * turns[turn - 2] * parameters.beta
    return link + parameters.alpha


def constant(file, name):
    """A size in the sources of the runtime."""
    source = pathlib.Path(__file__).resolve().parent.parent.joinpath("runtime/src/comm/hosts", file).read_text()
    number, shift = re.search(rf"const {name}: usize = (\d+)(?: << (\d+))?;", source).groups()
    return int(number) << int(shift or 0)


class Sizes(unittest.TestCase):
    def test_sizes_are_those_of_the_runtime(self):
        self.assertEqual(model.RAW_BYTES, constant("frame.rs", "SMALL_BYTES"))
        self.assertEqual(model.SHEET_BYTES, constant("board.rs", "SHEET_BYTES"))
        self.assertEqual(model.PARTS_BYTES, constant("gathering.rs", "PARTS_BYTES"))
        self.assertEqual(model.ARRIVAL_BYTES, constant("frame.rs", "ARRIVAL_BYTES"))
        self.assertEqual(model.FEW_HOSTS, constant("dissemination.rs", "FEW_RUNS"))
        self.assertEqual([model.MIN_BLOCK, model.MAX_BLOCK, model.MESSAGE_COST],
                         [constant("chain.rs", name) for name in ("MIN_BLOCK", "BLOCK_BYTES", "MESSAGE_COST")])
        self.assertEqual(model.CHUNK_BYTES, constant("house.rs", "STAGE_BYTES"))
        self.assertEqual(model.MAX_PIECE, constant("frame.rs", "PIECE_BYTES"))
        self.assertEqual([model.TURNS, model.MIN_PIECE, model.MEMORY, model.TURNS_IN_MEMORY - 1],
                         [constant("direct.rs", name) for name in ("TURNS", "MIN_PIECE", "MEMORY", "AHEAD")])


class Formulas(unittest.TestCase):
    def test_the_chain_takes_what_its_schedule_takes(self):
        for hosts in (2, 3, 4, 5, 8):
            for ranks in (1, 2):
                for blocks in (1, 2, 16, 64):
                    block = model.MAX_BLOCK
                    size = blocks * ranks * block
                    hop = SLOW.alpha + SLOW.overhead + block * SLOW.beta
                    by_hand = played(hosts, blocks * ranks, hop, ranks * block * SLOW.gamma, block * SLOW.beta)
                    by_hand += model.dot(model.arrival(hosts, ranks), SLOW)
                    by_hand += model.dot(model.meeting(ranks), SLOW)
                    formula = model.seconds(model.chain, hosts, ranks, size, SLOW, block=block)
                    # Before the first result comes back, a link in the middle serves one direction only: a hop or two at most.
                    self.assertLess(abs(formula - by_hand), 2 * hop + 0.05 * by_hand, (hosts, ranks, blocks))

    def test_two_hosts_send_every_byte_once_in_each_direction(self):
        size = 64 << 20
        link = model.seconds(model.chain, 2, 1, size, SLOW) / (size * SLOW.beta)
        self.assertTrue(1 < link < 1.02, link)
        in_the_middle = model.seconds(model.chain, 3, 1, size, SLOW) / (size * SLOW.beta)
        self.assertTrue(2 < in_the_middle < 2.04, in_the_middle)

    def test_small_payloads_go_from_all_to_all(self):
        self.assertEqual(model.all_reduce(3, 2, 100, SLOW), Parameters(1, 2, 2 * 2 * 100, 6 * 100))
        size = model.RAW_BYTES + 1
        self.assertEqual(model.all_reduce(3, 2, size, SLOW), model.chain(3, 2, size, SLOW))
        self.assertEqual(model.all_reduce(3, 1, size, SLOW), model.shards(3, size))
        # With many ranks their payloads take too much memory.
        self.assertEqual(model.all_reduce(64, 2, 16 << 10, SLOW), model.chain(64, 2, 16 << 10, SLOW))

    def test_arrivals_of_many_hosts_are_passed_on(self):
        steps = [model.arrival(hosts, 8)[:2] for hosts in (2, 3, 4, 5, 64, 1000)]
        self.assertEqual(steps, [(1, 1), (1, 2), (2, 2), (3, 3), (6, 6), (10, 10)])

    def test_shards_are_a_message_to_all_and_one_from_all(self):
        self.assertEqual(model.shards(4, 1000), Parameters(2, 6, 1500 + 2 * 250, 1000))
        self.assertEqual(model.shards(2, 1000), Parameters(2, 2, 1000, 1000))
        last = {hosts: max(size for size in range(0, 1 << 21, 1 << 10)
                           if model.all_reduce(hosts, 1, size, SLOW) == model.shards(hosts, size)) for hosts in (2, 4, 64)}
        self.assertEqual(last, {2: 256 << 10, 4: 256 << 10, 64: 1 << 20})

    def test_a_fast_link_leaves_messages_and_sums(self):
        fast, block = SLOW._replace(beta=1e-12), 128 << 10
        sums = model.chain(8, 1, 64 << 20, fast, block)
        self.assertEqual(sums.gamma, 8 * block + (64 << 20) - block)
        messages = model.chain(8, 1, 64 << 20, fast._replace(gamma=0), block)
        self.assertEqual(messages.gamma, 8 * block)
        self.assertAlmostEqual(messages.overhead, 3 + 14 + 2 * 511)
        # Direct: each of four turns has 14 messages.
        self.assertAlmostEqual(model.direct(8, 1, 4 << 20, fast._replace(gamma=0)).overhead, 3 + 2 * 7 + 3 * 14)

    def test_blocks_shrink_with_the_number_of_hosts(self):
        # √(1 MiB · 64 KiB / (2·(hosts − 1))), as in the runtime, in cache lines.
        self.assertEqual([model.block_bytes(1 << 20, 2 * (hosts - 1)) for hosts in (2, 3, 9, 1024)], [128 << 10, 128 << 10, 64 << 10, 5760])
        self.assertEqual(model.block_bytes(64 << 20, 2), 128 << 10)
        self.assertEqual(model.block_bytes(1 << 10, 14), 4 << 10)
        # At most a part, and a part of a chunk.
        self.assertEqual(model.first_block(2, 100, 2), 50)
        self.assertEqual(model.first_block(16, 64 << 20, 2), 64 << 10)
        self.assertEqual(model.first_block(2, 1 << 20, 2, 512), 512)

    def test_pieces_are_a_quarter_of_a_part(self):
        for part, ranks, piece in [(1000, 4, 1000), (200 << 10, 4, 128 << 10), (640 << 10, 4, 160 << 10), (4 << 20, 4, 256 << 10),
                                   (4 << 20, 64, 43648), (4 << 20, 100_000, 64)]:
            self.assertEqual(model.piece_bytes(part, ranks), piece, (part, ranks))

    def test_the_direct_exchange_takes_what_its_schedule_takes(self):
        for hosts in (2, 3, 5, 8):
            for size in (64 << 10, 1 << 20, 16 << 20):
                by_hand = exchanged(hosts, size, SLOW)
                formula = model.seconds(model.direct, hosts, 1, size, SLOW)
                late = (hosts - 2) * model.piece_bytes(size / hosts, hosts) * SLOW.beta
                # Hosts on paper are never late, and a sum is hidden behind the link.
                self.assertLess(abs(formula - late - by_hand), 0.02 * by_hand + 4 * hosts * SLOW.overhead, (hosts, size))

    def test_a_bucket_hides_pauses(self):
        difference = lambda algorithm, *layout: algorithm(*layout, SLOW).beta - algorithm(*layout, SLOW, bucket=1000).beta
        self.assertEqual(difference(model.chain, 5, 2, 1 << 20), 5000)
        self.assertEqual(difference(model.direct, 5, 1, 1 << 20), 2000)
        # Two hosts wait for nobody else; and a block is no shorter than nothing.
        self.assertEqual(difference(model.direct, 2, 1, 1 << 20), 0)
        self.assertEqual(difference(model.chain, 2, 2, 20 << 10), 2000)
        tiny = model.chain(2, 2, 1000, SLOW, bucket=1 << 20)
        self.assertEqual(tiny.beta, 500)

    def test_frames_have_headers(self):
        self.assertAlmostEqual(model.WIRE_BYTES, 1.0684, 4)

    def test_ring_and_halving_differ_in_their_steps_only(self):
        ring, halving = model.ring(8, 1, 1 << 20), model.halving(8, 1, 1 << 20)
        self.assertEqual((ring.alpha, halving.alpha), (3 + 14, 3 + 6))
        self.assertEqual(ring[2:], halving[2:])
        self.assertEqual(ring.beta, 2 * 7 / 8 * (1 << 20))

    def test_hosts_are_one_more_hop(self):
        two, three = (model.seconds(model.tree, hosts, 1, 1 << 20, SLOW) for hosts in (2, 3))
        self.assertLess(two, three)
        self.assertEqual(model.tree(2, 1, 1 << 20, SLOW), model.chain(2, 1, 1 << 20, SLOW))

    def test_a_best_block_is_no_worse_than_any(self):
        block, best = model.best_block(model.chain, 64, 8, 10 << 20, SLOW)
        for power in range(12, 21):
            self.assertLessEqual(best, model.seconds(model.chain, 64, 8, 10 << 20, SLOW, block=1 << power))
        self.assertLess(block, model.MAX_BLOCK)

    def test_the_block_is_near_the_best(self):
        for hosts in (2, 4, 16, 64):
            for size in (1 << 20, 16 << 20):
                _, best = model.best_block(model.chain, hosts, 8, size, SLOW)
                self.assertLess(model.seconds(model.chain, hosts, 8, size, SLOW), 2 * best, (hosts, size))

    def test_buckets_take_whole_tensors(self):
        self.assertEqual(model.bucket_sizes([9, 5, 2, 1, 3], first=3, rest=4), [3, 8, 9])
        self.assertEqual(model.bucket_sizes([1, 1, 100, 1], first=1, rest=1000), [1, 102])
        self.assertEqual(model.bucket_sizes([], first=1, rest=1), [])

    def test_direct_moves_fewer_bytes_than_the_chain_with_one_rank_a_host(self):
        for hosts in (3, 4, 8):
            self.assertLess(model.direct(hosts, 1, 1 << 30, SLOW).beta, model.chain(hosts, 1, 1 << 30, SLOW).beta)
        self.assertGreater(model.direct(8, 8, 1 << 30, SLOW).beta, model.chain(8, 8, 1 << 30, SLOW).beta)

    def test_shared_cores_multiply_the_overhead_only(self):
        alone, crowded = model.all_reduce(3, 2, 100, SLOW), model.all_reduce(3, 2, 100, SLOW, cores=2)
        self.assertEqual(crowded, alone._replace(overhead=3 * alone.overhead))
        self.assertEqual(model.arrival(2, 1, cores=4), model.arrival(2, 1))


class Crossovers(unittest.TestCase):
    def test_from_the_crossover_on_the_alternative_is_faster(self):
        for kind, ranks in ((model.direct, 1), (model.tree, 8), (model.ring, 8), (model.halving, 8)):
            chain = lambda hosts: model.seconds(model.chain, hosts, ranks, 100 << 20, SLOW)
            alternative = lambda hosts: model.seconds(kind, hosts, ranks, 100 << 20, SLOW)
            hosts = model.crossover(alternative, chain, most=4096)
            self.assertIsNotNone(hosts, kind)
            for count in range(hosts, 128):
                self.assertLessEqual(alternative(count), 0.9 * chain(count))
            if 2 < hosts <= 64:
                self.assertGreater(alternative(hosts - 1), 0.9 * chain(hosts - 1))

    def test_an_alternative_that_never_wins_has_no_crossover(self):
        self.assertIsNone(model.crossover(lambda hosts: 1.0, lambda hosts: 1.0, most=256))


class Fit(unittest.TestCase):
    POINTS = [(hosts, ranks, 4**power) for hosts in (2, 3, 4) for ranks in (1, 2) for power in range(1, 12)]

    def points(self, noise=0.0, where=None, cores=2):
        chance = random.Random(1)
        for hosts, ranks, size in where or self.POINTS:
            exact = model.dot(model.all_reduce(hosts, ranks, size, SLOW, cores), SLOW)
            yield hosts, ranks, size, exact * (1 + chance.uniform(-noise, noise))

    def test_exact_points_give_the_parameters(self):
        found = model.fit(list(self.points()), SLOW.gamma, cores=2)
        for name in SLOW._fields:
            self.assertAlmostEqual(getattr(found, name) / getattr(SLOW, name), 1, 4, name)

    def test_noisy_points_predict_a_fifth_host(self):
        found = model.fit(list(self.points(noise=0.1)), SLOW.gamma, cores=2)
        fifth = list(self.points(where=[(5, ranks, 4**power) for ranks in (1, 2) for power in range(1, 12)]))
        for *_, deviation in model.deviations(fifth, found, cores=2):
            self.assertLess(abs(deviation), 0.15)

    def test_no_parameter_is_negative(self):
        # Without any latency, noise would make it negative.
        bare, sizes = Parameters(0, 0, 80e-9, 0), [4**power for power in range(13)]
        points = [(hosts, 1, size, model.dot(model.all_reduce(hosts, 1, size, bare), bare) * (1 + 0.01 * (-1) ** (hosts + index)))
                  for hosts in (2, 3, 4) for index, size in enumerate(sizes)]
        self.assertGreaterEqual(min(model.fit(points, 0.0)), 0)

    def test_too_few_points_are_an_error(self):
        with self.assertRaisesRegex(ValueError, "do not determine"):
            model.fit([(2, 1, 4, 1e-4), (2, 1, 1 << 20, 1e-2)], 0.0)


class Rates(unittest.TestCase):
    def test_rates_are_bits(self):
        self.assertEqual(namespaces.bytes_per_second("100mbit"), 12.5e6)
        self.assertEqual(namespaces.bytes_per_second("1gbit"), 125e6)
        for wrong in ("100", "100mb", "mbit", "-1mbit", "1gbit "):
            with self.assertRaisesRegex(ValueError, "is not a rate"):
                namespaces.bytes_per_second(wrong)

    def test_a_bucket_holds_a_frame(self):
        for rate in ("1kbit", "100mbit", "10gbit"):
            self.assertGreaterEqual(namespaces.bucket_bytes(rate), 1514)


if __name__ == "__main__":
    unittest.main()
