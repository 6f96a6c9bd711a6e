"""From a jaxpr to one flat list of equations: calls inlined, static scans unrolled.

What a user wrote as nested jits, custom derivatives, checkpoints or a scan over layers becomes a
list in which every value has one name, so that later steps see only plain operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.extend import source_info_util

from jaxgraph.frontend import parts
from jaxgraph.frontend.packs import Pack, PackFinder

# Call-like primitives, and the parameter that holds their body. They mean "evaluate the body".
_BODY_OF = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "jaxgraph_call": "jaxpr",  # another wrapped function: its equations join this one's splits
    "jaxgraph_kernel": "jaxpr",  # a function of jaxgraph.ops: here its definition counts
    "jaxgraph_unpack": "jaxpr",  # where it is not that of an argument
    "jaxgraph_repack": "jaxpr",  # where it is not that of a result
}


# A step of this many equations takes seconds to plan; a longer loop is better left a loop.
_MAX_UNROLLED_EQNS = 50_000


class Value:
    """A value of the flat list: an aval and, for small integers known at plan time, its content."""

    __slots__ = ("aval", "known")

    def __init__(self, aval: Any, known: np.ndarray | None = None):
        self.aval = aval
        self.known = known


@dataclasses.dataclass(eq=False, slots=True)
class FlatEqn:
    """One primitive applied to values; ``source`` is the line in the user's code."""

    primitive: Any
    params: dict[str, Any]
    inputs: list[Value]
    outputs: list[Value]
    source: str
    effects: frozenset = frozenset()


@dataclasses.dataclass(eq=False)
class FlatStep:
    """A whole step.

    Attributes:
      inputs: its arguments.
      consts: the arrays it closed over.
      eqns: in an order in which they may run.
      outputs: its results; those that are buffers of packs no equation makes.
      packs: arguments that are packed trees.
    """

    inputs: list[Value]
    consts: list[tuple[Value, Any]]
    eqns: list[FlatEqn]
    outputs: list[Value]
    packs: list[Pack] = dataclasses.field(default_factory=list)

    @property
    def given(self) -> list[Value]:
        """What is there before the first equation: arguments, closed-over arrays, packed leaves."""
        leaves = [v for pack in self.packs for v in pack.leaves]
        return [*self.inputs, *(v for v, _ in self.consts), *leaves]

    @property
    def wanted(self) -> list[Value]:
        """What somebody outside reads: results, and the leaves of packed ones."""
        return [*self.outputs, *(v for pack in self.packs for v in pack.new_leaves)]


def flatten(closed_jaxpr: Any, max_unroll: int) -> FlatStep:
    """Flattens ``closed_jaxpr``; a scan of more than ``max_unroll`` iterations stays whole."""
    return _Flattener(max_unroll).run(closed_jaxpr)


class _Once:
    """A function that is computed once for each object, however often a body is inlined.

    It keeps the objects, so that no other takes on the id of one.
    """

    def __init__(self, function: Callable[[Any], Any]):
        self._function = function
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, of: Any) -> Any:
        known = self._known.get(id(of))
        if known is None:
            known = self._known[id(of)] = (of, self._function(of))
        return known[1]


