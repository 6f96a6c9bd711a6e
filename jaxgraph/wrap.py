"""wrap: a function like `jax.jit`'s, planned on its first call and replayed from graphs later."""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxgraph import pack as packing
from jaxgraph.explain import Explanation, Site, explain_plan
from jaxgraph.observe import Observed
from jaxgraph.options import Options
from jaxgraph.runtime import complaints, native
from jaxgraph.runtime.arguments import FlatCall, Parameters, call_unpacked
from jaxgraph.runtime.constants import ClosedOverArrays, Constants
from jaxgraph.runtime.primitive import Planned, graphed_call_p

# Traces of one call that may each find new closed-over arrays: one, where nothing is strange.
_MOST_RETRACES = 8

# From this size on, closed-over arrays are worth a note.
_NOTED_BYTES = 1 << 20

# Up to this size results may get slots in the executor (kMaxSlotBytes in ffi/core/placement.h).
_SMALL_BYTES = 1 << 20

_MUTABLE = Planned(None, None, "the function reads or writes mutable arrays (jax.Ref)")

_ordinals: dict[str, itertools.count] = collections.defaultdict(itertools.count)
_PjitFunction = type(jax.jit(lambda: None))
_config: Any = jax.config  # whose attributes type checkers do not know in every version


def wrap(
    fun: Callable[..., Any],
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    options: Options | None = None,
) -> GraphedFunction:
    """Makes a function that computes what `jax.jit(fun)` does, from captured graphs.

    Args:
      fun: a function of pytrees of arrays. A `jax.jit` function is taken apart: its donated and
        static arguments are not known here, so give them to `wrap`.
      donate_argnums: positions of arguments whose buffers may be reused, as for `jax.jit`. Donate
        the KV cache, and return it in the order it came in: then it is updated in place.
      static_argnums: positions of arguments that are compile-time constants, as for `jax.jit`.
      options: settings; default `Options()`, which reads the environment.

    Returns:
      A callable; see `GraphedFunction`.

    Raises:
      TypeError: `fun` is not callable, or is already wrapped.
      ValueError: `fun` has no argument at such a position, or one is both static and donated.
    """
    return _wrapped(
        fun,
        _as_tuple(donate_argnums),
        _as_tuple(static_argnums),
        Options() if options is None else options,
    )


def _wrapped(
    fun: Callable[..., Any],
    donate_argnums: tuple[int, ...],
    static_argnums: tuple[int, ...],
    options: Options,
    ordinal: int | None = None,
) -> GraphedFunction:
    """`ordinal` None: the next one of functions of this name."""
    if isinstance(fun, GraphedFunction):
        raise TypeError(f"{fun.name} is already wrapped: pass the function that it was made from")
    if not callable(fun):
        raise TypeError(f"wrap expects a function, got {type(fun).__name__}")
    inner = getattr(fun, "__wrapped__") if isinstance(fun, _PjitFunction) else fun  # noqa: B009
    number = next(_ordinals[_qualified_name(inner)]) if ordinal is None else ordinal
    return GraphedFunction(inner, donate_argnums, static_argnums, options, number)


