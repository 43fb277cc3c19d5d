#!/usr/bin/env python3
"""Injects random faults in random phases of a job, run after run. Checks that the culprit is named, the exit code is right,
the run ends quickly, and nothing survives.

    chaos.py --launcher PATH --job PATH [--runs 500] [--seed 1] [--out FILE.json]

Every run is a small job (tests/src/bin/t-job.rs) on 1 to 6 ranks, in a temporary folder with foreign files. The kinds of runs:

    fault, early, leak    a rank suffers one of the faults of `mgpurun --inject`, directly or behind a wrapper (a shell,
                          timeout, setsid, a process that filters its output …)
    guardian, launcher,   one of the launcher's two processes, or the run as a whole, receives a signal at a random moment
    interrupt
    wrapped               no fault, but ranks are started by wrappers
    limits                few open files, small files
    flood                 a rank opens many connections, or writes output to a reader that closes early
    mixed                 ranks make different numbers of steps, swap ranks, disagree on the world size

A miss is a wrong exit code, a culprit that is not named, lost output, a panic, a leftover process or file, a changed foreign
file, or a late end: more than a second after a death, or more than a second after the timeout for a hang. Each miss is printed
with the command line to repeat it; the exit code is 1 if there was one.
"""

import argparse
import collections
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time

import provenance

PHASES = ["phase=start", "phase=join", "phase=collective", "step=3", "phase=checkpoint", "phase=finalise"]
DEADLY = {"abort": 134, "exit:3": 3, "sigkill": 137, "segv": 139, "oom": 134, "panic": 101}
SILENT = ["hang", "sigstop"]
# Allowed delays: processes are started, memory is filled, and the machine runs other programs too.
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


# Ways to start a rank: a command line before the program. `timeout` and `setsid` leave the rank's process group.
WRAPPERS = {
    "shell": ["sh", "-c", '"$0" "$@"'],
    "exec": ["sh", "-c", 'exec "$0" "$@"'],
    "background": ["bash", "-c", '"$0" "$@" & wait $!'],
    "filter": ["bash", "-c", 'exec > >(sed "s/^/| /"); exec "$0" "$@"'],
    "env": ["env", "SOME=thing"],
    "nice": ["nice", "-n", "1"],
    "timeout": ["timeout", "50"],
    "setsid": ["setsid", "--wait"],
}

# A rank that opens silent connections and then becomes the program.
FLOOD = """import os, socket, sys
address = os.environ["MGPU_RENDEZVOUS"].removeprefix("unix:")
sockets = []
for _ in range(int(sys.argv[1])):
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(address)
    except OSError:
        break
    if len(sockets) < 500:
        sockets.append(peer)
os.execv(sys.argv[2], sys.argv[2:])
"""


def plant(folder, chance):
    """Creates foreign files in `folder`, with names similar or equal to ours."""
    names = ["checkpoints", "0123456789abcdef", "socket-0123456789abcdef", "socket-0123456789abcdef-1", "socket-", ""]
    for name in [f"mgpurun-{name}" for name in names]:
        if chance.random() < 0.5:
            deep = os.path.join(folder, name, "step-1")
            os.makedirs(deep)
            for file in [os.path.join(deep, "weights"), os.path.join(folder, name, "rendezvous")]:
                with open(file, "w") as out:
                    out.write(str(chance.random()))
    if chance.random() < 0.5:
        os.makedirs(os.path.join(folder, "mgpurun-fedcba9876543210"))
    if chance.random() < 0.5:
        os.symlink(folder, os.path.join(folder, "mgpurun-socket-aaaaaaaaaaaaaaaa"))


