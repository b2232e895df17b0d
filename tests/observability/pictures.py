"""Draws the panels of every Grafana dashboard from the data of a loaded local cluster, as docs/pictures/<dashboard>.png.

usage: pictures.py ROOT BINARIES [SECONDS]

A cluster of two workers and three shards serves a crowd that comes and goes; a shard is killed and comes back; Prometheus looks
each second. Needs Debian's prometheus and python3-matplotlib. Grafana itself has no part in it: expressions, titles, units and
places are those of the dashboards, the drawing is ours.
"""

import contextlib
import datetime
import json
import math
import pathlib
import sys
import tempfile
import threading
import time
import urllib.parse

import matplotlib
import observability
from cluster import Cluster, Prometheus, eventually, get
from live_test import configuration

matplotlib.use("Agg")
import matplotlib.dates  # noqa: E402
import matplotlib.pyplot as pyplot  # noqa: E402
import numpy  # noqa: E402

COLOURS = ["#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#705da0", "#37872d", "#fade2a"]
MAX_SERIES = 10  # of one panel


def crowd(cluster, stopping, clients):
    """Clients that come one after the other, and half of whom go again."""
    def run(number, end):
        turn = 0
        while not stopping.is_set() and time.monotonic() < end:
            turn += 1
            with contextlib.suppress(OSError, ValueError):
                cluster.ask(f"Count from {number} to 60. " * (1 + 3 * (turn % 3)) + f"{turn}", max_tokens=8 + 16 * (turn % 5))
    begin = time.monotonic()
    threads = [threading.Thread(target=run, args=(i, math.inf if i % 2 == 0 else begin + 90)) for i in range(clients)]
    for thread in threads:
        thread.start()
        stopping.wait(2)
    return threads


def record(root, binaries, directory, seconds):
    """Runs the cluster; returns (ask(expression) -> series, begin, end) while Prometheus lives."""
    stack = contextlib.ExitStack()
    cluster = stack.enter_context(Cluster(binaries, root / "models/demo-m2", directory / "cluster", shards=3, workers=2))
    cluster.start()
    prometheus = stack.enter_context(Prometheus(directory / "prometheus"))
    prometheus.start(configuration(root, cluster, directory / "prometheus"))
    stopping = threading.Event()
    begin = time.time()
    threads = crowd(cluster, stopping, 10)
    stopping.wait(max(5, seconds * 0.45 - (time.time() - begin)))
    ops = cluster.ops("expert-2")
    cluster.kill("expert-2")
    stopping.wait(seconds * 0.15)
    cluster.start_one("expert-2", ops_listen=ops)
    eventually(lambda: get(ops, "/readyz")[0] == 200, 60, "the shard again")
    stopping.wait(max(0, seconds - (time.time() - begin)))
    end = time.time()
    stopping.set()
    for thread in threads:
        thread.join()
    return stack, prometheus, begin, end


def series_of(prometheus, expression, begin, end):
    query = urllib.parse.urlencode({"query": expression.replace("$__rate_interval", "15s"), "start": f"{begin:.3f}",
                                    "end": f"{end:.3f}", "step": "2"})
    return prometheus.api("query_range?" + query)["result"]


def name_of(labels, pattern):
    if pattern and pattern != "__auto":
        out = pattern
        for key, value in labels.items():
            out = out.replace("{{" + key + "}}", value).replace("{{ " + key + " }}", value)
        return out
    return ", ".join(f"{k}={v}" for k, v in labels.items() if k not in ("__name__", "job")) or "value"


def points(series):
    times = [datetime.datetime.fromtimestamp(float(t)) for t, _ in series["values"]]
    values = [float(v) if v not in ("NaN", "+Inf", "-Inf") else math.nan for _, v in series["values"]]
    return times, values


def unit_text(unit):
    return {"s": "s", "reqps": "req/s", "Bps": "B/s", "bytes": "B", "decbytes": "B", "percentunit": "share", "ops": "1/s",
            "cps": "1/s"}.get(unit, "" if unit in ("none", "short", "") else unit)


def draw_lines(axes, panel, found):
    count = 0
    for target, series in found:
        for one in series:
            if count >= MAX_SERIES:
                break
            times, values = points(one)
            axes.plot(times, values, linewidth=1, color=COLOURS[count % len(COLOURS)],
                      label=name_of(one["metric"], target.get("legendFormat"))[:34])
            count += 1
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    low, high = axes.get_ylim()
    if "min" in defaults:
        low = min(low, defaults["min"]) if low < defaults["min"] else defaults["min"]
    axes.set_ylim(low, max(high, low + 1e-9))
    if 0 < count <= 6:
        axes.legend(fontsize=4.5, loc="upper left", frameon=False, labelcolor="#ccccdc")


