"""Expression programs: the small register programs inside EXPR and ROW nodes.

A directed graph of ``Val`` says what is computed; ``assemble`` schedules it into stages, gives it
registers and packs it. The format and its rules stand in ``ffi/core/expr.h``.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Sequence

import numpy as np

from jaxgraph.graph import dtypes

MAX_INSTRS, MAX_SRCS, MAX_OUTS, MAX_INDICES, MAX_IMMS, MAX_STAGES, MAX_RANK = (
    112,
    16,
    8,
    4,
    32,
    6,
    6,
)
_ELEMENT_REGS, _SCALAR_REGS = 32, 32

OPCODES = {"load": 0, "index": 1, "const": 2, "store": 3, "convert": 4, "bitcast": 5}
for _base, _names in (
    (
        8,
        "neg abs sign floor ceil round_away round_even not is_finite exp exp2 expm1 log log1p sqrt "
        "rsqrt cbrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh logistic erf erfc "
        "erf_inv popcnt clz",
    ),
    (
        64,
        "add sub mul div rem pow atan2 max min and or xor shl shr_logical shr_arithmetic "
        "eq ne lt le gt ge integer_pow",
    ),
    (112, "select clamp"),
    (160, "sum max min prod and or argmax argmin xor"),
):
    for _i, _name in enumerate(_names.split()):
        OPCODES[f"reduce_{_name}" if _base == 160 else _name] = _base + _i


class TooLarge(Exception):
    """The program exceeds a limit of the format; a part of it has to be stored instead."""


@dataclasses.dataclass(eq=False)
class Val:
    """A computed value.

    Attributes:
      op: a name of ``OPCODES``.
      dtype: what the instruction names (for comparisons and arg-reductions the operands').
      args: values it reads.
      aux: source, index or immediate slot for leaves; else the instruction's own extra.
      per_row: lives in a scalar register, computed once a row.
      stage: the first stage in which it can be computed (for a reduction: read).
      tensor_id: the graph tensor it computes, for finding where to cut a program that is too large.
    """

    op: str
    dtype: np.dtype
    args: tuple[Val, ...] = ()
    aux: int = 0
    per_row: bool = False
    stage: int = 0
    tensor_id: int = -1

    @property
    def is_reduction(self) -> bool:
        return self.op.startswith("reduce_")


@dataclasses.dataclass(eq=False)
class Store:
    """Writes ``value`` to output ``out``."""

    value: Val
    out: int
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Index:
    """An iota seen through views, over the iteration space."""

    offset: int
    strides: tuple[int, ...]


def count(stores: Iterable[Store]) -> int:
    """Distinct values that the stores need: a first measure of a program's size."""
    return len(_reachable([s.value for s in stores]))


def assemble(
    shape: Sequence[int],
    stores: Sequence[Store],
    imms: Sequence[int],
    indices: Sequence[Index],
    num_srcs: int,
) -> bytes:
    """Packs a program over the iteration space ``shape``.

    Raises:
      TooLarge: more instructions, registers, sources, ... than the format holds.
    """
    num_outs = len(stores)
    for n, limit in (
        (len(shape), MAX_RANK),
        (num_srcs, MAX_SRCS),
        (num_outs, MAX_OUTS),
        (len(indices), MAX_INDICES),
        (len(imms), MAX_IMMS),
    ):
        if n > limit:
            raise TooLarge
    instrs, stages = _schedule(stores)
    if len(instrs) > MAX_INSTRS or len(stages) > MAX_STAGES:
        raise TooLarge
    code = _allocate(instrs, stages)
    header = struct.pack(
        "<6BH", len(shape), len(stages), num_srcs, num_outs, len(indices), len(imms), len(code)
    )
    parts = [header, struct.pack(f"<{len(shape)}q", *shape)]
    parts += [struct.pack("<4H", *stage) for stage in stages]
    parts += [struct.pack("<6BH", *instr) for instr in code]
    parts += [struct.pack(f"<{1 + len(shape)}q", i.offset, *i.strides) for i in indices]
    parts.append(struct.pack(f"<{len(imms)}Q", *imms))
    return b"".join(parts)


def opcodes(program: bytes) -> bytes:
    """What a packed program does, instruction by instruction, whatever the shapes and constants."""
    rank, num_stages, _, _, _, _, num_instrs = struct.unpack_from("<6BH", program)
    first = struct.calcsize("<6BH") + 8 * (rank + num_stages)
    return program[first : first + 8 * num_instrs : 8]


def _reachable(roots: Iterable[Val], within_row: bool = False) -> list[Val]:
    """Values that the roots need, arguments first; ``within_row``: only those made per element."""
    order: list[Val] = []
    seen: set[int] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            val, done = stack.pop()
            if done:
                order.append(val)
            elif id(val) not in seen and not (within_row and val.per_row):
                seen.add(id(val))
                stack.append((val, True))
                stack.extend((a, False) for a in reversed(val.args))
    return order


def _schedule(stores: Sequence[Store]) -> tuple[list[Val | Store], list[tuple[int, int, int, int]]]:
    """Instructions in order and the stages' ranges (scalar begin, end, element begin, end)."""
    everything = _reachable([s.value for s in stores])
    # A reduction's value can be read one stage after the stage that accumulates it.
    last = max([v.stage for v in everything], default=0)
    instrs: list[Val | Store] = []
    stages = []
    for stage in range(last + 1):
        scalar_begin = len(instrs)
        instrs += [v for v in everything if v.per_row and not v.is_reduction and v.stage == stage]
        instrs += [s for s in stores if s.value.per_row and s.value.stage == stage]
        elem_begin = len(instrs)
        reductions = [v for v in everything if v.is_reduction and v.stage == stage + 1]
        element_stores = [s for s in stores if not s.value.per_row and s.value.stage == stage]
        roots = [v.args[0] for v in reductions] + [s.value for s in element_stores]
        done: set[int] = set()
        pending: list[Val | Store] = [*reductions, *element_stores]
        for sink, root in zip(pending, roots, strict=True):
            for val in _reachable([root], within_row=True):
                if id(val) not in done:
                    done.add(id(val))
                    instrs.append(val)
            instrs.append(sink)
        stages.append((scalar_begin, elem_begin, elem_begin, len(instrs)))
    return instrs, stages


def _allocate(
    instrs: Sequence[Val | Store], stages: Sequence[tuple[int, int, int, int]]
) -> list[tuple[int, ...]]:
    """Registers by last use: element registers within a stage, scalar ones over the program."""
    stage_of = [0] * len(instrs)
    in_loop = [False] * len(instrs)
    for number, (begin, _, loop_begin, end) in enumerate(stages):
        stage_of[begin:end] = [number] * (end - begin)
        in_loop[loop_begin:end] = [True] * (end - loop_begin)

    def reads(instr: Val | Store) -> tuple[Val, ...]:
        return (instr.value,) if isinstance(instr, Store) else instr.args

    last_use: dict[tuple[int, int], int] = {}
    for at, instr in enumerate(instrs):
        for val in reads(instr):
            last_use[_slot(val, stage_of[at])] = at

    free = {False: list(range(_ELEMENT_REGS))[::-1], True: list(range(32, 32 + _SCALAR_REGS))[::-1]}
    register: dict[tuple[int, int], int] = {}
    code = []
    # Scalar registers read inside an element section are read again for the next element, so they
    # are free only when the stage is over.
    after_loop: list[int] = []
    for at, instr in enumerate(instrs):
        stage = stage_of[at]
        if after_loop and (not in_loop[at] or stage != stage_of[at - 1]):
            free[True] += after_loop
            after_loop = []
        operands = [register[_slot(v, stage)] for v in reads(instr)]
        # Registers read here for the last time may be written here already: an instruction reads
        # all its operands before it writes. A reduction's target lives on from its first element.
        for val in dict.fromkeys(reads(instr)):
            slot = _slot(val, stage)
            if last_use[slot] == at:
                released = register.pop(slot)
                (after_loop if val.per_row and in_loop[at] else free[val.per_row]).append(released)
        dst = 0
        if isinstance(instr, Val):
            if not free[instr.per_row]:
                raise TooLarge
            dst = free[instr.per_row].pop()
            slot = _slot(instr, stage)
            register[slot] = dst
            if slot not in last_use:
                free[instr.per_row].append(register.pop(slot))
        code.append(_encode(instr, dst, operands))
    return code


def _slot(val: Val, stage: int) -> tuple[int, int]:
    """Element values are made anew in each stage; scalar ones are made once."""
    return (id(val), -1 if val.per_row else stage)


def _encode(instr: Val | Store, dst: int, operands: list[int]) -> tuple[int, ...]:
    a, b, c = (operands + [0, 0, 0])[:3]
    if isinstance(instr, Store):
        return (OPCODES["store"], dtypes.code_of(instr.dtype), 0, a, 0, 0, instr.out)
    return (OPCODES[instr.op], dtypes.code_of(instr.dtype), dst, a, b, c, instr.aux & 0xFFFF)