def explain(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """How `wrap(fun)` would run a call and why, without running it.

    Args:
      fun: a wrapped function, a plain one, or a `jax.jit` function without static arguments, whose
        donated arguments are then known.
      *args: arguments of such a call; of a wrapped function none means the last planned call's.
      **kwargs: keyword arguments of such a call.

    Returns:
      An object that prints well, with its parts as attributes.

    Raises:
      TypeError: `fun` is not callable, or not with these arguments.
    """
    if isinstance(fun, GraphedFunction):
        return fun.explain(*args, **kwargs)
    donated = _donated_argnums(fun, args, kwargs) if isinstance(fun, _PjitFunction) else ()
    return _wrapped(fun, donated, (), Options(), ordinal=-1).explain(*args, **kwargs)


def _donated_argnums(fun: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The positional arguments that a jitted function donates."""
    infos, _ = fun.trace(*args, **kwargs).args_info
    leaves = [jax.tree.leaves(info) for info in infos]
    return tuple(i for i, of in enumerate(leaves) if of and all(info.donated for info in of))


class GraphedFunction(Observed):
    """A wrapped function: call it as the function it was made from.

    It composes like a `jax.jit` function: inside `jit`, `lax.scan`, `shard_map`; under `grad` and
    `vmap` the original function is used.

    Attributes:
      name: the function's qualified name.
      function_id: identifies this wrapped function in the executors of every process that wraps the
        same functions in the same order.
      options: its settings.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        donate_argnums: tuple[int, ...],
        static_argnums: tuple[int, ...],
        options: Options,
        ordinal: int,
    ):
        functools.update_wrapper(self, fun, updated=())  # not the attributes of a callable object
        self.name: str = _qualified_name(fun)
        self.function_id: int = _function_id(self.name, ordinal)
        self.options: Options = options
        self._fun = fun
        self._parameters = Parameters.of(fun, static_argnums, donate_argnums)
        self._parameters.check(self.name)
        super().__init__()
        self._last: Planned | None = None  # what the last call that was traced came to
        self._warned = False
        self._hoist_lock = threading.Lock()
        self._constants = Constants()
        # The jitted function, and the arguments in front; one attribute, replaced as a whole.
        self._compiled = (self._jit(self._constants), self._constants.prefix)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the function: what `jax.jit(fun)(*args, **kwargs)` returns, or raises."""
        self._tally.add_call()
        jitted, prefix = self._compiled
        try:
            return jitted(*prefix, *args, **kwargs)
        except ClosedOverArrays as found:
            self._hoist(found)
            return self._retrying(lambda jitted: jitted, args, kwargs)
        except (RuntimeError, ValueError) as error:
            self._complain(error, args, kwargs)
            raise

    def explain(self, /, *args: Any, **kwargs: Any) -> Explanation:
        """How a call is run and why, without running it.

        Args:
          *args: arguments of such a call, or none: then the last planned call's.
          **kwargs: keyword arguments of such a call.

        Returns:
          An object that prints well, with its parts as attributes.
        """
        planned = self._planned(args, kwargs) if args or kwargs else self._last
        return explain_plan(
            planned,
            function=self.name,
            function_id=self.function_id,
            options=self.options,
            site=_site(args, kwargs),
        )

    def pack(
        self, tree: Any, *, argnum: int = 0, example_args: Sequence[Any] | None = None
    ) -> packing.Packed:
        """Packs a pytree of arrays into one device buffer, to be passed in an argument's place.

        JAX's dispatch costs about a microsecond per array and call; a packed tree is one array.
        Arrays are copied one by one: give numpy arrays, and the tree is never twice on the device.
        The function sees the tree. A donated one comes back packed, in the same buffer: see
        `Packed`.

        Args:
          tree: what the argument is: JAX or numpy arrays on one device. It is not changed.
          argnum: the argument's position.
          example_args: all arguments of such a call; `tree`, or anything, at `argnum`. If given,
            small weights that only products of a single row read are laid out in the buffer as
            those read them fastest, and the function is traced with the packed tree, so that a
            mistake shows here.

        Returns:
          The packed tree: a pytree with a single leaf. `Packed.unpack()` gives the tree back.

        Raises:
          TypeError, ValueError: a leaf cannot be packed, or the arrays lie on several devices.
        """
        if argnum < 0 or (self._parameters.limit is not None and argnum >= self._parameters.limit):
            raise ValueError(
                f"argnum={argnum}: {self.name} has no such argument (positional arguments: "
                f"{', '.join(self._parameters.names) or 'none'})"
            )
        if argnum in self._parameters.static:
            raise ValueError(
                f"argnum={argnum} ({self._parameters.name(argnum)!r}) is static: only arguments of "
                "arrays can be packed"
            )
        name = self._parameters.name(argnum)
        if example_args is None:
            return packing.pack(tree, name=name)
        args = list(example_args)
        if argnum >= len(args):
            raise ValueError(f"example_args has {len(args)} arguments, none for argnum={argnum}")
        packing.check(tree, name=name)
        args[argnum] = tree
        packed = packing.pack(tree, name=name, orders=self._weight_orders(args, argnum))
        args[argnum] = packed
        self._trace(tuple(args), {})
        return packed

    def _weight_orders(self, args: Sequence[Any], argnum: int) -> list[tuple[int, ...] | None]:
        """For each leaf of an argument how its readers want it to lie; None: as it is."""
        static, donated = (
            self._parameters.keys(argnums, len(args))
            for argnums in (self._parameters.static, self._parameters.donated)
        )
        num_leaves = [0 if i in static else len(jax.tree.leaves(arg)) for i, arg in enumerate(args)]
        if argnum in donated:  # results may take its place
            return [None] * num_leaves[argnum]
        closed, _ = FlatCall(self._fun, self._parameters, tuple(args), {}).trace()
        from jaxgraph.frontend.flatten import flatten
        from jaxgraph.passes.weight_order import weight_orders

        orders = weight_orders(flatten(closed, self.options.max_unroll))
        first = sum(num_leaves[:argnum])
        return orders[first : first + num_leaves[argnum]]

    def warmup(self, /, *args: Any, **kwargs: Any) -> None:
        """Compiles, and runs until graphs are captured. Donated arguments are copied, not consumed.

        Args:
          *args: arguments of a call.
          **kwargs: keyword arguments of a call.
        """
        donated = self._parameters.keys(self._parameters.donated, len(args))
        arguments = [*enumerate(args), *kwargs.items()]
        leaves = jax.tree.leaves([argument for key, argument in arguments if key in donated])
        types = {(t.shape, t.dtype) for t in map(jax.typeof, leaves)}
        # As in a loop: the next call's results lie elsewhere, so they will get slots; but those in
        # donated buffers stay there.
        kept = []
        for _ in range(self.options.warmup_calls):
            copied_args, copied_kwargs = self.with_copies(args, kwargs)
            results = jax.block_until_ready(self(*copied_args, **copied_kwargs))
            kept += [
                r
                for r in jax.tree.leaves(results)
                if r.nbytes <= _SMALL_BYTES and (r.shape, r.dtype) not in types
            ]
            del results

    def reserve(self, /, *args: Any, **kwargs: Any) -> int:
        """Plans a call without running it, and sizes the arena of its device for it.

        Call it once for each signature (prompt and decode) ahead of time: then the arena never
        grows later, when memory may be short.

        Args:
          *args: arguments of a call; nothing is donated.
          **kwargs: keyword arguments of a call.

        Returns:
          The bytes that such a call needs, all of which are reserved; 0 where the plain function
          runs.

        Raises:
          MemoryError: the device has not that much memory.
        """
        planned = self._planned(args, kwargs)
        site = _site(args, kwargs)
        if planned is None or planned.plan is None or site.devices > 1:
            return 0
        if native.why_unsupported(site.platform) is not None:
            return 0
        programs = [native_split.program for native_split in planned.plan.native_splits()]
        nbytes = max(map(native.arena_bytes, programs), default=0)
        if nbytes:
            native.reserve(native.ffi_platform(site.platform), site.ordinal, nbytes)
        return nbytes

    def plain(self) -> Any:
        """The function as `jax.jit` runs it, with the same donated and static arguments."""
        return jax.jit(
            lambda *args, **kwargs: call_unpacked(self._fun, self._parameters, args, kwargs),
            donate_argnums=self._parameters.donated,
            static_argnums=self._parameters.static,
        )

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """Lowers a call, as `jax.jit(fun).lower` does. Closed-over arrays become constants."""
        return self._unhoisted.lower(*args, **kwargs)

    def export(self, *, platforms: Sequence[str] | None = None) -> Callable[..., Any]:
        """What `jax.export.export(jax.jit(fun))` does, with native splits.

        JAX refuses to serialize calls of foreign functions unless told that they are known; this
        tells it. Who loads the result imports jaxgraph first, in a version that reads the same
        program format: another one refuses it by name. Closed-over arrays become constants.

        Args:
          platforms: to export for, as `jax.export` names them ("cpu", "cuda", "tpu", ...); default:
            the present one. Those without a native backend get the plain function.

        Returns:
          A function of a call's arguments (arrays or `jax.ShapeDtypeStruct`) that returns a
          `jax.export.Exported`.
        """
        from jax import export

        known = export.DisabledSafetyCheck.custom_call(native.EXECUTE)
        return export.export(self._unhoisted, platforms=platforms, disabled_checks=[known])

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds like a function, so that a method can be wrapped (`self` is argument 0)."""
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<jaxgraph.wrap of {self.name}>"

    # Tracing. `_traced` runs inside JAX's trace of a call, so that JAX's own cache decides when a
    # call needs a new plan: shapes, dtypes, weak types, static arguments, x64 mode, mesh.

    def _jit(self, constants: Constants) -> Any:
        shift = len(constants.prefix)

        def traced(*args: Any, **kwargs: Any) -> Any:
            hoisted = args[0] if shift else ()
            return self._traced(constants, hoisted, args[shift:], kwargs)

        functools.update_wrapper(traced, self._fun, updated=())
        if shift:
            traced.__signature__ = self._parameters.with_prefix()
        return jax.jit(
            traced,
            donate_argnums=_shifted(self._parameters.donated, shift),
            static_argnums=_shifted(self._parameters.static, shift),
        )

    @functools.cached_property
    def _unhoisted(self) -> Any:
        return self._jit(Constants(hoist=False))

    def _traced(
        self,
        constants: Constants,
        hoisted: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self.options.disable or _config.jax_disable_jit:
            return call_unpacked(self._fun, self._parameters, args, kwargs)
        call = FlatCall(self._fun, self._parameters, args, kwargs)
        closed, out_tree = call.trace()
        if any(map(_touches_an_argument, closed.effects)):
            self._last = _MUTABLE
            return call_unpacked(self._fun, self._parameters, args, kwargs)
        closed, operands = constants.hoist_from(closed, hoisted)
        labels = [f"closed-over array {i}" for i in range(len(operands))] + call.labels
        donated = [False] * len(operands) + call.donated
        if _under_another_trace(call.leaves):
            donated = None  # an outer jit decides about its own arguments
        values = [*operands, *call.leaves]
        notes = _notes_on_closed_over(constants.arrays if hoisted else closed.consts)
        begin = time.perf_counter_ns()
        planned = self._last = self._plan(closed, values, labels, donated, notes)
        self._tally.add_plan(time.perf_counter_ns() - begin)
        out = graphed_call_p.bind(*values, jaxpr=closed, planned=planned)
        return jax.tree.unflatten(out_tree, out)

    def _plan(
        self,
        closed: Any,
        values: Sequence[Any],
        labels: Sequence[str],
        donated: Sequence[bool] | None,
        notes: Sequence[str],
    ) -> Planned:
        from jaxgraph.plan import plan_step  # here, for the sake of a quick `import jaxgraph`

        try:
            plan = plan_step(
                closed,
                name=self.name,
                function_id=self.function_id,
                options=self.options,
                arg_labels=labels,
                donated=donated,
            )
            # Where nothing is native, the function as the user wrote it is what XLA shall see.
            run = _traced_run(plan, closed, values) if plan.has_native else None
            return Planned(plan, run, notes=notes)
        except Exception as error:
            if self.options.strict:
                raise
            return Planned(None, None, self._warn(error))

    def _warn(self, error: Exception) -> str:
        """Says once that planning failed; returns the reason."""
        reason = f"planning failed ({type(error).__name__}: {error})"
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"jaxgraph: {self.name}: {reason}; the plain function runs instead. Please report "
                "this with the traceback that Options(strict=True) gives.",
                RuntimeWarning,
                stacklevel=2,
            )
        return reason

    def _complain(self, error: Exception, args: Any, kwargs: Any) -> None:
        """Raises an error that says more than JAX's own, where there is more to say."""
        closed_over = self._constants.arrays
        more = complaints.clearer(
            error, self._fun, self.name, self._parameters, args, kwargs, closed_over
        )
        if more is not None:
            raise more from error

    # Closed-over arrays.

    def _hoist(self, found: ClosedOverArrays) -> None:
        with self._hoist_lock:
            constants = self._constants.extended(found.arrays)
            if constants is not self._constants:  # another thread may have found them first
                self._constants = constants
                self._compiled = (self._jit(constants), constants.prefix)

    def _retrying(self, method: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
        """Calls a method of the jitted function until no new closed-over array turns up.

        A function whose arrays differ at every trace would never end: then they stay constants, as
        `jax.jit` has them.
        """
        for _ in range(_MOST_RETRACES):
            jitted, prefix = self._compiled
            try:
                return method(jitted)(*prefix, *args, **kwargs)
            except ClosedOverArrays as found:
                self._hoist(found)
            except (RuntimeError, ValueError) as error:
                self._complain(error, args, kwargs)
                raise
        with self._hoist_lock:
            self._constants = Constants(hoist=False)
            self._compiled = (self._unhoisted, ())
        return method(self._unhoisted)(*args, **kwargs)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._retrying(lambda jitted: jitted.trace, args, kwargs)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned | None:
        """What planning such a call came to; traces it if it was not traced yet."""
        for equation in self._trace(args, kwargs).jaxpr.eqns:
            if equation.primitive is graphed_call_p:
                return equation.params["planned"]
        return self._last if self.options.disable else _MUTABLE

    def with_copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of a call, donated ones copied: a call may consume them."""
        donated = self._parameters.keys(self._parameters.donated, len(args))

        def copied(items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
            return {k: jax.tree.map(jnp.copy, v) if k in donated else v for k, v in items}

        return tuple(copied(enumerate(args)).values()), copied(kwargs.items())


def _touches_an_argument(effect: Any) -> bool:
    """Is it an effect on one input: a read or write of a mutable array?"""
    return hasattr(effect, "input_index") or hasattr(effect, "input")


def _traced_run(plan: Any, closed: Any, values: Sequence[Any]) -> Any:
    """The planned function as a jaxpr, held against the function that it stands for."""
    planned: Any = jax.make_jaxpr(plan.run)(*values)
    got = [(aval.shape, aval.dtype) for aval in planned.out_avals]
    expected = [(aval.shape, aval.dtype) for aval in closed.out_avals]
    if got != expected:
        raise TypeError(f"the plan returns {got}, the function {expected}")
    if planned.effects != closed.effects:
        raise TypeError(f"the plan has effects {planned.effects}, the function {closed.effects}")
    return planned


def _notes_on_closed_over(arrays: Sequence[Any]) -> list[str]:
    """What becomes of large closed-over arrays. JAX traces once for calls of both kinds."""
    nbytes = sum(getattr(array, "nbytes", 0) for array in arrays)
    if nbytes <= _NOTED_BYTES:
        return []
    return [
        f"it closes over {nbytes:,} bytes of arrays: operands where it is called directly, but "
        "inside another jit, and in lower(), constants of the code, which cost compile time and "
        "memory there; pass them as arguments"
    ]


def _qualified_name(fun: Callable[..., Any]) -> str:
    inner = fun
    while isinstance(inner, functools.partial):
        inner = inner.func
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}.{named.__qualname__}"


def _function_id(name: str, ordinal: int) -> int:
    digest = hashlib.blake2b(f"{name}#{ordinal}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1  # 0 means all functions


def _under_another_trace(leaves: Sequence[Any]) -> bool:
    """Whether our own jit is being traced inside somebody else's trace.

    JAX says so only in internals; where they are missing, a direct call is assumed, which changes
    no more than a remark of `explain`.
    """
    traces = [getattr(leaf, "_trace", None) for leaf in leaves]
    outer = {type(getattr(t, "parent_trace", None)).__name__ for t in traces if t is not None}
    return bool(outer - {"EvalTrace", "NoneType"})


def _as_tuple(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _shifted(argnums: tuple[int, ...], shift: int) -> tuple[int, ...]:
    return tuple(n if n < 0 else n + shift for n in argnums)


def _site(args: Sequence[Any], kwargs: dict[str, Any]) -> Site:
    """Where such a call would run."""
    devices = set()
    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            devices |= leaf.devices()
    if not devices:
        devices = jnp.zeros(()).devices()
    device = min(devices, key=lambda d: d.id)
    return Site(_lowering_platform(device), device.local_hardware_id or 0, len(devices))


def _lowering_platform(device: Any) -> str:
    """The platform's name in lowering rules: JAX says "gpu" for CUDA and ROCm alike."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
