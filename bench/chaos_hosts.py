#!/usr/bin/env python3
"""Injects random faults into random jobs on several hosts, run after run. Checks that every surviving host exits with the same
code and names the culprit, that the run ends in time, and that nothing is left on any host.

    chaos_hosts.py --launcher PATH --job PATH [--hosts 3] [--runs 300] [--seed 1] [--out FILE.json]

The hosts are network, UTS, PID and mount namespaces of this machine on one bridge; it takes root. Every run is a small job
(tests/src/bin/t-job.rs) on 2 to N hosts with 1 or 2 ranks each, and one of these faults at a random moment:

    rank         a rank dies by one of the faults of `mgpurun --inject`, or hangs
    agent        an agent, its guardian or both are killed
    off          a host is turned off
    drop         packets are dropped between a host and node 0, in one direction or both, before they leave or on their way
    outage       a link is dead for up to 3 s: nothing happens
    stop         an agent is stopped
    interrupt    an agent, or all agents at once, receive a signal
    wrong        an agent has another secret, another program argument, or does not come
    none         no fault

A miss is printed with what every host said; the exit code is 1 if there was one.
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

import provenance

DEADLY = {"abort": 134, "exit:3": 3, "sigkill": 137, "segv": 139, "panic": 101}
PHASES = ["phase=start", "phase=join", "phase=collective", "step=3"]
PROGRESS_TIMEOUT = 2
NODE_TIMEOUT = 3
# Processes are started, and the machine runs other programs too.
SLACK = 3.0


def children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


class Namespaces:
    """Namespaces with a process that keeps them."""

    def __init__(self, options, script, inside=None):
        enter = ["nsenter", "--target", str(inside.pid), "--net", "--"] if inside else []
        command = [*enter, "unshare", *options, "--fork", "--kill-child", "sh", "-ec", script]
        self.unshare = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if self.unshare.stdout.readline() != "ready\n":
            sys.exit("this machine does not allow hosts as namespaces")
        self.pid = children(self.unshare.pid)[0]

    def ip(self, script):
        command = ["nsenter", "--target", str(self.pid), "--net", "--", "ip", "-batch", "-"]
        subprocess.run(command, input=script, text=True, check=True, stdout=subprocess.DEVNULL)

    def end(self):
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.unshare.kill()
        self.unshare.wait()


class Hosts:
    """Hosts a, b, … on one bridge."""

    def __init__(self, count, folder):
        self.names = "abcdefgh"[:count]
        self.off = set()
        self.switch = Namespaces(["--net"], "echo ready; exec sleep infinity")
        self.switch.ip("link add br0 type bridge\nlink set br0 up\n")
        text = "127.0.0.1 localhost\n" + "".join(f"10.99.0.{n + 1} {name}\n" for n, name in enumerate(self.names))
        names = os.path.join(folder, "names")
        with open(names, "w") as file:
            file.write(text)
        self.hosts = []
        for number, name in enumerate(self.names):
            script = (
                f"echo {name} >/proc/sys/kernel/hostname; mount --bind '{names}' /etc/hosts; ip link set lo up; "
                "echo ready; exec sleep infinity"
            )
            host = Namespaces(["--net", "--uts", "--pid", "--mount", "--mount-proc"], script, self.switch)
            self.switch.ip(
                f"link add port{number} type veth peer name eth0 netns {host.pid}\n"
                f"link set port{number} master br0\nlink set port{number} up\n"
            )
            host.ip(f"address add 10.99.0.{number + 1}/24 dev eth0\nlink set eth0 up\n")
            self.hosts.append(host)

    def enter(self, host):
        namespaces = ["--net", "--uts", "--pid", "--mount"]
        return ["nsenter", "--target", str(self.hosts[host].pid), *namespaces, "--"]

    def set_link(self, host, state):
        self.switch.ip(f"link set port{host} {state}\n")

    def drop(self, source, target, they_leave):
        address = f"10.99.0.{target + 1}"
        nobody = f"neighbour replace {address} lladdr 02:00:00:00:00:99 nud permanent dev eth0\n"
        self.hosts[source].ip(nobody if they_leave else f"route add blackhole {address}/32\n")

    def turn_off(self, host):
        self.off.add(host)
        self.set_link(host, "down")
        os.kill(self.hosts[host].pid, signal.SIGKILL)

    def left(self, host):
        """The processes of a host."""

        def namespace(pid):
            try:
                return os.readlink(f"/proc/{pid}/ns/pid")
            except OSError:
                return None

        keeper = self.hosts[host].pid
        own = namespace(keeper)
        found = []
        for entry in os.listdir("/proc") if own else []:
            if entry.isdigit() and int(entry) != keeper and namespace(entry) == own:
                with open(f"/proc/{entry}/cmdline") as file:
                    line = file.read().replace("\0", " ")
                if line:
                    found.append(line)
        return found

    def end(self):
        for namespaces in [*self.hosts, self.switch]:
            namespaces.end()


class Run:
    """One job with its fault. `codes` are the exit codes by host, None for any; `said` is what survivors say."""

    def __init__(self, chance, args):
        self.args = args
        self.hosts = chance.randint(2, args.hosts)
        self.ranks = chance.randint(1, 2)
        self.delay = chance.uniform(0.0, 1.0)
        self.kind = chance.choice(
            ["rank"] * 4 + ["agent"] * 3 + ["off", "drop", "outage", "stop", "interrupt", "interrupt", "wrong", "none"]
        )
        self.host = chance.randrange(self.hosts)
        self.other = chance.randrange(1, self.hosts)
        self.rank = self.host * self.ranks + chance.randrange(self.ranks)
        self.outage = chance.uniform(0.0, 2.9)
        self.variant = None
        self.options, self.steps = [], "100000000"
        self.longest = SLACK + self.delay
        survivors = [host for host in range(self.hosts) if host != self.host]
        named = f"rank {self.rank} (host {'abcdefgh'[self.host]}) "
        lost = f"on {'abcdefgh'[self.host]} "
        self.expected = {}

        def expect(hosts, code, text):
            self.expected |= {host: (code, text) for host in hosts}

        everyone = range(self.hosts)
        if self.kind == "rank":
            self.variant = chance.choice([*DEADLY, "hang", "sigstop"])
            phase = "step=3" if self.variant not in DEADLY else chance.choice(PHASES)
            self.options = ["--inject", f"rank={self.rank},{phase},fault={self.variant}"]
            if self.variant in DEADLY:
                expect(everyone, DEADLY[self.variant], named)
            else:
                self.options += ["--progress-timeout", str(PROGRESS_TIMEOUT)]
                self.longest += PROGRESS_TIMEOUT
                expect(everyone, 65, named + "made no progress")
        elif self.kind == "agent":
            self.variant = chance.choice(["agent", "guardian", "both"])
            expect(survivors, 71, "mgpurun " + lost)
        elif self.kind == "off":
            self.longest += 6
            expect(survivors, 71, f"host {'abcdefgh'[self.host]} does not answer")
        elif self.kind == "drop":
            self.longest += 6
            self.variant = chance.choice(["to", "from", "both", "to, on the way", "from, on the way", "both, on the way"])
            lost = f"host {'abcdefgh'[self.other]} does not answer"
            expect([host for host in everyone if host != self.other], 71, lost)
            expect([self.other], 71, "host a does not answer")
        elif self.kind == "stop":
            self.options = ["--node-timeout", str(NODE_TIMEOUT)]
            self.longest += NODE_TIMEOUT + 1
            expect(survivors, 71, f"mgpurun {lost}has been silent")
        elif self.kind == "interrupt":
            self.variant = chance.choice(["one", "all"])
            expect(everyone, 143, "stopped by SIGTERM")
        elif self.kind == "wrong":
            self.variant = chance.choice(["secret", "argument", "absent"])
            self.options = ["--timeout", "3"]
            self.longest += 3
            if self.variant == "argument":
                # A third host that comes later finds nobody.
                expect([0, self.other], 73, "argument 1 of the program differs between nodes")
            else:
                expect([host for host in everyone if host != self.other], 64, "nodes joined within")
            if self.variant == "secret":
                expect([self.other], 72, "the secrets differ")
        elif self.kind == "outage":
            expect(everyone, 143, "stopped by SIGTERM")
        else:
            self.steps = "200"
            self.longest += 10
            expect(everyone, 0, "")

    def go(self):
        with tempfile.TemporaryDirectory() as folder:
            hosts = Hosts(self.hosts, folder)
            try:
                return self.on(hosts, folder)
            finally:
                hosts.end()

    def on(self, hosts, folder):
        """Runs the job. Returns its duration in seconds, what was wrong, and what the hosts said."""
        agents, files = {}, {}
        for host in range(self.hosts):
            if self.variant == "absent" and host == self.other:
                continue
            place = os.path.join(folder, hosts.names[host])
            os.mkdir(place)
            steps = self.steps + "1" if self.variant == "argument" and host == self.other else self.steps
            secret = "another secret of these jobs" if self.variant == "secret" and host == self.other else "the secret of these jobs"
            environment = dict(os.environ, TMPDIR=place, MGPU_SECRET=secret, RUST_BACKTRACE="0")
            environment.pop("XDG_RUNTIME_DIR", None)
            command = [self.args.launcher, "--nnodes", str(self.hosts), "--rdzv-endpoint", "a:29400", "-n", str(self.ranks)]
            command += ["--backend", "cpu", *self.options, "--", self.args.job, steps]
            files[host] = open(os.path.join(folder, f"said-{host}"), "w+")
            agents[host] = subprocess.Popen(
                hosts.enter(host) + command, env=environment, stdout=files[host], stderr=subprocess.STDOUT
            )
        if self.kind in ("agent", "off", "drop", "outage", "stop", "interrupt"):
            self.wait_for_ranks(files)
        time.sleep(self.delay)
        started = time.monotonic()
        stopped = self.disturb(hosts, agents)
        wrong, codes = [], {}
        for host, agent in agents.items():
            if host in stopped:
                continue
            try:
                codes[host] = agent.wait(timeout=max(0.1, started + 60 - time.monotonic()))
            except subprocess.TimeoutExpired:
                wrong.append(f"host {hosts.names[host]} hangs")
                agent.kill()
        took = time.monotonic() - started
        for pid in [pid for host in stopped for pid in (agents[host].pid, *self.launchers(agents[host]))]:
            os.kill(pid, signal.SIGCONT)
        for host in stopped:
            try:
                agents[host].wait(timeout=60)
            except subprocess.TimeoutExpired:
                wrong.append(f"host {hosts.names[host]} hangs after it was continued")
        said = {}
        for host, file in files.items():
            file.seek(0)
            said[host] = file.read()
        return took, wrong + self.judge(hosts, folder, codes, said, took), said

    def wait_for_ranks(self, files):
        """Until every rank has joined and said so, or an agent has ended."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            texts = [open(file.name).read() for file in files.values()]
            if all(text.count("life 0") == self.ranks for text in texts):
                return
            time.sleep(0.02)

    @staticmethod
    def launchers(agent):
        """The guardian and the agent that a command has started."""
        guardian = children(agent.pid)
        return guardian + [child for pid in guardian for child in children(pid)]

    def disturb(self, hosts, agents):
        """Makes the fault. Returns the hosts whose agents are stopped."""
        if self.kind == "agent":
            guardian, agent = self.launchers(agents[self.host])[:2]
            for pid in {"guardian": [guardian], "agent": [agent], "both": [guardian, agent]}[self.variant]:
                os.kill(pid, signal.SIGKILL)
        elif self.kind == "off":
            hosts.turn_off(self.host)
        elif self.kind == "drop":
            direction, _, place = self.variant.partition(", ")
            if direction in ("to", "both"):
                hosts.drop(0, self.other, place)
            if direction in ("from", "both"):
                hosts.drop(self.other, 0, place)
        elif self.kind == "outage":
            hosts.set_link(self.other, "down")
            time.sleep(self.outage)
            hosts.set_link(self.other, "up")
            time.sleep(3)
            if any(agent.poll() is not None for agent in agents.values()):
                return []
            os.kill(self.launchers(agents[0])[0], signal.SIGTERM)
        elif self.kind == "stop":
            for pid in self.launchers(agents[self.host])[:2]:
                os.kill(pid, signal.SIGSTOP)
            return [self.host]
        elif self.kind == "interrupt":
            for host in agents if self.variant == "all" else [self.host]:
                os.kill(self.launchers(agents[host])[0], signal.SIGTERM)
        return []

    def judge(self, hosts, folder, codes, said, took):
        wrong = []
        for host, (code, text) in self.expected.items():
            name = hosts.names[host]
            if codes.get(host) != code:
                wrong.append(f"exit code {codes.get(host)} instead of {code} on host {name}")
            if text not in said.get(host, ""):
                wrong.append(f"not said on host {name}: {text}")
        for host, text in said.items():
            name = hosts.names[host]
            if "panicked" in text and self.variant != "panic":
                wrong.append(f"a panic on host {name}")
            if host in hosts.off:
                continue
            # A killed agent is waited for by nobody.
            deadline = time.monotonic() + 1
            while (left := hosts.left(host)) and time.monotonic() < deadline:
                time.sleep(0.02)
            if left:
                wrong.append(f"left on host {name}: {left}")
            files = os.listdir(os.path.join(folder, name))
            if files and not (self.kind == "agent" and host == self.host):
                wrong.append(f"left on host {name}: {files}")
        if took > self.longest + (6 if self.kind == "outage" else 0):
            wrong.append(f"{took:.2f} s")
        return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out")
    args = parser.parse_args()
    # A command in other namespaces starts in their root folder.
    args.launcher, args.job = os.path.abspath(args.launcher), os.path.abspath(args.job)
    origin = provenance.record()
    chance = random.Random(args.seed)
    misses, times = [], collections.defaultdict(list)
    for number in range(args.runs):
        run = Run(chance, args)
        took, wrong, said = run.go()
        times[run.kind].append(took)
        if wrong:
            place = f"{run.hosts} hosts of {run.ranks} ranks, host {run.host}, {' '.join(run.options)}"
            misses.append({"run": number, "kind": run.kind, "variant": run.variant, "place": place, "wrong": wrong})
            print(f"miss in run {number} ({run.kind} {run.variant or ''}, {place}): {'; '.join(wrong)}")
            for host, text in said.items():
                print(f"  host {'abcdefgh'[host]}: " + text[-1500:].replace("\n", "\n    "))
            sys.stdout.flush()
    summary = {
        "hosts": args.hosts,
        "runs": args.runs,
        "misses": len(misses),
        "seconds": {kind: {"runs": len(all), "longest": round(max(all), 2)} for kind, all in sorted(times.items())},
    }
    print(json.dumps(summary))
    if args.out:
        provenance.write(args.out, origin | summary | {"what_missed": misses})
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
