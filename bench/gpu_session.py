"""A session of gpu_check.py: runs programs under deadlines, keeps their results, and writes them after every one.

Standard library only.
"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time

import provenance

HERE = os.path.dirname(os.path.abspath(__file__))
# Part of the name of the tests' fake GPU.
FAKE = "FAKE GPU"
# Keys of results that are times: those of a fake GPU must not be mistaken for figures.
TIMES = re.compile(r"(^|_)(seconds|s|ms|us|gbps|gflops|tflops)($|_)|per_s|spread|peak_share")
# What a machine may hand back: files of 16 MiB. Logs are cut, compressed and split accordingly.
LOG_LIMIT, PIECE, PIECES = 4 << 20, 15 << 20, 5
# Kept free before the deadline, to end a program, and to write results and logs.
RESERVE = 8


class Stopped(BaseException):
    """SIGTERM or SIGINT arrived. Not an error of an item, so no `except Exception` may catch it."""


def folder(variable, beside):
    """The folder in a variable, or the one beside this script, if it exists."""
    path = os.environ.get(variable) or beside
    return os.path.abspath(path) if os.path.isdir(path) else None


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(entry) for key, entry in value.items() if not TIMES.search(key)}
    if isinstance(value, list):
        return [without_times(entry) for entry in value]
    # Descriptions of kernels have theirs.
    return re.sub(r" [0-9.]+ ms", "", value) if isinstance(value, str) else value


def last_json(text):
    """The last line of JSON in a program's output; mgpurun may have put the rank before it."""
    for line in reversed(text.splitlines()):
        at = line.find("{")
        if at >= 0 and line.rstrip().endswith("}"):
            try:
                return json.loads(line[at:])
            except ValueError:
                pass
    return None


def end_group(child):
    """Ends a program and all of its processes. mgpurun cleans up when it receives SIGTERM."""
    child.terminate()
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


