"""One small model with several ways to keep its cache: rolling, and a position for each row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import DTYPES, Weights, check_decoding

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 2, 36, 4, 2, 9, 89, 48
WINDOW = 12


def rms_norm(x, weight):
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-5)
    return (x * scale).astype(x.dtype) * weight


def attend(q, keys, values, mask):
    """q [B, H, D] against keys and values [B, S, KV, D]; mask [S] or [B, S]."""
    batch, heads, head_dim = q.shape
    q = q.reshape(batch, KV_HEADS, heads // KV_HEADS, head_dim)
    scores = jnp.einsum("bkgd,bskd->bkgs", q, keys).astype(jnp.float32) * head_dim**-0.5
    mask = jnp.broadcast_to(mask, (batch, keys.shape[1]))
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("bkgs,bskd->bkgd", weights, values).reshape(batch, -1)


def decode_step(params, cache, token, position, *, write, mask):
    x = params["embed"][token]
    keys, values = list(cache["k"]), list(cache["v"])
    for i, p in enumerate(params["layers"]):
        h = rms_norm(x, p["norm"])
        q, k, v = (jnp.einsum("bd,dhk->bhk", h, p[name]) for name in ("q", "k", "v"))
        keys[i] = write(keys[i], k, position)
        values[i] = write(values[i], v, position)
        attended = attend(q, keys[i], values[i], mask(position, keys[i].shape[1]))
        x = x + attended @ p["o"]
        x = x + jnp.square(jax.nn.relu(x @ p["up"])) @ p["down"]
    logits = rms_norm(x, params["norm"]) @ params["head"]
    return jnp.argmax(logits, -1).astype(jnp.int32), logits, {"k": keys, "v": values}


def model(dtype, batch, context):
    w = Weights(dtype)

    def layer():
        return {
            "norm": w.vector(WIDTH, around=1.0),
            "q": w.matrix(WIDTH, HEADS, HEAD_DIM, fan_in=WIDTH),
            "k": w.matrix(WIDTH, KV_HEADS, HEAD_DIM, fan_in=WIDTH),
            "v": w.matrix(WIDTH, KV_HEADS, HEAD_DIM, fan_in=WIDTH),
            "o": w.matrix(HEADS * HEAD_DIM, WIDTH),
            "up": w.matrix(WIDTH, 2 * WIDTH),
            "down": w.matrix(2 * WIDTH, WIDTH),
        }

    params = {
        "embed": w.matrix(VOCAB, WIDTH, fan_in=1),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": w.vector(WIDTH, around=1.0),
        "head": w.matrix(WIDTH, VOCAB),
    }
    empty = [jnp.zeros((batch, context, KV_HEADS, HEAD_DIM), dtype) for _ in range(LAYERS)]
    return params, {"k": empty, "v": list(empty)}


def write_rolling(cache, new, position):
    slot = position % cache.shape[1]
    return jax.lax.dynamic_update_index_in_dim(cache, new, slot, axis=1)


def rolling_mask(position, length):
    return (jnp.arange(length) <= position) | (position >= length)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rolling_cache_is_one_split(dtype):
    """32 steps through a window of 12: each slot is written nearly three times."""
    step = functools.partial(decode_step, write=write_rolling, mask=rolling_mask)
    check_decoding(step, *model(dtype, 2, WINDOW))


def write_mapped(cache, new, positions):
    def write_row(cache, new, position):
        return jax.lax.dynamic_update_slice(cache, new[None], (position, 0, 0))

    return jax.vmap(write_row)(cache, new, positions)


def write_scattered(cache, new, positions):
    return cache.at[jnp.arange(cache.shape[0]), positions].set(new)


def write_one_hot(cache, new, positions):
    hit = jnp.arange(cache.shape[1]) == positions[:, None]
    return jnp.where(hit[:, :, None, None], new[:, None], cache)


def mask_of_rows(positions, length):
    return jnp.arange(length) <= positions[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("write", [write_mapped, write_scattered], ids=lambda f: f.__name__)
def test_a_position_for_each_row_is_one_split(dtype, write):
    step = functools.partial(decode_step, write=write, mask=mask_of_rows)
    batch = 3
    check_decoding(step, *model(dtype, batch, CONTEXT), batch=batch, position=np.array([0, 7, 15]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_rewritten_by_a_mask_is_one_split(dtype):
    """The whole cache is selected anew, so this spelling cannot keep its address."""
    step = functools.partial(decode_step, write=write_one_hot, mask=mask_of_rows)
    check_decoding(step, *model(dtype, 2, CONTEXT), position=np.array([0, 7]), in_place=False)


def step_with_one_array(params, cache, token, position):
    """Keys and values of all layers in one array: taken apart, and put together again."""
    layers = [cache[:, i] for i in range(LAYERS)]
    apart = {"k": [c[:, 0] for c in layers], "v": [c[:, 1] for c in layers]}
    token, logits, apart = decode_step(
        params, apart, token, position, write=write_at, mask=mask_up_to
    )
    pairs = zip(apart["k"], apart["v"], strict=True)
    return token, logits, jnp.stack([jnp.stack(pair, axis=1) for pair in pairs], axis=1)


def write_at(cache, new, position):
    return jax.lax.dynamic_update_slice(cache, new[:, None], (0, position, 0, 0))


def mask_up_to(position, length):
    return jnp.arange(length) <= position


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_cache_in_one_array_is_updated_where_it_lies(dtype, batch):
    params, apart = model(dtype, batch, CONTEXT)
    cache = jnp.stack([jnp.stack(pair, 1) for pair in zip(apart["k"], apart["v"], strict=True)], 1)
    explanation = check_decoding(step_with_one_array, params, cache, batch=batch)
    assert explanation.splits[0].ops["ATTENTION"] == LAYERS
    assert "COPY" not in explanation.splits[0].ops
