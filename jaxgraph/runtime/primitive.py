"""The primitive behind `wrap`: a planned function inside JAX's traces.

An equation of it holds the jaxpr of the function as the user wrote it, and the plan made from it.
Only the lowering to a platform with a native backend looks at the plan; everything else JAX can do
to a function (evaluate, differentiate, batch, transpose, lower for a TPU) it does to the jaxpr.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.extend as jex
from jax.interpreters import mlir

from jaxgraph.runtime import native
from jaxgraph.runtime.plain import mean_the_plain_function, plain


class Planned:
    """Parameter of an equation: what planning came to. Compared by identity.

    Attributes:
      plan: the plan; None: there is none.
      jaxpr: the planned function, native splits as FFI calls; None: the plain function runs,
        for want of a plan or because the plan leaves everything to XLA.
      why_plain: why there is no plan.
      notes: what else is worth knowing of the call: sentences for `explain`.
      plain_lowerings: why the plain function was lowered although there is a plan, by platform.
    """

    def __init__(
        self, plan: Any, jaxpr: Any, why_plain: str | None = None, notes: Sequence[str] = ()
    ):
        self.notes = tuple(notes)
        self.plan = plan
        self.jaxpr = jaxpr
        self.why_plain = why_plain
        self.plain_lowerings: dict[str, str] = {}

    def __repr__(self) -> str:
        return "plain" if self.jaxpr is None else "planned"


graphed_call_p = jex.core.Primitive("jaxgraph_call")
mean_the_plain_function(graphed_call_p)


def why_not_local(ctx: mlir.LoweringRuleContext) -> str | None:
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
        if planned.jaxpr is None:
            return _lower_plain(ctx, *args, jaxpr=jaxpr, planned=planned)
        reason = native.why_unsupported(platform) or why_not_local(ctx)
        if reason is not None:
            planned.plain_lowerings[platform] = reason
            return _lower_plain(ctx, *args, jaxpr=jaxpr, planned=planned)
        planned.plain_lowerings.pop(platform, None)
        run = jex.core.jaxpr_as_fun(planned.jaxpr)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *args)

    return lower


_lower_plain = mlir.lower_fun(plain, multiple_results=True)
mlir.register_lowering(graphed_call_p, _lower_plain)
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(graphed_call_p, _lower_for(_platform), platform=_platform)
