"""Storage: what happens in place, what is copied and why, and that the arena is packed soundly."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxgraph.frontend.flatten import flatten
from jaxgraph.frontend.lowering import build_graph
from jaxgraph.passes.concat import push_through_concat
from jaxgraph.passes.fuse import fuse
from jaxgraph.passes.in_place import chain_stacked_updates
from jaxgraph.passes.splits import cut
from jaxgraph.plan import units as un
from jaxgraph.plan.schedule import ALIGNMENT, fusion_runs
from jaxgraph.plan.storage import StoragePlan, plan_storage


def planned(fun, *args) -> StoragePlan:
    step = flatten(jax.make_jaxpr(fun)(*args), 64)
    cuts = cut(step)
    runs, left = cuts.runs, cuts.left
    assert [r.backend for r in runs] == ["native"], left
    graph = build_graph(step.inputs, runs[0].eqns, step.outputs, {})
    return plan_storage(fuse(chain_stacked_updates(push_through_concat(graph))))


def ops(plan: StoragePlan) -> list[str]:
    """Operations in order, without those that only turn an index around."""
    return [un.OP_NAMES[u.op] for u in plan.units if u.outs[0].layout.size > 1]


CACHE, ROW, AT = jnp.zeros((6, 4)), jnp.ones((1, 4)), jnp.int32(2)


def update(cache, row, at):
    return lax.dynamic_update_slice(cache, row, (at, 0))


def test_an_update_that_is_returned_happens_in_place():
    plan = planned(update, CACHE, ROW, AT)
    assert ops(plan) == ["SET_ROWS"]
    assert plan.aliases == {0: 0}
    assert plan.copied_updates == []


def test_updates_in_sequence_share_one_buffer():
    def fun(cache, row, at):
        return update(update(cache, row, at), row * 2, at + 1)

    plan = planned(fun, CACHE, ROW, AT)
    assert plan.aliases == {0: 0}
    assert "COPY" not in ops(plan)
    updates = [u for u in plan.units if u.op == un.SET_ROWS]
    buffers = {id(plan.buffers[u.outs[0].tensor.id]) for u in updates}
    assert len(buffers) == 1


def test_reading_the_old_value_before_the_update_is_ordered_not_copied():
    def fun(cache, row, at):
        return cache.sum(-1), update(cache, row, at)

    plan = planned(fun, CACHE, ROW, AT)
    assert ops(plan) == ["ROW", "SET_ROWS"]
    assert plan.copied_updates == []


def test_reading_the_old_value_after_the_update_costs_a_copy():
    def fun(cache, row, at):
        new = update(cache, row, at)
        return jnp.sin(new.sum(-1)) @ cache, new

    plan = planned(fun, CACHE, ROW, AT)
    assert ops(plan).index("COPY") < ops(plan).index("SET_ROWS")
    assert plan.aliases == {}
    assert [why for _, _, why in plan.copied_updates] == ["its old value is read after the update"]


def test_an_update_that_is_not_returned_must_not_touch_the_operand():
    plan = planned(lambda c, r, at: update(c, r, at).sum(-1), CACHE, ROW, AT)
    assert ops(plan) == ["COPY", "SET_ROWS", "ROW"]
    assert plan.aliases == {}


def test_returning_the_old_value_too_costs_a_copy():
    plan = planned(lambda c, r, at: (c * 1.0, update(c, r, at), c + 0), CACHE, ROW, AT)
    assert plan.copied_updates == []  # the others are new arrays, made before the update
    plan = planned(lambda c, r, at: (update(c, r, at), lax.reshape(c, (24,))), CACHE, ROW, AT)
    assert [why for _, _, why in plan.copied_updates] == ["its old value is returned"]


def test_two_updates_of_one_array_cannot_both_be_in_place():
    def fun(cache, row, at):
        return update(cache, row, at), update(cache, row * 2, at + 1)

    plan = planned(fun, CACHE, ROW, AT)
    assert len(plan.aliases) == 1
    assert ops(plan).count("COPY") == 1


def test_an_operand_gets_the_result_that_continues_it():
    """Two caches returned in the other order: each operand is paired with its own new value."""

    def fun(k, v, row, at):
        return update(v, row, at), update(k, row, at)

    assert planned(fun, CACHE, CACHE, ROW, AT).aliases == {0: 1, 1: 0}


def test_an_update_through_a_transpose_is_in_place():
    def fun(cache, row, at):
        moved = cache.T
        return lax.dynamic_update_slice(moved, row.T, (0, at)).T

    plan = planned(fun, CACHE, ROW, AT)
    assert ops(plan) == ["SET_ROWS"]
    assert plan.aliases == {0: 0}


def test_updating_a_part_copies():
    def fun(cache, row, at):
        return update(cache[:4], row, at), cache

    plan = planned(fun, CACHE, ROW, AT)
    assert [why for _, _, why in plan.copied_updates] == ["only a part of its array is updated"]


def test_results_are_computed_where_they_are_wanted():
    plan = planned(lambda x: (jnp.sin(x), jnp.sin(x) + 1), CACHE)
    assert ops(plan) == ["EXPR"]
    assert plan.arena_bytes == 0


def test_one_value_returned_twice_is_copied_once():
    plan = planned(lambda x: [jnp.sin(x)] * 2, CACHE)
    assert ops(plan) in (["EXPR"], ["EXPR", "COPY"])
    plan = planned(lambda x: (jnp.sin(x), jnp.sin(x).reshape(24)), CACHE)
    assert ops(plan) == ["EXPR", "COPY"]


def lifetimes(plan: StoragePlan):
    """(birth, death, first byte, last byte) of every arena buffer."""
    spans: dict[int, list] = {}
    for at, unit in enumerate(plan.units):
        for ref in (*unit.outs, *unit.srcs):
            buffer = plan.buffers[ref.tensor.id]
            if buffer.kind == "arena":
                span = spans.setdefault(id(buffer), [at, at, buffer])
                span[1] = at
    return [(a, b, buf.offset, buf.offset + buf.nbytes) for a, b, buf in spans.values()]


def test_products_of_one_row_stand_together():
    """Whatever the user's order: one kernel can then read the row for all of them."""

    def fun(x, w, v):
        x = x * 2
        a = jnp.sin(x @ w)
        b = jnp.cos(x @ v)
        return a, b

    plan = planned(fun, jnp.ones((2, 4)), jnp.ones((4, 4)), jnp.ones((4, 4)))
    names = ops(plan)
    first = names.index("MATMUL")
    assert names[first : first + 2] == ["MATMUL", "MATMUL"]


