"""Explanation: how a wrapped function is run, and why, for people and for programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxgraph.observe.events import Event, events
from jaxgraph.observe.history import history_of
from jaxgraph.runtime import native

if TYPE_CHECKING:
    from jaxgraph.options import Options
    from jaxgraph.passes.profitability import Decision
    from jaxgraph.passes.splits import LeftInXla
    from jaxgraph.plan.step import Copy, Split

# Bases that are listed in print; all are in `SplitInfo.bases`.
_PRINTED_BASES = 12

_ITEM_BYTES = {"bool": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "f16": 2, "bf16": 2}
_ITEM_BYTES |= {"i32": 4, "u32": 4, "f32": 4, "i64": 8, "u64": 8, "f64": 8}


@dataclasses.dataclass(frozen=True)
class ChunkInfo:
    """A run of nodes captured as one graph.

    Attributes:
      first_node: its first node's number in the split.
      nodes: how many there are.
      launches: kernels launched for them, after fusion; copies into and out of slots come on top.
    """

    first_node: int
    nodes: int
    launches: int


@dataclasses.dataclass(frozen=True)
class BaseInfo:
    """An array that crosses a split's border, and where its address is kept.

    Attributes:
      label: what it is: "params['layers'][0]['wq']", "result[1]".
      kind: "operand" or "result".
      nbytes: of the whole array.
      place: "in place" (its address is part of what is recorded), "patched" (the nodes that touch
        it are patched when it moves), "slot" (copied into or out of the arena), or "empty".
      nodes: how many nodes that launch something touch it.
      moves: of late: calls in which its address was another one.
      calls: ... of so many.
      why: the place, in words; may be empty.
    """

    label: str
    kind: str
    nbytes: int
    place: str
    nodes: int
    moves: int
    calls: int
    why: str

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{self.label}: {self.place}, {self.nbytes:,} bytes{why}"


@dataclasses.dataclass(frozen=True)
class VariantInfo:
    """A split's program with one set of addresses, as an executor holds it.

    Attributes:
      device: ordinal of the device.
      number: of the variant in its executor; 0: none is there yet, this is what one would be.
      stage: "cold", "warming" or "captured".
      calls: identical calls so far, while it warms up.
      chunks: the captured chunks; of number 0: the chunks there would be.
      arena_bytes: what it needs of the arena: intermediates and slots.
      not_capturable: the node that forbids a capture, and why; empty: none does.
      failures: of its program.
      last_failure: the last one's message.
      bases: operands and results, in the order of the program.
    """

    device: int
    number: int
    stage: str
    calls: int
    chunks: tuple[ChunkInfo, ...]
    arena_bytes: int
    not_capturable: str
    failures: int
    last_failure: str
    bases: tuple[BaseInfo, ...]

    @property
    def launches(self) -> int:
        """Kernels a call launches."""
        return sum(chunk.launches for chunk in self.chunks)

    def __str__(self) -> str:
        text = f"device {self.device}: {self.stage}"
        if self.chunks:
            text += f", {_count(self.launches, 'launch', 'launches')} in "
            text += _count(len(self.chunks), "chunk")
        if self.failures:
            text += f"; {_count(self.failures, 'failure')}, the last: {self.last_failure}"
        return text


@dataclasses.dataclass(frozen=True)
class SplitInfo:
    """A run of the step's equations that one backend executes. Sizes are of native splits.

    Attributes:
      number: its place in the step.
      backend: "native", "xla" or "callback".
      equations: of the user's function in it.
      never_captured: why it is never captured; empty: it is, or XLA decides.
      first_node: label of the node whose identity is the graph key.
      key: the graph key, 32 hexadecimal digits.
      ops: how many nodes there are of each kind.
      chunks: of the recording there is, or would be.
      bytes_read: of operands, at a call: each part once, of a gathered table the rows taken.
      arena_bytes: intermediates.
      reserved_bytes: ... and slots: what `reserve` asks for.
      regions: fork-join regions.
      bases: operands and results, and where their addresses are kept.
      variants: what the executors hold of it.
      program: the encoded program.
      bodies: splits within loops and branches that stay in XLA, which run them at every turn.
    """

    number: int
    backend: str
    equations: int
    never_captured: str = ""
    first_node: str = ""
    key: str = ""
    ops: Mapping[str, int] = dataclasses.field(default_factory=dict)
    chunks: tuple[ChunkInfo, ...] = ()
    bytes_read: int = 0
    arena_bytes: int = 0
    reserved_bytes: int = 0
    regions: int = 0
    bases: tuple[BaseInfo, ...] = ()
    variants: tuple[VariantInfo, ...] = ()
    program: bytes = dataclasses.field(default=b"", repr=False)
    bodies: tuple[SplitInfo, ...] = ()

    @property
    def nodes(self) -> int:
        """Nodes, views included."""
        return sum(self.ops.values())

    @property
    def launches(self) -> int:
        """Kernels a call launches, after fusion."""
        return sum(chunk.launches for chunk in self.chunks)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        head = f"split {self.number}: {self.backend}, {_count(self.equations, 'equation')}"
        if self.backend != "native":
            yield head + (f"; {self.never_captured}" if self.never_captured else "")
            for body in self.bodies:
                yield from (f"  in a body: {line}" for line in body._lines())
            return
        kinds = ", ".join(f"{count} {op}" for op, count in sorted(self.ops.items()))
        launched = ""
        if self.chunks:
            launches = _count(self.launches, "launch", "launches")
            launched = f", {launches} in {_count(len(self.chunks), 'chunk')}"
        yield f"{head} in {_count(self.nodes, 'node')} ({kinds}){launched}"
        yield (
            f"  reads {self.bytes_read:,} bytes; arena {self.arena_bytes:,} bytes, with slots "
            f"{self.reserved_bytes:,}; {_count(self.regions, 'fork-join region')}"
        )
        yield f"  key {self.key[:12]} at {self.first_node}"
        if self.never_captured:
            yield f"  never captured: {self.never_captured}"
        for variant in self.variants:
            yield f"  {variant}"
        shown = _most_telling(self.bases)
        for base in shown:
            yield f"  {base}"
        if len(shown) < len(self.bases):
            rest = [base for base in self.bases if base not in shown]
            nbytes = sum(base.nbytes for base in rest)
            places = ", ".join(dict.fromkeys(base.place for base in rest))
            yield f"  {places}: {len(rest):,} more, {nbytes:,} bytes (SplitInfo.bases)"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found. Prints as text.

    Attributes:
      function: the wrapped function's qualified name.
      platform: where its arguments live: "cpu", "cuda", "rocm", "tpu".
      native: whether native splits run there.
      notes: why the plain function runs, and what else is worth knowing: sentences.
      splits: in execution order; empty where there is no plan.
      left_in_xla: equations that are not native, why, and where they stand in the user's code.
      decisions: what the rules said that leave to XLA what XLA does better.
      copies: what calls copy that they need not.
      last_reset: the last time that a recording could not stand for the call, with the difference
        that made it so.
      history: the last execution in one sentence: a replay, or why it was none.
    """

    function: str
    platform: str
    native: bool
    notes: tuple[str, ...] = ()
    splits: tuple[SplitInfo, ...] = ()
    left_in_xla: tuple[LeftInXla, ...] = ()
    decisions: tuple[Decision, ...] = ()
    copies: tuple[Copy, ...] = ()
    last_reset: Event | None = None
    history: str = ""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        how = "native splits" if self.native else "the plain function"
        yield f"{self.function} on {self.platform}: {how}"
        for note in self.notes:
            yield f"  note: {note}"
        if self.history:
            yield f"  {self.history}"
        for split in self.splits:
            yield from (f"  {line}" for line in str(split).splitlines())
        for equation in self.left_in_xla:
            yield f"  in XLA: {equation}"
        for decision in self.decisions:
            yield f"  rule: {decision}"
        for copy in self.copies:
            yield f"  {copy}"
        if self.last_reset is not None:
            yield "  last reset:"
            yield from (f"    {line}" for line in str(self.last_reset).splitlines())


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a call would run.

    Attributes:
      platform: as lowering rules call it: "cpu", "cuda", "rocm", "tpu".
      ordinal: of the device among those that this process drives.
      devices: how many the arguments lie on.
    """

    platform: str
    ordinal: int
    devices: int


def explain_plan(
    planned: Any, *, function: str, function_id: int, options: Options, site: Site
) -> Explanation:
    """Puts together what is known of a planned call.

    Args:
      planned: what planning came to (`runtime.primitive.Planned`); None: nothing was planned.
      function: qualified name of the wrapped function.
      function_id: its number in the executors.
      options: its settings.
      site: where the call would run.
    """
    plan = None if planned is None else planned.plan
    plans = [] if plan is None else list(plan.with_bodies())
    notes = list(_why_plain(planned, options, site))
    runs = plan is not None and plan.has_native and not notes
    trouble: list[str] = []
    describe = _describer(function_id, site if runs else None, trouble)
    splits = () if plan is None else tuple(map(describe, plan.splits))
    return Explanation(
        function=function,
        platform=site.platform,
        native=runs,
        notes=(*notes, *(() if planned is None else planned.notes), *trouble),
        splits=splits,
        left_in_xla=tuple(e for p in plans for e in p.left_in_xla),
        decisions=tuple(d for p in plans for d in p.decisions),
        copies=tuple(c for p in plans for c in p.copies),
        last_reset=_last_reset(function_id),
        history=history_of(function_id),
    )


def _why_plain(planned: Any, options: Options, site: Site) -> Iterator[str]:
    """Why the plain function runs there; nothing where native splits do, or would do no better."""
    if options.disable:
        yield "disabled: Options(disable=True) or JAXGRAPH_DISABLE"
    elif planned is None:
        yield "not planned yet: call the function, or give explain its arguments"
    elif planned.plan is None:
        yield planned.why_plain
    elif not planned.plan.has_native:
        return
    elif (unsupported := native.why_unsupported(site.platform)) is not None:
        yield unsupported
    elif site.devices > 1:
        yield (
            f"the arguments are spread over {site.devices} devices: outside of shard_map such a "
            "call runs the plain function"
        )
    elif site.platform in planned.plain_lowerings:
        yield planned.plain_lowerings[site.platform]


def _last_reset(function_id: int) -> Event | None:
    """The last event that says that what was recorded could not stand for the call."""
    for event in reversed(events(function_id)):
        if event.what == "reset" or (event.what == "eager" and event.changes):
            return event
    return None


def _describer(
    function_id: int, site: Site | None, trouble: list[str]
) -> Callable[[Split], SplitInfo]:
    """What tells all of a split.

    Args:
      function_id: of the wrapped function.
      site: where native splits run; None: nowhere.
      trouble: takes sentences on what could not be found out.
    """
    held: dict[bytes, list[VariantInfo]] = {}
    for found in native.variants(function_id):
        held.setdefault(found["program_id"], []).append(_variant(found))

    def describe(split: Split) -> SplitInfo:
        if split.native is None:
            inside = [describe(s) for body in split.bodies for s in body.splits]
            why = _callback_in(split)
            return SplitInfo(split.number, split.backend, split.num_eqns, why, bodies=tuple(inside))
        program = native.describe_program(split.native.program)
        variants = tuple(held.get(program["id"], ()))
        recorded = [v for v in variants if v.stage == "captured"]
        shown = recorded[-1] if recorded else None
        if shown is None and site is not None:
            try:
                platform = native.ffi_platform(site.platform)
                shown = _variant(native.preview(platform, site.ordinal, split.native.program))
            except RuntimeError as error:  # of the device; the rest is known all the same
                trouble.append(f"what split {split.number} launches is unknown: {error}")
        return SplitInfo(
            split.number,
            split.backend,
            split.num_eqns,
            never_captured="" if shown is None else shown.not_capturable,
            first_node=split.native.first_node,
            key=split.native.key.hex(),
            ops=dict(split.native.ops),
            chunks=() if shown is None else shown.chunks,
            bytes_read=bytes_read(program),
            arena_bytes=split.native.arena_bytes,
            reserved_bytes=native.arena_bytes(split.native.program),
            regions=split.native.num_regions,
            bases=() if shown is None else shown.bases,
            variants=variants,
            program=split.native.program,
        )

    return describe


def _variant(found: Mapping[str, Any]) -> VariantInfo:
    values = {field.name: found[field.name] for field in dataclasses.fields(VariantInfo)}
    values["chunks"] = tuple(ChunkInfo(**chunk) for chunk in found["chunks"])
    values["bases"] = tuple(BaseInfo(**base) for base in found["bases"])
    return VariantInfo(**values)


def _callback_in(split: Split) -> str:
    from jaxgraph.passes.splits import CALLBACK

    if split.backend != CALLBACK:
        return ""
    calls = [f"{e.primitive.name} at {e.source or 'an unknown line'}" for e in split.cut.eqns]
    return f"never captured: it calls back into Python ({'; '.join(dict.fromkeys(calls))})"


def bytes_read(program: Mapping[str, Any]) -> int:
    """Bytes of operands that a run of a described program reads, each view of them once."""
    seen: set[tuple] = set()
    total = 0
    for node in program["nodes"]:
        sources = list(node["srcs"])
        if node["op"] == "view":
            continue
        if node["op"] == "set_rows":
            del sources[0]  # what it writes into
        if node["op"] == "gather":  # the rows that it takes, of which it has as many as results
            total += _nbytes(node["outs"][0]) * _is_operand(program, sources[0])
            del sources[0]
        if node["op"] == "matmul" and len(sources) == 3:  # a matrix of the table for each product
            taken = math.prod(node["outs"][0]["shape"][:2]) / sources[1]["shape"][0]
            total += int(_nbytes(sources[1]) * taken) * _is_operand(program, sources[1])
            del sources[1]
        for source in sources:
            view = (source["base"], source["offset"], _moving(source))
            if _is_operand(program, source) and view not in seen:
                seen.add(view)
                total += _nbytes(source)
    return total


def _is_operand(program: Mapping[str, Any], tensor: Mapping[str, Any]) -> bool:
    return program["bases"][tensor["base"]]["kind"] == "operand"


def _nbytes(tensor: Mapping[str, Any]) -> int:
    """Bytes of a tensor's distinct elements; a broadcast adds none."""
    return math.prod(n for n, _ in _moving(tensor)) * _ITEM_BYTES[tensor["dtype"]]


def _moving(tensor: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """(size, stride) of the dimensions along which an address moves."""
    dims = zip(tensor["shape"], tensor["strides"], strict=True)
    return tuple((n, s) for n, s in dims if s != 0 and n != 1)


def _most_telling(bases: Sequence[BaseInfo]) -> list[BaseInfo]:
    """All, if they are few; else those that wander, which weights in place do not."""
    if len(bases) <= _PRINTED_BASES:
        return list(bases)
    return [base for base in bases if base.place != "in place"][:_PRINTED_BASES]


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"
