#!/usr/bin/env python3
"""Measures jobs on several hosts, which are namespaces of this machine on one bridge, compared with other launchers.

    hosts.py [--rounds 20] [--rest 60] [--limit 120] [--only true,rest,faults,many] [--simulated FILE] [--swarm FILE]
             [--out FILE.json]
    hosts.py --table FILE.json

- true: two hosts with two ranks of `true` each, start to end; the launchers run in turn, figures are medians
- rest: CPU time of the agents of a job that sleeps
- faults: time from a fault of one host to the end of the launcher on the other; none after --limit seconds
- many: 16, 32 and 64 hosts with one rank each, whose ranks join and all-reduce, start to end

Figures that --out has of an earlier run stay, unless they are measured again. --simulated names the output of the simulation of 1,000 agents, which is stored with the figures:

    cargo test --release -p mgpurun --lib thousand -- --ignored --nocapture

--swarm names the binary of those tests: its 999 agents connect to a real coordinator over loopback.

It needs root, and target/release with `mgpurun` and `hello_ring`. Peers are `mpirun.openmpi` and `mpiexec.hydra` in PATH
and the torchrun that TORCHRUN names. --table prints results as a table in Markdown.
"""

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import provenance
from launchers import BIN, start_mgpurun, start_mpi, start_torchrun
from namespaces import Hosts, address

TORCHRUN = os.environ.get("TORCHRUN", "torchrun")
# Debian's names.
MPIEXEC = {"openmpi": "mpirun.openmpi", "mpich": "mpiexec.hydra"}


def start(launcher, hosts, ranks, program):
    """Starts a job with `ranks` ranks on each host. Returns the processes that were started, the one on n0 first."""
    if launcher == "mgpurun":
        return start_mgpurun(hosts, ranks, program)
    if launcher == "torchrun":
        return start_torchrun(hosts, ranks, program, [TORCHRUN])
    return start_mpi(launcher, hosts, ranks, program, MPIEXEC[launcher])


def available():
    programs = {"mgpurun": os.path.join(BIN, "mgpurun"), **MPIEXEC, "torchrun": TORCHRUN}
    return [name for name, program in programs.items() if shutil.which(program)]


def version(launcher):
    if launcher == "torchrun":
        return provenance.package_version(os.path.join(os.path.dirname(shutil.which(TORCHRUN)), "python"), "torch")
    return re.search(r"\d+\.\d+\.\d+", provenance.output(MPIEXEC[launcher], "--version") or "")[0]


def once(launcher, hosts, ranks, program):
    """Seconds from the start of a job to the end of all that was started."""
    started = time.perf_counter()
    processes = start(launcher, hosts, ranks, program)
    for process in processes:
        text, _ = process.communicate()
        if process.returncode != 0:
            sys.exit(f"{launcher}: exit code {process.returncode}\n{text}")
    return time.perf_counter() - started


