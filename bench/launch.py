#!/usr/bin/env python3
"""Measures how long it takes to start `true` on n ranks and wait for its end, compared with other launchers.

    launch.py [--ranks 8] [--rounds 30] [--out FILE.json]

Launchers run in turn; figures are medians. Peers are searched in target/peers or in the folder MGPU_PEERS, as in
allreduce.sh. A launcher that takes more than a second runs a tenth of the rounds; one that has not ended after half a
minute is ended, and left out with a line.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time

import provenance

# Seconds.
PATIENCE = 30
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def contenders(ranks):
    """The command lines of the installed launchers, by name."""
    peers = os.environ.get("MGPU_PEERS", os.path.join(ROOT, "target/peers"))
    program = shutil.which("true")
    number = str(ranks)
    found = {"mgpurun": [os.path.join(ROOT, "target/release/mgpurun"), "-n", number, program]}
    commands = {
        "mpich": ["v-mpich/bin/mpiexec", "-n", number, program],
        "intel-mpi": ["v-impi-devel/bin/mpiexec", "-n", number, program],
        "openmpi": ["v-openmpi/bin/mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", number, program],
        "torchrun": ["v/bin/torchrun", "--nproc-per-node", number, "--no-python", program],
    }
    for name, command in commands.items():
        path = os.path.join(peers, command[0])
        if os.access(path, os.X_OK):
            found[name] = [path] + command[1:]
    return found


def versions(found):
    """The versions of the peers, from the Python environments that they are installed in."""
    packages = {"mpich": "mpich", "intel-mpi": "impi-devel", "openmpi": "openmpi", "torchrun": "torch"}
    return {name: provenance.package_version(os.path.join(os.path.dirname(found[name][0]), "python"), package)
            for name, package in packages.items() if name in found}


def once(command):
    """Milliseconds of a run; None if it did not end in time."""
    started = time.perf_counter()
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return (time.perf_counter() - started) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out")
    args = parser.parse_args()
    found = contenders(args.ranks)
    times = {name: [] for name in found}
    slow = set()

    def run(name):
        took = once(found[name])
        if took is None and name == "mgpurun":
            sys.exit(f"mgpurun has not ended after {PATIENCE} s")
        if took is None:
            print(f"left out: {name} has not ended after {PATIENCE} s", file=sys.stderr)
            del found[name], times[name]
        return took

    for name in list(found):
        if (run(name) or 0) > 1000:
            slow.add(name)
    for turn in range(args.rounds):
        for name in list(found):
            if (name not in slow or turn % 10 == 0) and (took := run(name)) is not None:
                times[name].append(took)
    ours = sorted(times["mgpurun"])[len(times["mgpurun"]) // 2]
    result = {
        **provenance.record(versions=versions(found)),
        "ranks": args.ranks,
        "program": "true",
        "ms": {
            name: {
                "median": round(sorted(took)[len(took) // 2], 2),
                "min": round(min(took), 2),
                "max": round(max(took), 2),
                "rounds": len(took),
                "ratio": round(sorted(took)[len(took) // 2] / ours, 2),
            }
            for name, took in times.items()
        },
    }
    print(json.dumps(result, indent=1))
    if args.out:
        provenance.write(args.out, result)


if __name__ == "__main__":
    main()
