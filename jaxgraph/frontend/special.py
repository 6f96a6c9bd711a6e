"""Gamma and Bessel functions as series of elementwise operations, and orders of all floats.

The series are those that XLA's results come from, up to rounding: Lanczos' approximation of the
gamma function (g = 7, n = 9), and Chebyshev polynomials of the scaled Bessel functions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from jaxgraph.frontend.elementwise import Builder, convert
from jaxgraph.frontend.shaping import bitcast
from jaxgraph.graph import dtypes
from jaxgraph.graph.ir import Graph, Tensor

_LANCZOS_G = 7.0
_LANCZOS_FIRST = 0.99999999999980993
_LANCZOS = (
    676.5203681218851,
    -1259.1392167224028,
    771.32342877765313,
    -176.61502916214059,
    12.507343278686905,
    -0.13857109526572012,
    9.9843695780195716e-6,
    1.5056327351493116e-7,
)


def lower(graph: Graph, name: str, x: Tensor, label: str) -> Tensor:
    """Appends the nodes of one of `NAMES`; f16 and bf16 are computed in f32."""
    inner = np.float64 if x.dtype == np.float64 else np.float32
    wide = convert(graph, x, inner, label)
    result = _FUNCTIONS[name](Builder(graph, x, inner, label), wide)
    return convert(graph, result, x.dtype, label)


def compare_totally(graph: Graph, name: str, x: Tensor, y: Tensor, label: str) -> Tensor:
    """Appends a comparison in the order -NaN, -inf, .., -0, 0, .., inf, NaN."""
    if dtypes.is_float(x.dtype):
        x, y = (_total_key(graph, t, label) for t in (x, y))
    return graph.add("elementwise", (x, y), x.shape, np.bool_, label, op=TOTAL[name], aux=0)


def _total_key(graph: Graph, x: Tensor, label: str) -> Tensor:
    """An integer for each float, in the order of its bits: those below the sign turn with it."""
    integer = np.dtype(f"int{8 * x.dtype.itemsize}")
    op = Builder(graph, x, integer, label)
    # As it lies in memory: a register holds 16-bit floats as f32, which drops the sign of a NaN on
    # a GPU.
    bits = bitcast(graph, x, x.shape, integer, label)
    sign = op("shr_arithmetic", bits, 8 * x.dtype.itemsize - 1)
    return op("xor", bits, op("and", sign, int(np.iinfo(integer).max)))


def _reflected(op: Builder, x: Tensor) -> tuple[Tensor, Tensor]:
    """(whether the argument is below a half, the argument above it less one)."""
    reflects = op.test("lt", x, 0.5)
    return reflects, op.choose(reflects, op("neg", x), op("sub", x, 1.0))


def _log_of_shifted(op: Builder, z: Tensor) -> tuple[Tensor, Tensor]:
    """(t, log t) where t = z + g + 1/2; the logarithm keeps the small digits of z."""
    shift = _LANCZOS_G + 0.5
    log = op("add", op("log1p", op("div", z, shift)), math.log(shift))
    return op("add", z, shift), log


def _lgamma(op: Builder, x: Tensor) -> Tensor:
    reflects, z = _reflected(op, x)
    series: Tensor | float = _LANCZOS_FIRST
    for i, c in enumerate(_LANCZOS):
        series = op("add", series, op("div", c, op("add", z, i + 1.0)))
    t, log_t = _log_of_shifted(op, z)
    # log(sqrt(2 pi) t ** (z + 1/2) exp(-t) series), with t taken out of the power.
    power = op("sub", op("add", z, 0.5), op("div", t, log_t))
    log_y = op("add", op("mul", power, log_t), 0.5 * math.log(2 * math.pi))
    log_y = op("add", log_y, op("log", series))

    # gamma(x) gamma(1 - x) = pi / sin(pi x), of which only the part of x behind the point counts.
    size = op("abs", x)
    rest = op("sub", size, op("floor", size))
    rest = op.choose(op.test("gt", rest, 0.5), op("sub", 1.0, rest), rest)
    log_sine = op("log", op("sin", op("mul", rest, math.pi)))
    mirrored = op("sub", op("sub", math.log(math.pi), log_sine), log_y)
    mirrored = op.choose(op.test("is_finite", log_sine), mirrored, op("neg", log_sine))
    result = op.choose(reflects, mirrored, log_y)
    return op.choose(op.test("eq", size, math.inf), math.inf, result)


def _digamma(op: Builder, x: Tensor) -> Tensor:
    reflects, z = _reflected(op, x)
    above: Tensor | float = 0.0
    below: Tensor | float = _LANCZOS_FIRST
    for i, c in enumerate(_LANCZOS):
        at = op("add", z, i + 1.0)
        above = op("sub", above, op("div", c, op("mul", at, at)))
        below = op("add", below, op("div", c, at))
    t, log_t = _log_of_shifted(op, z)
    y = op("sub", op("add", log_t, op("div", above, below)), op("div", _LANCZOS_G, t))

    # digamma(1 - x) - digamma(x) = pi / tan(pi x)
    rest = op("add", x, op("abs", op("floor", op("add", x, 0.5))))
    angle = op("mul", rest, math.pi)
    slope = op("div", op("mul", op("cos", angle), math.pi), op("sin", angle))
    result = op.choose(reflects, op("sub", y, slope), y)
    pole = op("and", op.test("le", x, 0.0), op.test("eq", x, op("floor", x)), dtype=np.bool_)
    result = op.choose(pole, math.nan, result)
    return op.choose(op.test("eq", x, 0.0), -math.inf, result)


def _bessel_i0e(op: Builder, x: Tensor) -> Tensor:
    return _scaled_bessel(op, 0, op("abs", x))


def _bessel_i1e(op: Builder, x: Tensor) -> Tensor:
    size = op("abs", x)
    value = op("mul", _scaled_bessel(op, 1, size), op.choose(op.test("lt", x, 0.0), -1.0, 1.0))
    return op.choose(op.test("eq", x, 0.0), x, value)  # the sign of zero


def _scaled_bessel(op: Builder, order: int, x: Tensor) -> Tensor:
    """exp(-x) I(x) of a number that is not negative."""
    small = _chebyshev(op, _coefficients(order, False, op.dtype.name), op("mul", x, 0.5))
    if order == 1:  # an odd function: a polynomial times x, exact near zero
        small = op("mul", small, x)
    large = _chebyshev(op, _coefficients(order, True, op.dtype.name), op("div", 32.0, x))
    large = op("div", large, op("sqrt", x))
    return op.choose(op.test("le", x, _BORDER), small, large)


def _chebyshev(op: Builder, coefficients: tuple[float, ...], w: Tensor) -> Tensor:
    """The sum of c[n] T_n(w / 2 - 1), by Clenshaw's recurrence."""
    twice = op("sub", w, 2.0)
    b1: Tensor | float = 0.0
    b2: Tensor | float = 0.0
    for c in coefficients[:0:-1]:
        b1, b2 = op("add", op("sub", op("mul", twice, b1), b2), c), b1
    return op("add", op("sub", op("mul", op("mul", twice, 0.5), b1), b2), coefficients[0])


