"""Part B of gpu_check.py: how fast is it? Standard library only."""
import json
import os

from gpu_commands import NETS, Item, on_gpu, train
from gpu_speed import pytorch, throughput

# Of gpu_check --peak, and of its result.
PEAKS = {"copy": "copy_gbs", "bf16": "bf16_tflops", "tf32": "tf32_tflops", "f32": "f32_tflops"}


def bandwidth(s):
    if s.fake:
        return s.skip("bandwidth", "a fake GPU is not measured")
    path = os.path.join(s.scratch, "bandwidth.json")
    run = s.run("bandwidth", [s.program("gpu_check"), "--bandwidth", "--json", path], limit=60)
    if run and os.path.exists(path):
        with open(path) as file:
            _, figures = json.load(file)
        run["result"] = figures
        s.add("bandwidth", figures)
        for figure in figures:
            print(f"       {figure['what']}: {figure['value']:.0f} {figure['unit']}")


def layers(s, batch):
    """Every layer of every network, pass and precision, with the time of every candidate."""
    path, limit = os.path.join(s.scratch, f"layers-{batch}.json"), min(130, s.left())
    # It ends in time by itself, bf16 first, and rewrites its file after every pass.
    budget = ["--budget", f"{max(limit - 15, 1):.0f}"]
    # Rates of the GPU that an earlier call has measured.
    known = s.sections.get("peaks", [])[-1:]
    peaks = [f"{name}={peak[key]}" for peak in known for name, key in PEAKS.items()]
    only = ["--only", "lenet5"] if s.fake else []
    run = s.run(f"layers at {batch} images", [s.program("gpu_check"), "--layers", "--batch", str(batch), *budget, *only,
                                              *(word for peak in peaks for word in ("--peak", peak)), "--json", path],
                limit=limit)
    if run and os.path.exists(path):
        with open(path) as file:
            header, rows = json.load(file)
        run["result"] = {"passes": len(rows), "left_out": header["left_out"]}
        print(f"       {len(rows)} passes, {header['left_out']} left out")
        if header["peaks"]:
            s.add("peaks", [header["peaks"]])
        s.add("layers", map(of_layer, rows))


def of_layer(row):
    """A row of `gpu_check --layers` without what follows from the rest."""
    us = lambda ms: None if ms is None else round(1e3 * ms, 3)
    candidates = [{"name": entry["name"], "form": entry["form"], "us": us(entry["ms"]), "selected": entry["selected"],
                   "rejected": entry["rejected"], "single_run": entry["single_run"] or None} for entry in row["candidates"]]
    kept = {key: row[key] for key in ("networks", "layer", "batch", "precision", "pass", "bound_by", "notes", "error")}
    return {**kept, "bound_us": us(row["bound_ms"]),
            "candidates": [{key: value for key, value in entry.items() if value is not None} for entry in candidates]}


def steps(s):
    """Kernels, bytes and time of a step with this project's kernels, beside the least possible."""
    path = os.path.join(s.scratch, "steps.json")
    only = ["--only", "lenet5"] if s.fake else []
    run = s.run("steps", [s.program("gpu_check"), "--steps", *only, "--json", path], limit=60,
                env={"MGPU_BACKEND": "nccl"})
    if run and os.path.exists(path):
        with open(path) as file:
            rows = json.load(file)["steps"]
        kept = ("net", "batch", "kernels", "bytes", "least_bytes", "least_us", "seen_us")
        run["result"] = {"steps": len(rows)}
        s.add("steps", [{key: row[key] for key in kept} for row in rows])


def profile(s, net):
    """Time by stage."""
    length = ["--batch", 8, "--steps", 5] if s.fake else ["--batch", 1024, "--steps", 103]
    has_stages = lambda result: on_gpu(result) or (None if (result or {}).get("profile") else "it has no profile")
    run = s.run(f"profile of {net}", train(s, 1, "--net", net, *length, "--precision", "bf16", "--skip-test", "--profile", "--json"),
                limit=40, judge=has_stages)
    if run and not run["problem"]:
        result = run["result"]
        s.add("profile", [{"net": net, "batch": result["batch"], "precision": "bf16", "stages": result["profile"],
                           "rest": result["profile_ms"]}])


def timeline(s, net):
    """A few steps on a timeline, which travels with the logs."""
    trace = os.path.join(s.logs, f"timeline-{net}.json")
    length, recorded = (["--batch", 8, "--steps", 5], "4-5") if s.fake else (["--batch", 1024, "--steps", 50], "40-43")
    def has_spans(result):
        with open(trace) as file:
            spans = json.load(file)["traceEvents"]
        return on_gpu(result) or (None if spans else "the timeline is empty")
    s.run(f"timeline of {net}", train(s, 1, "--net", net, *length, "--precision", "bf16", "--skip-test", "--timeline", trace,
                                      "--timeline-steps", recorded, "--json"), limit=40, judge=has_spans)


def part_b(s):
    def ours(batch, choice="auto", required=False):
        for net in nets:
            yield Item("throughput", f"{net} {batch} bf16 {choice}", 7,
                       lambda s, net=net: throughput(s, net, batch, "bf16", choice), required)

    def once_more(net, batch):
        return Item("throughput", f"{net} {batch} bf16 auto, run 2", 7,
                    lambda s: throughput(s, net, batch, "bf16", "auto", attempt=2))

    nets, large, small = (["lenet5"], 16, 8) if s.fake else (NETS, 1024, 128)
    layer_batches = [2] if s.fake else [large, small]
    graphed = [(net, batch, "bf16", "graphed") for batch in (large, small) for net in nets]
    yield Item("bandwidth", "bandwidth", 10, bandwidth, required=True)
    yield from ours(large, required=True)
    yield from ours(small, required=True)
    yield Item("torch", "PyTorch, graphed", 80, lambda s: pytorch(s, graphed), required=True)
    yield Item("layers", f"layers at {layer_batches[0]} images", 50, lambda s: layers(s, layer_batches[0]), required=True)
    yield Item("throughput", f"{nets[0]} {large} bf16 narrow", 7, lambda s: throughput(s, nets[0], large, "bf16", "narrow"))
    yield once_more(nets[0], large)
    if not s.fake:
        yield Item("throughput", f"{nets[0]} {large} fp16 auto", 7, lambda s: throughput(s, nets[0], large, "fp16", "auto"))
    for net in nets[:5]:
        yield Item("profile", f"profile of {net}", 3, lambda s, net=net: profile(s, net))
    yield from ours(large, "builtin")
    yield Item("steps", "steps", 15, steps)
    for batch in layer_batches[1:]:
        yield Item("layers", f"layers at {batch} images", 15, lambda s, batch=batch: layers(s, batch))
    yield once_more("lenet5" if s.fake else "deep", small)
    yield Item("profile", f"timeline of {nets[0]}", 3, lambda s: timeline(s, nets[0]))
    yield from ours(small, "builtin")
    # A process for each: compiling takes most of the time.
    for net in nets[:2]:
        yield Item("torch", f"PyTorch, {net} compiled", 105,
                   lambda s, mode=(net, large, "bf16", "compiled"): pytorch(s, [mode]))
