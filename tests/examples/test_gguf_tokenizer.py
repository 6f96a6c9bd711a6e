"""The tokenizer and the chat template of a file."""

from pathlib import Path

import gguf
import pytest
from gguf_model import ModelFile, ModelFileError
from gguf_tokenizer import ChatTokenizer
from tiny_model import TOKENS, write_model

# The chat template around "What is the capital of France?", as SmolLM2's own tokenizer has it.
CAPITAL_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411),
    *(407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198),
    *(1, 520, 9531, 198),
]

TEXTS = [
    "Hello, world!",
    "  leading, trailing  and   inner   spaces  ",
    "line\nbreaks\r\n\ttabs",
    "digits 1234567890, 3.14159",
    "Grüße, naïve café, Ελληνικά, 日本語, हिन्दी",
    "🌊 and 👩‍👩‍👧‍👦",
    "I'm you're they've we'll it's",
    "def f(x):\n    return x ** 2  # code",
    "<|im_start|>user\nspecial tokens<|im_end|>",
    "\x00\x7f\u200b\ufeff",
]


@pytest.fixture(scope="module")
def real(smollm: ModelFile) -> ChatTokenizer:
    return ChatTokenizer(smollm)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(real: ChatTokenizer, text: str) -> None:
    assert real.decode(real.encode(text)) == text


def test_known_ids_of_a_rendered_chat(real: ChatTokenizer) -> None:
    text = real.render_chat("What is the capital of France?")
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>assistant\n")
    assert real.encode(text) == CAPITAL_IDS


def test_digits_are_tokens_of_their_own(real: ChatTokenizer) -> None:
    assert [real.decode([i]) for i in real.encode("2026")] == ["2", "0", "2", "6"]


def test_stop_tokens(real: ChatTokenizer) -> None:
    assert [real.decode([i]) for i in real.stop_ids] == ["<|im_end|>"]


def tiny(tmp_path: Path, **options) -> ChatTokenizer:
    return ChatTokenizer(ModelFile(write_model(tmp_path / "m.gguf", **options)))


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe"])
def test_merges_apply_in_their_order(tmp_path: Path, pre: str) -> None:
    tokenizer = tiny(tmp_path, pre=pre)
    assert tokenizer.encode("hello") == [TOKENS.index("hello")]
    assert tokenizer.encode("hell") == [TOKENS.index("he"), TOKENS.index("ll")]
    assert tokenizer.decode(tokenizer.encode("hello, 12 ü")) == "hello, 12 ü"


def test_special_tokens_are_recognised(tmp_path: Path) -> None:
    ids = tiny(tmp_path).encode("<|user|>hello<|end|>")
    assert [TOKENS[i] for i in ids] == ["<|user|>", "hello", "<|end|>"]


def test_bos_is_added_once(tmp_path: Path) -> None:
    tokenizer = tiny(tmp_path, tamper=lambda writer: writer.add_add_bos_token(True))
    bos = TOKENS.index("<|bos|>")
    assert tokenizer.encode("hello") == [bos, TOKENS.index("hello")]
    assert tokenizer.encode("<|bos|>hello") == [bos, TOKENS.index("hello")]


def test_chat_template(tmp_path: Path) -> None:
    assert tiny(tmp_path).render_chat("hi") == "<|user|>hi<|end|><|assistant|>"
    assert not tiny(tmp_path, template=None).has_chat_template


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('unhappy') }}",
        "{% for %}",
        "{{ messages[0].content.missing.further }}",
    ],
)
def test_a_bad_chat_template_is_one_clear_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(ModelFileError, match="chat template cannot be rendered"):
        tiny(tmp_path, template=template).render_chat("hi")


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc"]


def sentencepiece(tmp_path: Path, **scores: float) -> ChatTokenizer:
    """A tokenizer of PIECES and WORDS; the scores of some words are given."""

    def tamper(writer: gguf.GGUFWriter) -> None:
        tokens = PIECES + WORDS
        writer.add_token_list(tokens)
        writer.add_token_scores([float(scores.get(token, -100)) for token in tokens])
        kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2]
        kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(WORDS)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    path = write_model(tmp_path / "m.gguf", tokenizer="llama", vocabulary=False, tamper=tamper)
    return ChatTokenizer(ModelFile(path))


def test_sentencepiece_merges_the_best_score_first(tmp_path: Path) -> None:
    def pieces(tokenizer: ChatTokenizer, text: str) -> list[str]:
        return [tokenizer.tokenizer.id_to_token(i) for i in tokenizer.encode(text)]

    assert pieces(sentencepiece(tmp_path, ab=-1, bc=-2), "abc")[1:] == ["▁ab", "c"]
    assert pieces(sentencepiece(tmp_path, ab=-2, bc=-1), "abc")[1:] == ["▁a", "bc"]
    # <s> comes first; what is no piece falls back to its bytes.
    assert pieces(sentencepiece(tmp_path), "aü") == ["<s>", "▁a", "<0xC3>", "<0xBC>"]


@pytest.mark.parametrize("text", ["abc", "ab  c ü 日本", " a"])
def test_sentencepiece_round_trip(tmp_path: Path, text: str) -> None:
    tokenizer = sentencepiece(tmp_path, ab=-1)
    assert tokenizer.decode(tokenizer.encode(text)[1:]) == text
    assert tokenizer.stop_ids == {2}


def test_unsupported_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="tokenizer 'bert' is not supported"):
        tiny(tmp_path, tokenizer="bert")
    with pytest.raises(ModelFileError, match="pre-tokenizer 'falcon' is not supported"):
        tiny(tmp_path, pre="falcon")
