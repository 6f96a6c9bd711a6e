"""What happens to the buffer of a packed tree, as two primitives.

`unpack` gives the leaves that lie in a buffer, `repack` the buffer with other leaves. Planning
knows them by name, and takes each leaf for an array of its own (`jaxgraph.frontend.packs`). To
everybody else they are what they are made of: slices of bytes, and updates of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.extend as jex
from jax.interpreters import ad, mlir

from jaxgraph.runtime.plain import mean_the_plain_function, plain

if TYPE_CHECKING:
    from jaxgraph.pack import PackSpec

unpack_p: Any = jex.core.Primitive("jaxgraph_unpack")
repack_p: Any = jex.core.Primitive("jaxgraph_repack")


def unpack(buffer: jax.Array, spec: PackSpec) -> list[jax.Array]:
    """The array leaves, as they lie in the buffer."""

    def leaves(buffer: jax.Array) -> list[jax.Array]:
        return [leaf.read(buffer) for leaf in spec.arrays]

    return unpack_p.bind(buffer, jaxpr=jax.make_jaxpr(leaves)(buffer), spec=spec)


def repack(buffer: jax.Array, leaves: Sequence[jax.Array], spec: PackSpec) -> jax.Array:
    """The buffer with other array leaves, given as they lie in it."""

    def written(buffer: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        return [spec.write(buffer, list(zip(spec.arrays, leaves, strict=True)))]

    jaxpr = jax.make_jaxpr(written)(buffer, *leaves)
    (out,) = repack_p.bind(buffer, *leaves, jaxpr=jaxpr, spec=spec)
    return out


def _refuse_tangents(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Bytes carry no derivative: rather an error than one that is lost without a word."""
    tangents = [None if isinstance(t, ad.Zero) else t for t in tangents]
    if any(t is not None and t.dtype != jax.dtypes.float0 for t in tangents):
        raise TypeError(
            "a packed tree is bytes, which cannot be differentiated: pass the tree itself, "
            "packed.unpack(), to a function of which a derivative is taken"
        )
    out = repack_p.bind(*primals, **params)
    return out, [ad.Zero.from_primal_value(value) for value in out]


for _primitive in (unpack_p, repack_p):
    mean_the_plain_function(_primitive)
    mlir.register_lowering(_primitive, mlir.lower_fun(plain, multiple_results=True))
ad.primitive_jvps[repack_p] = _refuse_tangents