_BORDER = 8.0


@functools.cache
def _coefficients(order: int, large: bool, dtype: str) -> tuple[float, ...]:
    """Chebyshev coefficients of exp(-x) I(x) / x**order, or of sqrt(x) exp(-x) I(x) beyond 8.

    As many as the dtype has digits for, by interpolation of the integral that defines I; in long
    doubles, since rounding errors of each coefficient add up.
    """
    pi = 4 * np.arctan(np.longdouble(1))

    def middles(count: int) -> np.ndarray:
        return (np.arange(count) + np.longdouble(0.5)) * (pi / count)

    angles, nodes = middles(4096), middles(_NODES)
    y = np.cos(nodes)
    x = 16 / (y + 1) if large else 4 * (y + 1)
    terms = np.exp(x[:, None] * (np.cos(angles) - 1)) * np.cos(order * angles)
    values = terms.mean(axis=1) * (np.sqrt(x) if large else 1 / x**order)
    exact = 2 * (values * np.cos(np.arange(_NODES)[:, None] * nodes)).mean(axis=1)
    exact[0] /= 2
    count = int(np.argmax(np.abs(exact) < np.finfo(dtype).eps / 4))
    return tuple(float(c) for c in exact[:count])


_NODES = 48
_FUNCTIONS: dict[str, Callable[[Builder, Tensor], Tensor]] = {
    "lgamma": _lgamma,
    "digamma": _digamma,
    "bessel_i0e": _bessel_i0e,
    "bessel_i1e": _bessel_i1e,
}
NAMES = frozenset(_FUNCTIONS)
TOTAL = {"eq_to": "eq", "lt_to": "lt", "le_to": "le"}
