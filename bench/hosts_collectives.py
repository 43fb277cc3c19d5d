#!/usr/bin/env python3
"""Measures all-reduce over hosts, which are namespaces of this machine, beside MPI libraries and gloo over TCP.

    hosts_collectives.py [--layouts 2x1,2x2,4x1] [--rounds 3] [--min 4] [--max 67108864] [--only mgpu,impi,raw] [--tbf RATE] [--congestion NAME]
                         [--ours NAME=VARIABLE=VALUE[,VARIABLE=VALUE]] [--out FILE.json]
    hosts_collectives.py --table FILE.json

A layout is HOSTS x RANKS of each host. Contenders take turns: in every round each runs once on every layout, in rotating order;
figures are medians of the rounds. `--ours` adds a contender of ours with variables of the environment (--ours ucx=MGPU_NET=ucx);
`mgpu` itself runs without any. The bound is plain TCP, measured in the same round: neighbours in a chain of the same hosts exchange
as many bytes in both directions at once (bench/peers/raw_tcp.c). --tbf gives every host's link a rate in both directions, such as
1gbit, by token bucket filters. --congestion gives every host another congestion control than cubic, the default of Linux.

It needs root, gcc, and target/release with `mgpurun` and `allreduce_perf`. The MPI libraries are those of bench/allreduce.sh in
$MGPU_PEERS (target/peers); gloo is that of the Python in TORCH ($MGPU_PEERS/v/bin/python). What is not there is skipped with a line.
A run counts only if the interfaces have counted its bytes: hosts on one machine must not speak through its memory.

Writes bench/results/hosts-collectives-<date>-<machine>.json and .svg (with --tbf hosts-rate-RATE-…), and prints a table, with what
misses its goal: up to 1 KiB at most 1.1 times the best peer's time, up to 64 KiB its time, beyond 0.8 of it; from 16 MiB on at least
80% of plain TCP's speed; on 2 hosts × 1 with --tbf, 64 MiB within 1.1 times size / rate.
Run it on a quiet machine, after `cargo build --release`.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys

import launchers
import markdown
import plot_allreduce
import provenance
from namespaces import Hosts, address, bytes_per_second
from summarise_allreduce import OURS, size_name, summarise

HERE = os.path.dirname(os.path.abspath(__file__))
PEERS = os.path.abspath(os.environ.get("MGPU_PEERS") or os.path.join(provenance.ROOT, "target/peers"))
TORCH = os.environ.get("TORCH", os.path.join(PEERS, "v/bin/python"))
BUILT = os.path.join(provenance.ROOT, "target/bench-peers")
# Plain TCP, as a contender and as the bound of a drawing.
RAW, BOUND = "raw", "plain TCP"
# Seconds after which a run of one contender is stopped. What it has printed counts.
LIMIT = 240
# At most so many times the best peer's time, for sizes up to so many bytes.
GOALS = [(1 << 10, 1.1), (64 << 10, 1.0), (64 << 20, 0.8)]
# From this size on ours makes this share of the bound at least.
BOUND_GOAL = (16 << 20, 0.8)
# Over links with a rate: at most so many times size / rate, from this size on.
LINK_GOAL = (64 << 20, 1.1)


def torch():
    """The Python that has torch, by its absolute path, and torch's version; the version is None without it."""
    python = shutil.which(TORCH)
    # Not its real path: a virtual environment is known by the link.
    return python and os.path.abspath(python), python and provenance.package_version(python, "torch")


