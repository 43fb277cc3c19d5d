#!/usr/bin/env python3
"""Tests of what gpu_check.py does only on a real GPU: figures, tools, logs, deadlines. Standard library only."""
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import types
import unittest
from unittest import mock

sys.dont_write_bytecode = True
import gpu_check  # noqa: E402
import gpu_commands  # noqa: E402
import gpu_fast  # noqa: E402
import gpu_rest  # noqa: E402
import gpu_right  # noqa: E402
import gpu_session  # noqa: E402
import gpu_speed  # noqa: E402


class Recorder:
    """A session that runs nothing."""
    fake, data, env, bin = False, "/data", {}, "/bin"
    reserve = gpu_session.Session.reserve

    def __init__(self, scratch, result=None, lines=None):
        self.scratch = self.logs = scratch
        self.options = types.SimpleNamespace(only="")
        self.result, self.lines = result, lines or []
        self.commands, self.sections, self.skipped, self.versions = [], {}, [], {}
        self.seconds, self.reserved = 1000.0, 0.0
        # What `attempt` returns.
        self.attempted = (0, "")

    def program(self, name):
        return name

    def left(self):
        return self.seconds - self.reserved

    def attempt(self, *_):
        return self.attempted

    def skip(self, what, why):
        self.skipped.append((what, why))

    def run(self, name, command, **_):
        self.commands.append(command)
        return {"name": name, "problem": None, "result": self.result, "lines": self.lines}

    def record(self, name, command, seconds, code, problem, *_):
        self.commands.append((name, problem))

    def add(self, section, entries):
        self.sections.setdefault(section, []).extend(entries)

    def write(self):
        pass

    def begin_letter(self, *_):
        pass

    end_letter = write


class GpuCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.scratch = folder.name

    def write(self, name, text):
        with open(os.path.join(self.scratch, name), "w") as file:
            file.write(text)

    def test_a_figure_is_the_median_of_the_epochs_after_the_warm_up(self):
        epochs = [(0.4, 100), (0.4, 110), (1.0, 200), (1.0, 210), (1.0, 190)]
        text = "".join(json.dumps({"train_s": s, "images_per_s": rate}) + "\n" for s, rate in epochs)
        s = Recorder(self.scratch, {"images_per_s": 150.0, "max_gpu_mib": 7}, ["conv 1"])
        run = s.run

        def train(*arguments, **options):
            self.write("metrics.jsonl", text)
            return run(*arguments, **options)

        s.run = train
        with mock.patch("builtins.print"):
            gpu_speed.throughput(s, "conv6", 1024, "bf16", "auto")
        figure, = s.sections["throughput"]
        self.assertEqual((figure["images_per_s"], figure["epochs"], figure["seconds"], figure["spread"]), (200, 3, 3.0, 0.1))
        self.assertEqual((figure["kernels"], figure["mode"], figure["layers"]), ("auto", "graph", ["conv 1"]))
        # Enough epochs for two seconds after the warm-up on a GPU that is half as fast again as an H100.
        at = s.commands[0].index("--epochs")
        self.assertGreaterEqual(int(s.commands[0][at + 1]) * 60_000 / (1.5 * 215e3), 2.5)
        # Figures with narrow gradients are no figures of `auto`.
        with mock.patch("builtins.print"):
            gpu_speed.throughput(s, "conv6", 1024, "bf16", "narrow")
        self.assertIn("--kernels auto --narrow-gradients", " ".join(s.commands[1]))
        self.assertEqual([figure["kernels"] for figure in s.sections["throughput"]], ["auto", "narrow"])

    def test_pytorch_runs_once_and_its_lines_are_figures(self):
        lines = ['{"torch": "2.11.0"}',
                 '{"net": "conv6", "batch": 1024, "precision": "bf16", "mode": "graphed", "images_per_s": 5.0}',
                 '{"net": "keras", "batch": 1024, "precision": "bf16", "mode": "compiled", "error": "no time left"}']
        s = Recorder(self.scratch, None, lines)
        with mock.patch("importlib.util.find_spec", return_value=True), mock.patch("builtins.print"):
            gpu_speed.pytorch(s, [("conv6", 1024, "bf16", "graphed"), ("keras", 1024, "bf16", "compiled")])
        self.assertEqual((len(s.commands), s.versions), (1, {"torch": "2.11.0"}))
        self.assertEqual([figure.get("images_per_s") for figure in s.sections["torch"]], [5.0, None])
        self.assertEqual([what for what, _ in s.skipped], ["PyTorch keras 1024 bf16 compiled"])
        with mock.patch("importlib.util.find_spec", return_value=None):
            gpu_speed.pytorch(s, [("conv6", 1024, "bf16", "graphed")])
        self.assertEqual((len(s.commands), len(s.skipped)), (1, 2))

    def test_networks_of_pytorch_that_run_alone_have_their_own_runs(self):
        s, names = Recorder(self.scratch), []
        s.run = lambda name, *_, **__: names.append(name)
        single = [item for part in (gpu_fast.part_b, gpu_rest.part_c) for item in part(s)
                  if item.group == "torch" and not item.required]
        with mock.patch("importlib.util.find_spec", return_value=True):
            for item in single:
                item.work(s)
        self.assertEqual(len(names), 6)
        self.assertEqual(len(set(names)), len(names), names)

    def test_programs_of_the_tests_are_skipped_if_they_are_missing(self):
        s = Recorder(self.scratch)
        for item in [gpu_rest.groups, gpu_rest.collectives, gpu_rest.uneven]:
            item(s)
        self.assertEqual([what for what, _ in s.skipped], ["groups", "collectives in groups", "uneven data"])
        self.assertEqual(s.commands, [])

    def test_an_accuracy_below_the_bound_is_kept(self):
        result = {"device": "cuda", "test_acc": 0.9, "test_acc_average": None, "batch": 4, "epochs": 1, "steps": 5}
        s = Recorder(self.scratch, result)
        gpu_right.accuracy(s, "deep", 0.987)
        self.assertEqual([entry["test_accuracy"] for entry in s.sections["accuracy"]], [0.9])

    def test_layers_keep_every_candidate(self):
        row = {"networks": ["conv6"], "layer": "x", "batch": 1024, "precision": "bf16", "pass": "forward", "bound_ms": 0.5,
               "bound_by": "operations", "notes": [], "error": None, "operations": 1.0, "bytes": 1.0, "slope": 0.0,
               "candidates": [{"name": "built in", "form": None, "ms": 1.25, "selected": True, "rejected": None, "share": 0.4,
                               "single_run": False},
                              {"name": "cuDNN 1", "form": "plain", "ms": None, "selected": False, "rejected": "deviates",
                               "single_run": False}]}
        s = Recorder(self.scratch)
        peaks = {"copy_gbs": 3000, "bf16_tflops": 800, "tf32_tflops": 400, "f32_tflops": 50}
        self.write("layers-1024.json", json.dumps([{"peaks": peaks, "left_out": 2}, [row]]))
        with mock.patch("builtins.print"):
            gpu_fast.layers(s, 1024)
            self.assertIn("--budget", s.commands[0])
            self.assertNotIn("--peak", s.commands[0])
            # Another batch is compared with the same rates.
            gpu_fast.layers(s, 128)
        self.assertIn("--peak copy=3000 --peak bf16=800 --peak tf32=400 --peak f32=50", " ".join(s.commands[1]))
        entry, = s.sections["layers"]
        self.assertEqual((entry["bound_us"], entry["candidates"]), (500.0, [
            {"name": "built in", "us": 1250.0, "selected": True},
            {"name": "cuDNN 1", "form": "plain", "selected": False, "rejected": "deviates"}]))

    def test_the_table_of_ncu_has_a_row_for_each_metric(self):
        lines = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"',
                 '"0","conv_forward_bf16_large(void *)","gpu__time_duration.sum","ns","12,500"',
                 '"0","conv_forward_bf16_large(void *)","dram__bytes_read.sum","Mbyte","3.5"',
                 '"1","optimizer_update_adam","launch__registers_per_thread","register/thread","40"']
        self.assertEqual(gpu_rest.launches(lines), [{"kernel": "conv_forward_bf16_large", "us": 12.5, "read": 3.5},
                                                    {"kernel": "optimizer_update_adam", "registers": 40.0}])

    def test_a_tool_that_the_machine_refuses_is_skipped_with_its_reason(self):
        s = Recorder(self.scratch)
        for code, output, is_usable in [(0, "5 checks, 0 failed", True), (1, "a\n==ERROR== ERR_NVGPUCTRPERM: no permission", False),
                                        (0, "Warning: Unable to attach", False), (9, "", False),
                                        (None, "", False)]:
            s.attempted = code, output
            with mock.patch.object(gpu_commands, "tool", return_value="/ncu"):
                self.assertEqual(gpu_commands.working_tool(s, "ncu") == "/ncu", is_usable, output)
        self.assertEqual([why.split(":")[0] for _, why in s.skipped],
                         ["refused here"] * 3 + ["a trial did not end within 60 s"])
        self.assertIn("ERR_NVGPUCTRPERM", s.skipped[0][1])

    def test_an_item_that_does_not_fit_is_skipped_and_a_shorter_one_runs(self):
        s, done = Recorder(self.scratch), []
        s.seconds = 20.0
        items = [gpu_commands.Item("x", "long", 60, lambda _: done.append("long")),
                 gpu_commands.Item("x", "short", 10, lambda _: done.append("short"))]
        with mock.patch.dict(gpu_check.PARTS, {"A": (lambda _: items, 470)}):
            gpu_check.run_part(s, "A")
        self.assertEqual((done, s.skipped), (["short"], [("long", "it takes about 60 s, 20 s are left")]))

    def test_required_items_keep_their_time_whatever_others_take(self):
        s, given = Recorder(self.scratch), {}
        def item(name, seconds, required, takes):
            def work(s):
                given[name] = s.left()
                s.seconds -= takes
            return gpu_commands.Item("x", name, seconds, work, required)
        s.seconds = 100.0
        items = [item("slow", 10, True, 40), item("optional", 10, False, 10), item("too long", 20, False, 20),
                 item("measured", 30, True, 30), item("last", 5, True, 5), item("rest", 10, False, 0)]
        with mock.patch.dict(gpu_check.PARTS, {"A": (lambda _: items, 470)}):
            gpu_check.run_part(s, "A")
        self.assertEqual(given, {"slow": 65.0, "optional": 25.0, "measured": 45.0, "last": 20.0, "rest": 15.0})
        self.assertEqual([what for what, _ in s.skipped], ["too long"])

    def test_a_defect_of_the_script_ends_only_its_item(self):
        s, done = Recorder(self.scratch), []
        def interrupted(_):
            raise gpu_session.Stopped(15)
        items = [gpu_commands.Item("x", "broken", 1, lambda _: {}["missing"]),
                 gpu_commands.Item("x", "good", 1, lambda _: done.append("good")), gpu_commands.Item("x", "end", 1, interrupted)]
        with mock.patch.dict(gpu_check.PARTS, {"A": (lambda _: items, 470)}), self.assertRaises(gpu_session.Stopped):
            gpu_check.run_part(s, "A")
        self.assertEqual((done, s.commands), (["good"], [("broken, script", "this script failed: KeyError: 'missing'")]))

    def test_every_part_ends_in_time_and_has_its_most_important_items_first(self):
        s = types.SimpleNamespace(fake=False)
        for letter, most in [("A", 480), ("B", 540), ("C", 480)]:
            part, seconds = gpu_check.PARTS[letter]
            items = list(part(s))
            self.assertLess(seconds + gpu_session.RESERVE, most)
            self.assertEqual(len({(item.group, item.name) for item in items}), len(items))
            # Required items fit, even if they take a quarter more than expected.
            required = [item for item in items if item.required]
            self.assertLess(1.25 * sum(item.seconds for item in required), seconds - gpu_session.RESERVE)
        names = " ".join(item.name for item in gpu_fast.part_b(s) if item.required)
        for wanted in ["bandwidth", "conv6 1024 bf16 auto", "ensemble4800 128 bf16 auto", "PyTorch, graphed", "layers at 1024"]:
            self.assertIn(wanted, names)

    def test_a_fake_gpu_has_no_times(self):
        found = {"gflops": 1.5, "forward_ms": 2.0, "layers": 3, "lines": ["forward built in 0.25 ms, backward cuDNN 1 2.5 ms"]}
        expected = {"layers": 3, "lines": ["forward built in, backward cuDNN 1"]}
        self.assertEqual(gpu_session.without_times(found), expected)

    def test_logs_fit_into_files_of_sixteen_mebibytes(self):
        logs, path = os.path.join(self.scratch, "logs"), os.path.join(self.scratch, "logs.tgz")
        os.mkdir(logs)
        for name, size in [("small.log", 10), ("long.log", 400_000), ("trace.json", 150_000)]:
            with open(os.path.join(logs, name), "wb") as file:
                file.write(os.urandom(size))
        with mock.patch.multiple(gpu_session, LOG_LIMIT=100_000, PIECE=60_000, PIECES=6):
            gpu_session.pack_logs(logs, path)
        pieces = sorted(name for name in os.listdir(self.scratch) if name.startswith("logs.tgz"))
        self.assertGreater(len(pieces), 1)
        self.assertTrue(all(os.path.getsize(os.path.join(self.scratch, name)) <= 60_000 for name in pieces))
        with open(path, "wb") as whole:
            for name in pieces:
                with open(os.path.join(self.scratch, name), "rb") as piece:
                    whole.write(piece.read())
        with tarfile.open(path) as archive:
            sizes = {os.path.basename(entry.name): entry.size for entry in archive if entry.isfile()}
        self.assertEqual((sizes["small.log"], sizes["trace.json"]), (10, 150_000))
        self.assertTrue(100_000 < sizes["long.log"] < 101_000, sizes)

    def test_parts_of_several_folders_become_one_file(self):
        def content(letter, name):
            return {"letters": {letter: {}}, "versions": {}, "runs": [{"part": letter, "name": name}], "skipped": [],
                    "torch": [{"part": letter, "net": name}], "date": "2026-01-01", "commit": name}
        for name, entry in [("one.json", content("A", "old")), ("two.json", content("B", "x")), ("gpu.json", content("A", "new"))]:
            self.write(name, json.dumps(entry))
        here = os.getcwd()
        os.chdir(self.scratch)
        self.addCleanup(os.chdir, here)
        with mock.patch("builtins.print"):
            gpu_check.merge_files(["one.json", "two.json", "gpu.json"])
        with open("gpu.json") as file:
            merged = json.load(file)
        self.assertEqual((sorted(merged["letters"]), {run["name"] for run in merged["runs"]}), (["A", "B"], {"new", "x"}))
        self.assertEqual([entry["net"] for entry in merged["torch"]], ["x", "new"])
        # A file has one origin, its parts may have several.
        self.assertEqual({letter: entry["commit"] for letter, entry in merged["letters"].items()},
                         {"A": "new", "B": "x"})

    def test_a_dead_process_is_noticed_and_its_family_is_known(self):
        child = subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        family = gpu_rest.family(child.pid)
        self.assertEqual(len(family), 2)
        self.assertTrue(all(map(gpu_rest.is_alive, family)))
        gpu_session.end_group(child)
        child.stdout.close()
        end = time.monotonic() + 10
        while any(map(gpu_rest.is_alive, family)) and time.monotonic() < end:
            time.sleep(0.01)
        self.assertFalse(any(map(gpu_rest.is_alive, family)))


if __name__ == "__main__":
    unittest.main()
