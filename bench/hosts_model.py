#!/usr/bin/env python3
"""Measures what the model of an all-reduce over hosts (cost_model.py) predicts, and prints its tables.

    hosts_model.py [--tbf 100mbit] [--hosts 2,3,4,5] [--ranks 1,2] [--rounds 3] [--min 4] [--max 4194304] [--out FILE.json]
    hosts_model.py --check FILE.json       fits once more and prints how far predictions are from measurements
    hosts_model.py --tables FILE.json      the tables for other networks

Hosts are namespaces of this machine whose links have the rate in each direction. Parameters are fitted to all layouts but those with
the most hosts, for which they predict the times. γ, the time of a sum, is that of an all-reduce on one host. A link of at most 100
Mbit/s is slow enough that it is measured, and not the cores that all hosts share. TCP's congestion control is cubic, the default of
Linux: BBR paces each stream at the rate that it has had before, which leaves a link idle when several streams begin and end on it.

Exit code: 1 if a prediction for the most hosts is off by more than 15% for a size above 16 KiB, which the link decides. Smaller
payloads are exchanged in one go: they measure this machine's cores, and above some KiB TCP's windows, since acknowledgements wait
behind the payloads of a slow link. Their deviation is printed, too.

It needs root and target/release. Writes bench/results/hosts-model-<date>-<machine>.json.
"""

import argparse
import json
import os
import subprocess
import sys

import cost_model as model
import launchers
import markdown
import provenance
from cost_model import Parameters
from hosts_collectives import figures_of, rate
from namespaces import Hosts, bucket_bytes, bytes_per_second
from summarise_allreduce import OURS, size_name
from train_work import tensors, work

GOAL = 0.15
CONGESTION_CONTROL = "cubic"
# Seconds after which a run is stopped.
LIMIT = 240
# Networks of the tables, the hosts, and the ranks of each host.
TABLE_NETS = ["lenet5", "deep", "keras", "conv6", "layers", "ensemble2400"]
TABLE_HOSTS = [8, 64, 1024]
TABLE_RANKS = 8
FLOAT = 4
# The first bucket and the others, over hosts and on one (runtime/src/step/config.rs).
FIRST_BUCKET, BUCKET_OVER_HOSTS, BUCKET = 256 << 10, 8 << 20, 1 << 20
# Networks on paper: latency and overhead are assumed, as they are usual for TCP at 25 Gbit/s and for RDMA at 400.
LINKS = {25: (20e-6, 2e-6), 400: (5e-6, 0.5e-6)}


