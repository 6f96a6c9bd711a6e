"""The tokenizer of a GGUF file: its own vocabulary, its own merges, its own chat template."""

from typing import Any

from gguf import TokenType
from gguf_model import ModelFile
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class ChatTokenizer:
    """Text to token ids and back, with the file's special tokens and chat template."""

    def __init__(self, file: ModelFile) -> None:
        self.tokenizer = _build(file)
        self._file = file
        self._template: str | None = file.get("tokenizer.chat_template")
        self._bos: int | None = file.get("tokenizer.ggml.bos_token_id")
        self._add_bos = bool(file.get("tokenizer.ggml.add_bos_token", False))
        self.stop_ids = _stop_ids(file)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; special tokens written out in it are recognised."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if self._add_bos and self._bos is not None and ids[:1] != [self._bos]:
            ids = [self._bos, *ids]
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def render_chat(self, prompt: str) -> str:
        """The file's chat template around one message of a user, ready for the answer."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_template_error
        try:
            return environment.from_string(self._template or "").render(
                messages=[{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                bos_token=self._token_text("bos"),
                eos_token=self._token_text("eos"),
            )
        except TemplateError as error:
            raise self._file.error(
                f"its chat template cannot be rendered ({error}); use --raw"
            ) from None

    def _token_text(self, name: str) -> str:
        token = self._file.get(f"tokenizer.ggml.{name}_token_id")
        return "" if token is None else self.tokenizer.id_to_token(token) or ""


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _build(file: ModelFile) -> Tokenizer:
    kind = file.require("tokenizer.ggml.model")
    if kind != "gpt2":
        raise file.error(
            f"tokenizer '{kind}' is not supported; use a file with a byte-level BPE tokenizer"
        )
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    pre = file.get("tokenizer.ggml.pre", "default")
    model = models.BPE(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[_merge_pair(merge) for merge in file.require("tokenizer.ggml.merges")],
        # Llama 3 takes a word that is a token as it is, whatever the merges say.
        ignore_merges=pre in LLAMA3_PRE,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(file, pre)
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = file.get("tokenizer.ggml.token_type", [])
    for token, token_type in zip(tokens, types, strict=False):
        if token_type in (TokenType.CONTROL, TokenType.USER_DEFINED):
            special = token_type == TokenType.CONTROL
            added = AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    return tokenizer


def _merge_pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


LLAMA3_PRE = ("llama-bpe", "llama3", "llama-v3")
DIGIT_PRE = ("smollm", "starcoder", "refact", "command-r")
GPT2_PRE = ("default", "gpt-2")


def _pre_tokenizer(file: ModelFile, name: str) -> PreTokenizer:
    """How text is cut into words before the merges, by the name that the file gives it."""
    if name in LLAMA3_PRE:
        words = pre_tokenizers.Split(Regex(LLAMA3_WORDS), behavior="isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, letters])
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in DIGIT_PRE:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, letters])
    if name in GPT2_PRE:
        return letters
    raise file.error(f"pre-tokenizer '{name}' is not supported")


def _stop_ids(file: ModelFile) -> frozenset[int]:
    keys: tuple[str, ...] = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids: list[Any] = [file.get(f"tokenizer.ggml.{key}") for key in keys]
    return frozenset(int(i) for i in ids if i is not None)