def test_a_run_that_one_kernel_may_cover_never_reuses_its_own_memory():
    plan = llama_plan("15m", False, False)
    runs = fusion_runs(plan.units)
    members: dict[int, list[un.Unit]] = {}
    for unit, run in zip(plan.units, runs, strict=True):
        members.setdefault(run, []).append(unit)
    kinds = {tuple(un.OP_NAMES[u.op] for u in run) for run in members.values()}
    assert ("ROW", "MATMUL", "MATMUL", "EXPR") in kinds
    assert ("ROW", *["MATMUL"] * 3, "EXPR", "EXPR", "SET_ROWS", "SET_ROWS") in kinds
    for run in members.values():
        buffers = {
            id(b): b for u in run for r in (*u.outs, *u.srcs) for b in [plan.buffers[r.tensor.id]]
        }
        arena = sorted((b.offset, b.nbytes) for b in buffers.values() if b.kind == "arena")
        for (start, nbytes), (following, _) in zip(arena, arena[1:], strict=False):
            assert start + nbytes <= following


def test_a_product_and_the_norm_of_its_sum_share_no_memory_either():
    """The product's kernel may write what the norm's node does, while it still reads its rows."""
    plan = llama_plan("15m", False, False)
    joined = 0
    for product, row in zip(plan.units, plan.units[1:], strict=False):
        if (product.op, row.op) != (un.MATMUL, un.ROW) or product.writes()[0] not in row.reads():
            continue
        joined += 1
        read = [plan.buffers[t.id] for t in product.reads()]
        for written in (plan.buffers[t.id] for t in row.writes()):
            for b in read:
                apart = written.kind != b.kind or written.index != b.index
                if not apart and b.kind == "arena":
                    apart = (
                        written.offset + written.nbytes <= b.offset
                        or b.offset + b.nbytes <= written.offset
                    )
                assert apart
    import llama

    assert joined > 2 * llama.SHAPES["15m"].layers


@functools.cache
def llama_plan(shape: str, stacked: bool, per_row: bool) -> StoragePlan:
    import llama

    config = llama.SHAPES[shape]
    params = jax.eval_shape(
        lambda key: llama.random_params(config, jnp.float32, key, stacked=stacked),
        jax.random.key(0),
    )
    cache = jax.eval_shape(lambda: llama.empty_cache(config, 2, 128, jnp.float32, stacked=stacked))
    token = jax.ShapeDtypeStruct((2,), jnp.int32)
    position = jax.ShapeDtypeStruct((2,) if per_row else (), jnp.int32)
    step = functools.partial(llama.decode_step, config=config)
    return planned(step, params, cache, token, position)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_a_decode_step_copies_no_cache(stacked, per_row):
    plan = llama_plan("15m", stacked, per_row)
    assert "COPY" not in ops(plan)
    assert plan.copied_updates == []
    assert len(plan.aliases) == (2 if stacked else 12)


@pytest.mark.parametrize("stacked", [False, True])
def test_arena_buffers_that_live_at_once_never_overlap(stacked):
    spans = lifetimes(llama_plan("15m", stacked, False))
    assert len(spans) > 50
    for i, (a0, a1, x0, x1) in enumerate(spans):
        assert x0 % ALIGNMENT == 0
        for b0, b1, y0, y1 in spans[:i]:
            assert a1 < b0 or b1 < a0 or x1 <= y0 or y1 <= x0


def test_the_arena_is_near_its_widest_live_set():
    plan = llama_plan("135m", False, False)
    assert plan.arena_bytes <= 1.3 * plan.widest_live


def test_every_unit_comes_after_what_it_reads():
    plan = llama_plan("15m", True, False)
    written: set[int] = set()
    inputs = {t for t, b in plan.buffers.items() if b.kind == "operand"}
    for unit in plan.units:
        for tensor in unit.reads():
            if unit.op != un.SET_ROWS or tensor is not unit.outs[0].tensor:
                assert tensor.id in written or tensor.id in inputs
        written |= {t.id for t in unit.writes()}
