"""Strided layouts, and what the view-like operations of JAX do to them.

A layout says where the elements of a tensor lie relative to a buffer: ``offset`` and ``strides``
count elements. View operations launch nothing; they only rewrite a layout. Where strides cannot
express the view (a reshape across a transpose, say) the functions return None and the caller
materialises a copy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tensor lies in a buffer: element ``i`` at ``offset + sum(i * strides)``."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Row-major without gaps (dimensions of size one may have any stride)."""
        if self.size == 0:
            return True
        return all(
            n == 1 or s == c
            for n, s, c in zip(
                self.shape, self.strides, contiguous_strides(self.shape), strict=True
            )
        )

    @property
    def is_dense(self) -> bool:
        """Covers a buffer of its size exactly once, in whatever order of dimensions."""
        if self.offset != 0:
            return False
        step = 1
        for n, s in sorted(self.dims(), key=lambda d: d[1]):
            if s != step:
                return False
            step *= n
        return True

    def dims(self) -> tuple[tuple[int, int], ...]:
        """(size, stride) of the dimensions larger than one: what identifies the access pattern."""
        return tuple((n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def contiguous(shape: Sequence[int], offset: int = 0) -> Layout:
    return Layout(tuple(shape), contiguous_strides(shape), offset)


def transpose(x: Layout, permutation: Sequence[int]) -> Layout:
    return Layout(
        tuple(x.shape[p] for p in permutation), tuple(x.strides[p] for p in permutation), x.offset
    )


def broadcast(x: Layout, shape: Sequence[int], dimensions: Sequence[int]) -> Layout:
    """``lax.broadcast_in_dim``: input dimension ``i`` becomes dimension ``dimensions[i]``."""
    strides = [0] * len(shape)
    for i, d in enumerate(dimensions):
        strides[d] = x.strides[i] if x.shape[i] == shape[d] and x.shape[i] != 1 else 0
    return Layout(tuple(shape), tuple(strides), x.offset)


def slice_(
    x: Layout, starts: Sequence[int], limits: Sequence[int], steps: Sequence[int] | None
) -> Layout:
    steps = steps or (1,) * len(starts)
    shape = tuple(
        max(0, -(-(hi - lo) // st)) for lo, hi, st in zip(starts, limits, steps, strict=True)
    )
    offset = x.offset + sum(lo * s for lo, s in zip(starts, x.strides, strict=True))
    return Layout(shape, tuple(s * st for s, st in zip(x.strides, steps, strict=True)), offset)


def reverse(x: Layout, dimensions: Sequence[int]) -> Layout:
    strides, offset = list(x.strides), x.offset
    for d in dimensions:
        if x.shape[d] > 0:
            offset += (x.shape[d] - 1) * x.strides[d]
        strides[d] = -strides[d]
    return Layout(x.shape, tuple(strides), offset)


def reshape(x: Layout, shape: Sequence[int]) -> Layout | None:
    """Row-major reshape, or None where no strides express it."""
    shape = tuple(shape)
    if x.size == 0 or x.size == 1:
        return Layout(
            shape, (0,) * len(shape) if x.size == 1 else contiguous_strides(shape), x.offset
        )
    # Maximal runs of input dimensions that lie behind each other as one dimension.
    runs: list[list[int]] = []  # [size, stride of the innermost]
    for n, s in x.dims():
        if runs and runs[-1][1] == n * s:
            runs[-1][0] *= n
            runs[-1][1] = s
        else:
            runs.append([n, s])
    # Deal the output dimensions out to the runs, innermost first.
    strides = [0] * len(shape)
    left, step = 1, 0
    for d in range(len(shape) - 1, -1, -1):
        n = shape[d]
        if n == 1:
            continue
        if left == 1:
            left, step = runs.pop()
        if left % n:
            return None
        strides[d] = step
        left //= n
        step *= n
    return Layout(shape, tuple(strides), x.offset)


def reinterpret(x: Layout, old_size: int, new_shape: Sequence[int], new_size: int) -> Layout | None:
    """``lax.bitcast_convert_type`` between element sizes of ``old_size`` and ``new_size`` bytes."""
    new_shape = tuple(new_shape)
    if old_size == new_size:
        return Layout(new_shape, x.strides, x.offset)
    if old_size < new_size:  # [..., ratio] -> [...]
        ratio = new_size // old_size
        outer, last = x.strides[:-1], x.strides[-1]
        if (
            last != 1
            or x.offset % ratio
            or any(s % ratio for n, s in zip(x.shape[:-1], outer, strict=True) if n != 1)
        ):
            return None
        return Layout(new_shape, tuple(s // ratio for s in outer), x.offset // ratio)
    ratio = old_size // new_size  # [...] -> [..., ratio]
    return Layout(new_shape, tuple(s * ratio for s in x.strides) + (1,), x.offset * ratio)


def collapse(shapes: Sequence[int], strides: Sequence[Sequence[int]], keep_last: bool):
    """Merges neighbouring dimensions that every one of the stride lists walks as one.

    Args:
      shapes: the common iteration space.
      strides: for each tensor its strides over that space.
      keep_last: leave the last dimension alone (it is reduced over).

    Returns:
      (shape, strides) of the same space with as few dimensions as possible, none of size one
      except a kept last one.
    """
    dims = [
        (n, tuple(s[d] for s in strides))
        for d, n in enumerate(shapes)
        if n != 1 or (keep_last and d == len(shapes) - 1)
    ]
    merged: list[tuple[int, tuple[int, ...]]] = []
    for position, (n, ss) in enumerate(dims):
        last = keep_last and position == len(dims) - 1
        if merged and not last:
            m, mss = merged[-1]
            if all(a == n * b for a, b in zip(mss, ss, strict=True)):
                merged[-1] = (m * n, ss)
                continue
        merged.append((n, ss))
    shape = tuple(n for n, _ in merged)
    return shape, [tuple(ss[i] for _, ss in merged) for i in range(len(strides))]