def contents(folder):
    """Every path below `folder` with its contents."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in folders + files:
            path = os.path.join(parent, name)
            if os.path.islink(path):
                found[path] = os.readlink(path)
            elif os.path.isfile(path):
                with open(path) as file:
                    found[path] = file.read()
            else:
                found[path] = None
    return found


class Run:
    """One job, with its fault."""

    def __init__(self, chance, launcher, job):
        self.kind = chance.choice(
            ["fault"] * 6 + ["early", "leak", "guardian", "launcher", "interrupt", "wrapped", "limits", "flood", "mixed"]
        )
        self.ranks = chance.randint(1, 6)
        self.culprit = chance.randrange(self.ranks)
        self.phase = chance.choice(PHASES)
        self.delay = chance.uniform(0.0, 0.2)
        self.seed = chance.random()
        self.fault = None
        self.variant = None
        self.reader_leaves = False
        options, prefix, program, arguments = [], [], [], []
        if self.kind == "fault":
            self.fault = chance.choice(list(DEADLY) + SILENT)
        elif self.kind in ("early", "leak", "guardian", "launcher", "interrupt"):
            self.fault = {"early": "exit0"}.get(self.kind, "leak-child")
        if self.fault:
            options += ["--inject", f"rank={self.culprit},{self.phase},fault={self.fault}"]
        if self.fault in SILENT:
            options += ["--timeout", str(DEADLINE), "--progress-timeout", str(DEADLINE)]
        if self.kind in ("guardian", "launcher", "interrupt"):
            arguments = ["100000000"]
        if self.kind == "wrapped" or self.kind == "fault" and chance.random() < 0.3:
            # A filter ends when its input ends, so faults are also seen through it.
            self.variant = chance.choice(list(WRAPPERS))
            program = WRAPPERS[self.variant]
        elif self.kind == "limits":
            self.variant = chance.choice(["open files", "file size"])
            limit = ["-n", str(chance.randint(4, 64))] if self.variant == "open files" else ["-f", str(chance.randint(0, 200))]
            prefix = ["sh", "-c", f'ulimit {" ".join(limit)}; exec "$0" "$@"']
        elif self.kind == "flood":
            self.variant = chance.choice(["connections", "output"])
            if self.variant == "connections":
                flooded = [sys.executable, "-c", FLOOD, str(chance.randint(100, 5000))]
                program = self.only_culprit(flooded)
            else:
                self.reader_leaves = True
                program = ["sh", "-c", 'head -c 20000000 /dev/zero | tr "\\0" "\\n"; exec "$0" "$@"']
        elif self.kind == "mixed":
            self.ranks = max(2, self.ranks)
            self.variant = chance.choice(["steps", "rank", "world size"])
            program = {
                "steps": self.only_culprit(["sh", "-c", 'exec "$0" 9']),
                "rank": self.only_culprit(["sh", "-c", 'RANK=$(((RANK + 1) % WORLD_SIZE)) exec "$0"']),
                "world size": self.only_culprit(["sh", "-c", 'WORLD_SIZE=$((WORLD_SIZE + 1)) exec "$0"']),
            }[self.variant]
        self.command = prefix + [launcher, "--backend", "cpu", "-n", str(self.ranks)]
        self.command += options + ["--"] + program + [job] + arguments

    def only_culprit(self, wrapper):
        """A wrapper for the culprit only."""
        script = f'if [ "$RANK" = {self.culprit} ]; then program=$0; exec {quoted(wrapper)} "$program" "$@"; fi; exec "$0" "$@"'
        return ["sh", "-c", script]

    def expected(self):
        """Allowed exit codes, required messages, and the time limit."""
        name = f"mgpurun: rank {self.culprit} "
        alone = self.ranks == 1
        if self.kind == "guardian":
            return [-signal.SIGKILL], "", self.delay + 1.0
        if self.kind == "launcher":
            return [137], "the launcher was killed by SIGKILL", self.delay + 1.0
        if self.kind == "interrupt":
            return [143], "stopped by SIGTERM", self.delay + 1.0
        if self.kind == "wrapped":
            return [0], "", HEALTHY + 1.0
        if self.kind == "limits":
            # The limit has no effect, or an error names it.
            return None, "", HEALTHY + 2.0
        if self.kind == "flood":
            # A writer whose reader has closed ends as by SIGPIPE.
            return [141 if self.reader_leaves else 0], "", HEALTHY + 3.0
        if self.kind == "mixed":
            wanted = "claims to be rank" if self.variant == "world size" else "mgpurun: rank "
            return {"steps": [9], "rank": None, "world size": [68]}[self.variant], wanted, HEALTHY + 2.0
        if self.fault in DEADLY:
            code = DEADLY[self.fault]
            # setsid exits with the number of the signal that ended its program.
            return [code - 128 if self.variant == "setsid" and code > 128 else code], name, HEALTHY + 1.0
        if self.kind == "leak" or alone and self.fault == "exit0" or self.phase == "phase=finalise" and self.fault == "exit0":
            return [0], "", HEALTHY + 1.0
        if self.fault == "exit0":
            return [9], name + "exited with code 0 while others needed it", HEALTHY + 1.0
        if self.phase in ("phase=start", "phase=join"):
            return [64], name + f"did not join within {DEADLINE:.0f} s", HEALTHY + DEADLINE + 1.0
        return [65], name + "made no progress for", HEALTHY + DEADLINE + 1.0

    def is_possible(self):
        """A single rank that never joins is a program that does not use the runtime: no one waits for it."""
        return not (self.ranks == 1 and self.fault in SILENT and self.phase in ("phase=start", "phase=join"))

    def go(self):
        """Runs the job. Returns its duration in seconds, and what was wrong."""
        with tempfile.TemporaryDirectory() as folder:
            temporary, private = os.path.join(folder, "tmp"), os.path.join(folder, "run")
            chance = random.Random(self.seed)
            environment = dict(os.environ, TMPDIR=temporary, MGPU_CHAOS=folder, RUST_BACKTRACE="0")
            environment.pop("XDG_RUNTIME_DIR", None)
            for place in (temporary, private):
                os.mkdir(place)
                plant(place, chance)
            if chance.random() < 0.5:
                environment["XDG_RUNTIME_DIR"] = private
            before = contents(folder)
            started = time.monotonic()
            process = subprocess.Popen(
                self.command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            self.disturb(process)
            try:
                printed, said = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                printed, said = process.communicate()
            took = time.monotonic() - started
            wrong = self.judge(process.returncode, printed, said, took)
            survivors = left(f"MGPU_CHAOS={folder}")
            if survivors:
                wrong.append(f"left: {survivors}")
            after = contents(folder)
            if after != before:
                paths = sorted(path for path in before.keys() | after.keys() if before.get(path, 0) != after.get(path, 0))
                wrong.append(f"changed: {[os.path.relpath(path, folder) for path in paths]}")
            return took, wrong, said

    def judge(self, code, printed, said, took):
        """What is wrong with the end of the run."""
        codes, wanted, longest = self.expected()
        wrong = []
        if codes is not None and code not in codes:
            wrong.append(f"exit code {code} instead of {codes[0]}")
        if wanted not in said:
            wrong.append(f"not said: {wanted}")
        if took > longest:
            wrong.append(f"{took:.2f} s")
        if "panicked" in said and self.fault != "panic":
            wrong.append("a panic")
        if self.kind == "limits" and code != 0 and ("mgpurun" not in said or code < 0):
            wrong.append(f"exit code {code} without a word")
        if self.kind == "mixed" and code == 0:
            wrong.append("exit code 0")
        if code == 0 and not self.reader_leaves and self.fault != "exit0":
            lines = sum("life 0" in line for line in printed.splitlines())
            if lines != self.ranks:
                wrong.append(f"{lines} lines of {self.ranks} ranks")
        if len(said.splitlines()) > 200:
            wrong.append(f"{len(said.splitlines())} lines on standard error")
        return wrong

    def disturb(self, process):
        """Sends the signal or closes the reader, if that is the fault."""
        if self.reader_leaves:
            process.stdout.read(1000)
            process.stdout.close()
            process.stdout = None
        if self.kind not in ("guardian", "launcher", "interrupt"):
            return
        # Before it has a child, a signal ends it like any program that has just been started.
        while True:
            with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
                children = file.read().split()
            if children:
                break
        time.sleep(self.delay)
        if self.kind == "interrupt":
            process.send_signal(signal.SIGTERM)
        elif self.kind == "guardian":
            process.send_signal(signal.SIGKILL)
        else:
            os.kill(int(children[0]), signal.SIGKILL)


def quoted(words):
    """`words` quoted for the shell."""
    return " ".join(shlex.quote(word) for word in words)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out")
    args = parser.parse_args()
    origin = provenance.record()
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
            print(f"miss in run {number} ({run.kind} {run.variant or ''}): {'; '.join(wrong)}\n  {quoted(run.command)}\n{said[:2000]}")
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
        provenance.write(args.out, origin | summary | {"what_missed": misses})
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
