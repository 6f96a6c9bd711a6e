"""How a function of `jaxgraph.ops` becomes a kernel call.

Its definition is plain JAX. Where a native backend exists, it is planned as a split of a wrapped
function would be, and lowered to one FFI call that launches the kernels; XLA may capture the call
in its command buffers. Inside `jaxgraph.wrap` the definition itself is planned with the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend as jex
from jax.interpreters import mlir

from jaxgraph.errors import PlanError
from jaxgraph.frontend import contraction
from jaxgraph.frontend.flatten import flatten
from jaxgraph.options import Options
from jaxgraph.passes import profitability
from jaxgraph.passes.splits import NATIVE, cut
from jaxgraph.plan.program import NativeSplit, plan_native
from jaxgraph.plan.step import Split, evaluate
from jaxgraph.runtime import native
from jaxgraph.runtime.ffi_call import kernel_call
from jaxgraph.runtime.plain import mean_the_plain_function, plain
from jaxgraph.runtime.primitive import why_not_local

kernel_p: Any = jex.core.Primitive("jaxgraph_kernel")
mean_the_plain_function(kernel_p)


def call(definition: Callable[..., Any], *arrays: Any, **static: Any) -> Any:
    """Calls `definition(*arrays, **static)` as a kernel.

    Args:
      definition: a function of arrays that returns one array.
      *arrays: its operands; None stands for itself.
      **static: hashable settings.
    """
    return _jitted(definition, tuple(sorted(static.items())), *arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _jitted(definition: Callable[..., Any], static: tuple[Any, ...], *arrays: Any) -> Any:
    given = [a for a in arrays if a is not None]

    def of_given(*values: Any) -> Any:
        rest = iter(values)
        filled = [None if a is None else next(rest) for a in arrays]
        return definition(*filled, **dict(static))

    jaxpr = jax.make_jaxpr(of_given)(*given)
    (out,) = kernel_p.bind(*given, jaxpr=jaxpr, name=definition.__name__.strip("_"))
    return out


def plan(jaxpr: Any, name: str) -> tuple[NativeSplit, Callable[..., list[Any]]] | None:
    """The definition as one native split, and a function that calls it; None: it has no such form.

    Args:
      jaxpr: the closed jaxpr of the definition.
      name: what the kernel is called.
    """
    step = flatten(jaxpr, max_unroll=0)
    products = [e for e in step.eqns if e.primitive.name == "dot_general"]
    limits = profitability.Limits(streams=native.streams_many_rows())
    attends = name.startswith("attention")  # its rows are the heads that share keys and values
    for e in products:
        times = profitability.times_of_weight(e, limits)
        if attends:
            times = profitability.TIMES_BETWEEN_ACTIVATIONS
        if contraction.rows(e) > times * limits.max_rows:
            return None  # bound by arithmetic: XLA's library is the better one
    cuts = cut(step).runs
    if len(cuts) != 1 or cuts[0].backend != NATIVE:
        return None
    (run,) = cuts
    try:
        split = plan_native(
            run,
            name=f"jaxgraph.ops.{name}",
            function_id=1,
            split=0,
            exec_options=Options().exec_options(),
            labels={id(v): f"operand {i}" for i, v in enumerate(step.inputs)},
        )
    except PlanError:
        return None

    def call_kernel(*args: Any) -> list[Any]:
        whole = Split(run.backend, len(run.eqns), split, run, 0)
        return evaluate(step, [whole], args, lambda _, operands: kernel_call(split, operands))

    return split, call_kernel


def _lower_for(platform: str) -> Any:
    def lower(ctx: mlir.LoweringRuleContext, *args: Any, jaxpr: Any, name: str) -> Any:
        if native.why_unsupported(platform) is None and why_not_local(ctx) is None:
            planned = plan(jaxpr, name)
            if planned is not None:
                return mlir.lower_fun(planned[1], multiple_results=True)(ctx, *args)
        return _lower_plain(ctx, *args, jaxpr=jaxpr, name=name)

    return lower


_lower_plain = mlir.lower_fun(plain, multiple_results=True)
mlir.register_lowering(kernel_p, _lower_plain)
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(kernel_p, _lower_for(_platform), platform=_platform)
