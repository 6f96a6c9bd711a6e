"""A Llama decode step, as any JAX user would write it: pure functions over a pytree of arrays.

The parameters are a dictionary. `params["layers"]` has one of two forms, and every function here
takes both: a list with one dictionary per layer, or one dictionary whose arrays are stacked along a
leading layer axis and walked with `lax.scan` (faster to compile). The cache has the same form.

    config = SHAPES["15m"]
    params = random_params(config, jnp.float32, jax.random.key(0))
    cache = empty_cache(config, batch=1, context=256, dtype=jnp.float32)
    step = jax.jit(partial(decode_step, config=config), donate_argnums=1)
    token, position, cache = step(params, cache, token, position)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Params = dict[str, Any]
Cache = list[dict[str, Array]] | dict[str, Array]
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]


@dataclass(frozen=True)
class Config:
    """What the arrays do not say about a model. Hashable, so that it can be static under `jit`."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_base: float = 10000.0
    eps: float = 1e-5
    tied: bool = True
    # One divisor per rotary frequency: how Llama 3.1 and later stretch their context.
    rope_factors: tuple[float, ...] | None = None


SHAPES = {
    "15m": Config(6, 288, 6, 6, 48, 768, 32000),
    "135m": Config(30, 576, 9, 3, 64, 1536, 49152, rope_base=100000.0),
    "1b": Config(16, 2048, 32, 8, 64, 8192, 128256, rope_base=500000.0),
    "8b": Config(32, 4096, 32, 8, 128, 14336, 128256, rope_base=500000.0, tied=False),
}


def decode_step(
    params: Params, cache: Cache, token: Array, position: Array, *, config: Config
) -> tuple[Array, Array, Cache]:
    """Feeds one token per row and picks the next one greedily.

    Args:
        params: The model's arrays.
        cache: Keys and values so far. Returned in the order in which it came, so that a donated
            cache is updated in place.
        token: int32 [batch].
        position: int32, one for all rows (a scalar) or one per row ([batch]).
        config: The model's shape.

    Returns:
        The next token [batch], the next position, and the updated cache.
    """
    scores, cache = decode_logits(params, cache, token, position, config=config)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32), position + 1, cache


def decode_logits(
    params: Params, cache: Cache, token: Array, position: Array, *, config: Config
) -> tuple[Array, Cache]:
    """Like `decode_step`, but returns the float32 logits [batch, vocab] instead of a choice."""
    x = params["embed"][token]
    cos, sin = rotary_angles(position, config)

    def layer_step(x: Array, w: Params, cache: dict[str, Array], layer: Array | None):
        def attend(q: Array, k: Array, v: Array):
            new = {
                "k": write_token(cache["k"], k, position, layer),
                "v": write_token(cache["v"], v, position, layer),
            }
            keys, values = layer_of(new["k"], layer), layer_of(new["v"], layer)
            return attend_to_cache(q, keys, values, position), new

        return block(x, w, cos, sin, attend, config)

    x, cache = run_layers(layer_step, x, params["layers"], cache)
    return logits(params, x, config), cache


def prefill(
    params: Params, cache: Cache, tokens: Array, length: Array, *, config: Config
) -> tuple[Array, Array, Cache]:
    """Feeds a whole prompt at once and picks the token after it.

    Args:
        params: The model's arrays.
        cache: An empty cache.
        tokens: int32 [batch, padded length]. What is behind `length` is never attended to: a decode
            step overwrites a cache row before it is the first to read it.
        length: int32 scalar, the prompt's length without the padding.
        config: The model's shape.

    Returns:
        The token after the prompt [batch], its position (a scalar), and the filled cache.
    """
    x = params["embed"][tokens]
    cos, sin = rotary_angles(jnp.arange(tokens.shape[1]), config)

    def layer_step(x: Array, w: Params, cache: dict[str, Array], layer: Array | None):
        def attend(q: Array, k: Array, v: Array):
            new = {
                "k": write_prompt(cache["k"], k, layer),
                "v": write_prompt(cache["v"], v, layer),
            }
            return attend_causally(q, k, v), new

        return block(x, w, cos, sin, attend, config)

    x, cache = run_layers(layer_step, x, params["layers"], cache)
    last = lax.dynamic_index_in_dim(x, length - 1, axis=1, keepdims=False)
    token = jnp.argmax(logits(params, last, config), axis=-1).astype(jnp.int32)
    return token, jnp.asarray(length, jnp.int32), cache


def run_layers(layer_step: Callable, x: Array, layers: Any, cache: Cache) -> tuple[Array, Cache]:
    """Walks the layers in either form; see the module's docstring."""
    if isinstance(layers, list):
        new_cache = []
        for w, layer_cache in zip(layers, cache, strict=True):
            x, layer_cache = layer_step(x, w, layer_cache, None)
            new_cache.append(layer_cache)
        return x, new_cache

    # The cache is carried, not scanned over: as a scanned output it would be a second buffer, and
    # every step would copy it.
    def body(carry, inputs):
        x, cache = carry
        w, layer = inputs
        return layer_step(x, w, cache, layer), None

    count = layers["attn_norm"].shape[0]
    (x, cache), _ = lax.scan(body, (x, cache), (layers, jnp.arange(count)))
    return x, cache