class _Flattener:
    def __init__(self, max_unroll: int):
        self.max_unroll = max_unroll
        self.source_of = _Once(_source)
        self.number = _Once(_literal)
        self.eqns: list[FlatEqn] = []
        self.consts: dict[int, tuple[Value, Any]] = {}
        self.packs = PackFinder(Value)
        self.parts: dict[int, list[Value]] = {}  # of complex values, by id
        self.complex: list[Value] = []  # those, so that no other takes on the id of one

    def run(self, closed: Any) -> FlatStep:
        inputs = [Value(v.aval) for v in closed.jaxpr.invars]
        for value in inputs:
            self.packs.give(value)
        outputs = self.inline(closed.jaxpr, closed.consts, inputs)
        packs = self.settle_packs(outputs)
        return FlatStep(inputs, list(self.consts.values()), self.eqns, outputs, packs)

    def settle_packs(self, outputs: Sequence[Value]) -> list[Pack]:
        """The packs; what is left of their equations is made of others."""
        if self.packs.is_empty:
            return []
        wanted = {id(v) for v in outputs}
        read = {id(v) for e in needed_eqns(self.eqns, wanted) for v in e.inputs}
        packs, gone = self.packs.settle(wanted, read)
        kept = [e for e in self.eqns if e not in gone]
        self.eqns = []
        for eqn in kept:
            if eqn.primitive.name != "jaxgraph_repack":
                self.eqns.append(eqn)
            elif id(eqn.outputs[0]) in wanted | read:
                body = eqn.params["jaxpr"]
                (out,) = self.inline(body.jaxpr, body.consts, eqn.inputs, eqn.source)
                last = next(e for e in reversed(self.eqns) if out in e.outputs)
                last.outputs = [eqn.outputs[0] if v is out else v for v in last.outputs]
        return packs

    def const(self, array: Any, aval: Any) -> Value:
        """A closed-over array, once however often it is seen; small integers are known."""
        if id(array) not in self.consts:
            self.consts[id(array)] = (Value(aval, _small_known(array)), array)
            self.packs.give(self.consts[id(array)][0])
        return self.consts[id(array)][0]

    def inline(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value], source: str = ""
    ) -> list[Value]:
        """The values of ``jaxpr``'s results; ``source``: the line for equations that have none."""
        env: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        for var, array in zip(jaxpr.constvars, consts, strict=True):
            env[var] = array if isinstance(array, Value) else self.const(array, var.aval)

        def read(atom: Any) -> Value:
            if isinstance(atom, jex_core.Literal):
                return self.number(atom) if atom.aval.size == 1 else _literal(atom)
            return env[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(a) for a in eqn.invars]
            for var, value in zip(eqn.outvars, self.equation(eqn, inputs, source), strict=True):
                env[var] = value
        return [read(a) for a in jaxpr.outvars]

    def equation(self, eqn: Any, inputs: list[Value], source: str) -> list[Value]:
        name = eqn.primitive.name
        # Equations of library code traced earlier know no line of the user; their caller does.
        source = self.source_of(eqn.source_info) or source
        if name == "jaxgraph_unpack":
            avals = [v.aval for v in eqn.outvars]
            leaves = self.packs.unpacked(inputs[0], eqn.params["spec"], avals)
            if leaves is not None:
                return leaves
        if name == "jaxgraph_repack":
            outputs = [Value(v.aval) for v in eqn.outvars]
            self.emit(eqn.primitive, eqn.params, inputs, outputs, source)
            self.packs.note_repack(self.eqns[-1])
            return outputs
        body_param = _BODY_OF.get(name)
        if body_param is not None and body_param in eqn.params:
            body = eqn.params[body_param]
            jaxpr, consts = _open(body)
            return self.inline(jaxpr, consts, inputs, source)
        if name == "scan" and self.may_unroll(eqn):
            return self.unroll(eqn, inputs, source)
        if name == "concatenate":
            inputs = [v for v in inputs if v.aval.size] or inputs  # empty pieces add nothing
            if len(inputs) == 1:
                return inputs
        if any(map(parts.is_complex, (*inputs[:1], *eqn.outvars[:1]))):
            return self.complex_equation(eqn, inputs, source)
        known = _fold(eqn, inputs)
        outputs = [Value(v.aval, k) for v, k in zip(eqn.outvars, known, strict=True)]
        self.emit(eqn.primitive, eqn.params, inputs, outputs, source, frozenset(eqn.effects))
        return outputs

    def complex_equation(self, eqn: Any, inputs: list[Value], source: str) -> list[Value]:
        """An equation of complex values, and what is made of their parts."""
        if eqn.primitive in parts.PARTS:
            return [self.parts_of(inputs[0], source)[parts.PARTS.index(eqn.primitive)]]
        outputs = [Value(v.aval) for v in eqn.outvars]
        self.emit(eqn.primitive, eqn.params, inputs, outputs, source, frozenset(eqn.effects))
        rule = parts.rule_of(eqn)
        if rule is None:
            return outputs
        pairs = [self.parts_of(v, source) if parts.is_complex(v) else [v] for v in inputs]

        def flat(*args: Any) -> list[Any]:
            rest = iter(args)
            paired = ([next(rest) for _ in pair] for pair in pairs)
            return rule(*(tuple(x) if len(x) == 2 else x[0] for x in paired))

        values = [v for pair in pairs for v in pair]
        made = self.insert_all(_traced(flat, *values), source, *values)
        for i, value in enumerate(outputs):
            self.note_parts(value, made[2 * i : 2 * i + 2])
        return outputs

    def parts_of(self, value: Value, source: str) -> list[Value]:
        """The real and the imaginary part of a complex value."""
        if id(value) not in self.parts:
            made = []
            for i, primitive in enumerate(parts.PARTS):
                (eqn,) = _traced(primitive.bind, value).jaxpr.eqns
                known = None if value.known is None else parts.taken_apart(value.known)[i]
                made.append(Value(eqn.outvars[0].aval, known))
                if known is None:
                    self.emit(eqn.primitive, eqn.params, [value], made[-1:], source)
            self.note_parts(value, made)
        return self.parts[id(value)]

    def note_parts(self, value: Value, made: list[Value]) -> None:
        self.parts[id(value)] = made
        self.complex.append(value)

    def emit(self, primitive, params, inputs, outputs, source, effects=frozenset()) -> None:
        self.eqns.append(FlatEqn(primitive, params, inputs, outputs, source, effects))

    def may_unroll(self, eqn: Any) -> bool:
        jaxpr, _ = _open(eqn.params["jaxpr"])
        length = eqn.params["length"]
        return (
            not eqn.effects
            and 0 < length <= self.max_unroll
            and length * count_eqns(jaxpr) <= _MAX_UNROLLED_EQNS
        )

    def unroll(self, eqn: Any, inputs: list[Value], source: str) -> list[Value]:
        """The iterations of a scan one after the other; a layer of a stacked input is a slice."""
        params = eqn.params
        length, reverse = params["length"], params["reverse"]
        num_consts, num_carry = scan_arity(params)
        jaxpr, body_consts = _open(params["jaxpr"])
        consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
        xs = inputs[num_consts + num_carry :]
        stacks: list[list[Value]] = [[] for _ in eqn.outvars[num_carry:]]
        slices = [_traced(lambda x: lax.index_in_dim(x, 0, 0, False), x) for x in xs]
        for i in reversed(range(length)) if reverse else range(length):
            layer = [
                self.insert(_at(i, sliced), source, x) for sliced, x in zip(slices, xs, strict=True)
            ]
            results = self.inline(jaxpr, body_consts, [*consts, *carry, *layer], source)
            carry = results[:num_carry]
            for stack, value in zip(stacks, results[num_carry:], strict=True):
                stack.append(value)
        if reverse:
            stacks = [stack[::-1] for stack in stacks]
        return [*carry, *(self.stack(pieces, source) for pieces in stacks)]

    def stack(self, pieces: Sequence[Value], source: str) -> Value:
        thin = _traced(lambda y: lax.expand_dims(y, (0,)), pieces[0])
        rows = [self.insert(thin, source, piece) for piece in pieces]
        return self.insert(_traced(lambda *rows: lax.concatenate(rows, 0), *rows), source, *rows)

    def insert(self, closed: Any, source: str, *values: Value) -> Value:
        """Inlines a function of one result."""
        (out,) = self.insert_all(closed, source, *values)
        return out

    def insert_all(self, closed: Any, source: str, *values: Value) -> list[Value]:
        """Inlines a function."""
        first = len(self.eqns)
        outputs = self.inline(closed.jaxpr, closed.consts, values)
        for eqn in self.eqns[first:]:
            eqn.source = source
        return outputs


