"""A model small enough to write into a GGUF file for every test."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from llama import Config
from tokenizers.pre_tokenizers import ByteLevel

WORDS = ["he", "ll", "llo", "hello"]
MERGES = ["h e", "l l", "ll o", "he llo"]
SPECIAL = ["<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"]
TOKENS = [*sorted(ByteLevel.alphabet()), *WORDS, *SPECIAL]
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"

TINY = Config(
    layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=len(TOKENS), eps=1e-5
)

Tamper = Callable[[gguf.GGUFWriter], None]


def tensors_of(config: Config, seed: int = 1) -> dict[str, np.ndarray]:
    """Random tensors under the names and in the layout of a GGUF file.

    With the default seed a text goes on for a while before it ends itself.
    """
    random = np.random.default_rng(seed)
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab, config.width),
        "output_norm.weight": (config.width,),
    }
    for n in range(config.layers):
        shapes |= {
            f"blk.{n}.attn_norm.weight": (config.width,),
            f"blk.{n}.attn_q.weight": (q, config.width),
            f"blk.{n}.attn_k.weight": (kv, config.width),
            f"blk.{n}.attn_v.weight": (kv, config.width),
            f"blk.{n}.attn_output.weight": (config.width, q),
            f"blk.{n}.ffn_norm.weight": (config.width,),
            f"blk.{n}.ffn_gate.weight": (config.ffn, config.width),
            f"blk.{n}.ffn_up.weight": (config.ffn, config.width),
            f"blk.{n}.ffn_down.weight": (config.width, config.ffn),
        }
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_model(
    path: Path,
    *,
    tensors: dict[str, np.ndarray] | None = None,
    arch: str = "llama",
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    tokenizer: str = "gpt2",
    pre: str = "smollm",
    template: str | None = TEMPLATE,
    vocabulary: bool = True,
    tamper: Tamper | None = None,
) -> Path:
    """Writes a complete model of the shape TINY; the arguments replace parts of it.

    Args:
        path: Where to.
        tensors: Instead of `tensors_of(TINY)`.
        arch: The architecture's name.
        types: Tensors to be quantized, and how.
        tokenizer: The tokenizer's kind.
        pre: The pre-tokenizer's name.
        template: The chat template, None for a file without one.
        vocabulary: Whether to write TOKENS and their kinds, or leave that to `tamper`.
        tamper: Adds further metadata.
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(TINY.layers)
    writer.add_embedding_length(TINY.width)
    writer.add_feed_forward_length(TINY.ffn)
    writer.add_head_count(TINY.heads)
    writer.add_head_count_kv(TINY.kv_heads)
    writer.add_layer_norm_rms_eps(TINY.eps)
    writer.add_context_length(64)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    if vocabulary:
        kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
        writer.add_token_list(TOKENS)
        writer.add_token_types([kinds[token in SPECIAL] for token in TOKENS])
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(TOKENS.index("<|bos|>"))
        writer.add_eos_token_id(TOKENS.index("<|end|>"))
    if template is not None:
        writer.add_chat_template(template)
    if tamper is not None:
        tamper(writer)
    for name, array in (tensors_of(TINY) if tensors is None else tensors).items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
