"""Draws the panels of every Grafana dashboard from the figures of a loaded local cluster, as docs/pictures/<dashboard>.png.

usage: pictures.py ROOT BINARIES [SECONDS [OUT]]

A cluster of two workers and three shards with mutual TLS serves a crowd that comes and goes. A shard is killed and comes back, a
worker is stopped for some seconds, somebody without TLS calls the scheduler, clients leave. Prometheus looks each second; the
rules are those of deploy/prometheus with windows a tenth as long. Grafana itself has no part in it: expressions, titles, units,
legends, thresholds and places are those of the dashboards, the drawing is ours. Fails if a panel has nothing to show. Needs
Debian's prometheus and python3-matplotlib.
"""

import contextlib
import datetime
import http.client
import json
import math
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.parse

import observability
from certificates import Authority
from cluster import Cluster, Prometheus, eventually, get
from live_test import SKIPPED, call_in_clear, configuration

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.colors
    import matplotlib.dates
    import matplotlib.pyplot as pyplot
    import numpy
    from PIL import Image, PngImagePlugin
except ModuleNotFoundError as missing:
    print(f"SKIPPED: Debian's package python3-matplotlib is missing ({missing})")
    sys.exit(SKIPPED)

DIVISOR = 10
COLOURS = ["#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#c0d8ff", "#37872d", "#ffa6b0"]
NAMED = {"green": "#73bf69", "orange": "#ff780a", "red": "#f2495c"}
TEXT, DIM, LINE, BACK, PANEL = "#d5d6dd", "#9a9ba3", "#2c3235", "#111217", "#181b1f"
WIDTH, UNIT, DPI = 1400, 27, 100  # pixels: of the picture, of one unit of gridPos' height
MAX_LEGENDS = 6
PALETTE = 112  # colours of a picture


def leave_early(cluster):
    """A client that goes before its stream is over."""
    host, port = cluster.address("router", "http").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(
        {"prompt": "Count from 1 to 99.", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}))
    connection.getresponse().read(64)
    connection.close()


def crowd(cluster, stopping, clients, leave_after):
    """Clients that come one after the other, and half of whom go again."""
    def run(number, end):
        turn = 0
        while not stopping.is_set() and time.monotonic() < end:
            turn += 1
            with contextlib.suppress(OSError, http.client.HTTPException):
                if turn % 40 == 7:
                    leave_early(cluster)
                # Half of a prompt is the same for all turns of a client.
                status, _ = cluster.ask(f"Count from {number} to 60. " * (2 + number % 3) + f"And {turn}. " * (1 + 3 * (turn % 3)),
                                        max_tokens=8 + 24 * (turn % 5))
                if status != 200:
                    stopping.wait(0.5)  # as a client that was told to come again
    begin = time.monotonic()
    threads = [threading.Thread(target=run, args=(i, math.inf if i % 2 == 0 else begin + leave_after)) for i in range(clients)]
    for thread in threads:
        thread.start()
        stopping.wait(leave_after / 50)
    return threads


