"""The tokenizer of a GGUF file: its own vocabulary, its own merges, its own chat template."""

from gguf import TokenType
from gguf_model import ModelFile
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

# Pre-tokenizers, by the names that files give them.
LLAMA3_PRE = ("llama-bpe", "llama3", "llama-v3")
DIGIT_PRE = ("smollm", "starcoder", "refact", "command-r")
GPT2_PRE = ("default", "gpt-2")

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACE = "▁"  # how SentencePiece writes a space


class ChatTokenizer:
    """Text to token ids and back, with the file's special tokens and chat template."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._template: str | None = file.get("tokenizer.chat_template")
        kind = file.require("tokenizer.ggml.model")
        if kind == "gpt2":
            self.tokenizer = _byte_level(file)
        elif kind == "llama":
            self.tokenizer = _sentencepiece(file)
        else:
            raise file.error(f"tokenizer '{kind}' is not supported, only 'gpt2' and 'llama'")
        self._bos: int | None = None
        if file.get("tokenizer.ggml.add_bos_token", kind == "llama"):
            self._bos = file.get("tokenizer.ggml.bos_token_id")
        ends = (file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        self.stop_ids = frozenset(int(end) for end in ends if end is not None)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of text; special tokens that are written out in it are recognised."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if self._bos is not None and ids[:1] != [self._bos]:
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


def _byte_level(file: ModelFile) -> Tokenizer:
    """Byte-level BPE, as GPT-2, SmolLM2 and Llama 3 use it."""
    pre = file.get("tokenizer.ggml.pre", "default")
    model = models.BPE(
        vocab=_vocabulary(file),
        merges=[_merge_pair(merge) for merge in file.require("tokenizer.ggml.merges")],
        # Llama 3 takes a word that is a token as it is, whatever the merges say.
        ignore_merges=pre in LLAMA3_PRE,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(file, pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, file)
    return tokenizer


def _sentencepiece(file: ModelFile) -> Tokenizer:
    """SentencePiece's BPE, as Llama 2 and Mistral use it: scores instead of merges."""
    vocabulary = _vocabulary(file)
    scores: list[float] = file.require("tokenizer.ggml.scores")
    unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_from_scores(vocabulary, scores),
        unk_token=next(token for token, number in vocabulary.items() if number == unknown),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    steps: list = [normalizers.Replace(" ", SPACE)]
    strip: list = []
    if file.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
        strip.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_special_tokens(tokenizer, file)
    return tokenizer


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the highest-scored token first."""
    merges = []
    for token in sorted(vocabulary, key=lambda token: -scores[vocabulary[token]]):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        whole = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(whole, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges


def _vocabulary(file: ModelFile) -> dict[str, int]:
    return {token: number for number, token in enumerate(file.require("tokenizer.ggml.tokens"))}


def _merge_pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _add_special_tokens(tokenizer: Tokenizer, file: ModelFile) -> None:
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    types: list[int] = file.get("tokenizer.ggml.token_type", [])
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])


def _pre_tokenizer(file: ModelFile, name: str) -> PreTokenizer:
    """How text is cut into words before the merges."""
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
