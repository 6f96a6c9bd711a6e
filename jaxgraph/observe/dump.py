"""dump: everything that is known of a step's plan and graphs, as files."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxgraph.runtime import native

if TYPE_CHECKING:
    from jaxgraph.wrap import GraphedFunction


def dump(step: GraphedFunction, folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Writes the node graph, the plan and the captured graphs of a wrapped function.

    - `plan.txt`: what `explain` says.
    - `splitN.json`: the program of each native split: its nodes with kind, label, sources and
      outputs (address = base + offset), the bases, the options.
    - `splitN.dot`: its nodes and what flows between them, for Graphviz.
    - `DEVICE_splitN_variantV_chunkC.dot`: each captured chunk, on CUDA by
      `cudaGraphDebugDotPrint`.
    - `stats.json`, `events.json`: counters, events and executions.

    Args:
      step: a function of `jaxgraph.wrap` that was called.
      folder: is made if it is not there; files in it are overwritten.

    Returns:
      The files written.

    Raises:
      ValueError: the function has not been called, so there is nothing to write.
    """
    planned = step.last_plan()
    if planned is None:
        raise ValueError(f"{step.name} has no plan yet: call it first")
    target = pathlib.Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    files: list[pathlib.Path] = []

    def write(name: str, text: str) -> None:
        files.append(target / name)
        files[-1].write_text(text)

    write("plan.txt", f"{step.explain()}\n")
    for split in planned.native_splits():
        program = native.describe_program(split.program)
        number = program["split"]
        write(f"split{number}.json", json.dumps(as_json(program), indent=1))
        write(f"split{number}.dot", "\n".join(dot(program)) + "\n")
    files += [target / name for name in native.write_graphs(step.function_id, str(target))]
    write("stats.json", json.dumps(dict(step.stats()), indent=1))
    history = {
        "events": native.events(step.function_id, 0),
        "executions": native.executions(step.function_id),
    }
    write("events.json", json.dumps(as_json(history), indent=1))
    return files


def as_json(value: Any) -> Any:
    """The same with bytes as hexadecimal digits."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {key: as_json(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(v) for v in value]
    return value


def dot(program: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a DOT graph: nodes, and an edge to each from what wrote its sources last.

    A source comes from the node that wrote last at its beginning, or before it in the same buffer;
    if there is none, from the buffer.
    """
    yield f"digraph {_quoted(program['function'])} {{"
    yield "  node [shape=box];"
    bases = program["bases"]
    writers: dict[int, dict[int, str]] = {}  # base -> offset -> node
    shown: set[int] = set()
    for number, node in enumerate(program["nodes"]):
        shapes = " ".join(str(list(out["shape"])) for out in node["outs"])
        text = f"{number} {node['op']}\n{node['label']}\n{shapes}"
        yield f"  n{number} [label={_quoted(text)}];"
        for source in node["srcs"]:
            base = _owner(bases, source["base"])
            before = [at for at in writers.get(base, ()) if at <= source["offset"]]
            if before:
                yield f"  {writers[base][max(before)]} -> n{number};"
                continue
            if base not in shown:
                shown.add(base)
                yield f"  b{base} [label={_quoted(bases[base]['label'])}, shape=ellipse];"
            yield f"  b{base} -> n{number};"
        for out in node["outs"]:
            writers.setdefault(_owner(bases, out["base"]), {})[out["offset"]] = f"n{number}"
    yield "}"


def _owner(bases: Sequence[Mapping[str, Any]], base: int) -> int:
    """The base whose buffer it is: a result that is updated in place has its operand's."""
    alias = bases[base]["alias"]
    return base if alias < 0 else 1 + alias


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
