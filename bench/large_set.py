#!/usr/bin/env python3
"""Measures a training on a set that is larger than the memory that it may use, and on a smaller set in memory.

    large_set.py [--images 10000000] [--limit-mib 2048] [--ranks 1] [--steps 2000] [--rounds 3] [--folder DIR]
                 [--distinct N] [--programs target/release/] [--out FILE.json]

Writes the set (generated digits) to DIR unless it is there, 7.8 GB by default, and removes the files that it has written.
The training runs in a control group whose memory limit is --limit-mib (`memory.max`, or `memory.limit_in_bytes` of version
1); the page cache of its files counts there too. Needs root, and a control group below which one can be made.

--distinct N generates N digits and repeats them until the set is full, which is faster. --programs is what comes before the
names mgpurun and train_mnist: `target/debug/t-` for those of the tests.
"""

import argparse
import json
import os
import subprocess
import sys

import provenance

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NAMES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


def own_group():
    """The folder of this process's group for memory, and the names of limit, peak and failures there."""
    with open("/proc/self/cgroup") as file:
        groups = [line.strip().split(":", 2) for line in file]
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            return "/sys/fs/cgroup/memory" + path, ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
    path = next(path for _, controllers, path in groups if not controllers)
    return "/sys/fs/cgroup" + path, ("memory.max", "memory.peak")


class Group:
    """A control group with a memory limit, below that of this process."""

    def __init__(self, limit):
        parent, (self.limit, self.peak) = own_group()
        self.path = os.path.join(parent, f"mgpu-large-set-{os.getpid()}")
        os.mkdir(self.path)
        with open(os.path.join(self.path, self.limit), "w") as file:
            file.write(str(limit))

    def read(self, name):
        try:
            with open(os.path.join(self.path, name)) as file:
                return file.read().strip()
        except OSError:
            return None

    def enter(self):
        with open(os.path.join(self.path, "cgroup.procs"), "w") as file:
            file.write(str(os.getpid()))

    def remove(self):
        os.rmdir(self.path)


def write(args, folder, images):
    """Writes a set of so many images."""
    distinct = min(args.distinct or images, images)
    program = os.path.join(ROOT, args.programs) + "train_mnist"
    subprocess.run([program, "--write-digits", folder, "--images", str(distinct)], check=True)
    if distinct == images:
        return
    for name, header in zip(NAMES, (16, 8)):
        path = os.path.join(folder, name)
        with open(path, "rb+") as file:
            # The number of images is the second word of the header.
            file.seek(4)
            file.write(images.to_bytes(4, "big"))
            file.seek(header)
            body = file.read()
            whole, rest = divmod(images, distinct)
            for _ in range(whole - 1):
                file.write(body)
            file.write(body[:rest * len(body) // distinct])


def drop_from_cache(folder):
    """Removes the files' pages from the system's cache, which would be counted in another control group."""
    for name in NAMES:
        with open(os.path.join(folder, name), "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def train(args, data, group=None, more=()):
    programs = os.path.join(ROOT, args.programs)
    command = [f"{programs}mgpurun", "-n", str(args.ranks), "--backend", "cpu", "--no-prefix", f"{programs}train_mnist"]
    command += ["--data", data, "--steps", str(args.steps), "--batch", "128", "--json", "--skip-test", *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=group and group.enter)
    if done.returncode:
        sys.exit(f"large_set.py: exit code {done.returncode} of {' '.join(command)}")
    *lines, last = done.stdout.strip().splitlines()
    result = json.loads(last)
    return {
        **{key: result[key] for key in ("net", "images_per_s", "ms_per_step", "rank_rss_mib", "weights")},
        "streamed": any("read as they are needed" in line for line in lines),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000_000)
    parser.add_argument("--small-images", type=int, default=60_000)
    parser.add_argument("--limit-mib", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nets", default="lenet5")
    parser.add_argument("--folder", default=os.path.join(ROOT, "target", "large-set"))
    parser.add_argument("--programs", default="target/release/")
    parser.add_argument("--distinct", type=int)
    parser.add_argument("--out", default=provenance.result_path("large-set"))
    args = parser.parse_args()
    result = {**provenance.record(), "programs": args.programs, "images": args.images,
              "distinct_images": args.distinct or args.images, "limit_mib": args.limit_mib, "ranks": args.ranks, "batch": 128,
              "steps": args.steps, "rows": []}
    written = []
    for kind, images in [("large", args.images), ("small", args.small_images)]:
        folder = os.path.join(args.folder, kind)
        if not os.path.exists(folder):
            written.append(folder)
            write(args, folder, images)
    large, small = (os.path.join(args.folder, kind) for kind in ("large", "small"))
    result["bytes"] = sum(os.path.getsize(os.path.join(large, name)) for name in NAMES)
    try:
        for net in args.nets.split(","):
            for number in range(args.rounds):
                for set_, folder, limited, more in [
                    ("large", large, True, ()), ("small", small, False, ()), ("small", small, False, ("--data-on", "disk")),
                ]:
                    if limited:
                        drop_from_cache(folder)
                    group = Group(args.limit_mib << 20) if limited else None
                    try:
                        row = train(args, folder, group, ("--net", net, *more))
                        peak = group and group.read(group.peak)
                    finally:
                        if group:
                            group.remove()
                    row = {"set": set_, "round": number, **row}
                    if peak:
                        row["group_peak_mib"] = round(int(peak) / 2**20)
                    result["rows"].append(row)
                    print(json.dumps(row), flush=True)
                    provenance.write(args.out, result)
    finally:
        for folder in written:
            for name in NAMES:
                os.remove(os.path.join(folder, name))
            os.rmdir(folder)


if __name__ == "__main__":
    main()
