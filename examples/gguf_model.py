"""Reads a Llama-architecture GGUF file into the parameters that `llama.py` takes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from llama import Config, Params, layer_shapes, stack_layers

# What the file calls the arrays of one layer, `blk.N.<name>.weight`.
LAYER_TENSORS = {
    "attn_norm": "attn_norm",
    "attn_q": "wq",
    "attn_k": "wk",
    "attn_v": "wv",
    "attn_output": "wo",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "w_gate",
    "ffn_up": "w_up",
    "ffn_down": "w_down",
}
MODEL_TENSORS = {"token_embd": "embed", "output_norm": "norm", "output": "output"}


class ModelFileError(Exception):
    """Says in one line what is wrong with a model file and what to do about it."""


class ModelFile:
    """An opened GGUF file: its metadata, and its tensors by name (mapped, not yet read)."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        reader = _open(self.path)
        self._fields = reader.fields
        self.tensors: dict[str, gguf.ReaderTensor] = {t.name: t for t in reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value under `key`, as a Python value."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """The metadata value under `key`; its absence is an error."""
        if key not in self._fields:
            raise self.error(f"lacks the metadata entry {key}; it is no complete model")
        return self.get(key)

    def error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {problem}")


def _open(path: Path) -> gguf.GGUFReader:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise ModelFileError(
            f"{path}: no such file; give --model the path of a GGUF file"
        ) from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from None
    if magic != b"GGUF":
        raise ModelFileError(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
    try:
        return gguf.GGUFReader(path)
    except Exception as error:
        # The reader meets a short or garbled file as whatever happens to fail first: an index, a
        # shape, an enumeration, text decoding.
        raise ModelFileError(
            f"{path}: truncated or damaged GGUF file ({error}); fetch it again"
        ) from None


def read_config(file: ModelFile) -> Config:
    """The model's shape, from the metadata. Raises ModelFileError for what `llama.py` lacks."""
    architecture = file.require("general.architecture")
    if architecture != "llama":
        raise file.error(
            f"architecture '{architecture}' is not supported; use a file with architecture 'llama'"
        )
    if file.get("llama.expert_count", 0):
        raise file.error("mixtures of experts are not supported; use a dense model")

    width = int(file.require("llama.embedding_length"))
    heads = int(file.require("llama.attention.head_count"))
    head_dim = int(file.get("llama.attention.key_length", width // heads))
    if int(file.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise file.error("rotary embeddings over a part of the head are not supported")
    return Config(
        layers=int(file.require("llama.block_count")),
        width=width,
        heads=heads,
        kv_heads=int(file.get("llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        ffn=int(file.require("llama.feed_forward_length")),
        vocab=int(_tensor(file, "token_embd.weight").shape[1]),
        rope_base=float(file.get("llama.rope.freq_base", 10000.0)),
        eps=float(np.float32(file.require("llama.attention.layer_norm_rms_epsilon"))),
        tied="output.weight" not in file.tensors,
        rope_factors=_rope_factors(file, head_dim),
    )


def _rope_factors(file: ModelFile, head_dim: int) -> tuple[float, ...] | None:
    if "rope_freqs.weight" in file.tensors:
        return tuple(float(f) for f in _dequantize(file, "rope_freqs.weight"))
    scaling = file.get("llama.rope.scaling.type", "none")
    if scaling == "linear":
        return (float(file.require("llama.rope.scaling.factor")),) * (head_dim // 2)
    if scaling != "none":
        raise file.error(f"rotary scaling '{scaling}' is not supported, only 'linear'")
    return None


def load_params(
    file: ModelFile,
    config: Config,
    dtype: Any,
    *,
    stacked: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Params:
    """Dequantizes every tensor to `dtype` and arranges them as `llama.py` wants them.

    Args:
        file: The opened file.
        config: Its shape, from `read_config`.
        dtype: What the parameters become, e.g. `jnp.bfloat16`.
        stacked: Whether the layers are stacked (for `lax.scan`) or a list.
        progress: Called with (tensors done, tensors in all).

    Raises:
        ModelFileError: A tensor is missing, of a wrong shape, of a type that cannot be
            dequantized, or not understood.
    """
    params: Params = {}
    layers: list[Params] = [{} for _ in range(config.layers)]
    names = [name for name in file.tensors if name != "rope_freqs.weight"]
    for done, name in enumerate(names):
        place, key = _place_of(file, name, params, layers)
        array = _dequantize(file, name)
        if key in ("wq", "wk"):
            array = undo_rotary_permutation(array, config.head_dim)
        # The file has [out, in], the model [in, out]; the embedding is a table of rows in both.
        if array.ndim == 2 and key != "embed":
            array = array.T
        place[key] = jnp.asarray(np.ascontiguousarray(array).astype(dtype))
        if progress is not None:
            progress(done + 1, len(names))
    _check_complete(file, config, params, layers)
    params["layers"] = stack_layers(layers) if stacked else layers
    return params


def undo_rotary_permutation(w: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders the rows of each head from rotating neighbours to rotating halves.

    A Llama-architecture file has the rows of its query and key projections permuted so that rotary
    embedding acts on pairs (0, 1), (2, 3), …; the model rotates (0, D/2), (1, D/2 + 1), ….

    Args:
        w: [heads * head_dim, in].
        head_dim: The number of rows in a head.
    """
    pairs = w.reshape(-1, head_dim // 2, 2, w.shape[1])
    return pairs.swapaxes(1, 2).reshape(w.shape)


def _place_of(
    file: ModelFile, name: str, params: Params, layers: list[Params]
) -> tuple[Params, str]:
    """The dictionary and the key under which a tensor belongs."""
    match name.split("."):
        case [base, "weight"] if base in MODEL_TENSORS:
            return params, MODEL_TENSORS[base]
        case ["blk", number, base, "weight"] if base in LAYER_TENSORS and int(number) < len(layers):
            return layers[int(number)], LAYER_TENSORS[base]
    raise file.error(f"tensor '{name}' is not supported; this is not a plain Llama model")


def _tensor(file: ModelFile, name: str) -> gguf.ReaderTensor:
    if name not in file.tensors:
        raise file.error(f"tensor '{name}' is missing; it is no complete model")
    return file.tensors[name]


def _dequantize(file: ModelFile, name: str) -> np.ndarray:
    tensor = _tensor(file, name)
    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise file.error(
            f"tensor '{name}' has type {tensor.tensor_type.name}, which cannot be dequantized here"
        ) from None


def _check_complete(file: ModelFile, config: Config, params: Params, layers: list[Params]) -> None:
    expected = {"embed": (config.vocab, config.width), "norm": (config.width,)}
    if not config.tied:
        expected["output"] = (config.width, config.vocab)
    _check_shapes(file, "the model", params, expected)
    for number, layer in enumerate(layers):
        _check_shapes(file, f"layer {number}", layer, layer_shapes(config))


def _check_shapes(
    file: ModelFile, where: str, arrays: Params, expected: Mapping[str, tuple[int, ...]]
) -> None:
    for name, shape in expected.items():
        if name not in arrays:
            raise file.error(f"'{name}' of {where} is missing; it is no complete model")
        if arrays[name].shape != shape:
            raise file.error(
                f"'{name}' of {where} has shape {arrays[name].shape}, but the metadata says {shape}"
            )
