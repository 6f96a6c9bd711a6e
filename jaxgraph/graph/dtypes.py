"""Element types of the native core and their numbers in the program format.

The numbers mirror ``ffi/core/dtype.h``; they are part of the wire format.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

PRED, S8, S16, S32, S64, U8, U16, U32, U64, F16, BF16, F32, F64 = range(13)

_CODES = {
    np.dtype(np.bool_): PRED,
    np.dtype(np.int8): S8,
    np.dtype(np.int16): S16,
    np.dtype(np.int32): S32,
    np.dtype(np.int64): S64,
    np.dtype(np.uint8): U8,
    np.dtype(np.uint16): U16,
    np.dtype(np.uint32): U32,
    np.dtype(np.uint64): U64,
    np.dtype(np.float16): F16,
    np.dtype(ml_dtypes.bfloat16): BF16,
    np.dtype(np.float32): F32,
    np.dtype(np.float64): F64,
}


def is_native(dtype) -> bool:
    """Whether the native core has kernels for arrays of ``dtype`` (PRNG key types have none)."""
    try:
        return np.dtype(dtype) in _CODES
    except TypeError:
        return False


def code_of(dtype) -> int:
    """The number that stands for ``dtype`` in a program."""
    return _CODES[np.dtype(dtype)]


def is_float(dtype) -> bool:
    return code_of(dtype) >= F16


def is_integer(dtype) -> bool:
    return S8 <= code_of(dtype) <= U64


def register_bits(value, dtype) -> int:
    """``value`` of ``dtype`` as an expression register holds it (see ``ffi/core/expr.h``).

    A float for f16, bf16 and f32; a double for f64; an int64 for integers and booleans.
    """
    scalar = np.asarray(value).astype(dtype)
    code = code_of(dtype)
    if code in (F16, BF16, F32):
        return int(np.asarray(scalar, np.float32).view(np.uint32))
    if code == F64:
        return int(np.asarray(scalar, np.float64).view(np.uint64))
    if code == U64:
        return int(scalar)
    return int(np.asarray(int(scalar), np.int64).view(np.uint64))


def storage_bits(value, dtype) -> int:
    """The bytes of ``value`` in ``dtype`` itself, as an unsigned integer."""
    scalar = np.asarray(value).astype(dtype)
    return int.from_bytes(scalar.tobytes(), "little")


def from_storage(bits: int, dtype) -> np.generic:
    """The value of ``dtype`` whose bytes are ``bits``: the inverse of `storage_bits`."""
    dtype = np.dtype(dtype)
    return np.frombuffer(bits.to_bytes(dtype.itemsize, "little"), dtype)[0]
