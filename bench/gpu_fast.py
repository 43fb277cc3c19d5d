"""Part B of gpu_check.py: how fast is it? Standard library only."""
import json
import os

from gpu_commands import NETS, Item, on_gpu, train
from gpu_speed import pytorch, throughput


def bandwidth(s):
    if s.fake:
        return s.skip("bandwidth", "a fake GPU is not measured")
    path = os.path.join(s.scratch, "bandwidth.json")
    run = s.run("bandwidth", [s.program("gpu_check"), "--bandwidth", "--json", path], limit=60)
    if run and os.path.exists(path):
        with open(path) as file:
            run["result"] = json.load(file)
        s.add("bandwidth", run["result"][1])
        for figure in run["result"][1]:
            print(f"       {figure['what']}: {figure['value']:.0f} {figure['unit']}")


def layers(s, batch):
    """Every layer of every network, pass and precision, with the time of every candidate."""
    path, limit = os.path.join(s.scratch, f"layers-{batch}.json"), min(150, s.left())
    # It ends in time by itself, and rewrites its file after every pass.
    budget = ["--budget", f"{max(limit - 15, 1):.0f}"]
    only = ["--only", "lenet5"] if s.fake else []
    run = s.run(f"layers at {batch} images", [s.program("gpu_check"), "--layers", "--batch", str(batch), *budget, *only,
                                              "--json", path], limit=limit)
    if run and os.path.exists(path):
        with open(path) as file:
            header, rows = json.load(file)
        run["result"] = {"passes": len(rows), "left_out": header["left_out"]}
        if header["peaks"]:
            s.add("peaks", [header["peaks"]])
        s.add("layers", map(of_layer, rows))


def of_layer(row):
    """A row of `gpu_check --layers` without what follows from the rest."""
    us = lambda ms: None if ms is None else round(1e3 * ms, 3)
    candidates = [{"name": entry["name"], "form": entry["form"], "us": us(entry["ms"]), "selected": entry["selected"],
                   "rejected": entry["rejected"]} for entry in row["candidates"]]
    kept = {key: row[key] for key in ("networks", "layer", "batch", "precision", "pass", "bound_by", "notes", "error")}
    return {**kept, "bound_us": us(row["bound_ms"]),
            "candidates": [{key: value for key, value in entry.items() if value is not None} for entry in candidates]}


def profile(s, what):
    """Time by stage (--profile), or a timeline (--timeline), of conv6."""
    net, length = ("lenet5", ["--batch", 8, "--steps", 4]) if s.fake else ("conv6", ["--batch", 1024, "--steps", 100])
    trace = os.path.join(s.logs, f"timeline-{net}.json")
    flags = ["--profile"] if what == "profile" else ["--timeline", trace, "--timeline-steps", "2-4"]
    command = train(s, 1, "--net", net, *length, "--precision", "bf16", "--skip-test", *flags, "--json")
    run = s.run(f"{what} of {net}", command, limit=60, judge=on_gpu)
    stages = ((run or {}).get("result") or {}).get("profile")
    if stages:
        result = run["result"]
        s.add("profile", [{"net": net, "batch": result["batch"], "precision": "bf16", "stages": stages,
                           "rest": result.get("profile_ms")}])


def part_b(s):
    def ours(nets, batch, choice="auto"):
        for net in nets:
            yield Item("throughput", f"{net} {batch} bf16 {choice}", 11,
                       lambda s, net=net: throughput(s, net, batch, "bf16", choice))

    nets, large, small = (["lenet5"], 16, 8) if s.fake else (NETS, 1024, 128)
    layer_batches = [2] if s.fake else [large, small]
    graphed = [(net, batch, "bf16", "graphed") for batch in (large, small) for net in nets if net != "ensemble4800"]
    compiled = [(net, large, "bf16", "compiled") for net in nets[:2]]
    modes = [(net, batch, precision, mode) for net, batch, precision, mode in graphed + compiled]
    yield Item("bandwidth", "bandwidth", 15, bandwidth)
    yield from ours(nets, large)
    yield Item("torch", "PyTorch", 90, lambda s: pytorch(s, modes))
    yield Item("layers", f"layers at {layer_batches[0]} images", 90, lambda s: layers(s, layer_batches[0]))
    yield from ours(nets, small)
    yield Item("profile", "profile", 15, lambda s: profile(s, "profile"))
    yield Item("profile", "timeline", 15, lambda s: profile(s, "timeline"))
    yield from ours(nets, large, "builtin")
    for net, batch in [(nets[0], large), (nets[0] if s.fake else "deep", small)]:
        yield Item("throughput", f"{net} {batch} bf16 auto, run 2", 11,
                   lambda s, case=(net, batch): throughput(s, *case, "bf16", "auto", attempt=2))
    for batch in layer_batches[1:]:
        yield Item("layers", f"layers at {batch} images", 40, lambda s, batch=batch: layers(s, batch))
    yield from ours(nets, small, "builtin")
