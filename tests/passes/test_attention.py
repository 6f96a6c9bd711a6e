"""Attention: recognised in every spelling, and never where something else is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgraph
from jaxgraph.frontend.flatten import flatten
from jaxgraph.frontend.lowering import build_graph
from jaxgraph.passes.attention import find_attention
from jaxgraph.passes.concat import push_through_concat
from jaxgraph.passes.deferred import divide_before_mixing
from jaxgraph.passes.fuse import fuse
from jaxgraph.passes.splits import cut
from jaxgraph.plan import units as un
from jaxgraph.plan.storage import plan_storage

B, KV, G, D, S = 2, 2, 3, 8, 16
Q = jax.random.normal(jax.random.key(0), (B, KV, G, D))
K = jax.random.normal(jax.random.key(1), (B, S, KV, D))
V = jax.random.normal(jax.random.key(2), (B, S, KV, D))
AT = jnp.int32(9)


def scores(q, k):
    return jnp.einsum("bkgd,bskd->bkgs", q, k)


def mix(p, v):
    return jnp.einsum("bkgs,bskd->bkgd", p, v)


def visible(at, s=S):
    return jnp.arange(s) <= at


def where_mask(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k) * D**-0.5, -jnp.inf)
    return mix(jax.nn.softmax(s, -1), v)


def finite_mask(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k) / D**0.5, jnp.finfo(jnp.float32).min)
    return mix(jax.nn.softmax(s, -1), v)


def additive_mask(q, k, v, at):
    s = scores(q, k) * D**-0.5 + jnp.where(visible(at), 0.0, -jnp.inf)
    return mix(jax.nn.softmax(s, -1), v)


def scaled_after_the_mask(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k), -jnp.inf) * D**-0.5
    return mix(jax.nn.softmax(s, -1), v)


def by_hand(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k), -1e30)
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return mix(e / e.sum(-1, keepdims=True), v)


def by_the_inverse_of_the_sum(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k).astype(jnp.float32), -jnp.inf)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return mix((e * jnp.reciprocal(e.sum(-1, keepdims=True))).astype(v.dtype), v)


def by_one_over_the_sum(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k).astype(jnp.float32), -jnp.inf)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return mix(((1 / e.sum(-1))[..., None] * e).astype(v.dtype), v)


def exponentials(q, k, at):
    s = jnp.where(visible(at), scores(q, k).astype(jnp.float32), -jnp.inf)
    return jnp.exp(s - s.max(-1, keepdims=True))


def divided_after_mixing(q, k, v, at):
    e = exponentials(q, k, at)
    return (mix(e.astype(v.dtype), v) / e.sum(-1, keepdims=True)).astype(v.dtype)


def divided_in_another_order(q, k, v, at):
    e = exponentials(q, k, at)
    mixed = jnp.einsum("bkgs,bskd->bgdk", e, v.astype(jnp.float32))
    return mixed.transpose(0, 3, 1, 2) / e.sum(-1)[..., None]


def divided_in_their_own_type(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k), jnp.finfo(q.dtype).min)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return mix(e, v) / e.sum(-1)[..., None]


def by_logsumexp(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k), -jnp.inf)
    return mix(jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)), v)


def by_log_softmax(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k), -jnp.inf)
    return mix(jnp.exp(jax.nn.log_softmax(s)), v)


def soft_cap_and_window(q, k, v, at):
    s = 30.0 * jnp.tanh(scores(q, k) / 30.0)
    near = (jnp.arange(S) > at - 4) & visible(at)
    return mix(jax.nn.softmax(jnp.where(near, s, -jnp.inf), -1), v)


def bias(q, k, v, at):
    s = scores(q, k) - 0.1 * jnp.abs(jnp.arange(S) - at)
    return mix(jax.nn.softmax(s, -1), v)


def no_mask(q, k, v, at):
    return mix(jax.nn.softmax(scores(q, k), -1), v)


def narrow_weights(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k), -jnp.inf)
    return mix(jax.nn.softmax(s.astype(jnp.float32), -1).astype(v.dtype), v)


def shifted_beforehand(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k), -jnp.inf)
    return mix(jax.nn.softmax(s - s.max(-1, keepdims=True), -1), v)


def hidden_first(q, k, v, at):
    s = jnp.where(jnp.arange(S) > at, -jnp.inf, scores(q, k))
    return mix(jax.nn.softmax(s, -1), v)


def hidden_by_either(q, k, v, at):
    unseen = (jnp.arange(S) > at) | (jnp.arange(S) <= at - 4)
    return mix(jax.nn.softmax(jnp.where(unseen, -jnp.inf, scores(q, k)), -1), v)


def not_hidden(q, k, v, at):
    s = jnp.where(~(jnp.arange(S) > at), scores(q, k), -1e30)
    return mix(jax.nn.softmax(s, -1), v)


def up_to_a_length(q, k, v, at):
    s = jnp.where(jnp.arange(S) < at + 1, scores(q, k), -1e30)
    return mix(jax.nn.softmax(s, -1), v)


def up_to_a_computed_position(q, k, v, at):
    s = jnp.where(jnp.arange(S) <= jnp.minimum(at * 2, 12), scores(q, k), -jnp.inf)
    return mix(jax.nn.softmax(s, -1), v)


def given_lengths(q, k, v, at):
    q = q.reshape(B, 1, KV * G, D)
    lengths = jnp.stack([at, at - 3])
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


def beyond_a_length_is_hidden(q, k, v, at):
    s = jnp.where(jnp.arange(S) >= at, jnp.finfo(q.dtype).min, scores(q, k))
    return mix(jax.nn.softmax(s, -1), v)


def lengths_of_sequences(q, k, v, at):
    q = q.reshape(B, 1, KV * G, D)
    lengths = jnp.full(B, at + 1)
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


def matmuls(q, k, v, at):
    s = q @ k.transpose(0, 2, 3, 1)
    s = jnp.where(visible(at), s, -jnp.inf)
    return jax.nn.softmax(s, -1) @ v.transpose(0, 2, 1, 3)


def repeated_heads(q, k, v, at):
    q = q.reshape(B, KV * G, 1, D)
    k, v = (jnp.repeat(x, G, axis=2).transpose(0, 2, 1, 3) for x in (k, v))
    s = jnp.where(visible(at), q @ k.swapaxes(-1, -2), -jnp.inf)
    return jax.nn.softmax(s, -1) @ v


def broadcast_heads(q, k, v, at):
    k, v = (jnp.broadcast_to(x[:, :, :, None], (B, S, KV, G, D)) for x in (k, v))
    s = jnp.where(visible(at), jnp.einsum("bkgd,bskgd->bkgs", q, k), -jnp.inf)
    return jnp.einsum("bkgs,bskgd->bkgd", jax.nn.softmax(s, -1), v)


def repeated_and_widened_heads(q, k, v, at):
    q = q.reshape(B, KV * G, D).astype(jnp.float32)
    k, v = (jnp.repeat(x, G, axis=2).astype(jnp.float32) for x in (k, v))
    s = jnp.where(visible(at), jnp.einsum("bhd,bshd->bhs", q, k), -jnp.inf)
    return jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(s, -1), v)


def scores_in_another_order(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k).transpose(2, 0, 1, 3), -jnp.inf)
    return jnp.einsum("gbks,bskd->bkgd", jax.nn.softmax(s, -1), v)


def dot_product_attention(q, k, v, at):
    q = q.reshape(B, 1, KV * G, D)
    return jax.nn.dot_product_attention(q, k, v, mask=visible(at)[None, None, None])


def sinks_of(v):
    return v[0, : KV * G, 0, 0]  # some numbers, one for each head


def joined_sink(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k), -jnp.inf)
    sink = jnp.broadcast_to(sinks_of(v).reshape(1, KV, G, 1), (B, KV, G, 1))
    return mix(jax.nn.softmax(jnp.concatenate([s, sink], -1), -1)[..., :-1], v)


def sink_joined_in_front(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k), -jnp.inf)
    sink = jnp.broadcast_to(sinks_of(v).reshape(KV, G, 1), (B, KV, G, 1))
    p = jax.nn.softmax(jnp.concatenate([sink, s], -1).astype(jnp.float32), -1)
    return mix(p[..., 1:].astype(v.dtype), v)


def sink_joined_by_hand(q, k, v, at):  # as transformers has it for GPT-OSS
    s = scores(q, k) * D**-0.5 + jnp.where(visible(at), 0.0, jnp.finfo(q.dtype).min)
    s, sink = s.reshape(B, KV * G, 1, S), sinks_of(v).reshape(1, -1, 1, 1)
    s = jnp.concatenate([s, jnp.broadcast_to(sink, (B, KV * G, 1, 1))], -1)
    p = jax.nn.softmax(s - s.max(-1, keepdims=True), -1)[..., :S]
    return mix(p.reshape(B, KV, G, S), v)


def sink_in_the_total(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k).astype(jnp.float32), -jnp.inf)
    sink = sinks_of(v).reshape(KV, G, 1)
    peak = jnp.maximum(s.max(-1, keepdims=True), sink)
    e = jnp.exp(s - peak)
    return mix((e / (e.sum(-1, keepdims=True) + jnp.exp(sink - peak))).astype(v.dtype), v)


def sink_of_rows_in_the_total(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k).astype(jnp.float32), -1e30)
    sink = sinks_of(v).reshape(KV, G)
    peak = jnp.maximum(sink, s.max(-1))
    e = jnp.exp(s - peak[..., None])
    total = jnp.exp(sink - peak) + e.sum(-1)
    return mix((e / total[..., None]).astype(v.dtype), v)


def sink_in_the_inverse(q, k, v, at):
    s = scores(q, k).astype(jnp.float32) + jnp.where(visible(at), 0.0, -jnp.inf)
    sink = jnp.broadcast_to(sinks_of(v).reshape(KV, G)[None, :, :, None], (B, KV, G, 1))
    peak = lax.stop_gradient(jnp.maximum(jnp.max(s, -1, keepdims=True), sink))
    e = jnp.exp(s - peak)
    inverse = jnp.reciprocal(e.sum(-1, keepdims=True) + jnp.exp(sink - peak))
    return mix((e * inverse).astype(v.dtype), v)


def one_more_in_the_total(q, k, v, at):  # "softmax1": a sink of 0
    s = jnp.where(visible(at), scores(q, k).astype(jnp.float32), -jnp.inf)
    peak = jnp.maximum(s.max(-1, keepdims=True), 0.0)
    e = jnp.exp(s - peak)
    return mix((e / (e.sum(-1, keepdims=True) + jnp.exp(0.0 - peak))).astype(v.dtype), v)


def sink_of_repeated_heads(q, k, v, at):
    sink = sinks_of(v).reshape(-1, 1, 1)
    q = q.reshape(B, KV * G, 1, D)
    k, v = (jnp.repeat(x, G, axis=2).transpose(0, 2, 1, 3) for x in (k, v))
    s = jnp.where(visible(at), q @ k.swapaxes(-1, -2), -jnp.inf)
    sink = jnp.broadcast_to(sink, (B, KV * G, 1, 1))
    return jax.nn.softmax(jnp.concatenate([s, sink], -1), -1)[..., :-1] @ v


def sink_of_scores_in_another_order(q, k, v, at):
    s = jnp.where(visible(at), scores(q, k).transpose(2, 0, 1, 3), -jnp.inf)
    sink = sinks_of(v).reshape(KV, G).T[:, None, :, None]
    s = jnp.concatenate([s, jnp.broadcast_to(sink, (G, B, KV, 1))], -1)
    return jnp.einsum("gbks,bskd->bkgd", jax.nn.softmax(s, -1)[..., :-1], v)


WITH_SINKS = [
    joined_sink,
    sink_joined_in_front,
    sink_joined_by_hand,
    sink_in_the_total,
    sink_of_rows_in_the_total,
    sink_in_the_inverse,
    one_more_in_the_total,
    sink_of_repeated_heads,
    sink_of_scores_in_another_order,
]


def each_row_its_position(q, k, v, at):
    at = jnp.stack([at, at - 5])
    seen = jnp.arange(S) <= at[:, None]
    s = jnp.where(seen[:, None, None, :], scores(q, k), -jnp.inf)
    return mix(jax.nn.softmax(s, -1), v)


SPELLINGS = [
    where_mask,
    finite_mask,
    additive_mask,
    scaled_after_the_mask,
    by_hand,
    by_the_inverse_of_the_sum,
    by_one_over_the_sum,
    divided_after_mixing,
    divided_in_another_order,
    divided_in_their_own_type,
    by_logsumexp,
    by_log_softmax,
    soft_cap_and_window,
    bias,
    no_mask,
    narrow_weights,
    shifted_beforehand,
    hidden_first,
    hidden_by_either,
    not_hidden,
    up_to_a_length,
    up_to_a_computed_position,
    lengths_of_sequences,
    given_lengths,
    beyond_a_length_is_hidden,
    matmuls,
    repeated_heads,
    broadcast_heads,
    repeated_and_widened_heads,
    scores_in_another_order,
    dot_product_attention,
    each_row_its_position,
    *WITH_SINKS,
]
BOUNDED = [f for f in SPELLINGS if f not in (bias, no_mask)]


def planned(fun, *args):
    step = flatten(jax.make_jaxpr(fun)(*args), 64)
    cuts = cut(step)
    runs, left = cuts.runs, cuts.left
    assert [r.backend for r in runs] == ["native"], left
    graph = build_graph(step.inputs, runs[0].eqns, step.outputs, {})
    return plan_storage(fuse(find_attention(divide_before_mixing(push_through_concat(graph)))))


def units(fun, *args):
    return planned(fun, *args).units


def attention_units(fun, *args):
    return [u for u in units(fun, *args) if u.op == un.ATTENTION]


@pytest.mark.parametrize("fun", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings_are_one_node(fun):
    found = units(fun, Q, K, V, AT)
    assert len([u for u in found if u.op == un.ATTENTION]) == 1
    assert not any(u.op in (un.MATMUL, un.ROW) for u in found)


@pytest.mark.parametrize("fun", SPELLINGS, ids=lambda f: f.__name__)
def test_what_can_be_seen_is_known_where_the_mask_says_it(fun):
    (unit,) = attention_units(fun, Q, K, V, AT)
    bound = unit.params[1]
    assert (bound != un.NO_BOUND) == (fun in BOUNDED)
    if bound != un.NO_BOUND:
        assert unit.srcs[bound].dtype == np.int32
        assert unit.srcs[bound].layout.strides[-1] == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("fun", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings_compute_what_jit_computes(fun, dtype):
    args = [x.astype(dtype) for x in (Q, K, V)]
    step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    wide = jax.jit(fun)(Q, K, V, AT)
    tolerance = {jnp.float32: 1e-5, jnp.bfloat16: 4e-2, jnp.float16: 6e-3}[dtype]
    for at in (9, 0, 15):
        wide = jax.jit(fun)(*[x.astype(jnp.float32) for x in args], jnp.int32(at))
        got = step(*args, jnp.int32(at)).astype(jnp.float32)
        scale = 1 + np.abs(wide).max(initial=0, where=np.isfinite(wide))
        np.testing.assert_allclose(got, wide, atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("fun", SPELLINGS, ids=lambda f: f.__name__)
def test_the_cache_is_read_as_it_lies(fun, dtype):
    """Neither repeated nor widened: the node's keys and values are the arguments themselves."""
    args = [x.astype(dtype) for x in (Q, K, V)]
    (unit,) = attention_units(fun, *args, AT)
    assert [src.tensor.node.kind for src in unit.srcs[1:3]] == ["input", "input"]
    assert [src.dtype for src in unit.srcs[1:3]] == [dtype, dtype]


