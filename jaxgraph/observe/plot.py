"""Pictures of a step: how long its executions took, and where its nodes run. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxgraph.observe.events import Execution

if TYPE_CHECKING:
    from jaxgraph.explain import Explanation
    from jaxgraph.wrap import GraphedFunction

# What happened, in a colour each (legible with any colour vision).
COLOURS = {"eager": "#d55e00", "capture": "#cc79a7", "update": "#e69f00", "replay": "#0072b2"}
_BACKENDS = {"native": "#0072b2", "xla": "#999999", "callback": "#d55e00"}
_CHUNKS = ("#56b4e9", "#0072b2")


def plot(step: GraphedFunction) -> Any:
    """Draws a step's latency over its calls, coloured by what happened, above a map of its splits.

    The latency is the host's: until everything was enqueued (on a CPU: computed). The map is to
    scale by equations; the chunks of a native split share its width by their nodes.

    Args:
      step: a function of `jaxgraph.wrap` that was called.

    Returns:
      A `matplotlib.figure.Figure`; `figure.savefig("step.png")` writes it.

    Raises:
      ImportError: matplotlib is missing (`pip install "jaxgraph[plot]"`).
      ValueError: the function has not been called, so there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "jaxgraph[plot]"') from error
    executions = step.executions()
    if not executions:
        raise ValueError(f"no native split of {step.name} has run yet: call it first")
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    latency, splits = figure.subplots(2, 1, height_ratios=(3, 1))
    _draw_latency(latency, executions)
    _draw_splits(splits, step.explain())
    figure.suptitle(step.name)
    return figure


def _draw_latency(axes: Any, executions: Sequence[Execution]) -> None:
    for outcome, colour in COLOURS.items():
        chosen = [(i, e) for i, e in enumerate(executions) if e.outcome == outcome]
        if not chosen:
            continue
        axes.scatter(
            [i for i, _ in chosen],
            [(e.decide_ns + e.run_ns) / 1e3 for _, e in chosen],
            s=14,
            color=colour,
            label=f"{outcome} ({len(chosen):,})",
        )
    axes.set_yscale("log")
    axes.set_xlabel("execution")
    axes.set_ylabel("host time, µs")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _draw_splits(axes: Any, explanation: Explanation) -> None:
    at = 0.0
    for split in explanation.splits:
        width = max(split.equations, 1)
        axes.barh(1, width, left=at, height=0.8, color=_BACKENDS[split.backend], edgecolor="white")
        axes.text(at + width / 2, 1, f"{split.number}: {split.backend}", ha="center", va="center",
                  color="white", fontsize=8, clip_on=True)  # fmt: skip
        nodes = sum(chunk.nodes for chunk in split.chunks)
        left = at
        for number, chunk in enumerate(split.chunks):
            part = width * chunk.nodes / max(nodes, 1)
            axes.barh(0, part, left=left, height=0.8, color=_CHUNKS[number % 2], edgecolor="white")
            axes.text(left + part / 2, 0, f"{chunk.launches}", ha="center", va="center",
                      color="white", fontsize=8, clip_on=True)  # fmt: skip
            left += part
        at += width
    axes.set_yticks([1, 0], ["splits", "chunks"])
    axes.set_xlabel("equations; in each chunk, its launches")
    axes.set_xlim(0, max(at, 1))
    axes.spines[["top", "right", "left"]].set_visible(False)
