"""Checks and benchmarks on a machine with a GPU, in three parts. A failing item does not stop the others.

    gpu_check.sh [A|B|C…] [--only TEXT] [--fake FOLDER] [--deadline SECONDS] [--out FOLDER] [--list]
    gpu_check.sh merge FILE…      one result file from those of several calls; the later ones win

  A  right: doctor, every CUDA kernel against the CPU, conv6 trained to the end, golden runs
  B  fast: memory bandwidth, every candidate of every layer, training throughput beside PyTorch, profile and timeline
  C  the rest: NCCL with one rank and with several on this GPU, groups, a killed rank, a resumed training, GELU, TF32 and
     f32, ncu, compute-sanitizer

Each part ends before its own deadline (470, 530 and 470 seconds). Its items stand in the order of their worth, each with its
expected duration: one that does not fit any more is skipped, and a shorter one after it may still run. Those that --list calls
required keep their time whatever the others take.

Folders: MGPU_DATA (the four MNIST files), MGPU_GOLDEN (golden runs), BIN (the programs); without these variables
data/mnist, golden and the programs beside this script. NVIDIA's libraries may be in a Python environment: activate it.

Prints a line for every run and a table at the end. Writes gpu-<date>-<device>.json after every run, and at the end, also
after SIGTERM, the programs' output into gpu-check-logs-<parts>.tgz. Parts that are called separately on the same day with
the same output folder share one result file. On the tests' fake GPU (--fake FOLDER, or detected by its name) runs are small
and labelled, and nothing is timed.
Exit code: 1 if something failed, 143 after SIGTERM.
"""
import argparse
import json
import os
import signal
import sys
import traceback
import types

import provenance
from gpu_fast import part_b
from gpu_rest import part_c
from gpu_right import part_a
from gpu_session import FAKE, Session, Stopped, merge

# By letter: the items, in the order of their worth, and the seconds that all of them may take. An item has the seconds that it
# is expected to take on an H100. On a fake GPU everything is small.
PARTS = {"A": (part_a, 470), "B": (part_b, 530), "C": (part_c, 470)}


def interrupted(number, _frame):
    # The first signal ends the session; later ones must not disturb the writing of its results.
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    raise Stopped(number)


def run_part(session, letter):
    part, seconds = PARTS[letter]
    session.begin_letter(letter, seconds)
    only = session.options.only
    items = [item for item in part(session) if only in (item.group, "") or only in item.name]
    try:
        for at, item in enumerate(items):
            session.group = item.group
            session.reserve(item, items[at + 1:])
            # A required item makes do with less than its expected time.
            needed, left = 0 if session.fake else 5 if item.required else item.seconds, session.left()
            if left < max(needed, 2):
                session.skip(item.name, f"it takes about {item.seconds:.0f} s, {max(left, 0):.0f} s are left")
                continue
            try:
                item.work(session)
            except Exception as error:
                # A defect of this script must not end the session.
                problem = f"this script failed: {type(error).__name__}: {error}"
                session.record(item.name + ", script", [], 0.0, None, problem, None, traceback.format_exc())
    finally:
        session.reserved = 0.0
        session.end_letter()
        session.write()


def table(s):
    """Prints training throughput for each network, batch and precision; then failures and skipped items."""
    print(f"\n=== {s.machine['device']}, driver for CUDA {s.machine['driver']}")
    if s.fake:
        print(f"{FAKE}: no figures of a real GPU; times are omitted")
    columns = ["ours auto", "ours narrow", "ours builtin", "torch graphed", "torch compiled"]
    rows = {}
    for who, section, key in [("ours", "throughput", "kernels"), ("torch", "torch", "mode")]:
        for figure in [] if s.fake else s.sections.get(section, []):
            if "images_per_s" in figure and f"{who} {figure[key]}" in columns:
                row = rows.setdefault((figure["net"], str(figure["batch"]), figure["precision"]), {})
                row[f"{who} {figure[key]}"] = figure["images_per_s"]
    if rows:
        print("images/s".ljust(24) + "".join(column.rjust(18) for column in columns) + "   best of ours / of torch")
        for key, row in rows.items():
            cells = "".join((f"{row[column]:,.0f}" if column in row else "-").rjust(18) for column in columns)
            best = [max((row[c] for c in row if c.startswith(who)), default=None) for who in ("ours", "torch")]
            ratio = f"{best[0] / best[1]:.2f}" if all(best) else "-"
            print(" ".join(key).ljust(24) + cells + ratio.rjust(12))
    for letter in sorted(s.letters):
        runs = [run for run in s.runs if run["part"] == letter]
        failed = [run for run in runs if run["problem"]]
        left_out = [entry for entry in s.skipped if entry["part"] == letter]
        print(f"{letter}: {len(runs)} runs, {len(failed)} failed, {len(left_out)} left out")
        for run in failed:
            print(f"    FAILED {run['name']}: {run['problem']}")
        for entry in left_out:
            print(f"    left out {entry['what']}: {entry['why']}")
    print(f"wrote {s.path}")


def merge_files(paths):
    """Writes one result file from several into the current folder, under the name of the last."""
    contents = []
    for path in paths:
        with open(path) as file:
            contents.append(json.load(file))
        # Parts may differ in these, of which a file has one each.
        origin = {key: contents[-1][key] for key in ("date", "commit", "command") if key in contents[-1]}
        for letter in contents[-1]["letters"].values():
            letter.update({**origin, **letter})
    newest = contents[-1]
    for content in contents[:-1]:
        target = types.SimpleNamespace(letters=newest["letters"], versions=newest["versions"], runs=newest["runs"],
                                       skipped=newest["skipped"], sections={})
        merge(target, content, list(newest["letters"]))
        for name, entries in target.sections.items():
            newest[name] = entries + newest.get(name, [])
    path = os.path.basename(paths[-1])
    provenance.write(path, newest)
    print(f"wrote {path}: parts {', '.join(sorted(newest['letters']))}")


def main():
    if sys.argv[1:2] == ["merge"] and sys.argv[2:]:
        return merge_files(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("letters", nargs="*", metavar="PART", help="A, B or C [default: all]")
    parser.add_argument("--only", default="", metavar="TEXT", help="only items of the group TEXT, or whose name contains it")
    parser.add_argument("--fake", metavar="FOLDER", help="folder of the tests' fake libraries")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="time limit of all parts together")
    parser.add_argument("--out", default=os.environ.get("OUT", "."), metavar="FOLDER",
                        help="output folder [default: $OUT, or the current folder]")
    parser.add_argument("--list", action="store_true", help="list the items and their expected durations")
    options = parser.parse_args()
    unknown = [letter for letter in options.letters if letter not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; known are {', '.join(PARTS)}")
    options.letters = options.letters or list(PARTS)
    if options.list:
        for letter in options.letters:
            for item in PARTS[letter][0](types.SimpleNamespace(fake=False)):
                required = "required" if item.required else ""
                print(f"{letter}  {item.seconds:4.0f} s  {required:<8}  {item.group}: {item.name}")
        return
    os.makedirs(options.out, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupted)
    session = Session(options)
    print(f"{session.machine['device']}, compute capability {session.machine['architecture']}")
    code = 0
    try:
        for letter in options.letters:
            run_part(session, letter)
    except Stopped as stopped:
        code = 128 + stopped.args[0]
        print(f"stopped by signal {stopped.args[0]}; the results so far are kept")
    session.close()
    table(session)
    sys.exit(code or (1 if any(run["problem"] for run in session.runs) else 0))


if __name__ == "__main__":
    main()
