"""Primitives that stand for a plain function: everything but their lowering is that function's.

Their equations hold its jaxpr in the parameter `jaxpr`. Other parameters are the lowering's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend as jex
from jax.interpreters import ad, batching


def plain(*args: Any, jaxpr: Any, **params: Any) -> list[Any]:
    """The function as its author wrote it."""
    del params
    return jex.core.jaxpr_as_fun(jaxpr)(*args)


def mean_the_plain_function(primitive: Any) -> None:
    """Gives a primitive with a parameter `jaxpr` all rules but its lowerings.

    Evaluated, differentiated, transposed or batched it is the plain function.
    """
    primitive.multiple_results = True
    # Not a jitted function: under jax.disable_jit that would come back here for ever.
    primitive.def_impl(plain)
    primitive.def_effectful_abstract_eval(_abstract_eval)
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    batching.primitive_batchers[primitive] = _batch


def _abstract_eval(*avals: Any, jaxpr: Any, **params: Any) -> tuple[Any, Any]:
    del avals, params
    return jaxpr.out_avals, jaxpr.effects


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    active = [not isinstance(t, ad.Zero) for t in tangents]

    def of_active(*values: Any) -> list[Any]:
        return plain(*_merge(active, values, primals), **params)

    return jax.jvp(
        of_active,
        tuple(p for p, is_active in zip(primals, active, strict=True) if is_active),
        tuple(t for t, is_active in zip(tangents, active, strict=True) if is_active),
    )


def _batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    out = jax.vmap(lambda *args: plain(*args, **params), in_axes=tuple(dims))(*args)
    return out, [0] * len(out)


def _transpose(cotangents: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
    linear = [ad.is_undefined_primal(a) for a in args]

    def of_linear(*values: Any) -> list[Any]:
        return plain(*_merge(linear, values, args), **params)

    unknown = [a.aval for a, is_linear in zip(args, linear, strict=True) if is_linear]
    transposed = jax.linear_transpose(
        of_linear, *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in unknown]
    )
    results = iter(transposed([ad.instantiate_zeros(ct) for ct in cotangents]))
    return [next(results) if is_linear else None for is_linear in linear]


def _merge(chosen: Sequence[bool], values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """`others`, with the chosen places filled from `values` in order."""
    given = iter(values)
    return [next(given) if c else other for c, other in zip(chosen, others, strict=True)]
