"""Hosts that are namespaces of this machine on one bridge. Standard library only; it takes root.

A host is a network, a UTS, a PID and a mount namespace with an interface `eth0`, the other end of which is a port of the bridge.
It has shared memory and a folder for temporary files of its own; all other files are those of this machine. It is kept by one process,
so a killed keeper is a host that is turned off.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile

# It ends with the process that has made the namespaces, however that ends: its standard input is closed then.
KEEP = "echo ready; exec cat"
ALL = ("--net", "--uts", "--pid", "--mount")
# Variables that would make a launcher part of another job, or of this one.
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("MGPU_", "PET_", "OMPI_", "PMI"))}
SECRET = "a secret of the benchmark"


SUBNET = "10.97.0.0/24"


def address(host):
    return f"10.97.0.{host + 1}"


def hardware_address(host):
    return f"02:00:00:00:00:{host + 1:02x}"


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def bytes_per_second(rate):
    """The number behind a rate such as `100mbit` or `1gbit`, in bytes per second."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if not found:
        raise ValueError(f"{rate} is not a rate such as 100mbit or 1gbit")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8


def bucket_bytes(rate):
    """The bucket of a token bucket filter: two thirds of a millisecond of the rate, and at least a few frames.

    A bucket lets so many bytes pass at once after a pause. A large one would hide the rate from small messages. With a small one the
    rate is missed whenever the filter's timer is late; and the kernel cuts a packet of up to 64 KiB that is larger than the bucket
    into frames, which at 1 Gbit/s costs much more time than the rest of the way.
    """
    return max(6000, round(bytes_per_second(rate) / 1500))


class Namespaces:
    """A process that keeps namespaces; when it is killed, all others in them are."""

    def __init__(self, options, script=KEEP, outer=None):
        enter = outer.enter(("--net",)) if outer else []
        self.process = subprocess.Popen(
            [*enter, "unshare", *options, "--fork", "--kill-child", "sh", "-ec", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if self.process.stdout.readline() != "ready\n":
            sys.exit(f"this machine does not allow hosts as namespaces: {self.process.stderr.read().strip()}")
        self.pid = children(self.process.pid)[0]

    def enter(self, namespaces):
        return ["nsenter", "--target", str(self.pid), *namespaces, "--"]

    def ip(self, *commands):
        script = "".join(command + "\n" for command in commands)
        subprocess.run([*self.enter(("--net",)), "ip", "-batch", "-"], input=script, text=True, check=True,
                       stdout=subprocess.DEVNULL)

    def limit(self, interface, rate):
        """What leaves through this interface gets a token bucket filter."""
        subprocess.run([*self.enter(("--net",)), "tc", "qdisc", "replace", "dev", interface, "root", "tbf", "rate", rate,
                        "burst", str(bucket_bytes(rate)), "limit", str(4 << 20)], check=True)

    def counters(self, interface):
        """Bytes that an interface has received and sent, with headers."""
        shown = subprocess.run([*self.enter(("--net",)), "ip", "-json", "-statistics", "link", "show", "dev", interface],
                               check=True, capture_output=True, text=True).stdout
        counted = json.loads(shown)[0]["stats64"]
        return counted["rx"]["bytes"], counted["tx"]["bytes"]

    def end(self):
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


class Hosts:
    """Hosts n0, n1, … on a bridge. `rate`, such as 100mbit, limits each host's link in both directions. TCP's congestion control is
    cubic, the default of Linux, whatever this machine's is."""

    def __init__(self, count, rate=None, congestion_control="cubic"):
        self.congestion_control = congestion_control
        self.folder = tempfile.TemporaryDirectory()
        self.switch = Namespaces(["--net"])
        self.switch.ip("link add br0 type bridge", "link set br0 up", "link set lo up")
        self.names = self.path("hosts")
        with open(self.names, "w") as file:
            file.write("127.0.0.1 localhost\n")
            file.writelines(f"{address(host)} n{host}\n" for host in range(count))
        self.hosts = [self.connected(host, count, rate) for host in range(count)]
        self.write_shell()

    def connected(self, host, count, rate):
        """A new host with its port of the bridge."""
        os.mkdir(self.path(f"n{host}"))
        script = (f"echo n{host} >/proc/sys/kernel/hostname; mount --bind {shlex.quote(self.names)} /etc/hosts; "
                  f"mount -t tmpfs tmpfs /dev/shm; ip link set lo up; {KEEP}")
        namespaces = Namespaces(["--net", "--uts", "--pid", "--mount", "--mount-proc"], script, self.switch)
        self.switch.ip(f"link add port{host} type veth peer name eth0 "
                       f"address {hardware_address(host)} netns {namespaces.pid}",
                       f"link set port{host} master br0", f"link set port{host} up")
        # The kernel's table of neighbours is shared by all namespaces, and too small to find out 64 × 63 of them.
        others = (other for other in range(count) if other != host)
        namespaces.ip(f"address add {address(host)}/24 dev eth0", "link set eth0 up",
                      *(f"neighbour add {address(other)} lladdr {hardware_address(other)} dev eth0 nud permanent"
                        for other in others),
                      # A new namespace may not have it as its default, but a route may name it.
                      f"route replace {SUBNET} dev eth0 congctl {self.congestion_control}")
        if rate:
            namespaces.limit("eth0", rate)
            self.switch.limit(f"port{host}", rate)
        return namespaces

    def write_shell(self):
        """What mpirun and mpiexec start their daemons with, instead of ssh: `shell [OPTION…] ADDRESS COMMAND…`."""
        with open(self.path("shell"), "w") as file:
            file.write("#!/bin/sh\nwhile case $1 in -*) true;; *) false;; esac; do shift; done\ncase $1 in\n")
            for host, namespaces in enumerate(self.hosts):
                enter = f"env TMPDIR={shlex.quote(self.path(f'n{host}'))} {' '.join(namespaces.enter(ALL))}"
                file.write(f'{address(host)}) shift; exec {enter} sh -c "$*";;\n')
            file.write("esac\nexit 1\n")
        os.chmod(self.path("shell"), 0o755)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for namespaces in [*self.hosts, self.switch]:
            namespaces.end()
        self.folder.cleanup()

    def start(self, host, command, namespaces=ALL, variables=None, errors=subprocess.STDOUT):
        return subprocess.Popen([*self.hosts[host].enter(namespaces), *command], stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=errors, text=True,
                                env={**ENVIRONMENT, "MGPU_SECRET": SECRET, "TMPDIR": self.path(f"n{host}"), **(variables or {})})

    def processes(self, host, name):
        """The processes of a host that run this program, or a script of this name."""
        found, own = [], os.readlink(f"/proc/{self.hosts[host].pid}/ns/pid")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline") as file:
                    words = file.read().split("\0")[:2]
                if name in map(os.path.basename, words) and os.readlink(f"/proc/{pid}/ns/pid") == own:
                    found.append(int(pid))
            except OSError:
                pass
        return found

    def sent_bytes(self):
        """Bytes that have left each host so far, with headers."""
        return [namespaces.counters("eth0")[1] for namespaces in self.hosts]

    def set_link(self, host, state):
        self.switch.ip(f"link set port{host} {state}")

    def power_off(self, host):
        """Its link goes down first: nobody hears of the end of its processes."""
        self.set_link(host, "down")
        os.kill(self.hosts[host].pid, signal.SIGKILL)
