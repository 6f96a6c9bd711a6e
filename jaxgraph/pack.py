"""Packed: a pytree of arrays in one device buffer.

JAX's dispatch costs about a microsecond per argument and call, so 300 parameters cost more than
many a small model's step. A packed tree is one argument, and a packed cache is one result, too. The
function that receives it sees the tree.
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

from jaxgraph.runtime import pack_primitives

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
        """The leaf as it lies in the buffer: slice, reshape and bitcast; traceable."""
        shape = self.shape if self.order is None else [self.shape[d] for d in self.order]
        raw = lax.slice(buffer, (self.offset,), (self.offset + self.nbytes,))
        if self.dtype == np.bool_:
            return raw.reshape(shape) != 0
        if self.dtype.itemsize == 1:
            return lax.bitcast_convert_type(raw.reshape(shape), self.dtype)
        return lax.bitcast_convert_type(raw.reshape(*shape, self.dtype.itemsize), self.dtype)

    def turned(self, lying: jax.Array) -> jax.Array:
        """The leaf, given as it lies in the buffer."""
        return lying if self.order is None else lax.transpose(lying, np.argsort(self.order))

    def lying(self, leaf: jax.Array) -> jax.Array:
        """The leaf as it lies in the buffer."""
        return leaf if self.order is None else lax.transpose(leaf, self.order)

    def fits(self, value: Any) -> bool:
        """Is it an array that may take the leaf's place?"""
        return (getattr(value, "shape", None), getattr(value, "dtype", None)) == (
            self.shape,
            self.dtype,
        )


def _bytes_of(array: jax.Array) -> jax.Array:
    if array.dtype == np.bool_:
        array = array.astype(jnp.uint8)
    return lax.bitcast_convert_type(array, jnp.uint8).reshape(-1)


@dataclasses.dataclass(frozen=True)
class _ScalarLeaf:
    value: Any

    def fits(self, value: Any) -> bool:
        """Is it the same Python scalar?"""
        return self == _ScalarLeaf(value)

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

    @property
    def arrays(self) -> list[_ArrayLeaf]:
        """The leaves that lie in the buffer."""
        return [leaf for leaf in self.leaves if isinstance(leaf, _ArrayLeaf)]

    def write(self, buffer: jax.Array, leaves: Sequence[tuple[_ArrayLeaf, jax.Array]]) -> jax.Array:
        """The buffer with other leaves, given as they lie in it, in ascending order; traceable."""
        leaves = [(leaf, value) for leaf, value in leaves if leaf.nbytes]
        if self.nbytes <= np.iinfo(np.int32).max:
            for leaf, value in leaves:
                start = (np.int32(leaf.offset),)
                buffer = lax.dynamic_update_slice(buffer, _bytes_of(value), start)
            return buffer
        # Where a byte's place is no 32-bit number, only static slices can tell it without x64.
        pieces, end = [], 0
        for leaf, value in leaves:
            pieces += [lax.slice(buffer, (end,), (leaf.offset,)), _bytes_of(value)]
            end = leaf.offset + leaf.nbytes
        return lax.concatenate([*pieces, lax.slice(buffer, (end,), (self.nbytes,))], 0)

    def fits(self, tree: Any) -> bool:
        """May the tree take the place of one that was packed so? Same structure, shapes, dtypes."""
        values, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            return False
        return all(leaf.fits(value) for leaf, value in zip(self.leaves, values, strict=True))

    def __reduce__(self) -> Any:
        return _intern, (self.treedef, self.leaves, self.nbytes)

    def __repr__(self) -> str:
        return f"PackSpec({len(self.leaves)} leaves, {self.nbytes} bytes)"


@functools.cache
def _intern(treedef: Any, leaves: tuple[Any, ...], nbytes: int) -> PackSpec:
    return PackSpec(treedef, leaves, nbytes)


class Packed:
    """A pytree of arrays in one device buffer; itself a pytree with a single leaf.

    Made by `GraphedFunction.pack`, accepted by a wrapped function in the tree's place. In the place
    of a donated argument it is also what comes back: the first part of the function's result that
    has the tree's structure, shapes and dtypes is packed in the same way, in the same buffer.
    Python scalars in the tree are part of its structure; they have to come back unchanged.

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
        arrays = iter(pack_primitives.unpack(self.buffer, self.spec))
        leaves = [
            leaf.turned(next(arrays)) if isinstance(leaf, _ArrayLeaf) else leaf.value
            for leaf in self.spec.leaves
        ]
        return jax.tree.unflatten(self.spec.treedef, leaves)

    def repack(self, tree: Any) -> Packed:
        """Another tree in this one's place. Traceable: in a jitted function that donates this one,
        in its buffer.

        Args:
          tree: of the same structure, shapes and dtypes, with the same Python scalars.

        Raises:
          ValueError: it is not.
        """
        if not self.spec.fits(tree):
            raise ValueError(
                "a tree of another structure, or with leaves of other shapes or dtypes, cannot "
                f"take the place of {self!r}: pack it anew"
            )
        values = zip(self.spec.leaves, jax.tree.leaves(tree), strict=True)
        lying = [leaf.lying(v) for leaf, v in values if isinstance(leaf, _ArrayLeaf)]
        return Packed(pack_primitives.repack(self.buffer, lying, self.spec), self.spec)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.spec.nbytes

    def __repr__(self) -> str:
        return f"Packed({len(self.spec.leaves)} leaves, {self.spec.nbytes} bytes)"


# As a dataclass: then JAX reads the fields without calls into Python, which every call of a
# function would pay for several times.
jax.tree_util.register_dataclass(Packed, data_fields=["buffer"], meta_fields=["spec"])


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
    raw = _bytes_of(array if order is None else array.transpose(order))
    return lax.dynamic_update_slice(buffer, raw, (offset,))
