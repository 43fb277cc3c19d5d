#!/usr/bin/env python3
"""Tables of docs/src/placements.md, from a result of placements.py, for readme.py. Standard library only.

    summarise_placements.py RESULT.json      prints them

The figures of the founding documents are constants here: images/s are computed from the times that they print.
"""

import json
import statistics
import sys

from train_work import work

FLOAT = 4
TRAINING_IMAGES = 60_000
COLUMNS = ("replicated", "shared", "host", "layers", "layers:2")

# Document 000, on Titan X GPUs: what, images per step, seconds of 2,000 steps, and our counterpart as (ranks, placement).
STEPS_000 = 2000
TOWERS_000 = [
    ("the CPU alone", 128, [712.075], None),
    ("one GPU", 128, [37.064], (1, "replicated")),
    ("one GPU, variables in host memory", 128, [65.073], (1, "host")),
    ("layers on two GPUs, gradients beside their layers", 128, [40.363], (2, "layers")),
    ("layers on two GPUs, gradients anywhere", 128, [46.657], None),
    ("two GPUs, averaged by the CPU, 128 images each", 256, [86.920, 75.582], (2, "host")),
    ("two GPUs, averaged by the CPU, 256 images each", 512, [109.699], None),
    ("two GPUs, averaged by the CPU, 512 images each", 1024, [168.136], None),
    ("three GPUs, averaged by the CPU, 256 images each", 768, [117.820], None),
    ("three GPUs, the same without variables in host memory", 768, [91.023], None),
    ("three GPUs, averaged by the CPU, 768 images each", 2304, [230.154], None),
]
# Document 001: seconds of an epoch, by number of GPUs; 60,000 images.
EPOCH_001 = {1: 47, 8: 7}
# Document 003, two GPUs: images/s of steps 10, 20, …, 200.
RATES_003 = [6528, 6803, 6741, 6700, 6746, 6627, 6749, 6368, 6762, 6338, 6504, 6721, 6735, 6636, 6777, 6392, 6855, 6804, 6645, 6747]
# Document 004: seconds of an epoch of training and per cent of one GPU, the same of a test; by number of GPUs.
SHARED_004 = {1: (7.234, 100, 0.412, 100), 2: (3.902, 185, 0.231, 178), 4: (2.311, 313, 0.242, 170), 8: (2.173, 333, 0.162, 254)}
NCCL_004 = {1: (7.348, 100, 0.415, 100), 2: (3.877, 190, 0.229, 181), 4: (2.208, 333, 0.143, 290), 8: (1.448, 507, 0.095, 435)}


class Gpu:
    """Training with the fastest kernels on one GPU: its name, and images/s by network and batch, None if not measured."""

    def __init__(self, name="GPU", rate=lambda net, batch: None):
        self.name, self.rate = name, rate


class Figures:
    """The cells of a result."""

    def __init__(self, result):
        self.result = result
        self.cells = {(cell["net"], cell["ranks"], cell["placement"]): cell for cell in result["figures"]}
        self.nets = list(dict.fromkeys(net for net, _, _ in self.cells))
        self.cores = int(result["machine"]["cores"])
        self.ranks = sorted({ranks for _, ranks, _ in self.cells})

    def cell(self, net, ranks, placement):
        return self.cells.get((net, ranks, placement))

    def value(self, net, ranks, placement, key):
        """The median of a figure; None without one."""
        return ((self.cell(net, ranks, placement) or {}).get(key) or {}).get("median")

    def relative(self, net, ranks, placement):
        """Speed relative to one rank with its own weights."""
        rate, one = self.value(net, ranks, placement, "images_per_s"), self.value(net, 1, "replicated", "images_per_s")
        return rate / one if rate and one else None

    def lacks(self, net, ranks, placement):
        """What a table has in place of a figure."""
        if placement == "layers:2" and ranks != 4:
            return ""
        cell = self.cell(net, ranks, placement)
        if cell and "images_per_s" not in cell:
            return "refused" if cell["reason"].startswith("exit code 2") else "failed"
        return "not measured"

    def table_by_cell(self, shown, ranks=None):
        """One line for each network and number of ranks, one column for each placement. `shown` gets a cell's place."""
        lines = [["network", "ranks", *(f"`{column}`" for column in COLUMNS)]]
        for net in self.nets:
            for number in ranks or self.ranks:
                cells = [shown(net, number, column) or self.lacks(net, number, column) for column in COLUMNS]
                lines.append([f"`{net}`", number, *cells])
        return lines