def test_heads_that_take_turns_are_right():
    """`tile` puts the same head at every second place: no neighbours share it."""

    def fun(q, k, v, at):
        q = q.reshape(B, KV * G, 1, D)
        k, v = (jnp.tile(x, (1, 1, G, 1)).transpose(0, 2, 1, 3) for x in (k, v))
        return jax.nn.softmax(q @ k.swapaxes(-1, -2), -1) @ v

    step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    np.testing.assert_allclose(step(Q, K, V, AT), jax.jit(fun)(Q, K, V, AT), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("fun", WITH_SINKS, ids=lambda f: f.__name__)
def test_sinks_are_read_as_they_lie(fun, dtype):
    """One for each query; of a constant one number lies in memory."""
    (unit,) = attention_units(fun, *[x.astype(dtype) for x in (Q, K, V)], AT)
    sink = unit.srcs[-1]
    assert unit.params[2] == len(unit.srcs) - 1
    assert sink.layout.shape == (*unit.outs[0].layout.shape[:3], 1)
    if fun is one_more_in_the_total:
        assert (sink.tensor.node.kind, sink.tensor.size) == ("const", 1)
    else:
        assert (sink.tensor.node.kind, sink.dtype) == ("input", dtype)
        assert sink.layout.strides[0] == 0  # one for all of the batch


@pytest.mark.parametrize("fun", [where_mask, dot_product_attention], ids=lambda f: f.__name__)
def test_without_a_sink_there_is_none(fun):
    (unit,) = attention_units(fun, Q, K, V, AT)
    assert unit.params[2] == 0


def sum_of_other_scores(q, k, v, at):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return mix(e / jnp.exp(s).sum(-1, keepdims=True), v)


def another_axis(q, k, v, at):
    return mix(jax.nn.softmax(scores(q, k), -2), v)


def maximum_of_other_scores(q, k, v, at):
    s = scores(q, k)
    e = jnp.exp(s - (2 * s).max(-1, keepdims=True))
    return mix(e / e.sum(-1, keepdims=True), v)


def by_two_over_the_sum(q, k, v, at):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return mix(e * (2 / e.sum(-1, keepdims=True)), v)


def not_normalised(q, k, v, at):
    s = scores(q, k)
    return mix(jnp.exp(s - s.max(-1, keepdims=True)), v)


def weights_are_returned(q, k, v, at):
    p = jax.nn.softmax(scores(q, k), -1)
    return mix(p, v), p


def scores_are_returned(q, k, v, at):
    s = scores(q, k)
    return mix(jax.nn.softmax(s, -1), v), s


def mixed_over_another_axis(q, k, v, at):
    p = jax.nn.softmax(jnp.einsum("bkgd,bskd->bksg", q, k[:, :G]), -1)
    return jnp.einsum("bkgs,bskd->bkgd", p.swapaxes(-1, -2), v[:, :G])


def scores_meet_their_mirror(q, k, v, at):
    s = scores(q, k)
    return mix(jax.nn.softmax(s + s[..., ::-1], -1), v)


def weights_are_changed(q, k, v, at):
    return mix(jnp.square(jax.nn.softmax(scores(q, k), -1)), v)


def rows_of_scores_are_normed(q, k, v, at):
    s = scores(q, k)
    s = s * lax.rsqrt(jnp.mean(s * s, -1, keepdims=True) + 1e-3)
    return mix(jax.nn.softmax(s, -1), v)


def scores_over_the_sum_of_all(q, k, v, at):
    s = scores(q, k)
    return mix(jax.nn.softmax(s / (1 + jnp.abs(s.sum())), -1), v)


def peak_beyond_a_number(q, k, v, at):
    s = scores(q, k)
    e = jnp.exp(s - jnp.maximum(s.max(-1, keepdims=True), 3.0))
    return mix(e / e.sum(-1, keepdims=True), v)


def not_shifted(q, k, v, at):
    e = jnp.exp(scores(q, k))  # overflows where a softmax does not
    return mix(e / e.sum(-1, keepdims=True), v)


def logsumexp_of_others(q, k, v, at):
    s = scores(q, k)
    return mix(jnp.exp(s - jax.nn.logsumexp(2 * s, -1, keepdims=True)), v)


def logsumexp_of_all_heads(q, k, v, at):
    s = scores(q, k)
    return mix(jnp.exp(s - jax.nn.logsumexp(s, (-2, -1), keepdims=True)), v)


def twice_the_logarithm(q, k, v, at):
    p = jax.nn.log_softmax(scores(q, k))
    return mix(jnp.exp(p + p), v)


def joined_sink_is_kept(q, k, v, at):  # its weight is not cut off, but the first one's
    sink = jnp.broadcast_to(sinks_of(v).reshape(1, KV, G, 1), (B, KV, G, 1))
    return mix(jax.nn.softmax(jnp.concatenate([scores(q, k), sink], -1), -1)[..., 1:], v)


def two_sinks(q, k, v, at):
    sink = jnp.broadcast_to(sinks_of(v).reshape(1, KV, G, 1), (B, KV, G, 1))
    return mix(jax.nn.softmax(jnp.concatenate([scores(q, k), sink, sink], -1), -1)[..., :-2], v)


def sink_of_two(q, k, v, at):
    sink = jnp.broadcast_to(sinks_of(v).reshape(1, KV, G, 1), (B, KV, G, 2))
    return mix(jax.nn.softmax(jnp.concatenate([scores(q, k), sink], -1), -1)[..., :-2], v)


def sink_made_of_scores(q, k, v, at):
    s = scores(q, k)
    s = jnp.where(visible(at), s, -jnp.inf)
    return mix(jax.nn.softmax(jnp.concatenate([s, 0.5 * s[..., :1]], -1), -1)[..., :-1], v)


def sink_joined_to_other_rows(q, k, v, at):
    s = scores(q, k)
    sink = jnp.broadcast_to(sinks_of(v)[:S, None][:1, None, None], (1, KV, G, S))
    p = jax.nn.softmax(jnp.concatenate([s, sink], 0), -1)
    return mix(p[:B], v)


def sink_beside_the_maximum_of_scores(q, k, v, at):  # where nothing is seen: NaN, and not 0
    s = jnp.where(visible(at), scores(q, k), -jnp.inf)
    peak = s.max(-1, keepdims=True)
    e = jnp.exp(s - peak)
    return mix(e / (e.sum(-1, keepdims=True) + jnp.exp(sinks_of(v).reshape(KV, G, 1) - peak)), v)


def sink_unlike_the_peak(q, k, v, at):
    s, sink = scores(q, k), sinks_of(v).reshape(KV, G, 1)
    peak = jnp.maximum(s.max(-1, keepdims=True), sink)
    e = jnp.exp(s - peak)
    return mix(e / (e.sum(-1, keepdims=True) + jnp.exp(2 * sink - peak)), v)


def sink_without_the_peak(q, k, v, at):
    s, sink = scores(q, k), sinks_of(v).reshape(KV, G, 1)
    peak = jnp.maximum(s.max(-1, keepdims=True), sink)
    e = jnp.exp(s - peak)
    return mix(e / (e.sum(-1, keepdims=True) + jnp.exp(sink)), v)


def shifted_by_another_row(q, k, v, at):
    s = scores(q, k)
    s = s - (2 * s).max(-1, keepdims=True)
    return mix(jax.nn.softmax(s, -1), v)


def divided_by_another_row(q, k, v, at):
    e = exponentials(q, k, at)
    return mix(e, v) / e.sum(-1).swapaxes(0, 1)[..., None]


def divided_by_rows_in_another_order(q, k, v, at):
    e = exponentials(q, k, at)
    return mix(e, v).swapaxes(0, 1) / e.sum(-1)[..., None]


def divided_by_the_sum_of_others(q, k, v, at):
    e = exponentials(q, k, at)
    return mix(e, v) / exponentials(q, k, at - 3).sum(-1)[..., None]


def divided_along_a_row(q, k, v, at):
    e = exponentials(q[..., :D], k, at)
    return mix(e, v[..., :G]) / e.sum(-1)[:, :, None]


def divided_by_the_sum_of_all_rows(q, k, v, at):
    e = exponentials(q, k, at)
    return mix(e, v) / e.sum(-1).sum(-1)[..., None, None]


def divided_and_returned(q, k, v, at):
    e = exponentials(q, k, at)
    mixed = mix(e, v)
    return mixed / e.sum(-1)[..., None], mixed


def sum_divided_by_what_is_mixed(q, k, v, at):
    e = exponentials(q, k, at)
    return e.sum(-1)[..., None] / (mix(e, v) + 3)


def shifted_beside_a_sink(q, k, v, at):  # the sink is not
    s, sink = scores(q, k), sinks_of(v).reshape(KV, G, 1)
    s = s - s.max(-1, keepdims=True)
    peak = jnp.maximum(s.max(-1, keepdims=True), sink)
    e = jnp.exp(s - peak)
    return mix(e / (e.sum(-1, keepdims=True) + jnp.exp(sink - peak)), v)


NEAR_MISSES = [
    divided_by_another_row,
    divided_by_rows_in_another_order,
    divided_by_the_sum_of_others,
    divided_along_a_row,
    divided_by_the_sum_of_all_rows,
    divided_and_returned,
    sum_divided_by_what_is_mixed,
    joined_sink_is_kept,
    two_sinks,
    sink_of_two,
    sink_made_of_scores,
    sink_joined_to_other_rows,
    sink_beside_the_maximum_of_scores,
    sink_unlike_the_peak,
    sink_without_the_peak,
    shifted_by_another_row,
    shifted_beside_a_sink,
    peak_beyond_a_number,
    not_shifted,
    logsumexp_of_others,
    logsumexp_of_all_heads,
    twice_the_logarithm,
    sum_of_other_scores,
    another_axis,
    maximum_of_other_scores,
    by_two_over_the_sum,
    not_normalised,
    weights_are_returned,
    scores_are_returned,
    mixed_over_another_axis,
    scores_meet_their_mirror,
    weights_are_changed,
    rows_of_scores_are_normed,
    scores_over_the_sum_of_all,
]


@pytest.mark.parametrize("fun", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses_are_not_attention_and_right(fun):
    assert attention_units(fun, Q, K, V, AT) == []
    step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    for _ in range(3):
        got, expected = step(Q, K, V, AT), jax.jit(fun)(Q, K, V, AT)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected
        )


def bound_of(mask, fill=-jnp.inf):
    def fun(q, k, v, at):
        s = jnp.where(mask(at), scores(q, k), fill)
        return mix(jax.nn.softmax(s, -1), v)

    (unit,) = attention_units(fun, Q, K, V, AT)
    return unit.params[1]


@pytest.mark.parametrize(
    "mask",
    [
        lambda at: jnp.arange(S) >= at,  # the other side
        lambda at: jnp.arange(S) != at,  # not monotone
        lambda at: (jnp.arange(S) <= at) | (jnp.arange(S) > 12),  # more than the bound is seen
        lambda at: jnp.arange(S)[::-1] <= at,  # counted from the end
        lambda at: jnp.arange(S) * 2 <= at,  # another scale
        lambda at: ~(jnp.arange(S) <= at),
    ],
)
def test_masks_that_bound_nothing(mask):
    assert bound_of(mask) == un.NO_BOUND


def test_a_finite_fill_bounds_nothing_where_a_window_may_hide_a_whole_row():
    def mask(at):
        return (jnp.arange(S) <= at) & (jnp.arange(S) > at - 4)

    def fun(q, k, v, at):
        s = jnp.where(mask(at), scores(q, k), -1e30)
        return mix(jax.nn.softmax(s, -1), v)

    step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    for at in (0, -2, 5, S + 3):
        got, want = step(Q, K, V, jnp.int32(at)), jax.jit(fun)(Q, K, V, jnp.int32(at))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert bound_of(mask, -1e30) == un.NO_BOUND
    assert bound_of(mask) != un.NO_BOUND


@pytest.mark.parametrize("fill", [-jnp.inf, -1e30])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.int8])
@pytest.mark.parametrize("more", [0, 1, 2])
def test_bounds_at_the_ends_of_their_type(dtype, fill, more):
    """`at + 1` wraps, and nothing is seen; below zero nothing is, either.

    A row of which nothing is seen is a mean of all positions where the fill is finite.
    """

    def fun(q, k, v, at):
        s = jnp.where(jnp.arange(S, dtype=dtype) < at + dtype(more), scores(q, k), fill)
        return mix(jax.nn.softmax(s, -1), v)

    step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    for at in (jnp.iinfo(dtype).max, jnp.iinfo(dtype).min, 0, 7):
        got, want = step(Q, K, V, dtype(at)), jax.jit(fun)(Q, K, V, dtype(at))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_lengths_that_lie_in_packed_memory_are_a_bound():
    def fun(q, k, v, packed):
        lengths = jax.lax.bitcast_convert_type(packed.reshape(B, 4), jnp.int32)
        q = q.reshape(B, 1, KV * G, D)
        return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)

    step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    for lengths in ([3, 9], [0, S], [300, 1]):
        packed = jnp.asarray(np.array(lengths, np.int32).view(np.uint8))
        got, want = step(Q, K, V, packed), jax.jit(fun)(Q, K, V, packed)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    (unit,) = attention_units(fun, Q, K, V, packed)
    assert unit.params[1] != un.NO_BOUND


