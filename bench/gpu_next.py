#!/usr/bin/env python3
"""What to do next on GPUs: layers and passes in the order of the time that they lose against the bound of the GPU.

    gpu_next.py FILE.json        prints it for a result file of gpu_check.sh

The bound of a pass is the longer of two times: its FLOPs at the GPU's best rate, and its operands' bytes (each read or written
once) at the rate of a copy. Both rates are those of the same file, or else of an H100. What a pass takes beyond the bound,
divided by the step's time, is what a perfect kernel would save. Standard library only.

Sources, the most detailed first:

- `layers`, from `gpu_check --layers`: the bound of each pass, and the time of every candidate for it;
- the lines of --show-kernels in `throughput`, which have the time of the fastest candidate of each pass;
- for everything else `kernels_of_a_step`, from ncu: every kernel with its time and the bytes that it moves; or `profile`,
  from `train_mnist --profile`: the time of each stage, less that of its passes.
"""

import json
import re
import sys

import train_work

# If the file has no measured ones: a dense product in bf16 and a copy on an H100.
TERAFLOPS, GIGABYTES = 790.0, 3000.0
# Of tensor cores, relative to bf16; f32 does not use them.
RATE = {"bf16": 1.0, "tf32": 0.5, "f32": 0.075}
LINE = re.compile(r"(?P<layer>(?:conv|dense) .*), (?P<batch>\d+) (?:images|samples), (?P<precision>\w+): (?P<passes>.*)")
# A stage of the profile that has passes, with the operations that follow: `2 conv 8 3x3 same of 4x9x9, relu, pool`.
STAGE = re.compile(r"\d+ (?P<layer>(?:conv|dense) [^,]*)(?P<after>, .*)?")
PASS = re.compile(r"(forward|backward input|backward weights) (.+?) ([\d.]+) ms(?:, |$)")
# Kernels of this project that are no matrix product: their bound is memory.
MEMORY_BOUND = ("activation", "arena", "conv_bias", "conv_first", "conv_sum", "conv_turn", "digest", "dropout", "gather", "gelu",
                "loss", "norm", "optimizer", "pool", "step")
ROWS = 20


def rates(measured):
    """TFLOP/s in bf16 and GB/s of the file's GPU."""
    for peaks in measured.get("peaks", [])[-1:]:
        return peaks["bf16_tflops"], peaks["copy_gbs"]
    found = {entry["what"]: entry["value"] for entry in measured.get("bandwidth", [])}
    products = [value for what, value in found.items() if what.startswith("bf16 product")]
    return max(products, default=TERAFLOPS), found.get("copy", GIGABYTES)


def shapes(net):
    """Each layer of a network: its names in --show-kernels and in --layers (without the batch), FLOP of a pass for one image,
    elements of input, output and weights."""
    channels, height, width = train_work.INPUT
    found = []
    for layer in train_work.NETS[net]:
        if layer[0] == "pool":
            height, width = (height + layer[1]) // 2, (width + layer[1]) // 2
            continue
        if layer[0] in ("norm", "act"):
            continue
        inputs = channels * height * width
        if layer[0] == "conv":
            _, filters, kernel, padding = layer
            names = (f"conv {filters} {kernel}x{kernel} of {channels}x{height}x{width}",
                     f"{channels}x{height}x{width}, {filters} of {kernel}x{kernel} {padding}")
            if padding == "valid":
                height, width = height - kernel + 1, width - kernel + 1
            terms = channels * kernel * kernel
        else:
            filters, terms = layer[1], inputs
            names = (f"dense {filters} of {inputs}", f"{inputs} to {filters}")
            height = width = 1
        outputs = filters * height * width
        found.append((names, 2 * outputs * terms, inputs, outputs, filters * terms))
        channels = filters
    return found


def find(net, layer):
    """The layers of a network that have this name: networks repeat some."""
    return [shape for shape in shapes(net) if layer in shape[0]]


def bound_us(shape, batch, precision, peak):
    """The bound of each pass of a layer in microseconds. All three passes have the same operands."""
    teraflops, gigabytes = peak
    _, flop, inputs, outputs, weights = shape
    size = 2 if precision == "bf16" else 4
    flops = batch * flop / (teraflops * RATE[precision] * 1e12)
    copied = size * (batch * (inputs + outputs) + weights) / (gigabytes * 1e9)
    return 1e6 * max(flops, copied)