def block(
    x: Array, w: Params, cos: Array, sin: Array, attend: Attend, config: Config
) -> tuple[Array, Any]:
    """One transformer layer. `attend` maps (q, k, v) to the attention's result and a new cache."""
    h = rms_norm(x, w["attn_norm"], config.eps)
    q = rotary(split_heads(h @ w["wq"], config.heads), cos, sin)
    k = rotary(split_heads(h @ w["wk"], config.kv_heads), cos, sin)
    v = split_heads(h @ w["wv"], config.kv_heads)
    attended, cache = attend(q, k, v)
    x = x + attended.reshape(*x.shape[:-1], -1) @ w["wo"]
    h = rms_norm(x, w["ffn_norm"], config.eps)
    return x + (jax.nn.silu(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"], cache


def logits(params: Params, x: Array, config: Config) -> Array:
    """Final norm and output projection, in float32 whatever the parameters' dtype."""
    x = rms_norm(x, params["norm"], config.eps)
    w = params["embed"].T if config.tied else params["output"]
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight


def split_heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:-1], heads, -1)


def rotary_angles(position: Array, config: Config) -> tuple[Array, Array]:
    """Cosines and sines, [..., 1, head_dim / 2]; the 1 stands for the heads."""
    half = config.head_dim // 2
    frequency = config.rope_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope_factors is not None:
        frequency = frequency / jnp.array(config.rope_factors, jnp.float32)
    angle = position.astype(jnp.float32)[..., None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotary(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the first half of each head against its second half."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend_to_cache(q: Array, keys: Array, values: Array, position: Array) -> Array:
    """One query per row against the cache: q [B, H, D], keys and values [B, KV, S, D]."""
    batch, heads, head_dim = q.shape
    kv_heads, context = keys.shape[1:3]
    q = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bkgd,bksd->bkgs", q, keys, preferred_element_type=jnp.float32)
    visible = jnp.arange(context) <= position[..., None]
    visible = jnp.broadcast_to(visible, (batch, context))[:, None, None, :]
    scores = jnp.where(visible, scores * head_dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("bkgs,bksd->bkgd", weights, values).reshape(batch, heads, head_dim)


def attend_causally(q: Array, k: Array, v: Array) -> Array:
    """A prompt against itself: q [B, T, H, D], k and v [B, T, KV, D]."""
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
    visible = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(visible, scores * head_dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    attended = jnp.einsum("bkgts,bskd->btkgd", weights, v)
    return attended.reshape(batch, length, heads, head_dim)


def write_token(cache: Array, new: Array, position: Array, layer: Array | None) -> Array:
    """Puts new [B, KV, D] at `position` of cache [B, KV, S, D], or of one layer of all caches."""
    new = new[:, :, None, :]
    if position.ndim == 0:
        start = (0, 0, position, 0)
        if layer is None:
            return lax.dynamic_update_slice(cache, new, start)
        return lax.dynamic_update_slice(cache, new[None], (layer, *start))

    # One position per row: the same update, batched.
    def write_row(cache: Array, new: Array, position: Array) -> Array:
        if layer is None:
            return lax.dynamic_update_slice(cache, new, (0, position, 0))
        return lax.dynamic_update_slice(cache, new[None], (layer, 0, position, 0))

    axis = 0 if layer is None else 1
    return jax.vmap(write_row, in_axes=(axis, 0, 0), out_axes=axis)(cache, new, position)


def write_prompt(cache: Array, new: Array, layer: Array | None) -> Array:
    """Puts new [B, T, KV, D] at the cache's start."""
    new = new.swapaxes(1, 2)
    if layer is None:
        return lax.dynamic_update_slice(cache, new, (0, 0, 0, 0))
    return lax.dynamic_update_slice(cache, new[None], (layer, 0, 0, 0, 0))


def layer_of(cache: Array, layer: Array | None) -> Array:
    if layer is None:
        return cache
    return lax.dynamic_index_in_dim(cache, layer, keepdims=False)


def empty_cache(
    config: Config, batch: int, context: int, dtype: Any, *, stacked: bool = False
) -> Cache:
    """A cache of zeros, for parameters in list form or (`stacked`) in scan form."""
    shape = (batch, config.kv_heads, context, config.head_dim)
    if stacked:
        shape = (config.layers, *shape)
        return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}
    return [
        {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)} for _ in range(config.layers)
    ]


def stack_layers(layers: list[Params]) -> Params:
    """Turns the list form of the layers into the form that is walked with `lax.scan`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The arrays of one layer, as [in, out]."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "attn_norm": (config.width,),
        "wq": (config.width, q),
        "wk": (config.width, kv),
        "wv": (config.width, kv),
        "wo": (q, config.width),
        "ffn_norm": (config.width,),
        "w_gate": (config.width, config.ffn),
        "w_up": (config.width, config.ffn),
        "w_down": (config.ffn, config.width),
    }


def random_params(config: Config, dtype: Any, key: Array, *, stacked: bool = False) -> Params:
    """Random parameters, made array by array: one big initializer takes minutes to compile."""
    keys = iter(jax.random.split(key, 16 * config.layers + 16))

    def make(shape: tuple[int, ...], *, norm: bool = False, layers: int | None = None) -> Array:
        full = shape if layers is None else (layers, *shape)
        if norm:
            return jnp.ones(full, dtype)
        # Scaled by the fan-in, so that activations keep their size through the layers.
        return jax.random.normal(next(keys), full, dtype) * jnp.asarray(shape[0] ** -0.5, dtype)

    def make_layer(layers: int | None = None) -> Params:
        return {
            name: make(shape, norm=name.endswith("norm"), layers=layers)
            for name, shape in layer_shapes(config).items()
        }

    params: Params = {
        "embed": make((config.vocab, config.width)),
        "norm": make((config.width,), norm=True),
        "layers": make_layer(config.layers)
        if stacked
        else [make_layer() for _ in range(config.layers)],
    }
    if not config.tied:
        params["output"] = make((config.width, config.vocab))
    return params
