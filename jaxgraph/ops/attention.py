"""One query step against a cache: positions, the cache's update, attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxgraph.ops import checks, kernel


def rope(
    x: ArrayLike,
    position: ArrayLike,
    *,
    base: float = 10000.0,
    interleaved: bool = False,
) -> Array:
    """Rotary position embedding (Su et al., 2021, arXiv:2104.09864).

    Pair i of a head is turned by ``position * base**(-2i / d)`` radians, in float32.

    Args:
      x: floats [batch, heads, d], d even.
      position: integers, one for all rows (a scalar) or one a row ([batch]).
      base: the frequencies' base.
      interleaved: pairs are (0, 1), (2, 3)… as in the paper; else i goes with i + d/2, as in
        Llama's checkpoints on Hugging Face.

    Returns:
      Floats [batch, heads, d], of x's dtype.

    Raises:
      TypeError, ValueError: an argument has another dtype or shape.
    """
    x, position = jnp.asarray(x), jnp.asarray(position)
    checks.floating("x", x)
    checks.shape("x", x, None, None, None)
    if x.shape[-1] % 2:
        raise ValueError(f"x must have heads of an even size, not {x.shape[-1]}")
    _check_position(position, x.shape[0])
    static: dict[str, Any] = {"base": float(base), "interleaved": bool(interleaved)}
    return kernel.call(_rope, x, position, **static)


def _rope(x: Array, position: Array, *, base: float, interleaved: bool) -> Array:
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position.astype(jnp.float32)[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    wide = x.astype(jnp.float32)
    if interleaved:
        pairs = wide.reshape(*x.shape[:-1], half, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)


def update_cache(cache: ArrayLike, new: ArrayLike, position: ArrayLike) -> Array:
    """The cache with `new` at `position`. In place if XLA may reuse the cache's buffer (donate it).

    Args:
      cache: [batch, kv_heads, length, d].
      new: [batch, kv_heads, d], of the cache's dtype.
      position: integers, one for all rows (a scalar) or one a row ([batch]); beyond the cache's
        ends it means the first or last place.

    Returns:
      [batch, kv_heads, length, d].

    Raises:
      TypeError, ValueError: an argument has another dtype or shape.
    """
    cache, new, position = jnp.asarray(cache), jnp.asarray(new), jnp.asarray(position)
    checks.shape("cache", cache, None, None, None, None)
    batch, kv_heads, _, d = cache.shape
    checks.shape("new", new, batch, kv_heads, d)
    if new.dtype != cache.dtype:
        raise TypeError(f"new must have the cache's dtype {cache.dtype}, not {new.dtype}")
    _check_position(position, batch)
    return kernel.call(_update_cache, cache, new, position)


def _update_cache(cache: Array, new: Array, position: Array) -> Array:
    new = new[:, :, None, :]
    if position.ndim == 0:
        return lax.dynamic_update_slice(cache, new, (0, 0, position, 0))

    def of_row(cache: Array, new: Array, position: Array) -> Array:
        return lax.dynamic_update_slice(cache, new, (0, position, 0))

    return jax.vmap(of_row)(cache, new, position)


def attention_decode(
    q: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    position: ArrayLike,
    *,
    sinks: ArrayLike | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Attention of one query a row to a cache, of which it sees the places up to its position.

    ``softmax(scale * q·k) · v``; heads of q share a head of the cache in groups (Ainslie et al.,
    2023, arXiv:2305.13245). Scores, softmax and sums are float32.

    Args:
      q: floats [batch, heads, d].
      keys: floats [batch, kv_heads, length, d]; heads must be a multiple of kv_heads.
      values: floats [batch, kv_heads, length, e].
      position: integers, one for all rows (a scalar) or one a row ([batch]): the last place that
        the row sees, that of its own key.
      sinks: floats [heads]: one score more for each head, which takes its part of the weights and
        has no value (as in GPT-OSS, arXiv:2508.10925); default none.
      scale: of the scores; default 1/sqrt(d).
      window: how many places a row sees at most, the last ones; default all.
      soft_cap: scores are ``soft_cap * tanh(score / soft_cap)`` (Gemma 2, arXiv:2408.00118).

    Returns:
      Floats [batch, heads, e], of the values' dtype.

    Raises:
      TypeError, ValueError: an argument has another dtype or shape.
    """
    q, keys, values, position = (jnp.asarray(a) for a in (q, keys, values, position))
    for name, x in (("q", q), ("keys", keys), ("values", values)):
        checks.floating(name, x)
    checks.shape("q", q, None, None, None)
    batch, heads, d = q.shape
    checks.shape("keys", keys, batch, None, None, d)
    kv_heads, length = keys.shape[1:3]
    checks.shape("values", values, batch, kv_heads, length, None)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, no multiple of the cache's {kv_heads}")
    _check_position(position, batch)
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be 1 or more, or None")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap} must be above 0, or None")
    static: dict[str, Any] = {
        "scale": float(d**-0.5 if scale is None else scale),
        "window": window,
        "soft_cap": None if soft_cap is None else float(soft_cap),
    }
    if sinks is not None:
        sinks = jnp.asarray(sinks)
        checks.floating("sinks", sinks)
        checks.shape("sinks", sinks, heads)
    return kernel.call(_attention_decode, q, keys, values, position, sinks, **static)


def _attention_decode(
    q: Array,
    keys: Array,
    values: Array,
    position: Array,
    sinks: Array | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Array:
    batch, heads, d = q.shape
    kv_heads, length = keys.shape[1:3]
    q = q.reshape(batch, kv_heads, heads // kv_heads, d)
    scores = jnp.einsum("bkgd,bksd->bkgs", q, keys, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    place = jnp.arange(length)
    last = jnp.broadcast_to(position, (batch,))[:, None]
    seen = place <= last
    if window is not None:
        seen &= place > last - window
    scores = jnp.where(seen[:, None, None, :], scores, -jnp.inf)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks.astype(scores.dtype).reshape(kv_heads, -1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    weights = weights.astype(values.dtype)
    out = jnp.einsum("bkgs,bksd->bkgd", weights, values)
    return out.reshape(batch, heads, values.shape[-1])


def _check_position(position: Array, batch: int) -> None:
    checks.integer("position", position)
    if position.shape not in ((), (batch,)):
        raise ValueError(
            f"position must be a scalar or have the shape ({batch},), one a row, not "
            f"{tuple(position.shape)}"
        )
