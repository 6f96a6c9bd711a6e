"""Arguments of a wrapped function: their names, which are static or donated, and their leaves."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
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
        """The parameters of a function."""
        try:
            signature = inspect.signature(fun)
        except (TypeError, ValueError):  # some builtins have none
            return cls((), None, None, static, donated)
        parameters = signature.parameters.values()
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = tuple(p.name for p in parameters if p.kind in by_position)
        any_number = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        return cls(names, None if any_number else len(names), signature, static, donated)

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
    """One traced call as a function of its array leaves.

    Attributes:
      leaves: the leaves of all arguments that are not static.
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
        self._num_args = len(args)
        self._arguments: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        self._treedefs: dict[int | str, Any] = {}
        self.leaves: list[Any] = []
        self.labels: list[str] = []
        self.donated: list[bool] = []
        static = parameters.keys(parameters.static, len(args))
        donated = parameters.keys(parameters.donated, len(args))
        for key, value in self._arguments.items():
            if key in static:
                continue
            keyed, self._treedefs[key] = jax.tree_util.tree_flatten_with_path(value)
            name = parameters.name(key)
            for path, leaf in keyed:
                self.leaves.append(leaf)
                self.labels.append(name + jax.tree_util.keystr(path))
                self.donated.append(key in donated)

    def run(self, *leaves: Any) -> Any:
        """The function, called with these leaves; packed trees reach it unpacked."""
        given = iter(leaves)
        arguments = dict(self._arguments)
        for key, treedef in self._treedefs.items():
            value = treedef.unflatten(itertools.islice(given, treedef.num_leaves))
            arguments[key] = unpacked(value)
        args = [arguments.pop(i) for i in range(self._num_args)]
        return self._fun(*args, **arguments)


def unpacked(tree: Any) -> Any:
    """A tree, with the packed trees in it unpacked."""

    def is_packed(x: Any) -> bool:
        return isinstance(x, Packed)

    return jax.tree.map(lambda x: x.unpack() if is_packed(x) else x, tree, is_leaf=is_packed)