def test_a_bound_that_is_computed_is_stored_once_for_all_layers():
    def fun(q, k, v, at):
        for _ in range(3):
            q = up_to_a_computed_position(q, k, v, at)
        return q

    found = units(fun, Q, K, V, AT)
    assert sum(u.op == un.ATTENTION for u in found) == 3
    assert sum(u.op == un.EXPR for u in found) == 1


def test_a_finite_fill_bounds_nothing_where_other_conditions_hide_whole_rows():
    def fun(q, k, v, at):
        seen = visible(at) & (jnp.arange(S) > 12)  # with at = 9: nothing
        s = jnp.where(seen, scores(q, k), -1e30)
        return mix(jax.nn.softmax(s, -1), v)

    (unit,) = attention_units(fun, Q, K, V, AT)
    assert unit.params[1] == un.NO_BOUND
    step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    np.testing.assert_allclose(step(Q, K, V, AT), jax.jit(fun)(Q, K, V, AT), rtol=1e-4, atol=1e-5)


def long_step(length, dtype=jnp.bfloat16, heads=KV, width=64):
    """Two attentions over one cache, and the units that they become."""
    q = jax.ShapeDtypeStruct((1, heads, G, width), dtype)
    cache = jax.ShapeDtypeStruct((1, length, heads, width), dtype)

    def fun(q, k, v):
        return no_mask(jnp.cos(no_mask(q, k, v, None)), k, v, None)

    return planned(fun, q, cache, cache)