def of_layers(measured):
    """Passes from `layers`: network, batch, precision, layer, pass, bound, and the candidates as (µs, name), the one that
    training selects first."""
    for entry in measured.get("layers", []):
        timed = [candidate for candidate in entry["candidates"] if candidate.get("us") and not candidate.get("rejected")]
        timed.sort(key=lambda candidate: (not candidate.get("selected"), candidate["us"]))
        layer = entry["layer"].removeprefix(f"{entry['batch']}x")
        candidates = [(candidate["us"], candidate["name"]) for candidate in timed]
        for net in entry["networks"] if timed else []:
            yield net, entry["batch"], entry["precision"], layer, entry["pass"], entry["bound_us"], candidates


def of_lines(measured):
    """The same from the lines of --show-kernels: one candidate for each pass, and no bound."""
    for figure in measured.get("throughput", []):
        if figure.get("kernels") != "auto" or figure.get("mode") != "graph":
            continue
        for line in map(LINE.fullmatch, figure.get("layers") or []):
            for name, kernel, ms in PASS.findall(line["passes"]) if line else []:
                yield (figure["net"], int(line["batch"]), line["precision"], line["layer"], name, None,
                       [(1e3 * float(ms), kernel)])


def step_us(measured, net, batch, precision):
    found = [figure for figure in measured.get("throughput", [])
             if (figure["net"], figure["batch"], figure["precision"]) == (net, batch, precision)
             and (figure["kernels"], figure["mode"]) == ("auto", "graph")]
    return 1e3 * found[-1]["ms_per_step"] if found else None


def passes(measured):
    """All passes that have a step's time, those that lose the largest share of it first."""
    entries = list(of_layers(measured)) or list(of_lines(measured))
    peak, unique = rates(measured), {}
    for net, batch, precision, layer, name, bound, candidates in entries:
        step = step_us(measured, net, batch, precision)
        copies = find(net, layer) if net in train_work.NETS else []
        if step is None or not copies:
            continue
        (us, kernel), others = candidates[0], sorted(candidates[1:])
        bound = bound or bound_us(copies[0], batch, precision, peak)
        unique[net, batch, precision, layer, name] = {
            "net": net, "batch": batch, "precision": precision, "layer": copies[0][0][0], "copies": len(copies), "pass": name,
            "kernel": kernel, "us": us, "bound_us": bound, "lost_share": len(copies) * max(us - bound, 0.0) / step,
            "other": others[0] if others else None}
    return sorted(unique.values(), key=lambda row: -row["lost_share"])


def beyond_passes(measured, profile):
    """Microseconds of each stage of a profile, forward and backward, less those of its layer's passes, which have a table of
    their own. Stages whose passes have no time are left out."""
    case = (profile["net"], profile["batch"], profile["precision"])
    alone = {(row["layer"], row["pass"]): row["us"] for row in passes(measured)
             if (row["net"], row["batch"], row["precision"]) == case}
    times = {}
    for index, stage in enumerate(profile["stages"]):
        found = STAGE.fullmatch(stage["layer"])
        layer = re.sub(" (same|valid) ", " ", found["layer"]) if found else None
        # The first layer has no gradient of its input.
        backward = ["backward weights", "backward input"][:2 if index else 1]
        for direction, names in [("forward", ["forward"]), ("backward", backward)]:
            ms = stage.get(direction + "_ms")
            known = [alone.get((layer, name)) for name in names] if found else []
            if ms is None or None in known:
                continue
            what = f"{found['layer']}{found['after'] or ''}: beyond its passes" if found else stage["layer"].lstrip("0123456789 ")
            name = f"{what}, {direction}"
            times[name] = times.get(name, 0.0) + 1e3 * ms - sum(known)
    return times


def stages(measured):
    """Time of everything else by network, those that lose the largest share of the step first: from ncu's list of kernels
    if there is one, else from the profile."""
    _, gigabytes = rates(measured)
    rows = []
    for case, kernels in (measured.get("kernels_of_a_step") or {}).items():
        net, batch, precision = case.split()
        step = step_us(measured, net, int(batch), precision)
        sums = {}
        for entry in kernels:
            if step and entry["kernel"].startswith(MEMORY_BOUND):
                count, us, megabytes = sums.get(entry["kernel"], (0, 0.0, 0.0))
                sums[entry["kernel"]] = count + 1, us + entry["us"], megabytes + entry["megabytes"]
        for kernel, (count, us, megabytes) in sums.items():
            lost = max(us - 1e3 * megabytes / gigabytes, 0.0)
            rows.append({"net": net, "batch": int(batch), "stage": f"{count} × {kernel}", "us": us,
                         "bound_us": 1e3 * megabytes / gigabytes, "lost_share": lost / step})
    for entry in measured.get("profile", []) if not rows else []:
        step = step_us(measured, entry["net"], entry["batch"], entry["precision"])
        times = beyond_passes(measured, entry)
        times.update({name: 1e3 * ms for name, ms in (entry.get("rest") or {}).items() if name != "step"})
        rows += [{"net": entry["net"], "batch": entry["batch"], "stage": stage, "us": us, "bound_us": 0.0,
                  "lost_share": us / step} for stage, us in times.items() if step and us > 0.0]
    return sorted(rows, key=lambda row: -row["lost_share"])


