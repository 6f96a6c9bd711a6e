"""The primitive behind `wrap`: a planned function inside JAX's traces.

An equation of it holds the jaxpr of the function as the user wrote it, and the plan made from it.
Only the lowering to a platform with a native backend looks at the plan; everything else JAX can do
to a function (evaluate, differentiate, batch, transpose, lower for a TPU) it does to the jaxpr.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend as jex
from jax.interpreters import ad, batching, mlir

from jaxgraph.runtime import native


class Planned:
    """Parameter of an equation: what planning came to. Compared by identity.

    Attributes:
      plan: the plan; None: there is none.
      jaxpr: the planned function, native splits as FFI calls; None: the plain function runs.
      why_plain: why there is no plan.
      plain_lowerings: why the plain function was lowered although there is a plan, by platform.
    """

    def __init__(self, plan: Any, jaxpr: Any, why_plain: str | None = None):
        self.plan = plan
        self.jaxpr = jaxpr
        self.why_plain = why_plain
        self.plain_lowerings: dict[str, str] = {}

    def __repr__(self) -> str:
        return "plain" if self.jaxpr is None else "planned"


graphed_call_p = jex.core.Primitive("jaxgraph_call")
graphed_call_p.multiple_results = True


def _plain(*args: Any, jaxpr: Any, planned: Planned) -> list[Any]:
    """The function as the user wrote it."""
    del planned
    return jex.core.jaxpr_as_fun(jaxpr)(*args)


# Not a jitted function: under jax.disable_jit that would come back here for ever.
graphed_call_p.def_impl(_plain)


@graphed_call_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, jaxpr: Any, planned: Planned) -> tuple[Any, Any]:
    del avals, planned
    return jaxpr.out_avals, jaxpr.effects


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    active = [not isinstance(t, ad.Zero) for t in tangents]

    def of_active(*values: Any) -> list[Any]:
        return _plain(*_merge(active, values, primals), **params)

    return jax.jvp(
        of_active,
        tuple(p for p, is_active in zip(primals, active, strict=True) if is_active),
        tuple(t for t, is_active in zip(tangents, active, strict=True) if is_active),
    )


def _batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    out = jax.vmap(lambda *args: _plain(*args, **params), in_axes=tuple(dims))(*args)
    return out, [0] * len(out)


def _transpose(cotangents: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
    linear = [ad.is_undefined_primal(a) for a in args]

    def of_linear(*values: Any) -> list[Any]:
        return _plain(*_merge(linear, values, args), **params)

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


ad.primitive_jvps[graphed_call_p] = _jvp
ad.primitive_transposes[graphed_call_p] = _transpose
batching.primitive_batchers[graphed_call_p] = _batch


def _why_not_local(ctx: mlir.LoweringRuleContext) -> str | None:
    """Why the operands may be spread over devices here; a native call needs them whole."""
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.ShardingContext):
        if axes.num_devices > 1:
            return f"the operands are sharded by JAX over {axes.num_devices} devices"
    elif isinstance(axes, mlir.SPMDAxisContext):
        automatic = [
            str(name)
            for name, size in axes.mesh.shape.items()
            if size > 1 and name not in axes.manual_axes
        ]
        if automatic:
            return f"mesh axes {automatic} are not manual in this shard_map"
    return None


def _lower_for(platform: str) -> Any:
    def lower(ctx: mlir.LoweringRuleContext, *args: Any, jaxpr: Any, planned: Planned) -> Any:
        reason = planned.why_plain or native.why_unsupported(platform) or _why_not_local(ctx)
        if reason is not None:
            planned.plain_lowerings[platform] = reason
            return _lower_plain(ctx, *args, jaxpr=jaxpr, planned=planned)
        planned.plain_lowerings.pop(platform, None)
        run = jex.core.jaxpr_as_fun(planned.jaxpr)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *args)

    return lower


_lower_plain = mlir.lower_fun(_plain, multiple_results=True)
mlir.register_lowering(graphed_call_p, _lower_plain)
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(graphed_call_p, _lower_for(_platform), platform=_platform)