@contextlib.contextmanager
def recorded(root, binaries, directory, seconds):
    """Runs the cluster; gives (Prometheus, begin, end)."""
    for part in ("cluster", "prometheus"):
        (directory / part).mkdir()
    authority = Authority(directory / "tls")
    authority.issue("all", days=7)
    secret = directory / "secret"
    secret.write_text("the secret of this cluster\n")
    settings = [*authority.settings("all"), f"transport.secret_file={secret}", "attention.kv_blocks=64", "logging.stall_report_s=2",
                "router.max_queued_requests=9", "scheduler.admission_reserve_tokens=16", "scheduler.rebalance_interval_s=10",
                "scheduler.dead_after_ms=8000", "scheduler.load_half_life_s=10"]
    with Cluster(binaries, root / "models/demo-m2", directory / "cluster", shards=3, workers=2, settings=settings) as cluster:
        cluster.start()
        with Prometheus(directory / "prometheus") as prometheus:
            prometheus.start(configuration(root, cluster, directory / "prometheus", DIVISOR, named=True))
            stopping = threading.Event()
            eventually(lambda: all(t["health"] == "up" for t in prometheus.api("targets")["activeTargets"]), 60, "every target")
            begin = time.time()
            threads = crowd(cluster, stopping, 24, seconds * 0.5)
            try:
                def until(share):
                    stopping.wait(max(0, seconds * share - (time.time() - begin)))
                until(0.35)
                cluster.kill("expert-2")
                until(0.45)
                cluster.restart("expert-2")
                eventually(lambda: get(cluster.ops("expert-2"), "/readyz")[0] == 200, 60, "the shard again")
                until(0.6)
                authority.issue("all", days=14)
                until(0.75)
                cluster.running["attention-1"].send_signal(signal.SIGSTOP)
                stopping.wait(5)
                cluster.running["attention-1"].send_signal(signal.SIGCONT)
                until(0.85)
                call_in_clear(cluster)
                until(1)
            finally:
                cluster.running["attention-1"].send_signal(signal.SIGCONT)
                stopping.set()
                for thread in threads:
                    thread.join()
            yield prometheus, begin, begin + seconds


def series_of(prometheus, expression, begin, end):
    """[(labels, times, values)]; what is no number is nan."""
    text = observability.shortened(expression, DIVISOR).replace("$__rate_interval", "10s")
    step = max(1, (end - begin) / 160)
    query = urllib.parse.urlencode({"query": text, "start": f"{begin:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"})
    return [(one["metric"], [float(t) for t, _ in one["values"]],
             [float(v) if v not in ("NaN", "+Inf", "-Inf") else math.nan for _, v in one["values"]])
            for one in prometheus.api("query_range?" + query)["result"]]


def natural(text):
    return [(0, float(part), "") if part.isdigit() else (1, 0.0, part) for part in re.split(r"(\d+)", text)]


def name_of(labels, pattern):
    if pattern and pattern != "__auto":
        return re.sub(r"\{\{(\w+)\}\}", lambda m: labels.get(m[1], ""), pattern)
    return " ".join(v for k, v in sorted(labels.items()) if k != "__name__") or "value"


def scaled(value, steps):
    """By the largest step that it reaches."""
    for size, name in steps:
        if abs(value) >= size:
            return f"{value / size:.3g}{name}"
    return f"{value / steps[-1][0]:.3g}{steps[-1][1]}"


# (at least, one of it, its name), in seconds.
TIMES = [(2 * 86400, 86400, " days"), (2 * 3600, 3600, " h"), (120, 60, " min"), (1, 1, " s"), (1e-3, 1e-3, " ms"), (0, 1e-6, " \u00b5s")]


