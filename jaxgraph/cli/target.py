"""The function that a command is about, and arguments for a call of it."""

from __future__ import annotations

import argparse
import importlib
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxgraph.wrap import GraphedFunction, wrap

_DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "bool": "bool",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
}  # fmt: skip


class TargetError(Exception):
    """The function or its arguments cannot be found; says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments by which a command is told of a function."""
    parser.add_argument("function", help="MODULE:FUNCTION, plain, jitted or wrapped")
    parser.add_argument(
        "--args",
        metavar="MODULE:FUNCTION",
        help="returns the arguments of a call, as a tuple; default: example_args() beside it",
    )
    parser.add_argument(
        "--shapes",
        metavar="SHAPES",
        help="arguments by dtype and shape instead: 'f32[4,64] i32[]'; floats are random",
    )
    parser.add_argument(
        "--donate", metavar="N", type=int, nargs="*", default=[], help="donated arguments"
    )


def load(args: argparse.Namespace) -> tuple[GraphedFunction, tuple[Any, ...]]:
    """The function, wrapped, and the arguments of a call.

    Raises:
      TargetError: there is no such function, or nothing says what it is called with.
    """
    module, found = _find(args.function)
    step = found
    if not isinstance(step, GraphedFunction):
        try:
            step = wrap(found, donate_argnums=tuple(args.donate))
        except TypeError as error:
            raise TargetError(f"{args.function}: {error}") from error
    if args.shapes is not None:
        return step, tuple(
            _array(text) for text in re.findall(r"[^\s\[]+\[[^\]]*\]|\S+", args.shapes)
        )
    if args.args is not None:
        _, make = _find(args.args)
    else:
        make = getattr(module, "example_args", None)
    if make is None:
        raise TargetError(
            f"what is {args.function} called with? Give --shapes or --args, or put a function "
            f"example_args() beside it"
        )
    made = make()
    return step, made if isinstance(made, tuple) else (made,)


def _find(name: str) -> tuple[Any, Any]:
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise TargetError(f"'{name}' is not of the form MODULE:FUNCTION")
    try:
        module = found = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise TargetError(f"{module_name} cannot be imported: {error}") from error
    except AttributeError:
        raise TargetError(f"{module_name} has no {attribute}") from None
    return module, found


def _array(text: str) -> Any:
    match = re.fullmatch(r"(\w+)\[([\d,\s]*)\]", text)
    if match is None or match[1] not in _DTYPES:
        raise TargetError(f"'{text}' is not like f32[4,64]; dtypes: {' '.join(_DTYPES)}")
    shape = tuple(int(n) for n in match[2].split(",") if n.strip())
    dtype = _DTYPES[match[1]]
    if match[1].startswith(("f", "bf")):
        values = np.random.default_rng(0).standard_normal(shape)
        return jnp.asarray(values).astype(dtype)
    return jnp.zeros(shape, dtype)
