"""The order of a split's units, and the arena offsets that follow from it.

Emission may cover a run of neighbouring units with one kernel. Order and offsets make that
possible: products that read the same row stand together, and inside such a run nothing reuses
memory that the run itself still reads or writes.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

from jaxgraph.plan import units as un
from jaxgraph.plan.units import Unit

ALIGNMENT = 256  # bytes; what CUDA's allocator gives and 16-byte vector loads need


@dataclasses.dataclass(eq=False)
class Buffer:
    """Memory shared by all versions of one array: ``kind`` operand, result, or arena."""

    kind: str
    index: int = -1  # among operands or results
    nbytes: int = 0
    offset: int = 0  # in the arena


def order_units(units: Sequence[Unit], before: Mapping[Unit, set[Unit]]) -> list[Unit]:
    """A legal order, as near to the user's as dependencies and fusion allow.

    Args:
      units: all units.
      before: for each unit those that must run before it.
    """
    waits = {u: len(before[u]) for u in units}
    after: dict[Unit, list[Unit]] = {}
    for unit, sources in before.items():
        for source in sources:
            after.setdefault(source, []).append(unit)
    serial = {u: i for i, u in enumerate(units)}
    ready: list[tuple[int, int, Unit]] = []
    order: list[Unit] = []
    done: set[Unit] = set()

    def make_ready(unit: Unit) -> None:
        heapq.heappush(ready, (unit.position, serial[unit], unit))

    def take(unit: Unit) -> None:
        done.add(unit)
        order.append(unit)
        for later in after.get(unit, ()):
            waits[later] -= 1
            if waits[later] == 0:
                make_ready(later)

    for unit in units:
        if waits[unit] == 0:
            make_ready(unit)
    while ready:
        _, _, unit = heapq.heappop(ready)
        if unit in done:
            continue
        siblings = []
        if unit.op == un.MATMUL:
            siblings = [u for _, _, u in sorted(ready) if u not in done and _same_row(unit, u)]
        for one in (unit, *siblings):
            take(one)
    assert len(order) == len(units), "the units' dependencies have a cycle"
    return order


def _same_row(a: Unit, b: Unit) -> bool:
    """Are both products of the same row (query, key and value; gate and up)?"""
    return a.op == un.MATMUL and b.op == un.MATMUL and a.srcs[0] == b.srcs[0]


def fusion_runs(order: Sequence[Unit]) -> list[int]:
    """For each unit the number of the run that one kernel may cover.

    A run is: a row kernel, the products that read its row, and an elementwise kernel that reads
    them; or small kernels next to each other: elementwise ones, gathers, updates, copies. Where
    the products' elementwise kernel is the first of such (rotary embedding), it is all one run.
    """
    runs: list[int] = []
    at = 0
    while at < len(order):
        products = _product_run(order, at)
        light = products - 1 if products > at and order[products - 1].op == un.EXPR else at
        end = max(products, _light_run(order, light), at + 1)
        runs += [at] * (end - at)
        at = end
    return runs


def _product_run(order: Sequence[Unit], at: int) -> int:
    end = at + 1 if order[at].op == un.ROW else at
    first = end
    while end < len(order) and order[end].op == un.MATMUL and _same_row(order[first], order[end]):
        end += 1
    if end == first or (first > at and order[first].srcs[0].tensor not in order[at].writes()):
        return at
    made = {t for u in order[first:end] for t in u.writes()}
    if end < len(order) and order[end].op == un.EXPR and made & set(order[end].reads()):
        end += 1
    return end


_LIGHT = (un.EXPR, un.GATHER, un.SET_ROWS, un.COPY)
_MAX_LIGHT_RUN = 8


def _light_run(order: Sequence[Unit], at: int) -> int:
    end = at
    while end < len(order) and end - at < _MAX_LIGHT_RUN and order[end].op in _LIGHT:
        end += 1
    return end


def pack_arena(
    order: Sequence[Unit],
    buffers: Mapping[int, Buffer],
    region_of: Mapping[Unit, int],
    guard_bytes: int = 0,
) -> tuple[int, int]:
    """Gives arena buffers their offsets, by first fit over lifetimes that cover whole runs.

    Args:
      order: the units in order.
      buffers: by tensor id.
      region_of: the fork-join region of the units that stand in one. What runs at once shares
        nothing: a region is one run.
      guard_bytes: kept free behind every buffer, for tests that look for writes beyond it; then
        no two buffers ever share memory.

    Returns:
      (arena bytes, bytes of the widest set alive at once).
    """
    run_of = _join_regions(order, _join_sums(order, fusion_runs(order)), region_of)
    birth: dict[Buffer, int] = {}
    death: dict[Buffer, int] = {}
    for unit, run in zip(order, run_of, strict=True):
        for ref in (*unit.outs, *unit.srcs):
            buffer = buffers[ref.tensor.id]
            if buffer.kind == "arena":
                birth.setdefault(buffer, run)
                death[buffer] = run
    born: dict[int, list[Buffer]] = {}
    for buffer, run in birth.items():
        born.setdefault(run, []).append(buffer)
    live: list[Buffer] = []  # by offset
    top = widest = 0
    for run in sorted(set(run_of)):
        if guard_bytes == 0:
            live = [b for b in live if death[b] >= run]
        for buffer in sorted(born.get(run, ()), key=lambda b: -b.nbytes):
            need, start, place = _aligned(buffer.nbytes + guard_bytes), 0, 0
            while place < len(live) and live[place].offset - start < need:
                start = live[place].offset + _aligned(live[place].nbytes + guard_bytes)
                place += 1
            buffer.offset = start
            live.insert(place, buffer)
            top = max(top, start + need)
        widest = max(widest, sum(_aligned(b.nbytes) for b in live))
    return top, widest


def _join_sums(order: Sequence[Unit], runs: Sequence[int]) -> list[int]:
    """The runs, that of a single product and that of a row kernel which reads it as one.

    The product's kernel may do the first part of the row kernel, and then writes what that writes.
    """
    joined: list[int] = []
    products = 0  # of the run so far
    for i, unit in enumerate(order):
        starts = i == 0 or runs[i] != runs[i - 1]
        before = order[i - 1]
        goes_on = not starts or (
            i > 0
            and products == 1
            and before.op == un.MATMUL
            and unit.op == un.ROW
            and bool(set(before.writes()) & set(unit.reads()))
        )
        joined.append(joined[-1] if goes_on else i)
        products = (0 if starts else products) + (unit.op == un.MATMUL)
    return joined


def _join_regions(
    order: Sequence[Unit], run_of: Sequence[int], region_of: Mapping[Unit, int]
) -> list[int]:
    """The runs, those of one region as one."""
    joined: list[int] = []
    for i, unit in enumerate(order):
        region = region_of.get(unit)
        goes_on = (
            i > 0
            and region == region_of.get(order[i - 1])
            and (region is not None or run_of[i] == run_of[i - 1])
        )
        joined.append(joined[-1] if goes_on else i)
    return joined


def _aligned(n: int) -> int:
    return max(ALIGNMENT, -(-n // ALIGNMENT) * ALIGNMENT)
