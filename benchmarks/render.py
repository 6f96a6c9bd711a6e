"""Tables in Markdown and pictures of the figures that benchmarks/suite.py has gathered."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


def render(out: Path) -> Iterator[Path]:
    """Writes tables.md and the pictures of all figures in the folder; yields what it wrote."""
    decode = sorted((load(f) for f in out.glob("decode_*.json")), key=_order)
    tables = [table for table in _tables(out, decode) if table]
    if tables:
        (out / "tables.md").write_text("\n\n".join(tables) + "\n")
        yield out / "tables.md"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print('no pictures: they need matplotlib (pip install "jaxgraph[plot]")')
        return
    import pictures

    drawn = {f.stem: pictures.timeline_figure(load(f)) for f in out.glob("timeline_*.json")}
    if decode:
        drawn["bandwidth"] = pictures.bandwidth_figure(decode)
    if len({d["settings"]["batch"] for d in decode}) > 1:
        drawn["batches"] = pictures.batches_figure(decode)
    for name, figure in drawn.items():
        figure.savefig(out / f"{name}.png", dpi=110)
        yield out / f"{name}.png"


def load(file: Path) -> Figures:
    return json.loads(file.read_text())


def label(figures: Figures) -> str:
    """For people: "1b, batch 8", with the context where it is not the usual one."""
    s = figures["settings"]
    text = f"{s['shape']}, batch {s['batch']}"
    return text if s["context"] == 1024 else f"{text}, context {s['context']:,}"


def fastest(figures: Figures, engine: str) -> Figures | None:
    """The engine's ("XLA" or "jaxgraph") fastest way; None: it was not timed."""
    ways = [t for t in figures["timings"] if t["name"].startswith(engine)]
    return min(ways, key=lambda t: t["step_us"], default=None)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _order(figures: Figures) -> tuple[int, int, int]:
    s = figures["settings"]
    shapes = ("15m", "135m", "1b", "8b")
    return shapes.index(s["shape"]), s["context"], s["batch"]


def _tables(out: Path, decode: list[Figures]) -> Iterator[str]:
    if (out / "machine.json").exists():
        m = load(out / "machine.json")
        yield (
            f"{m['device']} (driver {m['driver']}), Python {m['python']}, jax {m['jax']}, "
            f"jaxlib {m['jaxlib']}, jaxgraph {m['jaxgraph']}, {m['date']}"
        )
    if decode:
        yield "## Decode steps\n\n" + _summary(decode)
    for figures in decode:
        yield f"### {label(figures)}\n\n" + _step(figures)
    if (out / "ops.json").exists():
        yield "## Operations\n\n" + _ops(load(out / "ops.json"))
    if (out / "regions.json").exists():
        yield "## Fork-join regions\n\n" + _regions(load(out / "regions.json"))
    for file in sorted(out.glob("profitability_*.json")):
        figures = load(file)
        yield f"## Profitability: {figures['settings']['table']}\n\n" + _profitability(figures)
    if (out / "identity.json").exists():
        yield "## What deciding costs\n\n" + _identity(load(out / "identity.json"))
    if (out / "planning.json").exists():
        yield "## What planning costs\n\n" + _planning(load(out / "planning.json"))
    for part, title in (
        ("products", "Streaming products"),
        ("attention", "Decode attention"),
        ("layers", "Layers of small models"),
        ("steps", "What each launch adds to a step"),
    ):
        if (out / f"{part}.json").exists():
            yield f"## {title}\n\n```text\n{load(out / f'{part}.json')['text'].rstrip()}\n```"
    for file in sorted(out.glob("timeline_*.json")):
        figures = load(file)
        yield f"## Kernels of a step of {figures['shape']}\n\n" + _timeline(figures)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table whose first column is text, the others figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _summary(decode: list[Figures]) -> str:
    rows = []
    for figures in decode:
        ours, xla = fastest(figures, "jaxgraph"), fastest(figures, "XLA")
        rows.append(
            [
                label(figures),
                f"{xla['step_us']:,.0f}" if xla else "",
                f"{ours['step_us']:,.0f}" if ours else "",
                f"{xla['step_us'] / ours['step_us']:.2f}" if ours and xla else "",
                f"{figures['floor_us']:,.0f}",
                percent(figures["floor_us"] / ours["step_us"]) if ours else "",
            ]
        )
    head = ["µs a step", "XLA's best", "jaxgraph's best", "times faster", "memory floor"]
    return table([*head, "jaxgraph, of the floor"], rows)


def _step(figures: Figures) -> str:
    floor = figures["floor_us"]
    rows = [
        [t["name"], f"{t['step_us']:,.1f}", f"{t['host_us']:,.1f}", percent(floor / t["step_us"])]
        for t in figures["timings"]
    ]
    rows.append(["memory floor", f"{floor:,.1f}", "", ""])
    return table(["", "µs a step", "host, µs a call", "of the floor"], rows)


def _ops(figures: Figures) -> str:
    rows = [[r["function"], f"{r['xla_us']:.2f}", f"{r['ops_us']:.2f}"] for r in figures["rows"]]
    return table([f"batch {figures['batch']}, µs a call", "XLA", "jaxgraph.ops"], rows)


def _profitability(figures: Figures) -> str:
    rows = [
        [
            str(r["case"]),
            f"{r['xla_us']:,.0f}",
            f"{r['jaxgraph_us']:,.0f}",
            f"{r['xla_us'] / r['jaxgraph_us']:.2f}",
        ]
        for r in figures["rows"]
    ]
    return table([figures["head"], "XLA, µs", "jaxgraph, µs", "times faster"], rows)


def _identity(figures: Figures) -> str:
    rows = [
        [r["what"], f"{r['ns'] / 1e3:,.2f}", f"{r['per']:,.1f} a {r['unit']}"]
        for r in figures["rows"]
    ]
    return table(["what", "µs", "ns each"], rows)


def _planning(figures: Figures) -> str:
    rows = [
        [f"a {r['how']} of {r['layers']}", f"{r['xla_s']:.2f}", f"{r['plan_s']:.2f}"]
        for r in figures["rows"]
    ]
    return table(["layers", "XLA's compilation, s", "tracing and planning, s"], rows)


def _regions(figures: Figures) -> str:
    sizes = sorted({(r["width"], r["hidden"]) for r in figures["rows"]})
    cells = {(r["experts"], r["width"], r["hidden"]): r for r in figures["rows"]}
    rows = []
    for experts in sorted({r["experts"] for r in figures["rows"]}):
        found = [cells.get((experts, *size)) for size in sizes]
        shown = [f"{r['at_once_us']:.0f}, {r['chain_us']:.0f}" if r else "" for r in found]
        rows.append([str(experts), *shown])
    return table(["experts", *(f"{w} × {h}" for w, h in sizes)], rows)


def _timeline(figures: Figures) -> str:
    rows = []
    for engine, step in figures["engines"].items():
        total = step["end_us"]
        for kind, (count, us) in step["kinds"].items():
            rows.append([f"{engine}: {kind}", str(count), f"{us:.1f}", percent(us / total)])
        rows.append([f"{engine}: a step", str(len(step["kernels"])), f"{total:.1f}", ""])
    return table(["from the end of a kernel to that of the next", "kernels", "µs", "of it"], rows)