class Contenders:
    """What is there to be measured, with versions; and what is not, and why."""

    def __init__(self, only=None, variants=(), congestion_control="cubic"):
        self.starts, self.versions, self.skipped = {}, {}, []
        self.variants, self.congestion_control = dict(variants), congestion_control
        os.makedirs(BUILT, exist_ok=True)
        for program in ("mgpurun", "allreduce_perf"):
            if not os.access(os.path.join(launchers.BIN, program), os.X_OK):
                sys.exit(f"there is no {program} in {launchers.BIN}: run cargo build --release")
        known = [OURS, *self.variants, *launchers.OVER_TCP, "gloo", RAW]
        if unknown := set(only or []) - set(known):
            sys.exit(f"there is no contender {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        self.wants = lambda name: only is None or name in only
        for name, variables in {OURS: {}, **self.variants}.items():
            if self.wants(name):
                self.starts[name] = self.of_ours(variables)
        for library in launchers.OVER_TCP:
            if self.wants(library):
                self.add_mpi(library)
        if self.wants("gloo"):
            self.add_gloo()
        if self.wants(RAW):
            self.add_raw()

    def skip(self, what):
        print(f"skipped: {what}", file=sys.stderr)
        self.skipped.append(what)

    def compile(self, name, *command):
        """Whether a program of bench/peers compiles. `command` ends in flags of the linker."""
        if not shutil.which(command[0]):
            self.skip(f"{name}: there is no {command[0]}")
            return False
        done = subprocess.run([*command[:1], "-O3", "-march=native", *command[1:], "-o", os.path.join(BUILT, name)],
                              capture_output=True, text=True)
        if done.returncode != 0:
            self.skip(f"{name}: its program does not compile: {done.stderr.strip().splitlines()[-1:]}")
        return done.returncode == 0

    @staticmethod
    def of_ours(variables):
        program = [os.path.join(launchers.BIN, "allreduce_perf"), "--check"]
        return lambda hosts, ranks, sizes: launchers.start_mgpurun(
            hosts, ranks, [*program, *sizes], ["--no-prefix", "--backend", "cpu"], variables)

    def add_mpi(self, library):
        package = {"impi": "impi-devel", "mpich-ucx": "mpich"}.get(library, library)
        venv = os.path.join(PEERS, f"v-{package}")
        mpiexec, source = os.path.join(venv, "bin/mpiexec"), os.path.join(HERE, "peers/collectives_mpi.c")
        if not os.path.exists(mpiexec):
            return self.skip(f"{library}: not installed")
        compiler = [os.path.join(venv, "bin/mpicc"), source]
        if library == "impi":
            folder = os.path.join(venv, "lib")
            compiler = ["gcc", source, "-I", os.path.join(venv, "include"), "-L", folder, "-lmpi", f"-Wl,-rpath,{folder}"]
        if not self.compile(package, *compiler):
            return None
        always, crowded = launchers.OVER_TCP[library]
        cores = len(os.sched_getaffinity(0))

        def start(hosts, ranks, sizes):
            variables = always if len(hosts.hosts) * ranks <= cores else always | crowded
            program = [os.path.join(BUILT, package), *sizes]
            return launchers.start_mpi(library.partition("-")[0], hosts, ranks, program, mpiexec, variables)

        self.starts[library] = start
        self.versions[library] = provenance.package_version(os.path.join(venv, "bin/python"), package)

    def add_gloo(self):
        python, version = torch()
        if not version:
            return self.skip("gloo: no torch in the Python that TORCH names")
        program = [os.path.join(HERE, "peers/collectives_gloo.py")]
        torchrun, variables = [python, "-m", "torch.distributed.run"], {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        self.starts["gloo"] = lambda hosts, ranks, sizes: launchers.start_torchrun(
            hosts, ranks, [*program, *sizes], torchrun, variables)
        self.versions["gloo"] = version

    def add_raw(self):
        if not self.compile("raw_tcp", "gcc", os.path.join(HERE, "peers/raw_tcp.c")):
            return

        def start(hosts, _, sizes):
            names = [address(host) for host in range(len(hosts.hosts))]
            program = os.path.join(BUILT, "raw_tcp")
            return [hosts.start(host, [program, str(host), *names, *sizes]) for host in range(len(names))]

        self.starts[RAW] = start

    def run(self, name, layout, sizes, rate=None):
        """The lines of one run on a layout; none, and a line that says why, if it failed."""
        count, ranks = layout
        with Hosts(count, rate, self.congestion_control) as hosts:
            before = sum(hosts.sent_bytes())
            codes, texts = launchers.finish(self.starts[name](hosts, ranks, [*sizes]), LIMIT)
            sent = sum(hosts.sent_bytes()) - before
        where = f"{name} on {count} hosts × {ranks}"
        lines = [json.loads(line) for line in texts[0].splitlines() if line.startswith("{") and line.endswith("}")]
        lines = [{**line, "impl": name, "layout": f"{count}x{ranks}"} for line in lines]
        if any(code != 0 for code in codes):
            how = f"stopped after {LIMIT} s" if None in codes else f"exit codes {codes}"
            self.skip(f"{where}: {how}, kept {len(lines)} sizes")
            print("\n".join(text[-800:] for text in texts), file=sys.stderr)
        # Each host but one sends its part of every size at least once.
        if sent < sum(line["bytes"] for line in lines):
            self.skip(f"{where}: only {sent} bytes went over the network")
            return []
        return lines


def rotated(names, by):
    by %= len(names)
    return names[by:] + names[:by]


def figures_of(lines):
    """The figures of all lines; plain TCP becomes the bound of each size."""
    raw = {}
    for line in lines:
        if line["impl"] == RAW:
            raw.setdefault((line["layout"], line["bytes"]), []).append(line["us_p50"])
    figures = summarise([line for line in lines if line["impl"] != RAW])
    for figure in figures:
        for entry in figure["sizes"]:
            # Contenders of ours are no peers: `judged` compares.
            entry.pop("best_peer", None), entry.pop("ratio", None)
            times = raw.get((figure["layout"], entry["bytes"]))
            if times:
                entry["bound_us"] = round(statistics.median(times), 2)
    return figures


def best_peer(entry, ours):
    """Name and time of the fastest peer; None without one."""
    peers = [(time, name) for name, time in entry["us"].items() if name not in ours]
    return min(peers)[::-1] if peers else None


def goal(size):
    return next((most for limit, most in GOALS if size <= limit), None)


def judged(result):
    """For each layout, contender of ours and size: the ratios, and what misses a goal."""
    rate = bytes_per_second(result["tbf"]) if result.get("tbf") else None
    for figure in result["figures"]:
        for entry in figure["sizes"]:
            for name in filter(entry["us"].get, result["ours"]):
                us, size = entry["us"][name], entry["bytes"]
                found = {"layout": figure["layout"], "name": name, "bytes": size, "us": us, "missed": []}
                peer = best_peer(entry, result["ours"])
                if peer:
                    found["peer"], found["ratio"] = peer, us / peer[1]
                    if not rate and goal(size) and found["ratio"] > goal(size):
                        found["missed"].append(f"{found['ratio']:.2f} of {peer[0]}'s time, at most {goal(size)} asked")
                if entry.get("bound_us"):
                    found["of_bound"] = entry["bound_us"] / us
                    if not rate and size >= BOUND_GOAL[0] and found["of_bound"] < BOUND_GOAL[1]:
                        found["missed"].append(f"{found['of_bound']:.0%} of plain TCP, at least {BOUND_GOAL[1]:.0%} asked")
                if rate:
                    found["of_link"] = us * 1e-6 / (size / rate)
                    if figure["layout"] == "2x1" and size >= LINK_GOAL[0] and found["of_link"] > LINK_GOAL[1]:
                        found["missed"].append(f"{found['of_link']:.2f} × size / rate, at most {LINK_GOAL[1]} asked")
                yield found


def time_name(us):
    return f"{us / 1e3:,.1f} ms" if us >= 1e4 else f"{us:,.0f} µs" if us >= 100 else f"{us:.1f} µs"


def rows_of(result, sizes=None):
    """The head and the rows of a table of these sizes [default: all]: layouts, contenders of ours, sizes."""
    variants, rate = len(result["ours"]) > 1, result.get("tbf")
    rows = [["hosts × ranks", *["ours"] * variants, "size", "mgpurun", "best peer", "mgpurun / best peer", "share of plain TCP",
             *[f"mgpurun × {rate} / size"] * bool(rate)]]
    for one in judged(result):
        if sizes and one["bytes"] not in sizes:
            continue
        name, us = one.get("peer", (None, None))
        cells = [one["layout"].replace("x", " × "), *[one["name"]] * variants, size_name(one["bytes"]), time_name(one["us"]),
                 f"{time_name(us)} ({plot_allreduce.NAMES.get(name, name)})" if name else "–",
                 f"{one['ratio']:.2f}" if name else "–", f"{one['of_bound']:.0%}" if "of_bound" in one else "–"]
        rows.append(cells + [f"{one['of_link']:.2f}"] if rate else cells)
    return rows


def misses(result):
    return [f"{one['layout']}, {one['name']}, {size_name(one['bytes'])}: {why}" for one in judged(result) for why in one["missed"]]


def report(result):
    """All figures as a table in Markdown, and what misses a goal."""
    missed = misses(result)
    return "\n".join([markdown.table(rows_of(result)), "", f"{len(missed)} goals missed" + (":" if missed else ""),
                      *(f"- {line}" for line in missed)])


def variant(text):
    """`NAME=VARIABLE=VALUE[,VARIABLE=VALUE]`."""
    name, _, settings = text.partition("=")
    pairs = [setting.partition("=")[::2] for setting in settings.split(",")]
    if not name or not all(key and value for key, value in pairs):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VARIABLE=VALUE")
    return name, dict(pairs)


def layout(text):
    try:
        hosts, ranks = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not HOSTSxRANKS") from None
    if hosts < 2 or ranks < 1:
        raise argparse.ArgumentTypeError(f"{text}: two hosts with a rank each at least")
    return hosts, ranks


def rate(text):
    try:
        bytes_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(error) from None
    return text


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=lambda text: [layout(one) for one in text.split(",")], default="2x1,2x2,4x1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--min", type=int, default=4)
    parser.add_argument("--max", type=int, default=64 << 20)
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"contenders: {OURS}, {', '.join(launchers.OVER_TCP)}, gloo, {RAW}")
    parser.add_argument("--ours", type=variant, action="append", default=[])
    parser.add_argument("--tbf", metavar="RATE", type=rate)
    parser.add_argument("--congestion", metavar="NAME", default="cubic", help="such as bbr; mgpurun replaces bbr by cubic")
    parser.add_argument("--out")
    parser.add_argument("--table", metavar="FILE.json")
    args = parser.parse_args()
    if not 4 <= args.min <= args.max:
        parser.error(f"sizes are at least 4 bytes: --min {args.min} --max {args.max}")
    return args


