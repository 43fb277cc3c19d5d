#!/usr/bin/env python3
"""Where a result file comes from: date, commit, machine and command line. Standard library only.

    provenance.py COMMAND…       prints it as one JSON object, for a shell script that was called by this command line

Every script that writes a result file takes these entries from here. They have no absolute paths: a data folder appears as the
variable that names it, a path below the repository as a relative path, any other absolute path as `…/NAME`.
"""

import datetime
import json
import os
import re
import shlex
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
HERE = os.path.dirname(os.path.realpath(__file__))
# Variables that name folders. Other variables that begin with MGPU_ change what is measured: the command line shows them.
FOLDERS = ["MGPU_DATA", "MGPU_GOLDEN", "MGPU_PEERS", "MGPU_CACHE_DIR", "BIN", "OUT"]


def output(*command):
    """What a program prints; None if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def without_machine(path):
    """An absolute path in the form that result files have."""
    for name in FOLDERS:
        folder = os.path.abspath(os.environ[name]) if os.environ.get(name) else None
        if folder and (path + "/").startswith(folder + "/"):
            return f"${name}{path[len(folder):]}"
    if path.startswith(ROOT + "/"):
        return path[len(ROOT) + 1:]
    return "." if path == ROOT else "…/" + os.path.basename(path)


def shown(word):
    """A word of a command line, quoted for a shell. Its paths may follow `=`, `:` or `,`."""
    def replace(path):
        # `..` may lead out of the repository.
        return without_machine(os.path.abspath(path[0]))

    word = re.sub(r"(?:(?<=[=:,])|^)(?:/|\.\.(?=/|$))[^=:,]*", replace, word)
    return word if re.fullmatch(r"[\w@%+=:,./$…-]+", word) else shlex.quote(word)


def command_line(words=None):
    """A command line to store: of this process, unless words are given."""
    words = words or [os.path.abspath(sys.argv[0]), *sys.argv[1:]]
    settings = [f"{name}={shown(value)}" for name, value in sorted(os.environ.items())
                if name.startswith("MGPU_") and name not in FOLDERS]
    return " ".join([*settings, *map(shown, words)])


def date():
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def commit():
    """The commit of the checkout, with `-dirty` if sources differ from it; None outside a checkout. `gpu_check.sh pack`
    leaves it in a file."""
    try:
        with open(os.path.join(HERE, "commit")) as file:
            return file.read().strip() or None
    except OSError:
        pass
    if output("git", "-C", ROOT, "rev-parse", "--show-toplevel") != ROOT:
        return None
    name = output("git", "-C", ROOT, "rev-parse", "--short", "HEAD")
    # New result files do not change what is measured.
    clean = output("git", "-C", ROOT, "diff", "--quiet", "HEAD", "--", ".", ":(exclude)bench/results") is not None
    return name if clean else f"{name}-dirty"


def machine():
    return json.loads(output(os.path.join(HERE, "describe_machine.sh")) or "{}")


def record(words=None, versions=None):
    """The entries that every result file has. `versions` are those of the programs that ours are compared with."""
    found = {"date": date(), "commit": commit(), "machine": machine(), "versions": versions, "command": command_line(words)}
    return {key: value for key, value in found.items() if value is not None}


def result_path(kind):
    """The path of a result file of this kind, with date and machine in its name."""
    slug = output(os.path.join(HERE, "describe_machine.sh"), "--slug") or "machine"
    return os.path.join(HERE, "results", f"{kind}-{date()}-{slug}.json")


def package_version(python, package):
    """The version of a package of a Python environment; None if it is not there."""
    return output(python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))")


def write(path, result):
    """Replaces a result file atomically."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path + ".partial", "w") as file:
        json.dump(result, file, indent=1, ensure_ascii=False)
        file.write("\n")
    os.replace(path + ".partial", path)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__.strip())
    print(json.dumps(record(sys.argv[1:])))