def measured_gamma():
    """Seconds in which a rank reads and adds a byte: of an all-reduce of 64 MiB by two ranks of one host, who read 64 MiB each."""
    size = 64 << 20
    command = [os.path.join(launchers.BIN, "mgpurun"), "-n", "2", "--no-prefix", "--backend", "cpu", "allreduce_perf",
               "--min", str(size), "--max", str(size)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(shown.splitlines()[-1])["us_p50"] * 1e-6 / size


def run(layout, sizes, rate):
    """The lines of one run on a layout."""
    count, ranks = layout
    with Hosts(count, rate, CONGESTION_CONTROL) as hosts:
        program = [os.path.join(launchers.BIN, "allreduce_perf"), *sizes]
        agents = launchers.start_mgpurun(hosts, ranks, program, ["--no-prefix", "--backend", "cpu"])
        codes, texts = launchers.finish(agents, LIMIT)
        sent = sum(hosts.sent_bytes())
    if any(code != 0 for code in codes):
        sys.exit(f"{count} hosts × {ranks}: exit codes {codes}\n" + "\n".join(text[-800:] for text in texts))
    lines = [json.loads(line) for line in texts[0].splitlines() if line.startswith("{")]
    if sent < sum(line["bytes"] for line in lines):
        sys.exit(f"{count} hosts × {ranks}: only {sent} bytes went over the network")
    return [{**line, "layout": f"{count}x{ranks}"} for line in lines]


def measure(args):
    layouts = [(hosts, ranks) for hosts in args.hosts for ranks in args.ranks]
    result = {"what": "p50 of an all-reduce in microseconds over links with a rate, f32 sum in place, the median of several rounds",
              **provenance.record(), "tbf": args.tbf, "congestion_control": CONGESTION_CONTROL, "rounds": args.rounds,
              "gamma": measured_gamma()}
    lines = []
    for turn in range(args.rounds):
        for place in layouts:
            print(f"round {turn + 1} of {args.rounds}: {place[0]} hosts × {place[1]}", file=sys.stderr)
            lines += run(place, ["--min", str(args.min), "--max", str(args.max)], args.tbf)
        result["figures"] = figures_of(lines)
        provenance.write(args.out, result)
    return result


def points(result):
    """(hosts, ranks, size, seconds) of every figure."""
    for figure in result["figures"]:
        hosts, ranks = map(int, figure["layout"].split("x"))
        for entry in figure["sizes"]:
            yield hosts, ranks, entry["bytes"], entry["us"][OURS] * 1e-6


def check(result):
    """Fits all layouts but those with the most hosts. Returns the parameters, and the deviations of those."""
    measured = list(points(result))
    most = max(hosts for hosts, *_ in measured)
    known = [point for point in measured if point[0] < most]
    cores = int(result["machine"]["cores"])
    bucket = bucket_bytes(result["tbf"]) / model.WIRE_BYTES
    parameters = model.fit(known, result["gamma"], cores, bucket)
    return parameters, list(model.deviations([point for point in measured if point[0] == most], parameters, cores, bucket))


def largest_deviations(rows):
    """The largest deviation by ranks of a host, of sizes that the link decides."""
    found = {}
    for _, ranks, size, *_, deviation in rows:
        if size > model.RAW_BYTES:
            found[ranks] = max(abs(deviation), found.get(ranks, 0))
    return found


def parameter_words(parameters):
    rate = f"{8e-9 / parameters.beta:.4g} Gbit/s" if parameters.beta else "any rate"
    return (f"α = {parameters.alpha * 1e6:.3g} µs, o = {parameters.overhead * 1e6:.3g} µs, β = {parameters.beta * 1e9:.3g} ns/byte "
            f"({rate}), γ = {parameters.gamma * 1e9:.3g} ns/byte")


def cells_of_time(seconds):
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def check_rows(result):
    """The head and the rows of the table of predictions."""
    _, rows = check(result)
    return [["hosts × ranks", "size", "predicted", "measured", "deviation"]] + [
        [f"{hosts} × {ranks}", size_name(size), cells_of_time(predicted), cells_of_time(measured), f"{deviation:+.0%}"]
        for hosts, ranks, size, measured, predicted, deviation in rows]


def link(gbits, gamma):
    """The parameters of hosts with such links, on paper."""
    alpha, overhead = LINKS[gbits]
    return Parameters(alpha, overhead, 8e-9 / gbits, gamma)


def gradient_bytes(net):
    return FLOAT * work(net)[1]


def gradient_buckets(net, rest):
    return model.bucket_sizes([FLOAT * count for count in tensors(net)], FIRST_BUCKET, rest)


def paper_rows(gbits, gamma):
    """Times of the gradients of our networks over links of this rate: the head and the rows of a table."""
    parameters = link(gbits, gamma)
    head = ["network", "gradients", "hosts", "mgpurun, buckets of 1 MiB", "mgpurun, buckets of 8 MiB", "chain", "chain, best block", *model.ALTERNATIVES]
    rows = [head]
    for net in TABLE_NETS:
        size = gradient_bytes(net)
        for hosts in TABLE_HOSTS:
            def timed(algorithm, size=size, hosts=hosts):
                return model.seconds(algorithm, hosts, TABLE_RANKS, size, parameters)

            buckets = [cells_of_time(sum(timed(model.all_reduce, size=bucket) for bucket in gradient_buckets(net, rest)))
                       for rest in (BUCKET, BUCKET_OVER_HOSTS)]
            block, best = model.best_block(model.chain, hosts, TABLE_RANKS, size, parameters)
            rows.append([f"`{net}`", f"{size / (1 << 20):.1f} MiB", f"{hosts:,}", *buckets,
                         cells_of_time(timed(model.chain)), f"{cells_of_time(best)} ({size_name(block)})",
                         *(cells_of_time(timed(getattr(model, name))) for name in model.ALTERNATIVES)])
    return rows


def crossover_rows(gamma):
    """From how many hosts on other algorithms win, each with its best block: the head and the rows of a table."""
    rows = [["network", *(f"{name}, {gbits} Gbit/s" for gbits in LINKS for name in model.ALTERNATIVES)]]
    for net in TABLE_NETS:
        size = gradient_bytes(net)

        def timed(name, gbits, size=size):
            algorithm, parameters = getattr(model, name), link(gbits, gamma)
            if name in ("chain", "tree"):
                return lambda hosts: model.best_block(algorithm, hosts, TABLE_RANKS, size, parameters)[1]
            return lambda hosts: model.seconds(algorithm, hosts, TABLE_RANKS, size, parameters)

        found = [model.crossover(timed(name, gbits), timed("chain", gbits), 4096) for gbits in LINKS for name in model.ALTERNATIVES]
        rows.append([f"`{net}`", *("never" if hosts is None else f"{hosts:,}" for hosts in found)])
    return rows


def print_tables(gamma):
    for gbits in LINKS:
        print(f"{TABLE_RANKS} ranks a host, links of {gbits} Gbit/s; {parameter_words(link(gbits, gamma))}:\n")
        print(markdown.table(paper_rows(gbits, gamma)) + "\n")
    print("Fewest hosts from which on it takes at most 90% of the chain's time, both with their best blocks:\n")
    print(markdown.table(crossover_rows(gamma)))


def verdict(result):
    """The fit and its largest deviations, in words."""
    parameters, rows = check(result)
    words = [f"{deviation:.0%} with {ranks} rank{'s' if ranks > 1 else ''} a host" for ranks, deviation in largest_deviations(rows).items()]
    small = [abs(row[-1]) for row in rows if row[2] <= model.RAW_BYTES]
    factor = parameters.beta * bytes_per_second(result["tbf"])
    return (f"Fitted at {result['tbf']}: {parameter_words(parameters)}. β is {factor:.2f} times the time of a byte at this rate; headers and "
            f"acknowledgements explain {model.WIRE_BYTES:.2f}. Largest deviation above {size_name(model.RAW_BYTES)}: "
            + (", ".join(words) or "none measured") + (f"; up to there: {max(small):.0%}." if small else "."))


def report(result):
    """Prints the fit and what it predicts. Returns whether the predictions are good enough."""
    print(f"{markdown.table(check_rows(result))}\n\n{verdict(result)} At most {GOAL:.0%} is asked above {size_name(model.RAW_BYTES)}.")
    found = largest_deviations(check(result)[1])
    return bool(found) and max(found.values()) <= GOAL


def numbers(text):
    return [int(word) for word in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tbf", metavar="RATE", type=rate, default="100mbit")
    parser.add_argument("--hosts", type=numbers, default="2,3,4,5")
    parser.add_argument("--ranks", type=numbers, default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--min", type=int, default=4)
    parser.add_argument("--max", type=int, default=4 << 20)
    parser.add_argument("--out", default=provenance.result_path("hosts-model"))
    parser.add_argument("--check", metavar="FILE.json")
    parser.add_argument("--tables", metavar="FILE.json")
    args = parser.parse_args()
    if args.check or args.tables:
        with open(args.check or args.tables) as file:
            result = json.load(file)
        if args.tables:
            return print_tables(result["gamma"])
    else:
        result = measure(args)
    return 0 if report(result) else 1


if __name__ == "__main__":
    sys.exit(main())
