"""Plots a result of bench/allreduce.sh or hosts_collectives.py: time against size, a panel for each number of ranks, or layout of
hosts. Standard library only.

    plot_allreduce.py RESULT.json OUT.svg

Both axes are logarithmic. Each collective has a row of panels. The dashed line is the bound: the time of the memory traffic alone,
or what the result calls it.
"""

import json
import math
import sys
from html import escape

WIDTH, HEIGHT = 380, 300  # of a panel's plotting area
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 42  # around it
LEGEND = 46  # below all panels
# Distinguishable without colour vision (Okabe and Ito); ours is the dark one.
COLOURS = {"mgpu": "#000000", "mpich": "#0072b2", "openmpi": "#d55e00", "impi": "#009e73", "gloo": "#cc79a7", "mpich-ucx": "#56b4e9"}
NAMES = {"mpich": "MPICH", "mpich-ucx": "MPICH, UCX", "openmpi": "Open MPI", "impi": "Intel MPI"}
SPARE = ["#e69f00", "#f0e442"]
BOUND = "bound"


def size_name(size):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def time_name(micros):
    if micros >= 1e6:
        return f"{micros / 1e6:g} s"
    return f"{micros / 1e3:g} ms" if micros >= 1e3 else f"{micros:g} µs"


def series(figure):
    """Name and points (bytes, µs) of each line of a panel, the bound last."""
    for name in figure["contenders"]:
        yield name, [(entry["bytes"], entry["us"][name]) for entry in figure["sizes"] if name in entry["us"]]
    yield BOUND, [(entry["bytes"], entry["bound_us"]) for entry in figure["sizes"] if entry.get("bound_us")]


def column(figure):
    """What a panel's column stands for."""
    return figure.get("layout", figure["ranks"])


def title(figure):
    if "layout" in figure:
        hosts, ranks = map(int, figure["layout"].split("x"))
        return f"{figure['collective']}, {hosts} hosts × {ranks} rank{'s' if ranks > 1 else ''}"
    return f"{figure['collective']}, {figure['ranks']} rank{'s' if figure['ranks'] > 1 else ''}"


class Drawing:
    def __init__(self, figures, bound):
        self.figures, self.bound = figures, bound
        self.rows = list(dict.fromkeys(figure["collective"] for figure in figures))
        self.columns = sorted({column(figure) for figure in figures})
        entries = [entry for figure in figures for entry in figure["sizes"]]
        sizes = [entry["bytes"] for entry in entries]
        # The bound of sizes that fit a cache is far below the others and must not stretch the axis.
        micros = [time for entry in entries for time in entry["us"].values() if time > 0]
        self.sizes = math.log2(min(sizes)), math.log2(max(max(sizes), 2 * min(sizes)))
        self.decades = math.floor(math.log10(min(micros))), math.ceil(math.log10(max(micros)))
        self.names = list(dict.fromkeys(name for figure in figures for name, points in series(figure) if points))
        self.parts = []

    def x(self, size):
        low, high = self.sizes
        return (math.log2(size) - low) / (high - low) * WIDTH

    def y(self, micros):
        low, high = self.decades
        return HEIGHT - (math.log10(micros) - low) / max(high - low, 1) * HEIGHT

    def colour(self, name):
        others = [other for other in self.names if other not in COLOURS and other != BOUND]
        return "#888888" if name == BOUND else COLOURS.get(name) or SPARE[others.index(name) % len(SPARE)]

    def text(self, x, y, text, anchor="middle", size=11, extra=""):
        head = f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" {extra}>'
        self.parts.append(f"{head}{escape(text)}</text>")

    def stroke(self, name):
        dash = ' stroke-dasharray="6 4"' if name == BOUND else ""
        return f'fill="none" stroke="{self.colour(name)}" stroke-width="{2.6 if name == "mgpu" else 1.5}"{dash}'

    def axes(self):
        size = 2 ** math.ceil(self.sizes[0])
        while math.log2(size) <= self.sizes[1]:
            x = self.x(size)
            self.parts.append(f'<path d="M{x:.1f} 0V{HEIGHT}" stroke="#e4e4e4"/>')
            self.text(x, HEIGHT + 16, size_name(size), size=10)
            size *= 16
        for decade in range(self.decades[0], self.decades[1] + 1):
            y = self.y(10**decade)
            self.parts.append(f'<path d="M0 {y:.1f}H{WIDTH}" stroke="#e4e4e4"/>')
            self.text(-6, y + 4, time_name(10.0**decade), "end", 10)
        self.parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#666666"/>')

    def panel(self, figure):
        self.axes()
        self.text(WIDTH / 2, -12, title(figure), size=13, extra='font-weight="bold"')
        self.text(WIDTH / 2, HEIGHT + 33, "size of a rank's buffer")
        # Our line is drawn last, above the others.
        for name, points in sorted(series(figure), key=lambda line: (line[0] == "mgpu", line[0] != BOUND)):
            inside = [(self.x(size), self.y(time)) for size, time in points if time >= 10 ** self.decades[0]]
            if not inside:
                continue
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in inside)
            self.parts.append(f'<path d="M{path}" {self.stroke(name)}/>')
            if name != BOUND:
                dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in inside)
                self.parts.append(f'<g fill="{self.colour(name)}">{dots}</g>')

    def legend(self, y):
        x = LEFT
        for name in self.names:
            self.parts.append(f'<path d="M{x} {y}h26" {self.stroke(name)}/>')
            self.text(x + 32, y + 4, self.bound if name == BOUND else NAMES.get(name, name), "start", 12)
            x += 118

    def svg(self, caption):
        panel_width, panel_height = LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM
        for figure in self.figures:
            x, y = self.columns.index(column(figure)) * panel_width, self.rows.index(figure["collective"]) * panel_height
            self.parts.append(f'<g transform="translate({x + LEFT} {y + TOP})">')
            self.panel(figure)
            self.parts.append("</g>")
        width = max(len(self.columns) * panel_width, LEFT + 118 * len(self.names))
        height = len(self.rows) * panel_height + LEGEND
        self.legend(height - LEGEND + 14)
        self.text(LEFT, height - 8, caption, "start", 10, 'fill="#666666"')
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        head += f' viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" fill="#222222">'
        return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *self.parts, "</svg>", ""])


def draw(result):
    """The drawing of a result, as SVG."""
    machine = result["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores"
    caption = f"{where}, {result['date']}, commit {result.get('commit', 'unknown')}: p50, lower is better"
    return Drawing(result["figures"], result.get("bound", "memory bound")).svg(caption)


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: plot_allreduce.py RESULT.json OUT.svg")
    with open(sys.argv[1]) as file:
        result = json.load(file)
    if not result["figures"]:
        sys.exit(f"{sys.argv[1]} has no figures")
    with open(sys.argv[2], "w") as file:
        file.write(draw(result))


if __name__ == "__main__":
    main()