def speed(figures):
    def shown(*place):
        rate, relative = figures.value(*place, "images_per_s"), figures.relative(*place)
        return rate and f"{rate:,.0f}" + (f" ({relative:.0%})" if relative and place[1] > 1 else "")

    return figures.table_by_cell(shown)


def gpu_speed(cells):
    """Images/s of one rank with a GPU, and relative to `replicated`. `cells` are those of a result of a GPU."""
    placements = COLUMNS[:3]
    alone = {(cell["net"], cell["placement"]): cell["images_per_s"] for cell in cells if "images_per_s" in cell}
    lines = [["network", *(f"`{name}`" for name in placements)]]
    for net in dict.fromkeys(net for net, _ in alone):
        rates = [alone[net, name] for name in placements]
        lines.append([f"`{net}`", *(f"{rate:,.0f} ({rate / rates[0]:.0%})" if rate is not rates[0] else f"{rate:,.0f}" for rate in rates)])
    return lines


def gpu_memory(cells):
    """Peak of GPU memory of two ranks, MiB: of rank 0 / of rank 1."""
    placements = COLUMNS[:4]
    # Only a pipeline has micro-batches.
    pairs = {(cell["net"], cell["placement"]): cell["rank_gpu_mib"] for cell in cells
             if cell["ranks"] == 2 and (cell["micro_batches"] == 2) == (cell["placement"] == "layers")}
    lines = [["network", *(f"`{name}`" for name in placements)]]
    for net in dict.fromkeys(net for net, _ in pairs):
        lines.append([f"`{net}`", *(" / ".join(map(str, pairs[net, name])) for name in placements)])
    return lines


def widest(figures):
    """The widest range of a cell's runs, relative to its median."""
    rates = [cell["images_per_s"] for cell in figures.cells.values() if "images_per_s" in cell]
    return max(((rate["max"] - rate["min"]) / rate["median"] for rate in rates), default=0.0)


def traffic(figures):
    """MiB per step of all ranks together, and the deviation from the formula."""
    def shown(*place):
        found = [entry for entry in (figures.cell(*place) or {}).get("bytes", []) if entry["measured"] is not None]
        if not found:
            return None
        measured = statistics.median(entry["measured"] for entry in found) / 2**20
        off = max((entry["measured"] / entry["formula"] - 1 for entry in found if entry["formula"]), key=abs, default=0.0)
        return f"{measured:,.2f} ({off:+.1%})"

    lines = figures.table_by_cell(shown, [ranks for ranks in figures.ranks if ranks > 1])
    lines[0].insert(1, "parameters, MiB")
    for line in lines[1:]:
        line.insert(1, f"{FLOAT * work(line[0].strip('`'))[1] / 2**20:.2f}")
    return lines


def memory(figures):
    """Peak of resident memory, MiB: of rank 0, and of the others from the lowest to the highest."""
    def shown(*place):
        ranks = (figures.cell(*place) or {}).get("rank_rss_mib")
        if not ranks:
            return None
        low, high = (f"{pick(ranks[1:]):,.0f}" for pick in (min, max)) if ranks[1:] else ("", "")
        others = low if low == high else f"{low}–{high}"
        return f"{ranks[0]:,.0f}" + (f" / {others}" if others else "")

    return figures.table_by_cell(shown)


def shares(figures):
    """Share of a step in collectives, or, of stages, without work; where the network was cut; micro-batches in flight."""
    def shown(net, ranks, placement):
        key = "idle" if placement.startswith("layers") else "communication"
        share = figures.value(net, ranks, placement, key)
        return None if share is None else f"{share:.1%}"

    lines = figures.table_by_cell(shown, [ranks for ranks in figures.ranks if ranks > 1])
    lines[0] = ["network", "ranks", *(f"`{name}`, communication" for name in COLUMNS[:3]),
                *(f"`{name}`, idle" for name in COLUMNS[3:]), "cuts of `layers`", "its micro-batches in flight, by rank"]
    for line in lines[1:]:
        cell = figures.cell(line[0].strip("`"), line[1], "layers") or {}
        chosen = dict.fromkeys(",".join(map(str, cuts)) for cuts in cell.get("cuts", []))
        line.append(" or ".join(chosen) or "–")
        line.append(", ".join(map(str, cell.get("rank_in_flight", []))) or "–")
    return lines


def ours(figures, net, place):
    """Our counterpart of a figure in a document: placement, ranks and speed relative to one rank."""
    if place is None:
        return ["–", "–"]
    relative = figures and figures.relative(net, *place)
    ranks, placement = place
    name = f"`{placement}`, {ranks} rank{'s' * (ranks > 1)}"
    return [name, f"{relative:.2f}" if relative else "not measured"]


