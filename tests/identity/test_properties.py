"""Node properties: every field counts. Coverage: every node once, in a legal order."""

import random

import pytest
from axpy_programs import (
    NUMBER,
    WIDTH,
    Step,
    axpy_params,
    encode,
    examples,
    random_steps,
    spec,
    testing,
)
from hypothesis import given
from hypothesis import strategies as st

BASES = [0x1000 * (i + 1) for i in range(len(NUMBER))]


def node(steps, at):
    """The spec's node as a dict that can be changed."""
    op, flags, region, branch, params, outs, srcs, label = spec(steps)["nodes"][at]
    return dict(op=op, flags=flags, region=region, branch=branch, params=params, outs=list(outs),
                srcs=list(srcs), label=label)  # fmt: skip


def with_tensor(n, side, which, **change):
    dtype, base, offset, shape, strides = n[side][which]
    new = dict(dtype=dtype, base=base, offset=offset, shape=shape, strides=strides) | change
    n[side][which] = tuple(new[f] for f in ("dtype", "base", "offset", "shape", "strides"))


def shrink(n):  # shapes of all tensors agree in an EXPR, so all change
    n["params"] = axpy_params(1.0, (WIDTH - 1,))
    for side in ("outs", "srcs"):
        for i in range(len(n[side])):
            with_tensor(n, side, i, shape=(WIDTH - 1,))


# name: (change to an EXPR node, the fields that must be named, how it is classified)
MUTATIONS = {
    "op": (lambda n: n.update(op=2), {"op"}, "structure"),
    "params": (lambda n: n.update(params=axpy_params(3.0)), {"params"}, "structure"),
    "flags": (lambda n: n.update(flags=1), {"flags"}, "structure"),
    "region": (lambda n: n.update(region=9), {"region"}, "structure"),
    "branch": (lambda n: n.update(branch=9), {"branch"}, "structure"),
    "shape": (shrink, {"shape", "params"}, "structure"),
    "output strides": (lambda n: with_tensor(n, "outs", 0, strides=(-1,),
                       offset=n["outs"][0][2] + 4 * (WIDTH - 1)),
                       {"strides", "address"}, "structure"),
    "source strides": (lambda n: with_tensor(n, "srcs", 1, strides=(0,)), {"strides"}, "structure"),
    "output address": (lambda n: with_tensor(n, "outs", 0, base=NUMBER["logits"], offset=0),
                       {"address"}, "addresses"),
    "source address": (lambda n: with_tensor(n, "srcs", 0, base=NUMBER["cache"], offset=64),
                       {"address"}, "addresses"),
}  # fmt: skip


def encoded(steps, at=None, change=None):
    program = spec(steps)
    if at is not None:
        n = node(steps, at)
        change(n)
        program["nodes"][at] = tuple(n.values())
    return encode(program)


@pytest.mark.parametrize("name", MUTATIONS)
@given(seed=st.integers(0, 10**6))
@examples(15)
def test_a_field_changed_alone_is_detected_and_named(name, seed):
    rng = random.Random(seed)
    steps = random_steps(rng)
    candidates = [
        i
        for i, s in enumerate(steps)
        if not s.view and s.out[0] == "arena" and (name != "region" or s.region == 0)
    ]  # a region is one run of nodes: none may leave it
    if not candidates:
        return
    at = rng.choice(candidates)
    change, fields, kind = MUTATIONS[name]
    before, after = encoded(steps), encoded(steps, at, change)
    assert before != after
    diff = testing.compare(before, BASES, after, BASES)
    assert diff["nodes_compared"] == len(steps)
    assert {n for n, *_ in diff["fields"]} == {at}
    assert {f for _, f, *_ in diff["fields"]} == fields
    assert diff["change"] == kind
    assert f"node {at} " in diff["summary"] and " -> " in diff["summary"]
    assert testing.compare(before, BASES, before, BASES)["change"] == "none"


@given(seed=st.integers(0, 10**6), moved=st.sampled_from(list(NUMBER)))
@examples(60)
def test_a_base_that_moves_is_seen_at_each_node_that_touches_it(seed, moved):
    steps = random_steps(random.Random(seed))
    bases = list(BASES)
    bases[NUMBER[moved]] += 0x100
    program = encoded(steps)
    diff = testing.compare(program, BASES, program, bases)
    touching = {
        i for i, s in enumerate(steps) if moved in ((s.a[0],) if s.view else
                                                    (s.out[0], s.a[0], s.b[0]))
    }  # fmt: skip
    assert {n for n, *_ in diff["fields"]} == touching
    assert {f for _, f, *_ in diff["fields"]} <= {"address"}
    launching = any(not steps[i].view for i in touching)
    assert diff["change"] == ("addresses" if launching else "none")


def test_views_are_compared_but_change_nothing():
    steps = [Step(("token", 0), ("token", 0), 1, ("token", 0), view=True)]
    before = encoded(steps)

    def shorter(n):
        for side in ("outs", "srcs"):
            with_tensor(n, side, 0, shape=(3,))

    diff = testing.compare(before, BASES, encoded(steps, 0, shorter), BASES)
    assert {f for _, f, *_ in diff["fields"]} == {"shape"}
    assert diff["change"] == "none"


def test_a_node_more_is_a_change_of_structure():
    steps = random_steps(random.Random(1))
    diff = testing.compare(encoded(steps), BASES, encoded(steps[:-1]), BASES)
    assert (diff["change"], diff["fields"][-1][1]) == ("structure", "node count")


@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 20), regions=st.booleans(),
       fusion=st.booleans(), concurrency=st.booleans())  # fmt: skip
@examples(60)
def test_every_node_is_covered_once_for_every_chunk_size(seed, nodes, regions, fusion, concurrency):
    steps = random_steps(random.Random(seed), nodes, regions=regions)
    n = len(steps)
    for chunk_size in range(n + 2):
        settings_ = dict(chunk_size=chunk_size, fusion=fusion, concurrency=concurrency)
        chunks = testing.plan(encode(spec(steps, **settings_)))
        covered, start = [], 0
        for chunk in chunks:
            assert chunk["first_node"] == start
            end = start + chunk["node_count"]
            for first, count, region, _ in chunk["launches"]:
                assert start <= first and first + count <= end
                covered += range(first, first + count)
                assert region == (steps[first].region if concurrency else 0)
            inside = 0 < end < n and steps[end].region != 0
            assert not inside or steps[end].region != steps[end - 1].region
            start = end
        assert start == n
        launching = [i for i, s in enumerate(steps) if not s.view]
        assert [i for i in covered if not steps[i].view] == launching, "once each, and in order"
        assert chunk_size > 0 or len(chunks) == 1