def summary(seconds):
    ordered = sorted(seconds)
    return {"median_ms": round(ordered[len(ordered) // 2] * 1e3, 1), "min_ms": round(ordered[0] * 1e3, 1),
            "max_ms": round(ordered[-1] * 1e3, 1), "rounds": len(ordered)}


def measure_true(rounds):
    with Hosts(2) as hosts:
        launchers = available()
        slow = {name for name in launchers if once(name, hosts, 2, ["true"]) > 2}
        times = {name: [] for name in launchers}
        for turn in range(rounds):
            for name in launchers:
                if name not in slow or turn % 4 == 0:
                    times[name].append(once(name, hosts, 2, ["true"]))
    return {name: summary(seconds) for name, seconds in times.items()}


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            sys.exit("a job has not started")
        time.sleep(0.05)


def cpu_seconds(pids):
    """CPU time of processes, by their clocks: exact, unlike the ticks in /proc."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def measure_rest(seconds):
    """CPU time of launcher and guardian of each host, as a share of one core."""
    with Hosts(2) as hosts:
        start("mgpurun", hosts, 2, ["sleep", "100000"])
        wait_for(lambda: all(len(hosts.processes(host, "sleep")) == 2 for host in range(2)))
        time.sleep(2)
        pids = [hosts.processes(host, "mgpurun") for host in range(2)]
        before = [cpu_seconds(of_host) for of_host in pids]
        time.sleep(seconds)
        share = [100 * (cpu_seconds(of_host) - used) / seconds for of_host, used in zip(pids, before)]
    return {"seconds": seconds, "coordinator_percent": round(share[0], 4), "agent_percent": round(share[1], 4)}


FAULTS = ["host off", "agent killed", "link down"]
AGENTS = {"mgpurun": "mgpurun", "openmpi": "orted", "mpich": "hydra_pmi_proxy", "torchrun": "torchrun"}


def measure_fault(launcher, fault, limit):
    """Seconds until the launcher on n0 ends after a fault of n1; None if it does not."""
    with Hosts(2) as hosts:
        processes = start(launcher, hosts, 1, ["sleep", "100000"])
        wait_for(lambda: len(hosts.processes(1, "sleep")) == 1, 120)
        time.sleep(3)
        agents = hosts.processes(1, AGENTS[launcher])
        started = time.perf_counter()
        if fault == "host off":
            hosts.power_off(1)
        elif fault == "link down":
            hosts.set_link(1, "down")
        else:
            # The process that was started first, not its children.
            os.kill(min(agents), signal.SIGKILL)
        try:
            text, _ = processes[0].communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            # It may be outside of its host's PID namespace.
            processes[0].kill()
            processes[0].wait()
            return {"seconds": None}
        return {"seconds": round(time.perf_counter() - started, 2), "exit_code": processes[0].returncode,
                "said": next((line for line in text.splitlines() if "n1" in line or address(1) in line), None)}


def measure_faults(limit):
    cases = [(launcher, fault) for launcher in available() for fault in FAULTS]
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        results = list(pool.map(lambda case: measure_fault(*case, limit), cases))
    found = {}
    for (launcher, fault), result in zip(cases, results):
        found.setdefault(launcher, {})[fault] = result
    return {"limit_seconds": limit, **found}


def measure_many(rounds=3):
    found = {}
    for count in (16, 32, 64):
        with Hosts(count) as hosts:
            program = [os.path.join(BIN, "hello_ring")]
            found[str(count)] = summary([once("mgpurun", hosts, 1, program) for _ in range(rounds)])
    return found


def measure_links(binary, seconds=10):
    """CPU time of a coordinator with 999 connected agents, as a share of one core."""
    with Hosts(1) as hosts:
        command = [os.path.join(BIN, "mgpurun"), "--nnodes", "1000", "--node-rank", "0", "--rdzv-endpoint",
                   "127.0.0.1:29400", "-n", "1", "sleep", "30"]
        hosts.start(0, command)
        wait_for(lambda: len(hosts.processes(0, "mgpurun")) == 2)
        before = cpu_seconds(hosts.processes(0, "mgpurun"))
        swarm = ["env", "MGPU_SWARM=127.0.0.1:29400", binary, "thousand_links", "--ignored", "--nocapture"]
        swarm = hosts.start(0, swarm)
        wait_for(lambda: len(hosts.processes(0, "sleep")) == 1)
        joined = cpu_seconds(hosts.processes(0, "mgpurun"))
        time.sleep(2)
        started = cpu_seconds(hosts.processes(0, "mgpurun"))
        time.sleep(seconds)
        share = 100 * (cpu_seconds(hosts.processes(0, "mgpurun")) - started) / seconds
        text, _ = swarm.communicate()
        found = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
        return {"agents": 1000, "joins_cpu_seconds": round(joined - before, 3), "seconds": seconds,
                "heartbeats_percent_of_a_core": round(share, 2), **found}


def table(result):
    lines = []
    if "true" in result:
        lines += ["| two hosts × two ranks of `true` | start to end (median) |", "|---|---|"]
        lines += [f"| {name} | {values['median_ms']:.0f} ms |" for name, values in result["true"].items()]
    if "many" in result:
        lines += ["", "| hosts × one rank of `hello_ring` | start to end (median) |", "|---|---|"]
        lines += [f"| {count} | {values['median_ms'] / 1e3:.2f} s |" for count, values in result["many"].items()]
    if "faults" in result:
        launchers = [name for name in result["faults"] if name != "limit_seconds"]
        lines += ["", f"| the other host ends its launcher after | {' | '.join(launchers)} |", "|---" * (len(launchers) + 1) + "|"]
        for fault in FAULTS:
            times = [result["faults"][name][fault]["seconds"] for name in launchers]
            cells = [f"not within {result['faults']['limit_seconds']} s" if seconds is None else f"{seconds:.1f} s"
                     for seconds in times]
            lines.append(f"| {fault} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rest", type=int, default=60)
    parser.add_argument("--limit", type=int, default=120)
    parser.add_argument("--only", default="true,rest,faults,many")
    parser.add_argument("--simulated")
    parser.add_argument("--swarm")
    parser.add_argument("--table")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.table:
        with open(args.table) as file:
            return print(table(json.load(file)))
    measures = {"true": lambda: measure_true(args.rounds), "rest": lambda: measure_rest(args.rest),
                "faults": lambda: measure_faults(args.limit), "many": measure_many}
    result = {}
    if args.out and os.path.exists(args.out):
        with open(args.out) as file:
            result = json.load(file)
    result |= provenance.record(versions={name: version(name) for name in available() if name != "mgpurun"})
    for name in filter(None, args.only.split(",")):
        result[name] = measures[name]()
        print(json.dumps({name: result[name]}, indent=1), file=sys.stderr)
    if args.swarm:
        result["links"] = measure_links(args.swarm)
        print(json.dumps(result["links"], indent=1), file=sys.stderr)
    if args.simulated:
        with open(args.simulated) as file:
            result["simulated"] = json.loads(next(line for line in file if line.startswith("{")))
    print(table(result))
    if args.out:
        provenance.write(args.out, result)


if __name__ == "__main__":
    main()
