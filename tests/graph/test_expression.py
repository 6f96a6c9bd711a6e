"""Expression programs: stages, registers, limits."""

import struct

import numpy as np
import pytest

from jaxgraph.graph.expression import (
    MAX_INSTRS,
    OPCODES,
    Store,
    TooLarge,
    Val,
    assemble,
)

F32 = np.dtype(np.float32)
NAMES = {v: k for k, v in OPCODES.items()}


def parse(program: bytes):
    """(stages, instructions) of a packed program; an instruction is (name, dst, a, b, c, aux)."""
    rank, num_stages, *_, num_instrs = struct.unpack_from("<6BH", program)
    at = 8 + 8 * rank
    stages = [struct.unpack_from("<4H", program, at + 8 * i) for i in range(num_stages)]
    at += 8 * num_stages
    instrs = []
    for i in range(num_instrs):
        op, _, dst, a, b, c, aux = struct.unpack_from("<6BH", program, at + 8 * i)
        instrs.append((NAMES[op], dst, a, b, c, aux))
    return stages, instrs


def load(src=0, per_row=False):
    return Val("load", F32, (), src, per_row)


def test_elementwise_is_one_stage():
    x, y = load(0), load(1)
    program = assemble((8,), [Store(Val("add", F32, (x, y)), 0, F32)], [], [], 2)
    stages, instrs = parse(program)
    assert stages == [(0, 0, 0, 4)]
    assert [i[0] for i in instrs] == ["load", "load", "add", "store"]
    _, dst, a, b, _, _ = instrs[2]
    assert {a, b} == {instrs[0][1], instrs[1][1]}
    assert instrs[3][2] == dst


def test_a_shared_value_is_computed_once():
    x = load()
    s = Val("sin", F32, (x,))
    program = assemble((8,), [Store(Val("mul", F32, (s, s)), 0, F32)], [], [], 1)
    assert [i[0] for i in parse(program)[1]] == ["load", "sin", "mul", "store"]


def norm():
    """x / sqrt(sum(x)): the values of a row in two stages."""
    x = load()
    total = Val("reduce_sum", F32, (x,), per_row=True, stage=1)
    root = Val("sqrt", F32, (total,), per_row=True, stage=1)
    return Val("div", F32, (x, root), stage=1)


def test_a_row_computes_its_elements_again_behind_the_reduction():
    stages, instrs = parse(assemble((2, 8), [Store(norm(), 0, F32)], [], [], 1))
    ops = [i[0] for i in instrs]
    assert ops == ["load", "reduce_sum", "sqrt", "load", "div", "store"]
    assert stages == [(0, 0, 0, 2), (2, 3, 3, 6)]


def test_register_files_are_kept_apart():
    _, instrs = parse(assemble((2, 8), [Store(norm(), 0, F32)], [], [], 1))
    by_name = {i[0]: i for i in instrs}
    assert by_name["reduce_sum"][1] >= 32 and by_name["sqrt"][1] >= 32
    assert by_name["div"][1] < 32 and by_name["div"][3] == by_name["sqrt"][1]


def test_a_scalar_read_in_a_loop_is_not_overwritten_by_the_loops_own_reduction():
    """The constant is read again for the next element; the sum may not take its register."""
    c = Val("const", F32, (), 0, per_row=True)
    shifted = Val("add", F32, (load(), c))
    total = Val("reduce_sum", F32, (shifted,), per_row=True, stage=1)
    _, instrs = parse(assemble((2, 8), [Store(total, 0, F32)], [0], [], 1))
    by_name = {i[0]: i for i in instrs}
    assert by_name["reduce_sum"][1] != by_name["const"][1]


def test_a_value_of_the_row_is_stored_from_the_scalar_section():
    total = Val("reduce_sum", F32, (load(),), per_row=True, stage=1)
    stages, instrs = parse(assemble((2, 8), [Store(total, 0, F32)], [], [], 1))
    assert stages == [(0, 0, 0, 2), (2, 3, 3, 3)]
    assert instrs[2][0] == "store" and instrs[2][2] == instrs[1][1]


def test_registers_are_reused():
    """A chain of a hundred operations needs two registers, not a hundred."""
    x = load()
    for _ in range(100):
        x = Val("neg", F32, (x,))
    _, instrs = parse(assemble((8,), [Store(x, 0, F32)], [], [], 1))
    assert max(i[1] for i in instrs) < 2


def test_too_many_instructions_are_refused():
    x = load()
    for _ in range(MAX_INSTRS):
        x = Val("neg", F32, (x,))
    with pytest.raises(TooLarge):
        assemble((8,), [Store(x, 0, F32)], [], [], 1)


def test_too_many_live_values_are_refused():
    leaves = [Val("sin", F32, (load(i % 8),)) for i in range(40)]
    roots = [Val("neg", F32, (v,)) for v in leaves]
    total = roots[0]
    for pair in zip(leaves, roots, strict=True):
        total = Val("select", F32, (total, *pair))
    late = total
    for v in leaves:  # every leaf is read again at the end
        late = Val("add", F32, (late, v))
    with pytest.raises(TooLarge):
        assemble((8,), [Store(late, 0, F32)], [], [], 8)
