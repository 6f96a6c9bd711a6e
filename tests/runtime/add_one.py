"""A program written by hand, y = x + 1, so that the FFI call is tested without the planner."""

import dataclasses
import math
import struct

import jax
import jax.numpy as jnp

from jaxgraph import Options
from jaxgraph.runtime import native

F32 = 11
EXPR = 1
LOAD, CONST, STORE, ADD = 0, 2, 3, 64
ARENA, OPERAND, RESULT = 0, 1, 2


def instruction(op, dst=0, a=0, b=0, aux=0):
    return struct.pack("<BBBBBBH", op, F32, dst, a, b, 0, aux)


def expr_params(shape):
    instructions = [
        instruction(LOAD, dst=0, aux=0),
        instruction(CONST, dst=1, aux=0),
        instruction(ADD, dst=2, a=0, b=1),
        instruction(STORE, a=2, aux=0),
    ]
    header = struct.pack("<BBBBBBH", len(shape), 1, 1, 1, 0, 1, len(instructions))
    stage = struct.pack("<4H", 0, 0, 0, len(instructions))
    one = struct.pack("<fI", 1.0, 0)
    return header + struct.pack(f"<{len(shape)}q", *shape) + stage + b"".join(instructions) + one


def base(kind, nbytes, label, *, written=False, alias=-1):
    return {
        "kind": kind,
        "hint": 0,
        "written": written,
        "alias": alias,
        "index": 0,
        "nbytes": nbytes,
        "label": label,
    }


def spec(function_id, shape=(8,), *, in_place=False, options=None):
    """The planner's description of the program."""
    nbytes = 4 * math.prod(shape)
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    x, y = (F32, 1, 0, shape, strides), (F32, 2, 0, shape, strides)
    return {
        "function": "tests.add_one",
        "function_id": function_id,
        "split": 0,
        "key": bytes(range(16)),
        "arena_bytes": 0,
        "options": (options or Options()).exec_options(),
        "bases": [
            base(ARENA, 0, "arena", written=True),
            base(OPERAND, nbytes, "x", written=in_place),
            base(RESULT, nbytes, "y", written=True, alias=0 if in_place else -1),
        ],
        "nodes": [(EXPR, 0, 0, 0, expr_params(shape), [y], [x], "add")],
    }


@dataclasses.dataclass(frozen=True)
class AddOne:
    """The program as `native_call` takes it."""

    function_id: int
    shape: tuple = (8,)
    in_place: bool = False
    options: Options | None = None

    @property
    def program(self):
        return native.encode_program(
            spec(self.function_id, self.shape, in_place=self.in_place, options=self.options)
        )

    @property
    def result_avals(self):
        return [jax.ShapeDtypeStruct(self.shape, jnp.float32)]

    @property
    def aliases(self):
        return {0: 0} if self.in_place else {}
