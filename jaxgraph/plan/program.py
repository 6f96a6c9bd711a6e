"""One native split as a program: bytes that the native core decodes and runs."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxgraph import _native
from jaxgraph.frontend.flatten import Value
from jaxgraph.frontend.lowering import build_graph
from jaxgraph.frontend.packs import Pack, PackedLeaf
from jaxgraph.graph import dtypes
from jaxgraph.graph.ir import Graph, Tensor
from jaxgraph.passes.attention import find_attention
from jaxgraph.passes.chosen import choose_matrices
from jaxgraph.passes.concat import push_through_concat
from jaxgraph.passes.deferred import divide_before_mixing
from jaxgraph.passes.fuse import fuse
from jaxgraph.passes.in_place import chain_stacked_updates
from jaxgraph.passes.splits import Cut
from jaxgraph.plan import units as un
from jaxgraph.plan.regions import Mark
from jaxgraph.plan.storage import Buffer, StoragePlan, plan_storage

_ARENA, _OPERAND, _RESULT = range(3)  # BaseKind
_UNKNOWN, _WANDERS = range(2)  # BaseHint

# Integer operands up to this size (tokens, positions, block tables) come in a new buffer at nearly
# every call; weights, which are floats, keep theirs. The executor corrects what this guesses wrong.
_SMALL_INTEGER_BYTES = 4096


# In this order.
_REWRITES = (
    push_through_concat,
    chain_stacked_updates,
    divide_before_mixing,
    find_attention,
    choose_matrices,
)


@dataclasses.dataclass(eq=False)
class NativeSplit:
    """A planned native split.

    Attributes:
      program: the encoded program.
      result_avals: shapes and dtypes of the results.
      aliases: operand index -> result index of arrays that are updated in place.
      operands: what each operand is: a value of the step, or a pack, that is, its buffer.
      results: what each result is; a pack: the buffer with other leaves.
      stored: by id of a value: the packed leaf in whose place the split puts it.
      num_nodes: nodes of the program.
      num_launches: nodes that launch a kernel, before emission-level fusion.
      arena_bytes: intermediates.
      widest_live: the largest sum of intermediates alive at once, in bytes.
      ops: how many nodes there are of each kind.
      first_node: label of the node that gives the split its graph key.
      key: the graph key.
      copied_updates: (where, bytes, why) of updates that copy their array first.
      arena_slots: (offset, bytes) of every intermediate in the arena.
      num_regions: fork-join regions.
    """

    program: bytes
    result_avals: tuple[jax.ShapeDtypeStruct, ...]
    aliases: dict[int, int]
    operands: list[Value | Pack]
    results: list[Value | Pack]
    stored: dict[int, PackedLeaf]
    num_nodes: int
    num_launches: int
    arena_bytes: int
    widest_live: int
    ops: dict[str, int]
    first_node: str
    key: bytes
    copied_updates: list[tuple[str, int, str]]
    arena_slots: list[tuple[int, int]]
    num_regions: int


def plan_native(
    cut: Cut,
    *,
    name: str,
    function_id: int,
    split: int,
    exec_options: Mapping[str, Any],
    labels: Mapping[int, str],
    places: Mapping[int, PackedLeaf] = MappingProxyType({}),
    begun: Counter[tuple[str, ...]] | None = None,
    guard_bytes: int = 0,
) -> NativeSplit:
    """Plans one native split.

    Args:
      cut: the equations and the values that cross the split's border.
      name: qualified name of the wrapped function.
      function_id: owner of the statistics.
      split: ordinal of the split within the step.
      exec_options: fields of ``ExecOptions`` in ``ffi/core/program.h``.
      labels: what a person would call each input, by ``id(value)``.
      places: the packed leaf in whose place a value lies, or is to be put, by ``id(value)``.
      begun: how many earlier splits of the step have a first node of some identity; counted on
        here. None: there are no others.
      guard_bytes: kept free behind every intermediate (``Options.guard_bytes``).

    Raises:
      PlanError: the split has no native form after all.
    """
    border = _Border(cut, places)
    graph = build_graph(border.inputs, cut.eqns, cut.outputs, dict(labels))
    for rewrite in _REWRITES:
        before, graph = graph, rewrite(graph)
        if graph is not before:
            before.dissolve()
    fused = fuse(graph, merge=exec_options.get("fusion", True))
    plan = plan_storage(fused, guard_bytes, border.stored)
    bases, base_of = _bases(plan, border, labels)
    nodes = [_node(unit, plan, base_of) for unit in plan.units]
    begun = Counter() if begun is None else begun
    first = _first_node(plan, graph, labels, border.inputs)
    key = _graph_key(name, function_id, first, begun[first])
    begun[first] += 1
    program = _native.encode_program(
        {
            "function": name,
            "function_id": function_id,
            "split": split,
            "key": key,
            "arena_bytes": plan.arena_bytes,
            "options": dict(exec_options),
            "bases": bases,
            "nodes": nodes,
        }
    )
    split_of = NativeSplit(
        program=program,
        result_avals=tuple(map(_aval, border.results)),
        aliases=border.aliases(plan),
        operands=border.operands,
        results=border.results,
        stored={id(v): places[id(v)] for v in cut.outputs if id(v) in places},
        num_nodes=len(nodes),
        num_launches=sum(u.op != un.VIEW for u in plan.units),
        arena_bytes=plan.arena_bytes,
        widest_live=plan.widest_live,
        ops=dict(Counter(un.OP_NAMES[u.op] for u in plan.units)),
        first_node=plan.units[0].label if plan.units else "",
        key=key,
        copied_updates=plan.copied_updates,
        arena_slots=sorted((b.offset, b.nbytes) for b in plan.arena_buffers),
        num_regions=len({mark.region for mark in plan.marks.values()}),
    )
    graph.dissolve()
    return split_of


class _Border:
    """What crosses a split's border: values, which may lie in buffers that others lie in, too.

    Attributes:
      inputs: the inputs of the graph: the cut's, and packed leaves that it replaces unread.
      operands: of the call: values, and packs.
      results: of the call.
      stored: input index -> output index of packed leaves: which output is to lie there when all
        is done; None: it stays as it is.
    """

    def __init__(self, cut: Cut, places: Mapping[int, PackedLeaf]):
        self._cut = cut
        self._places = places
        packed = [places[id(v)] for v in cut.outputs if id(v) in places]
        replaced = [at.pack.leaves[at.number] for at in packed]
        self.inputs = list({id(v): v for v in (*cut.inputs, *replaced)}.values())
        self.operands = _each_once(self._home(v) for v in self.inputs)
        self.results = _each_once(self._home(v) for v in cut.outputs)
        self._operand_numbers = {id(of): number for number, of in enumerate(self.operands)}
        self._result_numbers = {id(of): number for number, of in enumerate(self.results)}
        numbers = {places.get(id(v)): j for j, v in enumerate(cut.outputs)}
        self.stored: dict[int, int | None] = {
            i: numbers.get(places[id(v)]) for i, v in enumerate(self.inputs) if id(v) in places
        }

    def _home(self, value: Value) -> Value | Pack:
        """What is passed for a value: itself, or the pack in which it lies."""
        at = self._places.get(id(value))
        return value if at is None else at.pack

    def operand(self, i: int) -> tuple[int, int]:
        """In which operand an input of the graph lies, and from which byte on."""
        at = self._places.get(id(self.inputs[i]))
        number = self._operand_numbers[id(self._home(self.inputs[i]))]
        return number, 0 if at is None else at.spec.offset

    def result(self, j: int) -> int:
        """Which result an output of the graph is, or lies in."""
        return self._result_numbers[id(self._home(self._cut.outputs[j]))]

    def aliases(self, plan: StoragePlan) -> dict[int, int]:
        """Operand index -> result index."""
        return {self.operand(i)[0]: self.result(j) for i, j in plan.aliases.items()}


def _each_once(values: Iterable[Any]) -> list[Any]:
    return list({id(v): v for v in values}.values())


def _aval(of: Value | Pack) -> jax.ShapeDtypeStruct:
    aval = of.buffer.aval if isinstance(of, Pack) else of.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _bases(plan: StoragePlan, border: _Border, labels: Mapping[int, str]):
    """The base table, and a function from a buffer to (base number, byte offset)."""
    written = {
        border.operand(buffer.index)[0]
        for unit in plan.units
        for ref in unit.outs
        if (buffer := plan.buffers[ref.tensor.id]).kind == "operand"
    }
    aliases = border.aliases(plan)
    bases = [_base(_ARENA, nbytes=plan.arena_bytes, written=True, label="arena")]
    for i, of in enumerate(border.operands):
        aval, value = _aval(of), of.buffer if isinstance(of, Pack) else of
        nbytes = math.prod(aval.shape) * aval.dtype.itemsize
        small_integer = dtypes.is_integer(aval.dtype) and nbytes <= _SMALL_INTEGER_BYTES
        wanders = small_integer and i not in aliases and of is value
        bases.append(
            _base(
                _OPERAND,
                index=i,
                nbytes=nbytes,
                hint=_WANDERS if wanders else _UNKNOWN,
                written=i in written,
                label=labels.get(id(value), f"operand[{i}]"),
            )
        )
    alias_of = {j: i for i, j in aliases.items()}
    for j, of in enumerate(border.results):
        aval = _aval(of)
        bases.append(
            _base(
                _RESULT,
                index=j,
                nbytes=math.prod(aval.shape) * aval.dtype.itemsize,
                hint=_UNKNOWN if j in alias_of else _WANDERS,
                written=j not in alias_of,
                alias=alias_of.get(j, -1),
                label=f"result[{j}]",
            )
        )
    first_result = 1 + len(border.operands)

    def base_of(buffer: Buffer) -> tuple[int, int]:
        if buffer.kind == "arena":
            return 0, buffer.offset
        if buffer.kind == "result":
            return first_result + border.result(buffer.index), 0
        operand, offset = border.operand(buffer.index)
        return 1 + operand, offset

    return bases, base_of


def _base(
    kind, *, nbytes, label, index=0, hint=_UNKNOWN, written=False, alias=-1
) -> dict[str, Any]:
    return {
        "kind": kind,
        "hint": hint,
        "written": written,
        "alias": alias,
        "index": index,
        "nbytes": nbytes,
        "label": label,
    }


def _node(unit: un.Unit, plan: StoragePlan, base_of) -> tuple:
    def ref(r: un.Ref) -> tuple:
        base, offset = base_of(plan.buffers[r.tensor.id])
        at = offset + r.layout.offset * np.dtype(r.dtype).itemsize
        return (dtypes.code_of(r.dtype), base, at, r.layout.shape, r.layout.strides)

    outs, srcs = [ref(r) for r in unit.outs], [ref(r) for r in unit.srcs]
    mark = plan.marks.get(unit, Mark(0, 0))
    return (unit.op, 0, mark.region, mark.branch, unit.params, outs, srcs, unit.label)


def _first_node(
    plan: StoragePlan, graph: Graph, labels: Mapping[int, str], inputs: Sequence[Value]
) -> tuple[str, ...]:
    """What the split's first node is: operation, parameters, and where its sources come from."""
    if not plan.units:
        return ()
    first = plan.units[0]
    operands = {t.id: v for t, v in zip(graph.inputs, inputs, strict=True)}
    origins = (_origin(tensor, operands, labels) for tensor in first.reads())
    params = un.shape_free_params(first).hex()
    return (un.OP_NAMES[first.op], params, *origins, first.label.partition("@")[0])


def _graph_key(name: str, function_id: int, first: tuple[str, ...], number: int) -> bytes:
    """Identity of the split's first node within the wrapped function.

    No shapes and no ordinals: when a batch grows or splits shift, the key follows the content.
    Splits that begin alike (the layers of a model with something left in XLA in each) are numbered,
    and so are wrapped functions of one name: under one key they would push each other out at every
    call once there are more of them than `max_variants`.
    """
    said = [name, f"{function_id:016x}", *first, str(number)]
    return hashlib.blake2b("\0".join(said).encode(), digest_size=16).digest()


def _origin(tensor: Tensor, operands: Mapping[int, Value], labels: Mapping[int, str]) -> str:
    value = operands.get(tensor.id)
    return tensor.node.kind if value is None else labels.get(id(value), "operand")