def document_000(figures, gpu):
    alone = TOWERS_000[1][1] * STEPS_000 / TOWERS_000[1][2][0]
    lines = [["document 000", "s for 2,000 steps", "images/s there", "relative to one GPU", "here", "relative to one rank"]]
    for what, images, times, place in TOWERS_000:
        rates = [images * STEPS_000 / time for time in times]
        lines.append([what, " and ".join(f"{time:.2f}" for time in times), " and ".join(f"{rate:,.0f}" for rate in rates),
                      " and ".join(f"{rate / alone:.2f}" for rate in rates), *ours(figures, "deep", place)])
    if rate := gpu.rate("deep", 128):
        lines.append([f"(here, one {gpu.name}, bf16)", f"{128 * STEPS_000 / rate:.2f}", f"{rate:,.0f}", "–",
                      "`replicated`, 1 rank", "–"])
    return lines


def document_001(figures, gpu):
    one, eight = EPOCH_001[1], EPOCH_001[8]
    lines = [["", "devices", "s an epoch", "relative to one"],
             ["document 001, one GPU", "1 GPU", one, "1.00"],
             ["document 001, weights in host memory", "8 GPUs", eight, f"{one / eight:.2f}"]]
    for place in [(1, "replicated"), (2, "host"), (4, "host")]:
        rate = figures and figures.value("keras", *place, "images_per_s")
        name, relative = ours(figures, "keras", place)
        cores = min(place[0], figures.cores) if figures else place[0]
        devices = "1 CPU core" if cores == 1 else f"{cores} CPU cores"
        lines.append([f"here, {name}", devices, f"{TRAINING_IMAGES / rate:,.0f}" if rate else "not measured", relative])
    if rate := gpu.rate("keras", 128):
        lines.append(["here, `replicated`, 1 rank, bf16", f"one {gpu.name}", f"{TRAINING_IMAGES / rate:.2f}", "–"])
    return lines


def document_003(figures, gpu):
    gpu_rate = gpu.rate("layers", 1024)
    rate = figures and figures.value("layers", 2, "host", "images_per_s")
    return [
        ["", "device", "images/s"],
        ["document 003", "two GPUs", f"{statistics.median(RATES_003):,.0f} ({min(RATES_003):,}–{max(RATES_003):,})"],
        ["here, `host`, 128 images per step", "two CPU cores", f"{rate:,.0f}" if rate else "not measured"],
        ["here, `replicated`, 1,024 images per step, bf16", f"one {gpu.name}", f"{gpu_rate:,.0f}" if gpu_rate else "not measured"],
    ]


def document_004(figures, gpu):
    head = ["devices", "there: weights on GPU 0, s an epoch", "%", "there: NCCL, s an epoch", "%",
            "here: `shared`, s an epoch", "%", "here: `replicated`, s an epoch", "%"]
    lines = [head]
    for devices in SHARED_004:
        line = [devices]
        for table in (SHARED_004, NCCL_004):
            line += [f"{table[devices][0]:.3f}", f"{table[devices][1]}%"]
        for placement in ("shared", "replicated"):
            rate = figures and figures.value("conv6", devices, placement, "images_per_s")
            relative = figures and figures.relative("conv6", devices, placement)
            line += [f"{TRAINING_IMAGES / rate:,.0f}" if rate else "not measured", f"{relative:.0%}" if relative else "–"]
        lines.append(line)
    if rate := gpu.rate("conv6", 1024):
        lines.append([f"one {gpu.name}, bf16", *["–"] * 6, f"{TRAINING_IMAGES / rate:.2f}", "–"])
    return lines


def document_004_test():
    lines = [["devices", "weights on GPU 0, s a test", "%", "NCCL, s a test", "%"]]
    for devices in SHARED_004:
        line = [devices]
        for table in (SHARED_004, NCCL_004):
            line += [f"{table[devices][2]:.3f}", f"{table[devices][3]}%"]
        lines.append(line)
    return lines


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    with open(sys.argv[1]) as file:
        figures = Figures(json.load(file))
    tables = [(summarise.__name__, summarise(figures)) for summarise in (speed, traffic, memory, shares)]
    tables += [(compare.__name__, compare(figures, Gpu())) for compare in (document_000, document_001, document_003, document_004)]
    for name, lines in tables:
        print(name)
        for line in lines:
            print("  " + " | ".join(map(str, line)))


if __name__ == "__main__":
    main()
