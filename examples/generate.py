"""Generates text from a Llama-architecture GGUF file, with plain XLA, with jaxgraph, or with both.

Without --model it fetches SmolLM2-135M-Instruct (Apache-2.0, about 100 MB) once and keeps it in
$JAXGRAPH_CACHE, by default the user's cache directory. Decoding is greedy: the same file, prompt
and dtype give the same text.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

try:
    from gguf_model import ModelFile, ModelFileError, load_params, read_config
    from gguf_tokenizer import ChatTokenizer
    from model_cache import ModelMismatch, ModelUnavailable, default_model
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
    from tokenizers.decoders import DecodeStream
except ModuleNotFoundError as error:
    sys.exit(f"{error}; install the examples' requirements: pip install 'jaxgraph[examples]'")

import jax
import jax.numpy as jnp
import numpy as np
from generation import WARMUP_STEPS, Run, greedy, pad_prompt, timed
from llama import Config, Params, decode_step, empty_cache, prefill

ENGINES = {"xla": "plain XLA", "jaxgraph": "jaxgraph"}
CONTEXT_BLOCK = 256


class UsageError(Exception):
    """Says in one line what about the command cannot be done."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prompt", default="Why is the sky blue?", help="what to ask (default: %(default)r)")
    add("--max-tokens", type=positive, default=128, metavar="N", help="default: %(default)s")
    add(
        "--engine",
        choices=[*ENGINES, "both"],
        default="both",
        help="what runs the decode step; 'both' compares them (default: %(default)s)",
    )
    add("--model", type=Path, metavar="PATH", help="a GGUF file (default: SmolLM2-135M-Instruct)")
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="of parameters and cache; float32 multiplies at full precision (default: %(default)s)",
    )
    add(
        "--layers",
        choices=["list", "scan"],
        default="list",
        help="a Python loop over the layers, or lax.scan over stacked ones (default: %(default)s)",
    )
    add("--context", type=positive, metavar="N", help="cache length (default: what is needed)")
    add("--pack", action="store_true", help="put jaxgraph's parameters into one buffer")
    add("--plot", type=Path, metavar="PNG", help="draw jaxgraph's steps into this file")
    add("--raw", action="store_true", help="continue the prompt; don't apply the chat template")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console = Console(highlight=False)
    try:
        with jax.default_matmul_precision("highest" if arguments.dtype == "float32" else "default"):
            return generate(arguments, console)
    except (ModelFileError, ModelMismatch, ModelUnavailable, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def generate(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.plot and arguments.engine == "xla":
        raise UsageError("--plot draws what jaxgraph does; --engine xla does without it")
    file = ModelFile(arguments.model or default_model())
    config = read_config(file)
    tokenizer = ChatTokenizer(file)
    chat = tokenizer.has_chat_template and not arguments.raw
    prompt = tokenizer.encode(tokenizer.render_chat(arguments.prompt) if chat else arguments.prompt)
    context, max_tokens = plan_length(arguments, file, prompt, console)
    stacked = arguments.layers == "scan"
    dtype = jnp.dtype(arguments.dtype)
    params = load(file, config, dtype, stacked, console)
    name = file.get("general.name", file.path.stem)
    console.print(f"{name} · {dtype} · context {context} · {jax.devices()[0].device_kind}")

    # The prompt goes through XLA whichever engine decodes.
    fill = jax.jit(partial(prefill, config=config), donate_argnums=1)
    runs: dict[str, Run] = {}
    engines = list(ENGINES) if arguments.engine == "both" else [arguments.engine]
    try:
        for engine in engines:
            console.rule(ENGINES[engine], align="left")
            run = runs[engine] = Run()
            step = make_step(engine, config)
            cache = empty_cache(config, 1, context, dtype, stacked=stacked)
            prefilled = fill(params, cache, pad_prompt(prompt, context), len(prompt))
            step_params = params
            if engine == "jaxgraph" and arguments.pack:
                token, position, cache = prefilled
                step_params = step.pack(params, example_args=(params, cache, token, position))
            tokens = greedy(step, step_params, prefilled, max_tokens, tokenizer.stop_ids)
            try:
                stream(tokenizer, timed(tokens, run))
            finally:
                run.counters = dict(step.stats()) if engine == "jaxgraph" else {}
            if engine == "jaxgraph" and arguments.plot:
                draw(step, arguments.plot, console)
    except KeyboardInterrupt:
        report(runs, console)
        return 130
    report(runs, console)
    return 0


def plan_length(
    arguments: argparse.Namespace, file: ModelFile, prompt: list[int], console: Console
) -> tuple[int, int]:
    """The cache's length, and how many tokens fit into it."""
    if not prompt:
        raise UsageError("the prompt is empty; give --prompt some text")
    trained = int(file.get("llama.context_length", sys.maxsize))
    # The last token is only read, never fed back.
    needed = len(prompt) + arguments.max_tokens - 1
    context = arguments.context or min(-(-needed // CONTEXT_BLOCK) * CONTEXT_BLOCK, trained)
    if context > trained:
        console.print(f"note: the model was trained for a context of {trained}, not {context}")
    if len(prompt) > context:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens, but the context is {context}; "
            "raise --context or shorten the prompt"
        )
    max_tokens = min(arguments.max_tokens, context - len(prompt) + 1)
    if max_tokens < arguments.max_tokens:
        console.print(f"note: the context of {context} leaves room for {max_tokens} tokens")
    return context, max_tokens


def load(file: ModelFile, config: Config, dtype: Any, stacked: bool, console: Console) -> Params:
    columns = (TextColumn("Loading {task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(file.path.name)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return load_params(file, config, dtype, stacked=stacked, progress=progress)


def make_step(engine: str, config: Config) -> Callable:
    """The decode step as the engine runs it, the cache donated."""
    step = partial(decode_step, config=config)
    if engine == "xla":
        return jax.jit(step, donate_argnums=1)
    try:
        import jaxgraph
    except ModuleNotFoundError:
        raise UsageError(
            "jaxgraph is not installed; run 'pip install .' in the repository, or use --engine xla"
        ) from None
    return jaxgraph.wrap(step, donate_argnums=(1,))


def draw(step: Any, path: Path, console: Console) -> None:
    try:
        figure = step.plot()
    except (ImportError, ValueError) as error:  # no matplotlib; or nothing ran from graphs
        console.print(f"note: no picture: {error}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    console.print(f"Every step in a picture: {path}")


def stream(tokenizer: ChatTokenizer, tokens: Any) -> None:
    """Prints text as it comes; a character of several tokens waits for its last one."""
    decoder = DecodeStream(skip_special_tokens=True)
    try:
        for token in tokens:
            text = decoder.step(tokenizer.tokenizer, token)
            if text:
                print(text, end="", flush=True)
    finally:
        print(flush=True)


def report(runs: dict[str, Run], console: Console) -> None:
    table = Table("engine")
    for name in ("tokens/s", "median ms", "p99 ms", "steps"):
        table.add_column(name, justify="right")
    for engine, run in runs.items():
        steady = run.steady
        if steady.size:
            median, p99 = np.percentile(steady, [50, 99]) * 1e3
            figures = (f"{steady.size / steady.sum():.1f}", f"{median:.2f}", f"{p99:.2f}")
        else:
            figures = ("–", "–", "–")
        table.add_row(ENGINES[engine], *figures, str(steady.size))
    console.rule("time per step", align="left")
    console.print(table)
    console.print(
        f"The first {WARMUP_STEPS} steps (compilation, warm-up, capture) are not counted."
    )
    if len(runs) == 2:
        console.print(f"Tokens identical: {compare(*(run.tokens for run in runs.values()))}")
    for run in runs.values():
        if run.counters:
            console.print(counter_table(run.counters))


def counter_table(counters: dict[str, int]) -> Table:
    """jaxgraph's counters under the words that describe them."""
    names = {
        "eager": "eager",
        "captures": "captured",
        "replays": "replayed",
        "patches": "patched",
        "exec_updates": "updated",
        "instantiations": "instantiated",
    }
    table = Table(title="jaxgraph's counters", title_justify="left")
    for label in names.values():
        table.add_column(label, justify="right")
    table.add_row(*(str(counters[name]) for name in names))
    return table


def compare(a: list[int], b: list[int]) -> str:
    if a == b:
        return f"yes, all {len(a)}"
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return "yes, as far as both went" if same is None else f"no, they part at token {same + 1}"


if __name__ == "__main__":
    sys.exit(main())
