"""The loader against the file's own bytes, and its one-line errors."""

from dataclasses import replace
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf_model import ModelFile, ModelFileError, load_params, read_config, undo_rotary_permutation
from tiny_model import TINY, tensors_of, write_model


def load(path: Path, dtype=jnp.float32, **options):
    file = ModelFile(path)
    return load_params(file, read_config(file), dtype, **options)


def test_config_comes_from_the_metadata(tmp_path: Path) -> None:
    config = read_config(ModelFile(write_model(tmp_path / "m.gguf")))
    assert config == replace(TINY, eps=float(np.float32(TINY.eps)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values_are_those_of_the_dequantizers(tmp_path: Path, dtype) -> None:
    types = {
        "token_embd.weight": Type.Q8_0,
        "blk.0.ffn_gate.weight": Type.Q4_1,
        "blk.0.attn_v.weight": Type.F16,
        "blk.1.ffn_up.weight": Type.BF16,
    }
    path = write_model(tmp_path / "m.gguf", types=types)
    params = load(path, dtype)
    stored = {t.name: t for t in ModelFile(path).tensors.values()}

    def expected(name: str) -> np.ndarray:
        return gguf.dequantize(stored[name].data, stored[name].tensor_type).astype(dtype)

    layers = params["layers"]
    np.testing.assert_array_equal(params["embed"], expected("token_embd.weight"))
    np.testing.assert_array_equal(params["norm"], expected("output_norm.weight"))
    np.testing.assert_array_equal(layers[0]["w_gate"], expected("blk.0.ffn_gate.weight").T)
    np.testing.assert_array_equal(layers[0]["wv"], expected("blk.0.attn_v.weight").T)
    np.testing.assert_array_equal(layers[1]["w_up"], expected("blk.1.ffn_up.weight").T)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(params))


def test_rotary_permutation_turns_neighbours_into_halves() -> None:
    heads, head_dim = 3, 8
    # As the converter of Llama checkpoints stores a projection whose row r holds the value r.
    rows = np.arange(heads * head_dim, dtype=np.float32)[:, None]
    stored = rows.reshape(heads, 2, head_dim // 2, 1).swapaxes(1, 2).reshape(rows.shape)
    assert stored[:4, 0].tolist() == [0, 4, 1, 5]
    np.testing.assert_array_equal(undo_rotary_permutation(stored, head_dim), rows)


def test_only_query_and_key_are_permuted(tmp_path: Path) -> None:
    tensors = tensors_of(TINY)
    layer = load(write_model(tmp_path / "m.gguf", tensors=tensors))["layers"][0]
    q, v = tensors["blk.0.attn_q.weight"], tensors["blk.0.attn_v.weight"]
    np.testing.assert_array_equal(layer["wq"], undo_rotary_permutation(q, TINY.head_dim).T)
    np.testing.assert_array_equal(layer["wv"], v.T)


def test_stacked_layers_hold_the_same_values(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    listed, stacked = load(path)["layers"], load(path, stacked=True)["layers"]
    for name, array in stacked.items():
        for n, layer in enumerate(listed):
            np.testing.assert_array_equal(array[n], layer[name])


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(write_model(tmp_path / "m.gguf"), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(n + 1, len(calls)) for n in range(len(calls))]
    assert len(calls) == len(tensors_of(TINY))


def test_an_output_tensor_unties_the_embedding(tmp_path: Path) -> None:
    tensors = tensors_of(TINY)
    tensors["output.weight"] = np.ones((TINY.vocab, TINY.width), np.float32)
    path = write_model(tmp_path / "m.gguf", tensors=tensors)
    assert not read_config(ModelFile(path)).tied
    assert load(path)["output"].shape == (TINY.width, TINY.vocab)


def test_rope_factors_come_from_their_tensor(tmp_path: Path) -> None:
    tensors = tensors_of(TINY) | {"rope_freqs.weight": np.array([1, 2, 4, 8], np.float32)}
    path = write_model(tmp_path / "m.gguf", tensors=tensors)
    assert read_config(ModelFile(path)).rope_factors == (1.0, 2.0, 4.0, 8.0)
    assert "rope_freqs" not in load(path)


def error_of(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message


def test_missing_file(tmp_path: Path) -> None:
    assert "no such file" in error_of(tmp_path / "absent.gguf")


def test_wrong_magic(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("This is no model.")
    assert "not a GGUF file" in error_of(path)


@pytest.mark.parametrize("kept", [4, 20, 200, 0.5, 0.99])
def test_truncated_file(tmp_path: Path, kept: float) -> None:
    path = write_model(tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    assert "truncated" in error_of(path)


def test_unsupported_architecture(tmp_path: Path) -> None:
    assert "architecture 'mamba'" in error_of(write_model(tmp_path / "m.gguf", arch="mamba"))


def test_mixture_of_experts(tmp_path: Path) -> None:
    assert "experts" in error_of(
        write_model(tmp_path / "m.gguf", tamper=lambda writer: writer.add_expert_count(8))
    )


def test_unsupported_rope_scaling(tmp_path: Path) -> None:
    def tamper(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    assert "'yarn'" in error_of(write_model(tmp_path / "m.gguf", tamper=tamper))


def test_unsupported_tensor(tmp_path: Path) -> None:
    tensors = tensors_of(TINY) | {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
    assert "'blk.0.attn_q.bias' is not supported" in error_of(
        write_model(tmp_path / "m.gguf", tensors=tensors)
    )


def test_unsupported_tensor_type(tmp_path: Path) -> None:
    tensors = tensors_of(TINY)
    tensors["blk.0.ffn_up.weight"] = np.zeros((TINY.ffn, TINY.width), np.int32)
    assert "type I32" in error_of(write_model(tmp_path / "m.gguf", tensors=tensors))


def test_missing_tensor(tmp_path: Path) -> None:
    tensors = tensors_of(TINY)
    del tensors["blk.1.ffn_up.weight"]
    assert "'w_up' of layer 1 is missing" in error_of(
        write_model(tmp_path / "m.gguf", tensors=tensors)
    )


def test_wrong_shape(tmp_path: Path) -> None:
    tensors = tensors_of(TINY)
    tensors["blk.1.ffn_up.weight"] = np.zeros((TINY.ffn, TINY.width // 2), np.float32)
    assert "has shape" in error_of(write_model(tmp_path / "m.gguf", tensors=tensors))
