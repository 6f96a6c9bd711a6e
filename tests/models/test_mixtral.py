"""A mixture of experts: the best two of five, reached by gathered weights or by one-hot einsums."""

import functools

import jax
import jax.numpy as jnp
import pytest
from decoding import DTYPES, Weights, check_decoding

import jaxgraph

LAYERS, WIDTH, HEADS, HEAD_DIM, FFN, VOCAB, CONTEXT = 2, 40, 4, 10, 52, 97, 36
EXPERTS, CHOSEN = 5, 2
# With these weights no routing is a near tie: the second and third expert's logits lie at least
# 0.16 apart, far more than bf16 moves them.
SEED = 51


def rms_norm(x, weight):
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-5)
    return (x * scale).astype(x.dtype) * weight


def attention(p, x, cache, position):
    batch = x.shape[0]
    q, k, v = (jnp.dot(x, p[name]).reshape(batch, HEADS, HEAD_DIM) for name in ("q", "k", "v"))
    keys = cache["k"].at[:, :, position].set(k)
    values = cache["v"].at[:, :, position].set(v)
    scores = jnp.einsum("bhd,bhsd->bhs", q, keys) * HEAD_DIM**-0.5
    scores = jnp.where(jnp.arange(CONTEXT) <= position, scores.astype(jnp.float32), -jnp.inf)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    out = jnp.einsum("bhs,bhsd->bhd", weights, values)
    return out.reshape(batch, -1) @ p["o"], {"k": keys, "v": values}


def gathered_experts(p, x, weights, chosen):
    """The chosen experts' matrices are gathered: [batch, chosen, in, out]."""
    gate, up, down = (p[name][chosen] for name in ("gate", "up", "down"))
    h = jax.nn.silu(jnp.einsum("bd,bkdf->bkf", x, gate)) * jnp.einsum("bd,bkdf->bkf", x, up)
    return jnp.einsum("bkf,bkfd,bk->bd", h, down, weights)


def one_hot_experts(p, x, weights, chosen):
    """All experts run; what each token gets of them is a sum over experts."""
    mixture = jnp.einsum("bk,bke->be", weights, jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype))
    h = jax.nn.silu(jnp.einsum("bd,edf->bef", x, p["gate"]))
    h = h * jnp.einsum("bd,edf->bef", x, p["up"])
    return jnp.einsum("bef,efd,be->bd", h, p["down"], mixture)


def moe(p, x, experts):
    router_logits = (x @ p["router"]).astype(jnp.float32)
    weights, chosen = jax.lax.top_k(router_logits, CHOSEN)
    weights = jax.nn.softmax(weights, axis=-1).astype(x.dtype)
    return experts(p, x, weights, chosen)


def decode_step(params, cache, token, position, *, experts):
    x = params["embed"][token]
    new_cache = []
    for p, layer_cache in zip(params["layers"], cache, strict=True):
        h, layer_cache = attention(p["attention"], rms_norm(x, p["norm1"]), layer_cache, position)
        new_cache.append(layer_cache)
        x = x + h
        x = x + moe(p["moe"], rms_norm(x, p["norm2"]), experts)
    logits = rms_norm(x, params["norm"]) @ params["head"]
    return jnp.argmax(logits, axis=-1), logits, new_cache


def model(dtype, batch):
    w = Weights(dtype, SEED)

    def layer():
        return {
            "norm1": w.vector(WIDTH, around=1.0),
            "attention": {name: w.matrix(WIDTH, WIDTH) for name in ("q", "k", "v", "o")},
            "norm2": w.vector(WIDTH, around=1.0),
            "moe": {
                "router": w.matrix(WIDTH, EXPERTS) * 4,
                "gate": w.matrix(EXPERTS, WIDTH, FFN),
                "up": w.matrix(EXPERTS, WIDTH, FFN),
                "down": w.matrix(EXPERTS, FFN, WIDTH),
            },
        }

    params = {
        "embed": w.matrix(VOCAB, WIDTH, fan_in=1),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": w.vector(WIDTH, around=1.0),
        "head": w.matrix(WIDTH, VOCAB),
    }
    empty = jnp.zeros((batch, HEADS, CONTEXT, HEAD_DIM), dtype)
    return params, [{"k": empty, "v": empty} for _ in range(LAYERS)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [gathered_experts, one_hot_experts], ids=lambda f: f.__name__)
def test_a_mixture_of_experts_is_one_split(dtype, experts):
    step = functools.partial(decode_step, experts=experts)
    check_decoding(step, *model(dtype, 2))


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_gathered_experts_are_read_where_they_lie(batch):
    """Of a layer query, key, value, output, router, and three products of experts; nothing gathers
    but the embedding."""
    params, cache = model(jnp.float32, batch)
    step = functools.partial(decode_step, experts=gathered_experts)
    token, position = jnp.zeros(batch, jnp.int32), jnp.int32(0)
    (split,) = jaxgraph.explain(step, params, cache, token, position).splits
    assert split.ops["MATMUL"] == 8 * LAYERS + 1
    assert split.ops["GATHER"] == 1
    assert split.ops["SORT"] == LAYERS
