"""Greedy generation with a step function, and how long each step took."""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The first steps compile (XLA) or warm up and capture (jaxgraph); they are no part of the times.
WARMUP_STEPS = 3
# Prompts are padded to a multiple of this, so that prompts of similar length share one compilation.
PROMPT_BLOCK = 64


@dataclass
class Run:
    """What one engine generated, and the time from each token to the next in seconds."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    # jaxgraph's own, where it ran.
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def steady(self) -> np.ndarray:
        return np.array(self.seconds[WARMUP_STEPS:])


def greedy(
    step: Callable,
    params: Any,
    prefilled: tuple[jax.Array, jax.Array, Any],
    max_tokens: int,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """Yields up to `max_tokens` tokens, the last of which may be one of `stop`.

    Args:
        step: `llama.decode_step`, jitted or wrapped, with its config bound and its cache donated.
        params: The parameters, in whatever form `step` takes.
        prefilled: What `llama.prefill` returns; the cache is used up.
        max_tokens: How many to generate at most, at least one.
        stop: Token ids that end the text.
    """
    token, position, cache = prefilled
    for remaining in range(max_tokens - 1, -1, -1):
        # The next step is enqueued before this one's token is waited for, so that the device does
        # not idle while the host prints.
        following = step(params, cache, token, position) if remaining else None
        chosen = token.item()
        yield chosen
        if chosen in stop or following is None:
            return
        token, position, cache = following


def timed(tokens: Iterator[int], run: Run) -> Iterator[int]:
    """Passes tokens on, and notes them and their times in `run`."""
    last = None
    for token in tokens:
        now = time.perf_counter()
        run.tokens.append(token)
        if last is not None:
            run.seconds.append(now - last)
        last = now
        yield token


def pad_prompt(prompt: list[int], context: int) -> jax.Array:
    """The prompt as a batch of one, padded."""
    length = min(-(-len(prompt) // PROMPT_BLOCK) * PROMPT_BLOCK, context)
    return jnp.asarray([prompt + [0] * (length - len(prompt))], jnp.int32)
