"""The model against itself: both forms, both kinds of position, prompt at once or by token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama import (
    Config,
    decode_logits,
    decode_step,
    empty_cache,
    prefill,
    random_params,
    rotary,
    rotary_angles,
    stack_layers,
)

CONFIG = Config(layers=3, width=32, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=100)
CONTEXT, LENGTH = 16, 10
TOKENS = jax.random.randint(jax.random.key(1), (2, LENGTH), 0, CONFIG.vocab)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, jnp.float32, jax.random.key(0))


def decode(params, tokens, *, stacked=False, per_row=False):
    """The logits after each token, [length, batch, vocab], and the cache."""
    step = jax.jit(partial(decode_logits, config=CONFIG), donate_argnums=1)
    batch = tokens.shape[0]
    cache = empty_cache(CONFIG, batch, CONTEXT, jnp.float32, stacked=stacked)
    scores = []
    for i in range(tokens.shape[1]):
        position = jnp.full(batch, i, jnp.int32) if per_row else jnp.int32(i)
        one, cache = step(params, cache, tokens[:, i], position)
        scores.append(one)
    return np.stack(scores), cache


def test_list_and_scan_agree(params) -> None:
    stacked = {**params, "layers": stack_layers(params["layers"])}
    listed, scanned = decode(params, TOKENS)[0], decode(stacked, TOKENS, stacked=True)[0]
    np.testing.assert_allclose(listed, scanned, atol=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_position_per_row_agrees_with_one_for_all(params, stacked: bool) -> None:
    if stacked:
        params = {**params, "layers": stack_layers(params["layers"])}
    one, all_rows = (decode(params, TOKENS, stacked=stacked, per_row=p)[0] for p in (False, True))
    np.testing.assert_allclose(one, all_rows, atol=1e-5)


def test_rows_at_different_positions_do_not_mix(params) -> None:
    step = jax.jit(partial(decode_logits, config=CONFIG))
    caches = [decode(params, TOKENS[row : row + 1, :n])[1] for row, n in enumerate((4, 7))]
    both = jax.tree.map(lambda *rows: jnp.concatenate(rows), *caches)
    token, position = jnp.array([5, 6]), jnp.array([4, 7])
    together, _ = step(params, both, token, position)
    for row, cache in enumerate(caches):
        alone, _ = step(params, cache, token[row : row + 1], position[row])
        np.testing.assert_allclose(together[row], alone[0], atol=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_prefill_agrees_with_token_by_token(params, stacked: bool) -> None:
    if stacked:
        params = {**params, "layers": stack_layers(params["layers"])}
    scores, stepped = decode(params, TOKENS, stacked=stacked)
    cache = empty_cache(CONFIG, 2, CONTEXT, jnp.float32, stacked=stacked)
    padded = jnp.pad(TOKENS, ((0, 0), (0, 3)), constant_values=7)
    token, position, filled = prefill(params, cache, padded, LENGTH, config=CONFIG)
    assert token.tolist() == scores[-1].argmax(-1).tolist()
    assert position == LENGTH
    for a, b in zip(jax.tree.leaves(filled), jax.tree.leaves(stepped), strict=True):
        np.testing.assert_allclose(a[..., :LENGTH, :], b[..., :LENGTH, :], atol=1e-5)


def test_step_picks_the_best_logit_and_moves_on(params) -> None:
    cache = empty_cache(CONFIG, 2, CONTEXT, jnp.float32)
    token, position = jnp.array([3, 4]), jnp.int32(0)
    scores, _ = decode_logits(params, cache, token, position, config=CONFIG)
    chosen, following, _ = decode_step(params, cache, token, position, config=CONFIG)
    assert chosen.dtype == jnp.int32 and chosen.tolist() == scores.argmax(-1).tolist()
    assert following == 1


def test_rotary_depends_on_the_distance_alone() -> None:
    q, k = jax.random.normal(jax.random.key(2), (2, 1, CONFIG.head_dim))

    def product(at_q: int, at_k: int) -> float:
        turned = [
            rotary(x, *rotary_angles(jnp.int32(at), CONFIG)) for x, at in ((q, at_q), (k, at_k))
        ]
        return float(jnp.vdot(*turned))

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


def test_rope_factors_divide_the_frequencies() -> None:
    stretched = Config(**{**vars(CONFIG), "rope_factors": (2.0,) * (CONFIG.head_dim // 2)})
    plain = rotary_angles(jnp.int32(3), CONFIG)
    np.testing.assert_allclose(rotary_angles(jnp.int32(6), stretched), plain, atol=1e-6)
