"""Arguments of a wrapped function: their names, which are static or donated, and their leaves."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxgraph.pack import Packed


@dataclasses.dataclass(frozen=True)
class Parameters:
    """A function's parameters. Arguments are keyed by position, or by keyword.

    Attributes:
      names: of the parameters that may be given by position.
      limit: how many arguments may be given by position; None: any number.
      signature: of the function, where it has one.
      static: positions of compile-time constants.
      donated: positions of donated arguments.
    """

    names: tuple[str, ...]
    limit: int | None
    signature: inspect.Signature | None
    static: tuple[int, ...]
    donated: tuple[int, ...]

    @classmethod
    def of(
        cls, fun: Callable[..., Any], static: tuple[int, ...], donated: tuple[int, ...]
    ) -> Parameters:
        """The parameters of a function. Static and donated positions are not checked yet."""
        try:
            signature = inspect.signature(fun)
        except (TypeError, ValueError):  # some builtins have none
            return cls((), None, None, static, donated)
        parameters = signature.parameters.values()
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = tuple(p.name for p in parameters if p.kind in by_position)
        any_number = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        return cls(names, None if any_number else len(names), signature, static, donated)

    def check(self, function: str) -> None:
        """Raises a ValueError that names the function where the positions cannot be right."""
        for option, argnums in (("static_argnums", self.static), ("donate_argnums", self.donated)):
            for argnum in argnums:
                if self.limit is not None and not -self.limit <= argnum < self.limit:
                    names = ", ".join(self.names) or "none"
                    raise ValueError(
                        f"{option}={argnums}: {function} has no argument {argnum} (positional "
                        f"arguments: {names})"
                    )
        count = len(self.names) if self.limit is None else self.limit
        static, donated = (
            {n % count if n < 0 < count else n for n in argnums}
            for argnums in (self.static, self.donated)
        )
        for argnum in sorted(static & donated):
            raise ValueError(
                f"argument {self.name(argnum)!r} of {function} is both static and donated: only "
                "arrays can be donated"
            )

    def name(self, key: int | str) -> str:
        """An argument's name for people."""
        if isinstance(key, str):
            return key
        return self.names[key] if key < len(self.names) else f"args[{key}]"

    def keys(self, argnums: Sequence[int], num_args: int) -> set[int | str]:
        """Both keys, position and name, of these positions; negative ones count from the end."""
        keys: set[int | str] = set()
        for argnum in argnums:
            position = argnum + num_args if argnum < 0 else argnum
            keys.add(position)
            if 0 <= position < len(self.names):
                keys.add(self.names[position])
        return keys

    def with_prefix(self) -> inspect.Signature | None:
        """The signature with one more argument in front."""
        if self.signature is None:
            return None
        first = inspect.Parameter("closed_over_arrays", inspect.Parameter.POSITIONAL_ONLY)
        return self.signature.replace(parameters=[first, *self.signature.parameters.values()])


class FlatCall:
    """One traced call, and its array leaves.

    Attributes:
      leaves: the leaves of all arguments that are not static, in JAX's order.
      labels: for each leaf a name for people: "params['layers'][0]['wq']".
      donated: for each leaf whether it belongs to a donated argument.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        parameters: Parameters,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        self._fun = fun
        self._parameters = parameters
        self._args = args
        self._kwargs = kwargs
        self.leaves: list[Any] = []
        self.labels: list[str] = []
        self.donated: list[bool] = []
        static = parameters.keys(parameters.static, len(args))
        donated = parameters.keys(parameters.donated, len(args))
        arguments = [*enumerate(args), *sorted(kwargs.items())]
        for key, value in arguments:
            if key in static:
                continue
            for label, leaf in labelled_leaves(parameters.name(key), value):
                self.leaves.append(leaf)
                self.labels.append(label)
                self.donated.append(key in donated)

    def trace(self) -> tuple[Any, Any]:
        """The function's closed jaxpr over the leaves, and the tree of its results.

        It is traced under its own name, place and parameters, so that what JAX has to say of it
        names what the user wrote; packed trees reach it unpacked, and come back packed.
        """
        fun, parameters = self._fun, self._parameters

        def run(*args: Any, **kwargs: Any) -> Any:
            return call_unpacked(fun, parameters, args, kwargs)

        functools.update_wrapper(run, fun, updated=())
        trace = jax.make_jaxpr(run, static_argnums=parameters.static, return_shape=True)
        closed, out = trace(*self._args, **self._kwargs)
        return closed, jax.tree.structure(out)


def labelled_leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """The leaves of an argument, each with a name for people."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(value)
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in keyed]


def call_unpacked(
    fun: Callable[..., Any], parameters: Parameters, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a function of trees with arguments that may be packed.

    Where a donated argument holds a packed tree, the first part of the result that fits into its
    place comes back packed, in the same buffer.
    """
    out = fun(*_unpacked(args), **_unpacked(kwargs))
    donated = parameters.keys(parameters.donated, len(args))
    for key, value in [*enumerate(args), *sorted(kwargs.items())]:
        if key in donated:
            for packed in filter(_is_packed, jax.tree.leaves(value, is_leaf=_is_packed)):
                out = _with_packed(out, packed)
    return out


def _is_packed(x: Any) -> bool:
    return isinstance(x, Packed)


def _unpacked(tree: Any) -> Any:
    """A tree, with the packed trees in it unpacked."""
    return jax.tree.map(lambda x: x.unpack() if _is_packed(x) else x, tree, is_leaf=_is_packed)


def _with_packed(out: Any, packed: Packed) -> Any:
    """A tree with the first part of it packed that fits into the packed tree's place."""
    found: list[Any] = []

    def ends_here(part: Any) -> bool:
        if not found and not _is_packed(part) and packed.spec.fits(part):
            found.append(part)
            return True
        return _is_packed(part)

    parts, treedef = jax.tree.flatten(out, is_leaf=ends_here)
    for n, part in enumerate(parts):
        if found and part is found[0]:
            parts[n] = packed.repack(part)
            break  # the function may return one object twice
    return jax.tree.unflatten(treedef, parts)