def main():
    args = parse()
    if args.table:
        with open(args.table) as file:
            return print(report(json.load(file)))
    contenders = Contenders(args.only, args.ours, args.congestion)
    path = args.out or provenance.result_path(f"hosts-rate-{args.tbf}" if args.tbf else "hosts-collectives")
    sizes = ["--min", str(args.min), "--max", str(args.max)]
    result = {"what": "p50 of an all-reduce in microseconds, f32 sum in place, the median of several rounds",
              **provenance.record(versions=contenders.versions), "bound": BOUND, "tbf": args.tbf,
              "congestion_control": args.congestion,
              "ours": [OURS, *contenders.variants], "variables": contenders.variants, "rounds": args.rounds}
    lines, names = [], list(contenders.starts)
    for turn in range(args.rounds):
        for place in args.layouts:
            for name in rotated(names, turn):
                print(f"round {turn + 1} of {args.rounds}: {name} on {place[0]} hosts × {place[1]}", file=sys.stderr)
                lines += contenders.run(name, place, sizes, args.tbf)
        result |= {"skipped": contenders.skipped, "figures": figures_of(lines)}
        provenance.write(path, result)
    drawing = plot_allreduce.draw(result)
    with open(path.removesuffix(".json") + ".svg", "w") as file:
        file.write(drawing)
    print(report(result))


if __name__ == "__main__":
    main()