def test_blocks_that_share_a_long_cache_get_memory_to_meet_in():
    plan = long_step(65536)
    found = [u for u in plan.units if u.op == un.ATTENTION]
    spaces = [u.outs[1] for u in found]
    assert [s.dtype for s in spaces] == [np.float32] * 2
    assert all(s.layout.size >= 2 * 132 * G * (64 + 4) for s in spaces)
    buffers = [plan.buffers[s.tensor.id] for s in spaces]
    assert buffers[0] is not buffers[1]
    assert plan.arena_bytes < buffers[0].nbytes + buffers[1].nbytes, "the second uses it again"
    for unit, space in zip(found, buffers, strict=True):  # nothing that the node touches is in it
        for ref in (unit.outs[0], *unit.srcs):
            other = plan.buffers[ref.tensor.id]
            apart = space.offset + space.nbytes, other.offset + other.nbytes
            assert other.kind != "arena" or other.offset >= apart[0] or space.offset >= apart[1]


@pytest.mark.parametrize("length, heads", [(4095, 64), (4096, 1), (8192, 256)])
def test_where_sharing_gains_nothing_there_is_no_such_memory(length, heads):
    """The cache is short or small, or there are heads enough for every block."""
    plan = long_step(length, heads=heads)
    assert all(len(u.outs) == 1 for u in plan.units if u.op == un.ATTENTION)


