"""The pictures of docs/performance.md, drawn with matplotlib."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from render import Figures, fastest, label

ENGINES = {"XLA": "#999999", "jaxgraph": "#0072b2"}
KERNELS = {
    "products": "#0072b2",
    "attention": "#d55e00",
    "layers": "#cc79a7",
    "kernels of XLA": "#999999",
}
OTHER_KERNELS = "#009e73"
ENLARGED_US = 120


def bandwidth_figure(decode: Sequence[Figures]) -> Figure:
    """Bytes that a step must read over its time, at each engine's fastest way."""
    figure = Figure(figsize=(9, 0.9 + 0.42 * len(decode)), layout="constrained")
    axes = figure.subplots()
    copying = [d["copy_bytes_per_second"] / 1e12 for d in decode]
    for number, (engine, colour) in enumerate(ENGINES.items()):
        found = [fastest(d, engine) for d in decode]
        rates = [
            d["bytes_read"] / t["step_us"] / 1e6 if t else 0.0
            for d, t in zip(decode, found, strict=True)
        ]
        at = [row - 0.2 + 0.4 * number for row in range(len(decode))]
        bars = axes.barh(at, rates, height=0.4, color=colour, label=engine)
        axes.bar_label(bars, [f"{r:.2f}" if r else "" for r in rates], padding=3, fontsize=8)
    rows = range(len(decode))
    axes.vlines(copying, [r - 0.45 for r in rows], [r + 0.45 for r in rows], color="#d55e00",
                label="copying")  # fmt: skip
    axes.set_yticks(list(rows), [label(d) for d in decode])
    axes.invert_yaxis()
    axes.set_xlabel("TB/s: weights and cache that a step reads, over its time")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def batches_figure(decode: Sequence[Figures]) -> Figure:
    """Time of a step against the batch, for each shape that was timed at several."""
    usual = [d for d in decode if d["settings"]["context"] == 1024]
    by_shape: dict[str, list[Figures]] = {}
    for d in usual:
        by_shape.setdefault(d["settings"]["shape"], []).append(d)
    shapes = {shape: found for shape, found in by_shape.items() if len(found) > 1}
    figure = Figure(figsize=(4.5 * len(shapes), 3.6), layout="constrained")
    for axes, (shape, found) in zip(
        figure.subplots(1, len(shapes), squeeze=False)[0], shapes.items(), strict=True
    ):
        for engine, colour in ENGINES.items():
            points = [(d["settings"]["batch"], fastest(d, engine)) for d in found]
            timed = [(batch, t["step_us"] / 1e3) for batch, t in points if t]
            axes.plot(*zip(*timed, strict=True), "o-", color=colour, label=engine)
        floors = [(d["settings"]["batch"], d["floor_us"] / 1e3) for d in found]
        axes.plot(*zip(*floors, strict=True), "--", color="#d55e00", label="memory floor")
        axes.set_xscale("log", base=2)
        ticks = [d["settings"]["batch"] for d in found]
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set_ylim(bottom=0)
        axes.set_title(shape)
        axes.set_xlabel("batch")
        axes.set_ylabel("ms a step")
        axes.grid(True, axis="y", alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    return figure


def timeline_figure(figures: Figures) -> Figure:
    """One step as its kernels: whole, of each engine, and jaxgraph's beginning enlarged."""
    engines: dict[str, Any] = figures["engines"]
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    *whole, enlarged = figure.subplots(len(engines) + 1, 1)
    longest = max(step["end_us"] for step in engines.values())
    for axes, (name, step) in zip(whole, engines.items(), strict=True):
        _draw_kernels(axes, step["kernels"])
        axes.set_xlim(0, longest)
        count = len(step["kernels"])
        axes.set_title(f"{name}: {count} kernels, {step['end_us']:,.0f} µs", loc="left", fontsize=9)
    ours = engines["jaxgraph"]["kernels"]
    _draw_kernels(enlarged, ours, edgecolor="white", linewidth=1)
    enlarged.set_xlim(0, min(ENLARGED_US, ours[-1]["end_us"]))
    enlarged.set_title("jaxgraph, the beginning of the step", loc="left", fontsize=9)
    enlarged.set_xlabel("µs")
    known = {kernel["kind"] for step in engines.values() for kernel in step["kernels"]}
    patches = [Patch(color=KERNELS.get(k, OTHER_KERNELS), label=k) for k in sorted(known)]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"One decode step of {figures['shape']}, batch 1", fontsize=11)
    return figure


def _draw_kernels(axes: Any, kernels: Sequence[Figures], **how: Any) -> None:
    for k in kernels:
        colour = KERNELS.get(k["kind"], OTHER_KERNELS)
        width = k["end_us"] - k["start_us"]
        axes.barh(0, width, left=k["start_us"], height=0.8, color=colour, **how)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