class Session:
    def __init__(self, options):
        self.options = options
        self.env = dict(os.environ)
        # NVIDIA's libraries may be packages of this interpreter.
        self.env.setdefault("VIRTUAL_ENV", sys.prefix)
        self.begun = time.monotonic()
        self.end = self.begun + options.deadline if options.deadline else float("inf")
        self.letter_end = self.end
        # Seconds that are kept for the required items after the one that runs.
        self.reserved = 0.0
        self.letter = self.group = None
        self.runs, self.skipped, self.letters = [], [], {}
        # What items add besides their runs, such as tables of figures.
        self.sections = {}
        binaries = [HERE, os.path.join(HERE, "../target/release")]
        self.bin = next((os.path.abspath(path) for path in [os.environ.get("BIN"), *binaries]
                         if path and os.path.exists(os.path.join(path, "gpu_check"))), None)
        if self.bin is None:
            sys.exit("gpu_check.py: no gpu_check in BIN, beside this script or in target/release")
        self.data = folder("MGPU_DATA", os.path.join(HERE, "data/mnist"))
        self.golden = folder("MGPU_GOLDEN", os.path.join(HERE, "golden"))
        if options.fake:
            paths = [os.path.abspath(options.fake), self.env.get("LD_LIBRARY_PATH", "")]
            self.env["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
            self.env["MGPU_CACHE_DIR"] = os.path.join(os.path.abspath(options.fake), "kernels")
        self.scratch = tempfile.mkdtemp(prefix="gpu-check-")
        self.logs = os.path.join(self.scratch, "logs")
        os.mkdir(self.logs)
        self.versions = {}
        self.origin = provenance.record()
        self.machine = self.find_machine()
        self.fake = FAKE in self.machine["device"]
        if self.fake:
            # Ranks share the GPU, as on a machine that has one.
            self.env.setdefault("FAKE_GPU_COUNT", "1")
        slug = re.sub("[^a-z0-9]+", "-", self.machine["device"].lower()).strip("-")
        self.path = os.path.join(options.out, f"gpu-{self.origin['date']}-{slug}.json")
        self.add_earlier()

    def program(self, name):
        return os.path.join(self.bin, name)

    def find_machine(self):
        path = os.path.join(self.scratch, "machine.json")
        # No check has this name, so only the machine is printed.
        done = subprocess.run([self.program("gpu_check"), "--only", "no check", "--json", path], env=self.env,
                              capture_output=True, text=True, timeout=120)
        if not os.path.exists(path):
            sys.exit("gpu_check.py: no GPU: " + (done.stderr.strip() or done.stdout.strip()))
        with open(path) as file:
            keys = ["device", "architecture", "multiprocessors", "driver", "compiler", "version"]
            result = json.load(file)
        return {**self.origin["machine"], **{key: result[key] for key in keys}}

    def add_earlier(self):
        """Keeps what an earlier call of the same day, commit and GPU has measured in parts that this call does not run. With
        --only it keeps everything; what is repeated replaces what was there."""
        try:
            with open(self.path) as file:
                earlier = json.load(file)
        except (OSError, ValueError):
            return
        if earlier.get("commit") == self.origin.get("commit"):
            merge(self, earlier, [] if self.options.only else self.options.letters)

    # ---- Time ----

    def begin_letter(self, letter, seconds):
        self.letter = letter
        self.letter_end = min(time.monotonic() + seconds, self.end)
        self.letters[letter] = {"deadline_s": seconds}
        print(f"\n=== {letter}", flush=True)

    def end_letter(self):
        left = self.letter_end - time.monotonic()
        self.letters[self.letter]["seconds"] = round(self.letters[self.letter]["deadline_s"] - left, 1)

    def left(self):
        """Seconds that programs may still use."""
        return self.letter_end - time.monotonic() - RESERVE - self.reserved

    def reserve(self, item, later):
        """Keeps the time of the required items among `later`. A required item may use its own expected time all the same."""
        self.reserved = 0.0
        needed = 0.0 if self.fake else sum(each.seconds for each in later if each.required)
        self.reserved = max(min(needed, self.left() - item.seconds), 0.0) if item.required else needed

    # ---- Items ----

    def skip(self, what, why):
        self.skipped.append({"part": self.letter, "group": self.group, "what": what, "why": why})
        print(f"skipped {what}: {why}", flush=True)

    def start(self, name, command, env=None, feed=None):
        """Starts a program that writes to a log. Returns it and the log's path."""
        log = os.path.join(self.logs, re.sub("[^a-zA-Z0-9]+", "-", f"{self.letter} {self.group} {name}") + ".log")
        with open(log, "w") as output, tempfile.TemporaryFile("w+") as source:
            source.write(feed or "")
            source.seek(0)
            child = subprocess.Popen(command, env={**self.env, **(env or {})}, stdout=output, stderr=subprocess.STDOUT,
                                     stdin=source, start_new_session=True, cwd=self.scratch)
        return child, log

    def text_of(self, log):
        with open(log, errors="replace") as file:
            text = file.read()
        # Paths of a user's machine are private.
        for path, shown in [(self.data, "DATA"), (self.golden, "GOLDEN"), (self.bin, "BIN"), (self.scratch, "SCRATCH")]:
            text = text.replace(path, shown) if path else text
        return text

    def attempt(self, name, command, limit, env=None, feed=None):
        """Runs a program for at most `limit` seconds. Returns its exit code, None if it was stopped, and its output."""
        child, log = self.start(name, command, env, feed)
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(child)
        return code, self.text_of(log)

    def run(self, name, command, limit=180, expect=0, contains=None, env=None, judge=None, keep=None, feed=None):
        """Runs one program, with `feed` as its input. Its last line of JSON, if any, is the result; `judge` may find a
        problem in it. Lines that match `keep` are kept. Returns the entry of the result file; None if no time is left."""
        if self.left() < 2:
            self.skip(name, "no time left")
            return None
        limit = min(limit, self.left())
        start = time.monotonic()
        code, text = self.attempt(name, command, limit, env, feed)
        seconds = time.monotonic() - start
        result = last_json(text)
        problem = None
        if code is None:
            problem = f"stopped after {limit:.0f} s"
        elif code != expect:
            problem = f"exit code {code} instead of {expect}"
        elif contains and not re.search(contains, text):
            problem = f"it does not say {contains!r}"
        elif judge:
            problem = judge(result)
        lines = None
        if keep:
            lines = [" ".join(line.split()) for line in text.splitlines() if re.search(keep, line)]
        return self.record(name, command, seconds, code, problem, result, text, lines)

    def record(self, name, command, seconds, code, problem, result, text="", lines=None):
        """Adds an entry to the result file, prints it, and writes the file."""
        words = [os.path.basename(word) if os.path.isabs(word) else word for word in command]
        tail = text.splitlines()[-12:] if problem else []
        run = {"part": self.letter, "group": self.group, "name": name, "command": " ".join(words),
               "seconds": round(seconds, 1), "code": code, "problem": problem, "result": result, "tail": tail}
        if lines is not None:
            run["lines"] = lines
        self.runs = [old for old in self.runs if (old["part"], old["group"], old["name"]) != (self.letter, self.group, name)]
        self.runs.append(run)
        shown = "" if self.fake else f"{seconds:7.1f} s"
        print(f"{'FAILED' if problem else 'ok    '} {name:<60} {shown}  {problem or self.figure(run)}", flush=True)
        for line in tail:
            print("       | " + line, flush=True)
        self.write()
        return run

    def figure(self, run):
        """The figures to print for a run; no times on a fake GPU."""
        result, words = run["result"] or {}, []
        if isinstance(result, dict) and not self.fake:
            if "images_per_s" in result:
                words.append(f"{result['images_per_s']:,.0f} images/s")
            if result.get("test_acc") is not None:
                words.append(f"{100 * result['test_acc']:.2f}%")
        return ", ".join(words)

    def add(self, section, entries):
        """Adds entries to a section of the result file."""
        self.sections.setdefault(section, []).extend({**entry, "part": self.letter} for entry in entries)
        self.write()

    # ---- Results ----

    def content(self):
        content = {**self.origin, "machine": self.machine, "versions": self.versions, "fake": self.fake,
                   "letters": self.letters, **self.sections, "runs": self.runs, "skipped": self.skipped}
        if self.fake:
            content = {key: value if key in self.origin or key == "machine" else without_times(value)
                       for key, value in content.items()}
        return content

    def write(self):
        """Writes the file after every run, so that an interrupted session keeps its results."""
        provenance.write(self.path, self.content())

    def close(self):
        """Writes the results and all logs."""
        self.write()
        # A repeated item must not replace the logs of the whole part.
        name = "-".join(["".join(self.options.letters), *re.findall("[a-zA-Z0-9]+", self.options.only)])
        pack_logs(self.logs, os.path.join(self.options.out, f"gpu-check-logs-{name}.tgz"))
        shutil.rmtree(self.scratch, ignore_errors=True)


def merge(session, earlier, letters):
    """Adds the results of `earlier`, without those of the parts `letters`."""
    is_kept = [entry for entry in earlier.get("letters", {}) if entry not in letters]
    session.letters.update({letter: earlier["letters"][letter] for letter in is_kept})
    session.versions.update(earlier.get("versions") or {})
    for name in ("runs", "skipped"):
        getattr(session, name).extend(entry for entry in earlier.get(name, []) if entry.get("part") in is_kept)
    known = {"date", "commit", "machine", "versions", "command", "fake", "letters", "runs", "skipped"}
    for name, entries in earlier.items():
        if name not in known and isinstance(entries, list):
            kept = [entry for entry in entries if entry.get("part") in is_kept]
            if kept:
                session.sections.setdefault(name, []).extend(kept)


def pack_logs(logs, path):
    """All logs in one archive, smallest first. Long logs lose their middle; an archive that is too large for one file is
    split into pieces, to be joined by `cat`; what does not fit into the pieces is named and left out."""
    names = sorted(os.listdir(logs), key=lambda name: (os.path.getsize(os.path.join(logs, name)), name))
    left_out = []
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            file = os.path.join(logs, name)
            if archive.fileobj.fileobj.tell() > PIECE * PIECES - LOG_LIMIT:
                left_out.append(name)
                continue
            if os.path.getsize(file) > LOG_LIMIT and name.endswith(".log"):
                with open(file, "rb+") as log:
                    head = log.read(LOG_LIMIT // 2)
                    log.seek(-LOG_LIMIT // 2, os.SEEK_END)
                    tail = log.read()
                    log.seek(0)
                    log.truncate()
                    log.write(head + b"\n[the middle of this log is left out]\n" + tail)
            archive.add(file, os.path.join("logs", name))
    if left_out:
        print(f"logs without {', '.join(left_out)}: {PIECES} files of {PIECE >> 20} MiB are full")
    if os.path.getsize(path) > PIECE:
        with open(path, "rb") as archive:
            for number in range(PIECES + 1):
                piece = archive.read(PIECE)
                if piece:
                    with open(f"{path}.{number}", "wb") as file:
                        file.write(piece)
        os.remove(path)
