#!/usr/bin/env python3
"""A long training on hosts, which are namespaces of this machine, whose links drop now and then; and the same without that.

    soak_hosts.py [--minutes 20] [--every 60] [--blip 3] [--layout 3x2] [--net lenet5] [--variables VARIABLE=VALUE[,…]] [--out FILE.json]

Every minute the link of one host, in turn, is down for 3 seconds. No rank and no agent may end, and after as many steps the weights
must have the same checksum as those of a training whose links stay up. The steps are so many that the training takes about
--minutes; the other training comes before it, so the whole takes twice as long. Data are MNIST in MGPU_DATA, or generated digits.

It needs root, and target/release with `mgpurun` and `train_mnist`. Prints a JSON object; exit code: 1 if a run failed, if no link was
down, or if the weights differ.
"""

import argparse
import json
import os
import sys
import time

import launchers
import provenance
from hosts_collectives import layout
from namespaces import Hosts

# Steps of the run that measures the speed.
CALIBRATION_STEPS = 400


class Soak:
    def __init__(self, options):
        self.options = options

    def train(self, steps, seconds_between_blips=None):
        """Trains on new hosts. Returns the summary of rank 0, and how the links were disturbed."""
        count, ranks = self.options.layout
        data = ["--data", os.path.abspath(os.environ["MGPU_DATA"])] if os.environ.get("MGPU_DATA") else ["--synthetic"]
        program = [os.path.join(launchers.BIN, "train_mnist"), *data, "--net", self.options.net, "--steps", str(steps), "--threads", "1",
                   "--schedule", "constant", "--json"]
        with Hosts(count) as hosts:
            started = time.monotonic()
            agents = launchers.start_mgpurun(hosts, ranks, program, ["--no-prefix", "--backend", "cpu"], self.options.variables)
            blips = self.disturb(hosts, agents, seconds_between_blips) if seconds_between_blips else 0
            codes, texts = launchers.finish(agents)
            seconds = time.monotonic() - started
        lines = [line for line in texts[0].splitlines() if line.startswith("{") and line.endswith("}")]
        found = {"exit_codes": codes, "seconds": round(seconds, 1), "steps": steps, "blips": blips,
                 "weights": json.loads(lines[-1])["weights"] if lines else None,
                 "ms_per_step": json.loads(lines[-1])["ms_per_step"] if lines else None}
        print(json.dumps(found), file=sys.stderr)
        if any(codes):
            print("\n".join(f"n{host}: {text[-2000:]}" for host, text in enumerate(texts)), file=sys.stderr)
        return found

    def disturb(self, hosts, agents, seconds_between):
        """Takes one link down after the other until an agent ends. Returns how often."""
        blips = 0
        while wait(agents, seconds_between):
            host = blips % len(agents)
            print(f"the link of n{host} is down for {self.options.blip:g} s", file=sys.stderr)
            hosts.set_link(host, "down")
            try:
                wait(agents, self.options.blip)
            finally:
                hosts.set_link(host, "up")
            blips += 1
        return blips


def wait(agents, seconds):
    """Whether all agents still run after these seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if any(agent.poll() is not None for agent in agents):
            return False
        time.sleep(0.05)
    return True


def problems(undisturbed, disturbed):
    found = [f"exit codes {run['exit_codes']} {name}" for name, run in (("without blips", undisturbed), ("with blips", disturbed))
             if any(run["exit_codes"])]
    if not disturbed["blips"]:
        found.append("the training ended before any link was down")
    if not found and undisturbed["weights"] != disturbed["weights"]:
        found.append(f"weights {disturbed['weights']} with blips, {undisturbed['weights']} without")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every", type=float, default=60, metavar="SECONDS")
    parser.add_argument("--blip", type=float, default=3, metavar="SECONDS")
    parser.add_argument("--layout", type=layout, default="3x2")
    parser.add_argument("--net", default="lenet5")
    parser.add_argument("--steps", type=int, help="instead of as many as take --minutes")
    parser.add_argument("--variables", type=lambda text: dict(one.split("=", 1) for one in text.split(",")), help="such as MGPU_NET=tcp")
    parser.add_argument("--out")
    options = parser.parse_args()
    soak = Soak(options)
    steps = options.steps
    if not steps:
        speed = soak.train(CALIBRATION_STEPS)
        if not speed["ms_per_step"]:
            return 1
        steps = max(CALIBRATION_STEPS, round(options.minutes * 60e3 / speed["ms_per_step"]))
    undisturbed = soak.train(steps)
    disturbed = soak.train(steps, options.every)
    wrong = problems(undisturbed, disturbed)
    result = {**provenance.record(), "layout": "{}x{}".format(*options.layout), "net": options.net, "every_seconds": options.every,
              "blip_seconds": options.blip, "without_blips": undisturbed, "with_blips": disturbed, "problems": wrong}
    print(json.dumps(result, indent=1))
    if options.out:
        provenance.write(options.out, result)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
