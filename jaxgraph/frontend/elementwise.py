"""Elementwise primitives of ``jax.lax`` and the expression instructions they become."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jaxgraph.frontend.flatten import FlatEqn
from jaxgraph.graph import dtypes
from jaxgraph.graph.ir import Graph, Tensor

# Primitive name -> instruction of ffi/core/expr.h, where operands and result share one dtype.
_UNARY = {
    "neg": "neg",
    "abs": "abs",
    "sign": "sign",
    "floor": "floor",
    "ceil": "ceil",
    "not": "not",
    "exp": "exp",
    "exp2": "exp2",
    "expm1": "expm1",
    "log": "log",
    "log1p": "log1p",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "cbrt": "cbrt",
    "sin": "sin",
    "cos": "cos",
    "tan": "tan",
    "asin": "asin",
    "acos": "acos",
    "atan": "atan",
    "sinh": "sinh",
    "cosh": "cosh",
    "tanh": "tanh",
    "asinh": "asinh",
    "acosh": "acosh",
    "atanh": "atanh",
    "logistic": "logistic",
    "erf": "erf",
    "erfc": "erfc",
    "erf_inv": "erf_inv",
    "population_count": "popcnt",
    "clz": "clz",
}
_BINARY = {
    "add": "add",
    "add_any": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    "rem": "rem",
    "atan2": "atan2",
    "max": "max",
    "min": "min",
    "and": "and",
    "or": "or",
    "xor": "xor",
    "shift_left": "shl",
    "shift_right_logical": "shr_logical",
    "shift_right_arithmetic": "shr_arithmetic",
}
_COMPARE = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}
_IDENTITY = frozenset({"copy", "copy_p", "stop_gradient", "optimization_barrier", "name", "pvary"})
_OTHER = frozenset(
    {
        "is_finite",
        "integer_pow",
        "square",
        "one_minus_square",
        "log2",
        "nextafter",
        "pow",
        "round",
        "select_n",
        "clamp",
        "convert_element_type",
        "reduce_precision",
    }
)

NAMES = frozenset(_UNARY) | frozenset(_BINARY) | frozenset(_COMPARE) | _IDENTITY | _OTHER

# Costly enough that computing one twice is worse than storing it.
TRANSCENDENTAL = frozenset(
    [
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "cbrt",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
        "logistic",
        "erf",
        "erfc",
        "erf_inv",
        "pow",
        "atan2",
    ]
)


def why_not(eqn: FlatEqn) -> str | None:
    """Why this equation cannot be native, or None."""
    name = eqn.primitive.name
    if eqn.params.get("accuracy") is not None:
        return "asks for a result accuracy of its own"
    if name == "pow" and not dtypes.is_float(eqn.outputs[0].aval.dtype):
        return "raises integers to powers"
    if name == "reduce_precision" and _as_precise(eqn) is None:
        return "rounds to a precision that is no dtype's"
    if name == "integer_pow" and not -32768 <= eqn.params["y"] <= 32767:
        return "raises to a power beyond 16 bits"
    return None


def lower(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> list[Tensor]:
    """Appends the nodes of an elementwise equation and returns its outputs."""
    name = eqn.primitive.name
    if name in _IDENTITY:
        return inputs
    out = eqn.outputs[0].aval
    operands = [broadcast_scalar(graph, t, out.shape, label) for t in inputs]

    def node(op: str, *args: Tensor, aux: Any = 0) -> Tensor:
        return graph.add("elementwise", args, out.shape, out.dtype, label, op=op, aux=aux)

    if name in _UNARY:
        return [node(_UNARY[name], *operands)]
    if name in _BINARY:
        return [node(_BINARY[name], *operands)]
    if name in _COMPARE:
        return [node(_COMPARE[name], *operands)]
    if name == "is_finite":
        return [node("is_finite", *operands)]
    if name == "square":
        return [node("mul", operands[0], operands[0])]
    if name == "one_minus_square":
        one = constant(graph, 1, out.shape, out.dtype, label)
        return [node("mul", node("add", one, *operands), node("sub", one, *operands))]
    if name == "log2":
        factor = constant(graph, 1 / np.log(2), out.shape, out.dtype, label)
        return [node("mul", node("log", *operands), factor)]
    if name == "nextafter":
        return [_next_after(graph, *operands, label=label)]
    if name == "reduce_precision":
        narrow = convert(graph, operands[0], _as_precise(eqn), label)
        return [convert(graph, narrow, out.dtype, label)]
    if name == "pow":
        return [node("pow", *[convert(graph, t, out.dtype, label) for t in operands])]
    if name == "integer_pow":
        return [node("integer_pow", *operands, aux=int(eqn.params["y"]))]
    if name == "round":
        even = int(eqn.params["rounding_method"]) == 1  # lax.RoundingMethod.TO_NEAREST_EVEN
        return [node("round_even" if even else "round_away", *operands)]
    if name == "select_n":
        return [_select(graph, *operands, label=label)]
    if name == "clamp":
        return [node("clamp", *operands)]
    return [convert(graph, operands[0], out.dtype, label)]


def _select(graph: Graph, which: Tensor, *cases: Tensor, label: str) -> Tensor:
    """``cases[which]``, element by element; which of them is meant may be a boolean or a number."""
    chosen = cases[0]
    for i, case in enumerate(cases[1:], start=1):
        is_this = which
        if which.dtype != np.bool_:
            number = constant(graph, i, which.shape, which.dtype, label)
            is_this = graph.add(
                "elementwise", (which, number), which.shape, np.bool_, label, op="eq", aux=0
            )
        chosen = graph.add(
            "elementwise",
            (is_this, chosen, case),
            case.shape,
            case.dtype,
            label,
            op="select",
            aux=0,
        )
    return chosen


class Builder:
    """Elementwise operations on tensors of one shape, in one dtype."""

    def __init__(self, graph: Graph, like: Tensor, dtype, label: str):
        self.graph, self.shape, self.label = graph, like.shape, label
        self.dtype = np.dtype(dtype)

    def __call__(self, op: str, *operands: Tensor | float, dtype=None, aux: int = 0) -> Tensor:
        tensors = [self.number(x) if isinstance(x, int | float) else x for x in operands]
        dtype = self.dtype if dtype is None else dtype
        return self.graph.add("elementwise", tensors, self.shape, dtype, self.label, op=op, aux=aux)

    def number(self, value: float) -> Tensor:
        return constant(self.graph, value, self.shape, self.dtype, self.label)

    def test(self, op: str, *operands: Tensor | float) -> Tensor:
        return self(op, *operands, dtype=np.bool_)

    def choose(self, condition: Tensor, yes: Tensor | float, no: Tensor | float) -> Tensor:
        return self("select", condition, no, yes)


def _next_after(graph: Graph, x: Tensor, y: Tensor, label: str) -> Tensor:
    """The neighbour of ``x`` on the side of ``y``, by their bits: subnormal numbers count."""
    dtype, bits = x.dtype, np.dtype(f"int{8 * x.dtype.itemsize}")
    op = Builder(graph, x, bits, label)
    zero, one, largest = op.number(0), op.number(1), op.number(np.iinfo(bits).max)
    infinity = op.number(int(np.array(np.inf, dtype).view(bits)))
    from_, to = (op("bitcast", t, aux=dtypes.code_of(dtype)) for t in (x, y))
    size, to_size = op("and", from_, largest), op("and", to, largest)
    apart = op.test("lt", op("xor", from_, to), zero)  # their signs differ
    shrinks = op.test("or", apart, op.test("gt", size, to_size))
    moved = op("add", from_, op.choose(shrinks, -1, one))
    least = op("or", op("and", to, op.number(np.iinfo(bits).min)), one)
    moved = op.choose(op.test("eq", size, zero), least, moved)
    zeros = op.test("eq", op("or", size, to_size), zero)
    moved = op.choose(op.test("or", zeros, op.test("eq", from_, to)), to, moved)
    moved = op.choose(op.test("gt", to_size, infinity), to, moved)  # NaN
    moved = op.choose(op.test("gt", size, infinity), from_, moved)
    return op("bitcast", moved, dtype=dtype, aux=dtypes.code_of(bits))


def _as_precise(eqn: FlatEqn) -> np.dtype | None:
    """The dtype whose values are those that ``reduce_precision`` keeps.

    Not f16: of its subnormal numbers ``reduce_precision`` makes zeros.
    """
    own = eqn.inputs[0].aval.dtype
    bits = (eqn.params["exponent_bits"], eqn.params["mantissa_bits"])
    info = ml_dtypes.finfo(own)
    if bits[0] >= info.nexp and bits[1] >= info.nmant:
        return np.dtype(own)
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    return bfloat16 if own == np.float32 and bits == (8, 7) else None


def constant(graph: Graph, value: Any, shape: tuple[int, ...], dtype, label: str) -> Tensor:
    """``value`` in every element of ``shape``."""
    dtype = np.dtype(dtype)
    scalar = graph.add("const", (), (), dtype, label, value=dtypes.register_bits(value, dtype))
    return scalar if shape == () else broadcast_scalar(graph, scalar, shape, label)


def convert(graph: Graph, x: Tensor, dtype, label: str) -> Tensor:
    """``x`` in another dtype; ``x`` itself where nothing changes."""
    if x.dtype == np.dtype(dtype):
        return x
    aux = dtypes.code_of(x.dtype)
    return graph.add("elementwise", (x,), x.shape, dtype, label, op="convert", aux=aux)


def broadcast_scalar(graph: Graph, x: Tensor, shape: tuple[int, ...], label: str) -> Tensor:
    """``x`` in ``shape``: lax lets a scalar, or dimensions of size one, stand beside an array."""
    if x.shape == tuple(shape):
        return x
    dims = tuple(range(len(x.shape)))
    return graph.add("broadcast", (x,), shape, x.dtype, label, dims=dims)
