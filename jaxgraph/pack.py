"""Packed: a pytree of arrays in one device buffer.

JAX's dispatch costs about a microsecond per argument and call, so 300 parameters cost more than
many a small model's step. A packed tree is one argument. The function that receives it sees the
tree: each leaf is a slice of the buffer, which planning turns into a view (base plus offset).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

_ALIGNMENT = 256  # bytes, of every leaf

# What a leaf that is no array may be: it stays Python data, with JAX's weak promotion.
_SCALARS = (bool, int, float, complex)


@dataclasses.dataclass(frozen=True)
class _ArrayLeaf:
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    order: tuple[int, ...] | None = None  # of the dimensions in the buffer, outermost first

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, buffer: jax.Array) -> jax.Array:
        """The leaf as slice, reshape, bitcast and transpose of the buffer; traceable."""
        if self.order is not None:
            shape = tuple(self.shape[d] for d in self.order)
            lying = dataclasses.replace(self, shape=shape, order=None)
            return lax.transpose(lying.read(buffer), np.argsort(self.order))
        raw = lax.slice(buffer, (self.offset,), (self.offset + self.nbytes,))
        if self.dtype == np.bool_:
            return raw.reshape(self.shape) != 0
        if self.dtype.itemsize == 1:
            return lax.bitcast_convert_type(raw.reshape(self.shape), self.dtype)
        return lax.bitcast_convert_type(raw.reshape(*self.shape, self.dtype.itemsize), self.dtype)


@dataclasses.dataclass(frozen=True)
class _ScalarLeaf:
    value: Any

    def read(self, buffer: jax.Array) -> Any:
        del buffer
        return self.value

    def __eq__(self, other: object) -> bool:
        # 1, 1.0 and True are equal to Python, but promote differently.
        return (
            isinstance(other, _ScalarLeaf)
            and type(self.value) is type(other.value)
            and repr(self.value) == repr(other.value)
        )

    def __hash__(self) -> int:
        return hash((type(self.value), repr(self.value)))


class PackSpec:
    """Structure of a packed tree. Interned: equal specs are one object, so that JAX's comparison of
    tree structures, made at every call, is one of identities."""

    __slots__ = ("leaves", "nbytes", "treedef")

    def __init__(self, treedef: Any, leaves: tuple[_ArrayLeaf | _ScalarLeaf, ...], nbytes: int):
        self.treedef: Any = treedef
        self.leaves: tuple[_ArrayLeaf | _ScalarLeaf, ...] = leaves
        self.nbytes: int = nbytes

    def __reduce__(self) -> Any:
        return _intern, (self.treedef, self.leaves, self.nbytes)

    def __repr__(self) -> str:
        return f"PackSpec({len(self.leaves)} leaves, {self.nbytes} bytes)"


@functools.cache
def _intern(treedef: Any, leaves: tuple[Any, ...], nbytes: int) -> PackSpec:
    return PackSpec(treedef, leaves, nbytes)


@jax.tree_util.register_pytree_with_keys_class
class Packed:
    """A pytree of arrays in one device buffer; itself a pytree with a single leaf.

    Made by `GraphedFunction.pack`, accepted by a wrapped function in the tree's place.

    Attributes:
      buffer: the bytes of all leaves, each aligned to 256 bytes.
      spec: the tree's structure; one object for all trees of that structure.
    """

    __slots__ = ("buffer", "spec")

    def __init__(self, buffer: jax.Array, spec: PackSpec):
        self.buffer: jax.Array = buffer
        self.spec: PackSpec = spec

    def unpack(self) -> Any:
        """The tree again. Traceable; outside of a trace every leaf is a copy."""
        leaves = [leaf.read(self.buffer) for leaf in self.spec.leaves]
        return jax.tree.unflatten(self.spec.treedef, leaves)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.spec.nbytes

    def tree_flatten_with_keys(self) -> tuple[Any, PackSpec]:
        return ((jax.tree_util.GetAttrKey("buffer"), self.buffer),), self.spec

    def tree_flatten(self) -> tuple[Any, PackSpec]:
        return (self.buffer,), self.spec

    @classmethod
    def tree_unflatten(cls, spec: PackSpec, children: Any) -> Packed:
        return cls(children[0], spec)

    def __repr__(self) -> str:
        return f"Packed({len(self.spec.leaves)} leaves, {self.spec.nbytes} bytes)"


def pack(
    tree: Any, *, name: str = "tree", orders: Sequence[tuple[int, ...] | None] | None = None
) -> Packed:
    """Packs a pytree of arrays into one device buffer, one array at a time.

    Beside the buffer at most one leaf (and its bytes) is in device memory at once: give numpy
    leaves, and the model is never there twice.

    Args:
      tree: a pytree of JAX or numpy arrays; Python scalars and None stay part of the structure.
      name: what errors call the tree.
      orders: for each leaf the order of dimensions in which it lies in the buffer, outermost first;
        None: row-major.

    Returns:
      The packed tree, on the device of the tree's arrays.

    Raises:
      TypeError: a leaf is no array, or its dtype cannot be seen as bytes.
      ValueError: the arrays lie on several devices, or there is none.
    """
    labels, values, treedef = _leaves(tree, name)
    device = _common_device(values, labels, name)

    leaves: list[_ArrayLeaf | _ScalarLeaf] = []
    offset = 0
    for value, order in zip(values, orders or [None] * len(values), strict=True):
        if isinstance(value, _SCALARS):
            leaves.append(_ScalarLeaf(value))
            continue
        leaf = _ArrayLeaf(offset, value.shape, _device_dtype(value), order)
        leaves.append(leaf)
        offset += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
    if offset == 0:
        raise ValueError(f"{name} holds no array data, so there is nothing to pack")

    # In x64 mode offsets have 64 bits; the dtypes were settled above, outside of it.
    with jax.default_device(device), jax.enable_x64(True):
        buffer = jnp.zeros((offset,), jnp.uint8)
        for value, leaf in zip(values, leaves, strict=True):
            if isinstance(leaf, _ArrayLeaf) and leaf.nbytes:
                array = jnp.asarray(value, dtype=leaf.dtype)
                buffer = _write(buffer, array, np.int64(leaf.offset), leaf.order)
    return Packed(buffer, _intern(treedef, tuple(leaves), offset))


def check(tree: Any, *, name: str) -> None:
    """Raises what `pack` would raise of a leaf."""
    _leaves(tree, name)


def _leaves(tree: Any, name: str) -> tuple[list[str], list[Any], Any]:
    """What errors call each leaf, the leaves as arrays or Python scalars, and the structure."""
    keyed, treedef = jax.tree_util.tree_flatten_with_path(tree)
    labels = [name + jax.tree_util.keystr(path) for path, _ in keyed]
    values = [_check_leaf(value, label) for (_, value), label in zip(keyed, labels, strict=True)]
    return labels, values, treedef


def _check_leaf(value: Any, label: str) -> Any:
    """The leaf as array or Python scalar, or an error that names it."""
    if isinstance(value, _SCALARS) and not isinstance(value, np.generic):
        return value
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, Tracer):
        raise TypeError(f"{label} is a traced value: pack outside of jit, once, before the loop")
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{label} is a {type(value).__name__}, not an array: remove it from the tree, or make "
            "it an array"
        )
    if isinstance(value, jax.Array) and value.is_deleted():
        raise ValueError(f"{label} was deleted or donated: pack before donating it")
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{label} has dtype {value.dtype}, which has no bytes of its own: pack "
            "jax.random.key_data(...) of it instead"
        )
    if not _is_byte_sized(value.dtype):
        raise TypeError(
            f"{label} has dtype {value.dtype}, which cannot be seen as whole bytes: convert it to "
            "another dtype"
        )
    if isinstance(value, jax.Array) and value.weak_type:
        if value.ndim == 0:
            return value.item()
        raise TypeError(
            f"{label} is weakly typed: give it a dtype with .astype({value.dtype.name!r})"
        )
    return value


def _is_byte_sized(dtype: np.dtype) -> bool:
    if dtype == np.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits == 8 * dtype.itemsize
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits == 8 * dtype.itemsize
    return False  # complex: bitcast_convert_type has no such conversion


def _device_dtype(value: Any) -> np.dtype:
    """The dtype on the device: numpy's 64 bits become 32 unless x64 is enabled."""
    return np.dtype(jax.dtypes.canonicalize_dtype(value.dtype))


def _common_device(values: list[Any], labels: list[str], name: str) -> Any:
    """The device of the arrays; None: JAX's default."""
    device, where = None, ""
    for value, label in zip(values, labels, strict=True):
        if not isinstance(value, jax.Array):
            continue
        devices = value.devices()
        if len(devices) > 1:
            raise ValueError(
                f"{label} lies on {len(devices)} devices; a packed buffer lives on one: pass "
                f"{name} unpacked, or jax.device_put it to a single device first"
            )
        (own,) = devices
        if device is not None and own != device:
            raise ValueError(
                f"{label} lies on {own}, {where} on {device}; a packed buffer lives on one device: "
                "jax.device_put the tree to a single device first"
            )
        device, where = own, label
    return device


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write(
    buffer: jax.Array, array: jax.Array, offset: jax.Array, order: tuple[int, ...] | None
) -> jax.Array:
    """Writes an array's bytes into the buffer, in place, its dimensions in this order."""
    if order is not None:
        array = array.transpose(order)
    if array.dtype == np.bool_:
        array = array.astype(jnp.uint8)
    raw = lax.bitcast_convert_type(array, jnp.uint8).reshape(-1)
    return lax.dynamic_update_slice(buffer, raw, (offset,))
