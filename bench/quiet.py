#!/usr/bin/env python3
"""Measures the processor time and memory of mgpurun's two processes while a job prints little.

    quiet.py [--seconds 30] [--out FILE.json] [OPTIONS OF MGPURUN…]

The job is train_mnist on 2 ranks with generated digits.
"""

import argparse
import json
import os
import subprocess
import time

import provenance

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def processor_ns(pid):
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0])


def memory_kib(pid):
    with open(f"/proc/{pid}/smaps_rollup") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line[:20])
    return {"rss": int(fields["Rss"].split()[0]), "pss": int(fields["Pss"].split()[0])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--out")
    args, options = parser.parse_known_args()
    origin = provenance.record()
    release = os.path.join(ROOT, "target/release")
    command = [f"{release}/mgpurun", "-n", "2", "--backend", "cpu", *options]
    command += [f"{release}/train_mnist", "--synthetic", "--steps", "100000000", "--skip-test"]
    guardian = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # Wait until the digits are generated.
    time.sleep(5)
    with open(f"/proc/{guardian.pid}/task/{guardian.pid}/children") as file:
        processes = {"guardian": guardian.pid, "launcher": int(file.read().split()[0])}
    before = {name: processor_ns(pid) for name, pid in processes.items()}
    time.sleep(args.seconds)
    result = {
        **origin,
        "options": options,
        "seconds": args.seconds,
        "processes": {
            name: {
                "processor_percent": round((processor_ns(pid) - before[name]) / args.seconds / 1e7, 4),
                "memory_kib": memory_kib(pid),
            }
            for name, pid in processes.items()
        },
    }
    guardian.terminate()
    guardian.wait()
    print(json.dumps(result, indent=1))
    if args.out:
        provenance.write(args.out, result)


if __name__ == "__main__":
    main()