def text_of(value, unit):
    """A figure as Grafana writes it."""
    if math.isnan(value):
        return ""
    if value == 0:
        return {"percentunit": "0%"}.get(unit, "0")
    if unit == "s":
        return next(f"{value / size:.3g}{name}" for least, size, name in TIMES if abs(value) >= least)
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "bytes":
        return scaled(value, [(2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B")])
    if unit == "Bps":
        return scaled(value, [(1e9, " GB/s"), (1e6, " MB/s"), (1e3, " kB/s"), (1, " B/s")])
    suffix = {"reqps": " req/s", "ops": " ops/s"}.get(unit, "")
    if unit in ("short", "ops", "reqps") and abs(value) >= 1000:
        return scaled(value, [(1e9, " G"), (1e6, " M"), (1e3, " K")]) + suffix
    if abs(value) >= 100:
        return f"{value:.0f}" + suffix
    return f"{value:.3g}" + suffix


def unit_of(panel):
    return panel["fieldConfig"]["defaults"]["unit"]


def threshold_colour(panel, value):
    colour = "green"
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            colour = step["color"]
    return NAMED[colour]


def axis_text(unit):
    return matplotlib.ticker.FuncFormatter(lambda value, _: text_of(value, unit))


def ticks(low, high, unit):
    """Three to six round figures of an axis, in the unit that its top is written in."""
    size = 1.0
    if unit == "s":
        size = next(size for least, size, _ in TIMES if high >= least)
    elif unit == "bytes":
        size = 1024.0 ** max(0, min(3, int(math.log(max(high, 1), 1024))))
    span = (high - low) / size
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * times for times in (0.2, 0.5, 1, 2, 5) if span / (power * times) <= 5)
    first = math.ceil(low / size / step - 1e-9)
    return [size * step * i for i in range(first, int(high / size / step + 1e-9) + 1)]


class Drawing:
    """One dashboard's picture. Places are pixels from the upper left corner."""

    def __init__(self, dashboard, ask, begin, end):
        self.dashboard, self.ask = dashboard, ask
        self.limits = [matplotlib.dates.date2num(datetime.datetime.fromtimestamp(t)) for t in (begin, end)]
        self.panels = list(observability.panels(dashboard))
        self.height = UNIT * max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in self.panels) + 8
        self.figure = pyplot.figure(figsize=(WIDTH / DPI, self.height / DPI), dpi=DPI, facecolor=BACK)
        self.empty = []

    def box(self, x, y, width, height):
        return self.figure.add_axes((x / WIDTH, 1 - (y + height) / self.height, width / WIDTH, height / self.height), facecolor=PANEL)

    def text(self, x, y, text, **how):
        self.figure.text(x / WIDTH, 1 - y / self.height, text, **{"color": TEXT, "fontsize": 7, "va": "top", **how})

    def draw(self):
        for panel in self.panels:
            at = panel["gridPos"]
            x, y = at["x"] * WIDTH / 24 + 4, at["y"] * UNIT + 4
            width, height = at["w"] * WIDTH / 24 - 8, at["h"] * UNIT - 8
            if panel["type"] == "row":
                self.text(x + 2, y + 4, panel["title"], fontsize=9, weight="bold")
                continue
            frame = self.box(x, y, width, height)
            frame.set_xticks([])
            frame.set_yticks([])
            for spine in frame.spines.values():
                spine.set_color(LINE)
            self.text(x + 8, y + 6, panel["title"], fontsize=7.5, weight="bold")
            found = [(target, sorted(self.ask(target["expr"]), key=lambda s: natural(name_of(s[0], target["legendFormat"]))))
                     for target in panel["targets"]]
            if not any(not math.isnan(v) for _, series in found for _, _, values in series for v in values):
                self.empty.append(panel["title"])
                self.text(x + width / 2, y + height / 2, "No data", ha="center", color=DIM)
                continue
            {"timeseries": self.lines, "heatmap": self.heat, "stat": self.stat, "table": self.table}[panel["type"]](
                panel, found, x, y, width, height)

    def plot(self, x, y, width, height):
        axes = self.box(x, y, width, height)
        axes.tick_params(labelsize=6, colors=DIM, length=0, pad=2)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.grid(color=LINE, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.set_xlim(*self.limits)
        axes.xaxis.set_major_locator(matplotlib.ticker.LinearLocator(5))
        axes.xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%H:%M:%S"))
        for label, side in zip(axes.get_xticklabels(), ("left", "center", "center", "center", "right"), strict=True):
            label.set_ha(side)
        return axes

    def lines(self, panel, found, x, y, width, height):
        defaults, unit = panel["fieldConfig"]["defaults"], unit_of(panel)
        drawn = [(name_of(labels, target["legendFormat"]), times, values)
                 for target, series in found for labels, times, values in series]
        longest = max(len(name) for name, _, _ in drawn) + 11
        columns = max(1, min(4, int((width - 16) / (longest * 4.7)), len(drawn)))
        rows = math.ceil(min(len(drawn), MAX_LEGENDS if columns > 1 else 3) / columns)
        axes = self.plot(x + 56, y + 26, width - 70, height - 44 - 13 * rows - 4)
        axes.yaxis.set_major_formatter(axis_text(unit))
        stacked = defaults["custom"]["stacking"]["mode"] == "normal"
        grid = sorted({t for _, times, _ in drawn for t in times})
        when = [matplotlib.dates.date2num(datetime.datetime.fromtimestamp(t)) for t in grid]
        below, top = numpy.zeros(len(grid)), 0.0
        for i, (_, times, values) in enumerate(drawn):
            known = dict(zip(times, values, strict=True))
            line = numpy.array([known.get(t, math.nan) for t in grid])
            colour = COLOURS[i % len(COLOURS)]
            if stacked:
                line = below + numpy.nan_to_num(line)
                axes.fill_between(when, below, line, color=colour, alpha=0.3, linewidth=0)
                below = line
            elif len(drawn) <= 2:
                axes.fill_between(when, 0, line, color=colour, alpha=0.08, linewidth=0)
            axes.plot(when, line, linewidth=1, color=colour)
            if not numpy.isnan(line).all():
                top = max(top, numpy.nanmax(line))
        low = defaults.get("min", 0)
        axes.set_ylim(low, defaults.get("max", top * 1.08 if top > low else low + 1))
        axes.set_yticks(ticks(*axes.get_ylim(), unit))
        for step in defaults["thresholds"]["steps"][1:]:
            if defaults["custom"]["thresholdsStyle"]["mode"] == "line" and step["value"] <= axes.get_ylim()[1]:
                axes.axhline(step["value"], color=NAMED[step["color"]], linewidth=0.8, linestyle="--")
        # Where not all have room, those that reach highest.
        highest = sorted(range(len(drawn)), key=lambda i: -max((v for v in drawn[i][2] if not math.isnan(v)), default=0))
        shown = sorted(highest[:columns * rows])
        for place, i in enumerate(shown):
            name, _, values = drawn[i]
            column, at = place % columns, y + height - 15 - 13 * (rows - 1 - place // columns)
            left = x + 12 + column * (width - 16) / columns
            last = next((v for v in reversed(values) if not math.isnan(v)), math.nan)
            self.text(left, at + 1, "\u25ac", fontsize=6, color=COLOURS[i % len(COLOURS)])
            self.text(left + 12, at, f"{name}  {text_of(last, unit)}", fontsize=6)
        if len(shown) < len(drawn):
            self.text(x + width - 8, y + 7, f"{len(drawn) - len(shown)} more", fontsize=6, color=DIM, ha="right")

    def heat(self, panel, found, x, y, width, height):
        target, series = found[0]
        bucketed = "le" in series[0][0]
        if bucketed:
            series = sorted(series, key=lambda s: float(s[0]["le"]))
        times = sorted({t for _, when, _ in series for t in when})
        grid = numpy.full((len(series), len(times)), math.nan)
        index = {t: i for i, t in enumerate(times)}
        for row, (_, when, values) in enumerate(series):
            for t, value in zip(when, values, strict=True):
                grid[row, index[t]] = value
        names = [name_of(labels, target["legendFormat"]) for labels, _, _ in series]
        if bucketed:
            grid = numpy.diff(grid, axis=0, prepend=0)  # buckets are cumulative
            used = [i for i in range(len(series)) if numpy.nansum(grid[i]) > 0]
            low, high = max(0, min(used) - 1), min(len(series), max(used) + 2)
            grid, names = grid[low:high], names[low:high]
            names = [n if n == "+Inf" else text_of(float(n), panel["options"]["yAxis"]["unit"]) for n in names]
            grid[grid <= 0] = math.nan
        axes = self.plot(x + 66, y + 26, width - 150, height - 48)
        edges = [matplotlib.dates.date2num(datetime.datetime.fromtimestamp(t)) for t in times]
        # Few and much as dark and bright.
        colours = matplotlib.colors.ListedColormap(pyplot.get_cmap("Oranges_r")(numpy.linspace(0.02, 0.85, 24)))
        image = axes.imshow(grid, aspect="auto", origin="lower", cmap=colours, interpolation="nearest",
                            extent=(edges[0], edges[-1], -0.5, len(names) - 0.5))
        axes.set_facecolor(PANEL)
        axes.set_xlim(*self.limits)
        axes.grid(visible=False)
        step = max(1, math.ceil(len(names) / 12))
        axes.set_yticks(range(0, len(names), step))
        axes.set_yticklabels([f"{panel_prefix(target)}{name}" for name in names[::step]])
        bar = self.figure.colorbar(image, cax=self.box(x + width - 76, y + 26, 10, height - 48), format=axis_text(unit_of(panel)))
        bar.ax.tick_params(labelsize=6, colors=DIM, length=0, pad=2)
        bar.locator = matplotlib.ticker.MaxNLocator(5)
        bar.update_ticks()
        bar.outline.set_visible(False)

    def stat(self, panel, found, x, y, width, height):
        _, times, values = found[0][1][0]
        known = [(t, v) for t, v in zip(times, values, strict=True) if not math.isnan(v)]
        colour = threshold_colour(panel, known[-1][1])
        self.text(x + width / 2, y + height * 0.48, text_of(known[-1][1], unit_of(panel)), fontsize=19, color=colour, ha="center",
                  va="center", weight="bold")
        axes = self.box(x + 1, y + height - 30, width - 2, 29)
        axes.axis("off")
        axes.set_xlim(*self.limits)
        when = [matplotlib.dates.date2num(datetime.datetime.fromtimestamp(t)) for t, _ in known]
        axes.fill_between(when, 0, [v for _, v in known], color=colour, alpha=0.2, linewidth=0)
        axes.plot(when, [v for _, v in known], color=colour, linewidth=1)
        axes.set_ylim(0, max(1e-9, 1.1 * max(v for _, v in known)))

    def table(self, panel, found, x, y, width, height):
        """What holds at the end."""
        end = max(times[-1] for _, series in found for _, times, _ in series)
        rows = [(name_of(labels, target["legendFormat"]), values[-1])
                for target, series in found for labels, times, values in series if times[-1] == end]
        for i, (name, value) in enumerate(rows[:int((height - 34) / 17)]):
            self.text(x + 12, y + 30 + 17 * i, name, fontsize=6.5)
            self.text(x + width - 12, y + 30 + 17 * i, text_of(value, unit_of(panel)), fontsize=6.5, ha="right")

    def save(self, path):
        self.figure.savefig(path, dpi=DPI, facecolor=BACK)
        pyplot.close(self.figure)
        # A palette is a third of the size. The titles say for which panels it was drawn.
        notes = PngImagePlugin.PngInfo()
        notes.add_text("Panels", "\n".join(p["title"] for p in self.panels))
        image = Image.open(path).convert("RGB").quantize(PALETTE, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        image.save(path, optimize=True, pnginfo=notes)


def panel_prefix(target):
    """Layers and the like are numbers; their rows say of what."""
    return "layer " if target["legendFormat"] == "{{layer}}" else ""


def main():
    root, binaries = pathlib.Path(sys.argv[1]), sys.argv[2]
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 180
    out = pathlib.Path(sys.argv[4]) if len(sys.argv) > 4 else root / "docs/pictures"
    if shutil.which("prometheus") is None:
        print("SKIPPED: Debian's package prometheus is missing")
        return SKIPPED
    out.mkdir(exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory() as scratch, recorded(root, binaries, pathlib.Path(scratch), seconds) as (prometheus, begin, end):
        for file in observability.dashboard_files(root):
            drawing = Drawing(json.loads(file.read_text()), lambda e: series_of(prometheus, e, begin, end), begin, end)
            drawing.draw()
            path = out / f"{file.stem}.png"
            drawing.save(path)
            print(f"{path.name}: {len(drawing.panels)} panels, {path.stat().st_size} bytes" +
                  (f"; without data: {', '.join(drawing.empty)}" if drawing.empty else ""))
            failed = failed or bool(drawing.empty)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