def needed_eqns(eqns: Sequence[FlatEqn], wanted: set[int]) -> list[FlatEqn]:
    """Equations that a wanted value (by id) or an effect needs, in order."""
    needed = set(wanted)
    live = []
    for eqn in reversed(eqns):
        if eqn.effects or not needed.isdisjoint(map(id, eqn.outputs)):
            live.append(eqn)
            needed.update(map(id, eqn.inputs))
    return live[::-1]


def _traced(fun: Callable, *values: Value) -> Any:
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in values]
    return jax.make_jaxpr(fun)(*avals)


def _at(i: int, closed: Any) -> Any:
    """What takes the first layer of a stack, made to take layer ``i``. Tracing it again is slow."""
    if i == 0:
        return closed
    first, *rest = closed.jaxpr.eqns
    params = dict(first.params)
    for name, at in (("start_indices", i), ("limit_indices", i + 1)):
        params[name] = (at, *params[name][1:])
    eqns = [first.replace(params=params), *rest]
    return jex_core.ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)


def count_eqns(jaxpr: Any) -> int:
    """Equations of ``jaxpr`` as they will be after inlining."""
    total = 0
    for eqn in jaxpr.eqns:
        body_param = _BODY_OF.get(eqn.primitive.name) or (
            "jaxpr" if eqn.primitive.name == "scan" else None
        )
        if body_param is not None and body_param in eqn.params:
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            total += times * count_eqns(_open(eqn.params[body_param])[0])
        else:
            total += 1
    return total


def scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan; JAX 0.11 keeps them in a flat tree."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _open(body: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, consts) of a closed or an open jaxpr."""
    if hasattr(body, "jaxpr") and hasattr(body, "consts"):
        return body.jaxpr, body.consts
    return body, ()


def _literal(atom: Any) -> Value:
    return Value(atom.aval, np.asarray(atom.val, dtype=atom.aval.dtype))


def _source(source_info: Any) -> str:
    try:
        return source_info_util.summarize(source_info)
    except Exception:  # a line number is a courtesy; its absence must not stop the plan
        return ""


# Integer arithmetic on values known at plan time (layer numbers, offsets) is done here, so that an
# index like `i + 1` of an unrolled loop is a constant. Bounded, so that planning stays cheap.
_FOLD_LIMIT = 4096


def _small_known(array: Any) -> np.ndarray | None:
    if getattr(array, "size", _FOLD_LIMIT) >= _FOLD_LIMIT or isinstance(array, jax.core.Tracer):
        return None
    if not np.issubdtype(array.dtype, np.integer) and array.dtype != np.bool_:
        return None
    return np.asarray(array)


def _fold(eqn: Any, inputs: Sequence[Value]) -> list[np.ndarray | None]:
    unknown: list[np.ndarray | None] = [None] * len(eqn.outvars)
    for value in inputs:
        if value.known is None:
            return unknown
    fold = _FOLDABLE.get(eqn.primitive.name)
    if fold is None:
        return unknown
    for var in eqn.outvars:
        kind = getattr(var.aval.dtype, "kind", "")
        if kind not in "iub" or var.aval.size >= _FOLD_LIMIT:
            return unknown
    if any(v.aval.dtype.kind not in "iub" for v in inputs):
        return unknown
    (var,) = eqn.outvars
    with np.errstate(over="ignore"):
        out = np.asarray(fold(*[v.known for v in inputs], eqn.params))
    shape = var.aval.shape
    out = out.reshape(shape) if out.size == var.aval.size else np.broadcast_to(out, shape)
    return [out.astype(var.aval.dtype)]


def _rem(x: np.ndarray, y: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """With the sign of the dividend; it is what is left of a division by zero."""
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y)))


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    chosen = cases[0]
    for i, case in enumerate(cases[1:], start=1):
        chosen = np.where(which == i, case, chosen)
    return chosen


def _broadcast_in_dim(x: np.ndarray, *, shape, broadcast_dimensions, **_: Any) -> np.ndarray:
    sizes = [1] * len(shape)
    for size, d in zip(x.shape, broadcast_dimensions, strict=True):
        sizes[d] = size
    return x.reshape(sizes)  # the caller spreads it out


def _iota(*, dtype, shape, dimension, **_: Any) -> np.ndarray:
    line = np.arange(shape[dimension]).astype(dtype)
    return line.reshape([n if d == dimension else 1 for d, n in enumerate(shape)])


def _slice(x: np.ndarray, *, start_indices, limit_indices, strides) -> np.ndarray:
    return x[tuple(map(slice, start_indices, limit_indices, strides or [None] * x.ndim))]


# numpy's integers are XLA's. A call of JAX would take a millisecond, and a slice with other bounds
# a compilation.
_FOLDABLE: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, params: x + y,
    "sub": lambda x, y, params: x - y,
    "mul": lambda x, y, params: x * y,
    "neg": lambda x, params: np.negative(x),
    "max": lambda x, y, params: np.maximum(x, y),
    "min": lambda x, y, params: np.minimum(x, y),
    "rem": _rem,
    "lt": lambda x, y, params: x < y,
    "le": lambda x, y, params: x <= y,
    "gt": lambda x, y, params: x > y,
    "ge": lambda x, y, params: x >= y,
    "eq": lambda x, y, params: x == y,
    "ne": lambda x, y, params: x != y,
    "and": lambda x, y, params: x & y,
    "or": lambda x, y, params: x | y,
    "not": lambda x, params: ~x,
    "select_n": lambda which, *xs: _select(which, *xs[:-1]),
    "convert_element_type": lambda x, params: x,
    "broadcast_in_dim": lambda x, params: _broadcast_in_dim(x, **params),
    "reshape": lambda x, params: x.transpose(params.get("dimensions")),
    "squeeze": lambda x, params: x,
    "slice": lambda x, params: _slice(x, **params),
    "concatenate": lambda *xs: np.concatenate(xs[:-1], xs[-1]["dimension"]),
    "iota": lambda params: _iota(**params),
    "stop_gradient": lambda x, params: x,
    "copy": lambda x, params: x,
}
