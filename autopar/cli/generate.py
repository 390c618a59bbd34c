"""`autopar generate`: generate text with a model from a folder, and stream it to the terminal.

In: a model's folder, prompts, options. Out: text on standard output; token counts and throughput on standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.cli.serving_options import add_serving_options, serving_of
from autopar.cli.terminal import print_json, progress
from autopar.errors import InferenceError

if TYPE_CHECKING:
    from autopar.inference import Engine, Generation

#: Default maximum number of generated tokens.
_MOST_TOKENS = 128


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "generate text with a model from a folder, on the devices of this machine"
    generate = added.add_parser("generate", help=about, description=about)
    about = "a model as Hugging Face writes it: config.json, *.safetensors, tokenizer.json"
    generate.add_argument("model", metavar="MODEL_DIR", help=about)
    group = generate.add_argument_group("what to generate")
    about = "prompt; may be repeated: all texts are generated in one batch; - reads standard input"
    group.add_argument("--prompt", action="append", metavar="TEXT", help=about)
    about = "prompt as token numbers, comma-separated; the generated tokens are printed as numbers"
    group.add_argument("--tokens", action="append", metavar="N,N...", help=about)
    about = "maximum number of generated tokens (default: 128, or as many as --max-length leaves)"
    group.add_argument("--max-tokens", type=int, metavar="N", help=about)
    about = "sampling temperature; 0 takes the most probable token (default: 0; with --best-of: 1)"
    group.add_argument("--temperature", type=float, metavar="T", help=about)
    group.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="sample from the N most probable (default: all)"
    )
    about = "sample from the most probable tokens whose probabilities add up to P (default: 1, all)"
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help=about)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the samples (default: 0)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    about = "sample N texts for each prompt, and print the text with the highest probability"
    group.add_argument("--best-of", type=int, default=1, metavar="N", help=about)
    add_serving_options(generate)
    generate.add_argument("--json", action="store_true", help="print JSON at the end: texts, tokens, logprobs")
    generate.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Generate and print texts."""
    from autopar.inference import Engine, SamplingOptions

    prompts = _prompts(options)
    counts = {"--max-tokens": options.max_tokens, "--best-of": options.best_of}
    serving = serving_of(options.model, options, counts)
    temperature = options.temperature if options.temperature is not None else float(options.best_of > 1)
    sampling = SamplingOptions(temperature, options.top_k, options.top_p, options.seed)
    requests = [
        {"max_tokens": most, "stop": options.stop, "sampling": sampling}
        for most in _most_tokens(options, prompts, serving["options"].max_length)
    ]
    with progress() as report:
        engine = Engine.open(options.model, **serving, progress=report)
    started = time.perf_counter()
    results = list(_results(engine, prompts, options, requests))
    if options.json:
        print_json(results)
    seconds, stats = time.perf_counter() - started, engine.stats
    print(
        f"{stats.num_tokens} tokens in {seconds:.2f} s ({stats.num_tokens / seconds:,.1f} per second,"
        f" {stats.num_steps} steps); of {stats.num_prompt_tokens + stats.num_cached_tokens} prompt tokens"
        f" {stats.num_cached_tokens} were in the cache",
        file=sys.stderr,
    )


def _prompts(options: argparse.Namespace) -> list[str | list[int]]:
    texts = [sys.stdin.read() if text == "-" else text for text in options.prompt or []]
    tokens = [_numbers(text) for text in options.tokens or []]
    if not texts and not tokens:
        raise InferenceError("`autopar generate` needs a prompt: give --prompt TEXT, or --tokens N,N...")
    return [*texts, *tokens]


def _most_tokens(options: argparse.Namespace, prompts: list[str | list[int]], longest: int) -> list[int]:
    """The maximum number of tokens to generate for each prompt, checked before the model is loaded.

    Raises:
        InferenceError: a prompt is empty or too long.
    """
    from autopar.inference.model.config import DecoderConfig
    from autopar.inference.model.tokenizer import load_tokenizer, tokens_of
    from autopar.inference.schedule.stop_strings import TextUntilStop

    vocab_size = DecoderConfig.read(options.model).vocab_size
    TextUntilStop(options.stop)
    needs_tokenizer = options.stop or any(isinstance(prompt, str) for prompt in prompts)
    tokenizer = load_tokenizer(options.model) if needs_tokenizer else None
    counts: list[int] = []
    for number, prompt in enumerate(prompts, 1):
        length = len(tokens_of(prompt, tokenizer, vocab_size))
        if length == 0:
            raise InferenceError(f"prompt {number} has no tokens: give a longer text")
        most = options.max_tokens or max(1, min(_MOST_TOKENS, longest - length))
        if length + most > longest:
            raise InferenceError(
                f"prompt {number} has {length} tokens and {most} more are to be generated (--max-tokens), but --max-length is"
                f" {longest}: shorten the prompt, lower --max-tokens, or raise --max-length if the model allows it"
            )
        counts.append(most)
    return counts


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InferenceError(f"--tokens {text!r} is not a list of token ids: write comma-separated integers") from None


def _results(
    engine: Engine, prompts: list[str | list[int]], options: argparse.Namespace, requests: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The result of each prompt. Without `--json`, texts are printed while they are generated."""
    if options.best_of > 1:
        from autopar.inference import best_of

        for prompt, how in zip(prompts, requests, strict=True):
            best = best_of(engine, prompt, options.best_of, **how).best
            _print(_text_of(engine, best.text, best.tokens), options, len(prompts))
            yield {"prompt": prompt, **{k: v for k, v in asdict(best).items() if k not in ("prompt", "error")}}
        return
    generations = [engine.submit(prompt, **how) for prompt, how in zip(prompts, requests, strict=True)]
    try:
        for prompt, generation in zip(prompts, generations, strict=True):
            _stream(engine, generation, options, len(prompts))
            yield {
                "prompt": prompt,
                "text": generation.text,
                "tokens": generation.tokens,
                "logprobs": generation.logprobs,
                "ended": generation.ended,
            }
    finally:
        for generation in generations:
            generation.abort()


def _stream(engine: Engine, generation: Generation, options: argparse.Namespace, num: int) -> None:
    if options.json:
        generation.result()
        return
    for number, piece in enumerate(generation):
        separator = "," if engine.tokenizer is None and number else ""
        print(separator + _text_of(engine, piece.text, piece.tokens), end="", flush=True)
    print("\n" if num > 1 else "", flush=True)


def _print(text: str, options: argparse.Namespace, num: int) -> None:
    if not options.json:
        print(text, end="\n\n" if num > 1 else "\n", flush=True)


def _text_of(engine: Engine, text: str, tokens: Any) -> str:
    return ",".join(map(str, tokens)) if engine.tokenizer is None else text