def draw_heat(axes, found):
    target, series = found[0]

    def bound(one):
        with contextlib.suppress(KeyError, ValueError):
            return (0, float(one["metric"]["le"]))
        return (1, name_of(one["metric"], target.get("legendFormat")))
    series = sorted(series, key=bound)
    times = sorted({float(t) for one in series for t, _ in one["values"]})
    grid = numpy.full((len(series), len(times)), math.nan)
    index = {t: i for i, t in enumerate(times)}
    for row, one in enumerate(series):
        for t, value in one["values"]:
            grid[row, index[float(t)]] = float(value) if value not in ("NaN", "+Inf", "-Inf") else math.nan
    if series and "le" in series[0]["metric"]:
        grid = numpy.diff(grid, axis=0, prepend=0)  # cumulative buckets
    edges = [matplotlib.dates.date2num(datetime.datetime.fromtimestamp(t)) for t in times]
    axes.imshow(grid, aspect="auto", origin="lower", cmap="Oranges", interpolation="nearest",
                extent=(edges[0], edges[-1], -0.5, len(series) - 0.5))
    axes.xaxis_date()
    axes.set_yticks(range(0, len(series), max(1, len(series) // 8)))
    axes.set_yticklabels([name_of(series[i]["metric"], target.get("legendFormat"))[-14:]
                          for i in range(0, len(series), max(1, len(series) // 8))])


def draw_text(axes, panel, found):
    """Stats and tables: what holds at the end."""
    axes.set_xticks([])
    axes.set_yticks([])
    rows = []
    for target, series in found:
        for one in series[:8]:
            rows.append((name_of(one["metric"], target.get("legendFormat"))[:40], points(one)[1][-1]))
    if panel["type"] == "stat" and rows:
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
        axes.text(0.5, 0.5, f"{rows[0][1]:.4g} {unit_text(unit)}".strip(), fontsize=16, color=COLOURS[0], ha="center", va="center",
                  transform=axes.transAxes)
        return
    for i, (name, value) in enumerate(rows[:8]):
        axes.text(0.02, 0.9 - 0.12 * i, f"{name}: {value:.4g}", fontsize=5, color="#ccccdc", transform=axes.transAxes, va="top")


def draw(dashboard, ask, path):
    panels = [p for p in observability.panels(dashboard) if p["type"] != "row"]
    bottom = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    figure = pyplot.figure(figsize=(12, bottom * 0.24), facecolor="#111217")
    empty = []
    for panel in panels:
        at = panel["gridPos"]
        axes = figure.add_axes((at["x"] / 24 + 0.028, 1 - (at["y"] + at["h"] - 0.95) / bottom, at["w"] / 24 - 0.036,
                                (at["h"] - 2.3) / bottom), facecolor="#181b1f")
        axes.set_title(panel["title"], fontsize=6.5, color="#ccccdc", loc="left", pad=3)
        axes.tick_params(labelsize=4.5, colors="#8e8e95", length=2, pad=1.5)
        for spine in axes.spines.values():
            spine.set_color("#2c3235")
        axes.grid(color="#2c3235", linewidth=0.4)
        found = [(target, ask(target["expr"])) for target in panel.get("targets", [])]
        if not any(series for _, series in found):
            axes.text(0.5, 0.5, "no data", fontsize=6, color="#8e8e95", ha="center", va="center", transform=axes.transAxes)
            empty.append(panel["title"])
            continue
        if panel["type"] == "heatmap":
            draw_heat(axes, found)
        elif panel["type"] == "timeseries":
            draw_lines(axes, panel, found)
            axes.set_ylabel(unit_text(panel["fieldConfig"]["defaults"].get("unit", "")), fontsize=4.5, color="#8e8e95", labelpad=1)
        else:
            draw_text(axes, panel, found)
            continue
        axes.xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%H:%M:%S"))
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
    figure.savefig(path, dpi=100, facecolor=figure.get_facecolor(),
                   pil_kwargs={"optimize": True}, metadata={"Software": None})
    pyplot.close(figure)
    with contextlib.suppress(ImportError):
        from PIL import Image
        # A palette is a third of the size, and nothing here has more colours than that.
        Image.open(path).convert("P", palette=Image.ADAPTIVE, colors=96).save(path, optimize=True)
    return empty


def main():
    root, binaries = pathlib.Path(sys.argv[1]), sys.argv[2]
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 180
    out = root / "docs/pictures"
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        for part in ("cluster", "prometheus"):
            (directory / part).mkdir()
        stack, prometheus, begin, end = record(root, binaries, directory, seconds)
        with stack:
            for file in observability.dashboard_files(root):
                dashboard = json.loads(file.read_text())
                path = out / f"{file.stem}.png"
                empty = draw(dashboard, lambda e: series_of(prometheus, e, begin, end), path)
                print(f"{path.name}: {path.stat().st_size} bytes" + (f"; without data: {', '.join(empty)}" if empty else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