def steps(measured):
    """Each network's step beside the sum of the bounds of its layers, the farthest from it first."""
    peak, rows = rates(measured), []
    cases = {(figure["net"], figure["batch"]) for figure in measured.get("throughput", []) if figure["precision"] == "bf16"}
    for net, batch in sorted(cases):
        step = step_us(measured, net, batch, "bf16")
        if step is None or net not in train_work.NETS:
            continue
        # The first layer has no gradient of its input.
        floor = sum(bound_us(shape, batch, "bf16", peak) * (3 if index else 2)
                    for index, shape in enumerate(shapes(net)))
        rows.append({"net": net, "batch": batch, "step_us": step, "floor_us": floor, "ratio": step / floor})
    return sorted(rows, key=lambda row: -row["ratio"])


def cells(*line):
    return f"| {' | '.join(map(str, line))} |"


def of_pass(row):
    """A line of the table of layers and passes."""
    layer = row["layer"] + (f", {row['copies']} ×" if row["copies"] > 1 else "")
    name = row["pass"] + ("" if row["precision"] == "bf16" else f", {row['precision']}")
    kernel = row["kernel"] + (f" (else {row['other'][1]}: {row['other'][0]:,.0f} µs)" if row["other"] else "")
    return cells(f"`{row['net']}`", f"{row['batch']:,}", layer, name, kernel, f"{row['us']:,.0f}", f"{row['bound_us']:,.0f}",
                 f"{row['lost_share']:.1%}")


def measurements(content):
    """What a result file has measured. That of 2026-11-22 has figures from before and after its changes."""
    before = content.get("before", {})
    return {"bandwidth": before.get("bandwidth", []), **content, **content.get("after", {})}


def markdown(name, content):
    """The section for one result file."""
    measured = measurements(content)
    teraflops, gigabytes = rates(measured)
    lines = [f"From `bench/results/{name}` ({content['machine']['device']}, {content['date']}). "
             f"Bounds: {teraflops:,.0f} TFLOP/s in bf16, {gigabytes:,.0f} GB/s.", ""]
    if not measured.get("layers"):
        lines += ["This file has no times of all candidates (`gpu_check --layers`): the times are those of the fastest one, "
                  "which autotuning has printed.", ""]
    lines += ["**Steps**, the farthest from the sum of their layers' bounds first, in bf16:", "",
              cells("network", "batch", "step, µs", "layers' bounds, µs", "step / bounds"), "|---|---|---|---|---|"]
    lines += [cells(f"`{row['net']}`", f"{row['batch']:,}", f"{row['step_us']:,.0f}", f"{row['floor_us']:,.0f}",
                    f"{row['ratio']:.1f}") for row in steps(measured)]
    rows = passes(measured)
    for what, of_interest in [("bf16", [row for row in rows if row["precision"] == "bf16"][:ROWS]),
                              ("TF32 and f32", [row for row in rows if row["precision"] != "bf16"][:ROWS // 2])]:
        if of_interest:
            lines += ["", f"**Layers and passes in {what}**, by the share of the step that a kernel at the bound would save:", "",
                      cells("network", "batch", "layer", "pass", "kernel", "µs", "bound, µs", "share of the step lost"),
                      "|---|---|---|---|---|---|---|---|"]
            lines += map(of_pass, of_interest)
    others = stages(measured)[:ROWS]
    if others:
        lines += ["", "**Everything else**, by the share of the step beyond a copy of the same bytes:", "",
                  cells("network", "batch", "kernels or stage", "µs", "bound, µs", "share of the step lost"),
                  "|---|---|---|---|---|---|"]
        lines += [cells(f"`{row['net']}`", f"{row['batch']:,}", row["stage"], f"{row['us']:,.0f}", f"{row['bound_us']:,.0f}",
                        f"{row['lost_share']:.1%}") for row in others]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        print(markdown(sys.argv[1].rsplit("/", 1)[-1], json.load(file)), end="")
