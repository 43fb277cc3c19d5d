#!/usr/bin/env python3
"""Random faults in random phases of a job, one run after the other: is the culprit named, does the exit code tell, is
it quick, and does nothing survive?

    chaos.py --launcher PATH --job PATH [--runs 500] [--seed 1] [--out FILE.json]

Every run is a small job (tests/src/bin/t-job.rs) on 1 to 6 ranks. Something goes wrong in it: a rank commits one of the
faults of `mgpurun --inject`, or the launcher's two processes or the run as a whole are sent a signal at a random moment.
A miss is a wrong exit code, a culprit that is not named, a process that is left, or an end that comes later than a
second after a death, or than the deadline and a second after a silence. A program that exits with a miss count other
than 0 prints each miss with the command line to repeat it.
"""

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

PHASES = ["phase=start", "phase=join", "phase=collective", "step=3", "phase=checkpoint", "phase=finalise"]
DEADLY = {"abort": 134, "exit:3": 3, "sigkill": 137, "segv": 139, "oom": 134, "panic": 101}
SILENT = ["hang", "sigstop"]
# What may take its time: processes are started, memory is filled, and the machine does other things besides.
HEALTHY = 1.0
DEADLINE = 1.0


def left(mark):
    """The processes that have `mark` in their environment. Zombies have none."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if mark.encode() in file.read().split(b"\0"):
                        found.append(int(entry))
            except OSError:
                pass
    return found


class Run:
    """One job that something happens to."""

    def __init__(self, chance, launcher, job):
        self.kind = chance.choice(["fault"] * 6 + ["early", "leak", "guardian", "launcher", "interrupt"])
        self.ranks = chance.randint(1, 6)
        self.culprit = chance.randrange(self.ranks)
        self.phase = chance.choice(PHASES)
        self.delay = chance.uniform(0.0, 0.2)
        if self.kind == "fault":
            self.fault = chance.choice(list(DEADLY) + SILENT)
        else:
            self.fault = {"early": "exit0"}.get(self.kind, "leak-child")
        self.command = [launcher, "--backend", "cpu", "-n", str(self.ranks)]
        self.command += ["--inject", f"rank={self.culprit},{self.phase},fault={self.fault}"]
        if self.fault in SILENT:
            self.command += ["--timeout", str(DEADLINE), "--progress-timeout", str(DEADLINE)]
        self.command.append(job)
        if self.kind in ("guardian", "launcher", "interrupt"):
            self.command.append("100000000")

    def expected(self):
        """Exit code, what has to be said, and the longest time."""
        name = f"mgpurun: rank {self.culprit} "
        alone = self.ranks == 1
        if self.kind == "guardian":
            return -signal.SIGKILL, "", self.delay + 1.0
        if self.kind == "launcher":
            return 137, "the launcher was killed by SIGKILL", self.delay + 1.0
        if self.kind == "interrupt":
            return 143, "stopped by SIGTERM", self.delay + 1.0
        if self.fault in DEADLY:
            return DEADLY[self.fault], name, HEALTHY + 1.0
        if self.kind == "leak" or alone and self.fault == "exit0" or self.phase == "phase=finalise" and self.fault == "exit0":
            return 0, "", HEALTHY + 1.0
        if self.fault == "exit0":
            return 9, name + "exited with code 0 while others needed it", HEALTHY + 1.0
        if self.phase in ("phase=start", "phase=join"):
            return 64, name + f"did not join within {DEADLINE:.0f} s", HEALTHY + DEADLINE + 1.0
        return 65, name + "made no progress for", HEALTHY + DEADLINE + 1.0

    def is_possible(self):
        """A single rank that never joins is a program that does not use the runtime: nobody waits for it."""
        return not (self.ranks == 1 and self.fault in SILENT and self.phase in ("phase=start", "phase=join"))

    def go(self):
        """Runs it; the seconds it took, and what was wrong."""
        with tempfile.TemporaryDirectory() as folder:
            environment = dict(os.environ, TMPDIR=folder, MGPU_CHAOS=folder, RUST_BACKTRACE="0")
            environment.pop("XDG_RUNTIME_DIR", None)
            started = time.monotonic()
            process = subprocess.Popen(
                self.command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            self.disturb(process)
            try:
                _, said = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                _, said = process.communicate()
            took = time.monotonic() - started
            code, wanted, longest = self.expected()
            wrong = []
            if self.kind == "guardian":
                # Its standard error stays open until the last process has ended, so that is what was waited for.
                wanted = ""
            if process.returncode != code:
                wrong.append(f"exit code {process.returncode} instead of {code}")
            if wanted not in said:
                wrong.append(f"not said: {wanted}")
            if took > longest:
                wrong.append(f"{took:.2f} s")
            survivors = left(f"MGPU_CHAOS={folder}")
            if survivors:
                wrong.append(f"left: {survivors}")
            if os.listdir(folder):
                wrong.append(f"left: {os.listdir(folder)}")
            return took, wrong, said

    def disturb(self, process):
        """Sends the signal, where that is what happens."""
        if self.kind not in ("guardian", "launcher", "interrupt"):
            return
        time.sleep(self.delay)
        if self.kind == "interrupt":
            process.send_signal(signal.SIGTERM)
        elif self.kind == "guardian":
            process.send_signal(signal.SIGKILL)
        else:
            while True:
                with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
                    children = file.read().split()
                if children:
                    os.kill(int(children[0]), signal.SIGKILL)
                    return


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    misses, times = [], collections.defaultdict(list)
    for number in range(args.runs):
        run = Run(chance, args.launcher, args.job)
        while not run.is_possible():
            run = Run(chance, args.launcher, args.job)
        took, wrong, said = run.go()
        silent = run.kind == "fault" and run.fault in SILENT
        times["silence" if silent else "death" if run.kind == "fault" else run.kind].append(took)
        if wrong:
            misses.append({"run": number, "kind": run.kind, "command": run.command, "wrong": wrong})
            print(f"miss in run {number} ({run.kind}): {'; '.join(wrong)}\n  {' '.join(run.command)}\n{said}")
    summary = {
        "runs": args.runs,
        "misses": len(misses),
        "seed": args.seed,
        "seconds": {
            kind: {"runs": len(took), "median": round(sorted(took)[len(took) // 2], 3), "max": round(max(took), 3)}
            for kind, took in sorted(times.items())
        },
    }
    print(json.dumps(summary))
    if args.out:
        with open(args.out, "w") as file:
            json.dump(summary | {"what_missed": misses}, file, indent=1)
            file.write("\n")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
