"""report: one page with everything that is known of a step, to be sent to somebody."""

from __future__ import annotations

import datetime
import html
import io
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxgraph.observe.counters import is_part
from jaxgraph.observe.plot import plot
from jaxgraph.runtime import native

if TYPE_CHECKING:
    from jaxgraph.explain import Explanation
    from jaxgraph.observe.counters import Stats
    from jaxgraph.observe.events import Event
    from jaxgraph.wrap import GraphedFunction

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; color: #1a1a1a; background: #fff; }
header { background: #12263a; color: #fff; padding: 1rem 2rem; }
header h1 { font-size: 1.2rem; margin: 0; } header p { margin: 0; opacity: .8; }
nav { display: flex; flex-wrap: wrap; gap: .25rem; padding: .5rem 2rem; background: #eef2f6; }
nav button { border: 0; background: none; font: inherit; padding: .4rem .8rem; cursor: pointer;
  border-radius: 4px; }
nav button[aria-selected=true] { background: #0072b2; color: #fff; }
main { padding: 1rem 2rem; } section[hidden] { display: none; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem 1rem .15rem 0;
  vertical-align: top; border-bottom: 1px solid #e3e8ee; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.part td:first-child { padding-left: 1.2rem; color: #555; } tr.zero { color: #aaa; }
pre { background: #f6f8fa; padding: 1rem; overflow: auto; font-size: 13px; }
.verdict { font-size: 1.05rem; padding: .6rem 1rem; background: #eef2f6;
  border-left: 4px solid #0072b2; }
svg { max-width: 100%; height: auto; }
"""

_SCRIPT = """
const tabs = [...document.querySelectorAll('nav button')];
function show(name) {
  for (const tab of tabs) tab.setAttribute('aria-selected', tab.dataset.section === name);
  for (const s of document.querySelectorAll('section')) s.hidden = s.id !== name;
}
for (const tab of tabs) tab.addEventListener('click', () => show(tab.dataset.section));
const asked = location.hash.slice(1);
show(tabs.some(tab => tab.dataset.section === asked) ? asked : tabs[0].dataset.section);
"""


def report(step: GraphedFunction, path: str | os.PathLike[str]) -> pathlib.Path:
    """Writes a self-contained HTML page about a step: it needs no network and no other file.

    Its sections are counters, plan, events and pictures (with matplotlib, else a word about it).

    Args:
      step: a function of `jaxgraph.wrap`.
      path: the file to write.

    Returns:
      The path.
    """
    file = pathlib.Path(path)
    file.write_text(page(step), encoding="utf-8")
    return file


def page(step: GraphedFunction) -> str:
    """The page's text."""
    stats, events, explanation = step.stats(), step.events(), step.explain()
    sections = [
        ("counters", "Counters", _counters(stats)),
        ("plan", "Plan", _plan(explanation)),
        ("events", f"Events ({len(events):,})", _events(events)),
        ("pictures", "Pictures", _pictures(step)),
    ]
    info = native.build_info()
    now = datetime.datetime.now().isoformat(" ", "seconds")
    built = f"with CUDA for {info['cuda_architectures']}" if info["cuda"] else "without CUDA"
    tabs = "".join(
        f'<button role="tab" data-section="{name}">{html.escape(title)}</button>'
        for name, title, _ in sections
    )
    body = "".join(f'<section id="{name}">{content}</section>' for name, _, content in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>jaxgraph: {html.escape(step.name)}</title><style>{_STYLE}</style></head><body>"
        f"<header><h1>{html.escape(step.name)}</h1><p>jaxgraph {info['version']}, "
        f'{built}; {now}</p></header><nav role="tablist">{tabs}</nav><main><p class="verdict">'
        f"{html.escape(step.history())}</p>{body}</main><script>{_SCRIPT}</script></body></html>"
    )


def _counters(stats: Stats) -> str:
    rows = []
    for name in stats:
        classes = " ".join(["part"] * is_part(name) + ["zero"] * (not stats[name]))
        rows.append(
            f'<tr class="{classes}"><td>{name}</td>'
            f'<td class="number" data-counter="{name}">{stats[name]}</td></tr>'
        )
    return f"<table>{''.join(rows)}</table>"


def _plan(explanation: Explanation) -> str:
    return f"<pre>{html.escape(str(explanation))}</pre>"


def _events(events: Sequence[Event]) -> str:
    def cells() -> Iterator[str]:
        for event in reversed(events):
            time = datetime.datetime.fromtimestamp(event.time_s).strftime("%H:%M:%S.%f")[:-3]
            changes = "".join(f"<br>{html.escape(str(change))}" for change in event.changes)
            yield (
                f'<tr data-event="{event.sequence}"><td>{time}</td><td>{event.device}</td>'
                f"<td>{event.split}</td><td>{event.what}</td>"
                f"<td>{html.escape(event.why)}{changes}</td></tr>"
            )

    head = "<tr><th>time</th><th>device</th><th>split</th><th>what</th><th>why</th></tr>"
    return f"<table>{head}{''.join(cells())}</table>"


def _pictures(step: GraphedFunction) -> str:
    try:
        figure = plot(step)
    except (ImportError, ValueError) as error:
        return f"<p>{html.escape(str(error))}</p>"
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    svg = drawn.getvalue()
    return svg[svg.index("<svg") :]