@pytest.mark.parametrize("kv", [1, 2])
@pytest.mark.parametrize("order", ["ps", "sp"])
def test_pages_that_a_table_lists_are_gathered_once_and_seen_as_one_cache(kv, order):
    """Gathered pages are rows of a table, too, but no matrices of their own."""
    pages, page, count, g, d = 5, 4, 10, 3, 8
    rng = np.random.default_rng(0)
    pools = [jnp.asarray(rng.standard_normal((count, page, kv, d)), jnp.float32) for _ in range(2)]
    q = jnp.asarray(rng.standard_normal((2, kv, g, d)), jnp.float32)
    table = jnp.asarray(rng.permutation(count).reshape(2, pages))

    def fun(q, pool_k, pool_v, table, n):
        k, v = pool_k[table], pool_v[table]
        s = jnp.einsum("bkgd,bpskd->bkgps", q, k)
        s = jnp.where(jnp.arange(pages * page).reshape(pages, page) <= n, s, -jnp.inf)
        w = jax.nn.softmax(s.reshape(2, kv, g, -1)).reshape(s.shape)
        if order == "sp":
            return jnp.einsum("bkgsp,bpskd->bkgd", w.swapaxes(-1, -2), v)
        return jnp.einsum("bkgps,bpskd->bkgd", w, v)

    args = q, *pools, table, jnp.int32(13)
    step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    (split,) = step.explain(*args).splits
    assert split.ops["GATHER"] == 2 and "COPY" not in split.ops
    if order == "ps":
        assert split.ops["ATTENTION"] == 1
    for _ in range(3):
        np.testing.assert_allclose(step(*args), jax.jit(fun)(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("repeated", [1, 2])
def test_a_bias_of_heads_is_copied_where_heads_and_queries_are_grouped(repeated):
    """No strides show a row of each head for the queries of all heads that share keys."""
    heads, queries, length = 4, 3, 16
    rng = np.random.default_rng(0)

    def some(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def fun(q, k, v, slopes, n):
        k, v = (jnp.repeat(t, heads // repeated, 1) for t in (k, v))
        s = q @ k.swapaxes(-1, -2) / 4 + slopes[:, None, None] * jnp.arange(length)
        return jax.nn.softmax(jnp.where(jnp.arange(length) <= n, s, -jnp.inf)) @ v

    k, v = (some(2, repeated, length, 8) for _ in range(2))
    args = some(2, heads, queries, 8), k, v, some(heads), jnp.int32(9)
    assert len(attention_units(fun, *args)) == 1
    step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    for _ in range(3):
        np.testing.assert_allclose(step(*args), jax.jit(fun)(*args), rtol=1e-5, atol=1e-5)
