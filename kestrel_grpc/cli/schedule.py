"""``schedule``: runs prompts with an engine in this process, without a server. Prints answers and their timings.

All prompts are queued at once, so they share batches like the requests of a server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from kestrel_client.commands.parser import EXIT_FAILED, CommandError
from kestrel_client.commands.requests.flags import (
    add_logprobs_flags,
    add_question_flags,
    add_sampling_flags,
    sampling,
)
from kestrel_client.commands.values import whole
from kestrel_engine import (
    EngineResult,
    InCrops,
    InferenceEngine,
    KestrelError,
    RuntimeConfig,
    TokenLogprob,
)

from ..process.startup_progress import LoadingProgress
from ..settings.configuration import add_config_flag
from ..settings.flags import SettingsError
from ..settings.model import add_model_flags, runtime_config
from .engine_errors import told

ESSENTIAL = (
    *("--image", "--stream", "--json", "--temperature", "--max-tokens", "--config"),
    *("--model", "--weights", "--device", "--precision", "--max-batch-size"),
)


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = "Exits with 1 if an answer is empty."
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="a question")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="image that the prompts are about: given once for all prompts, or once for each, in order",
    )
    parser.add_argument(
        "--max-crops",
        type=whole(),
        default=0,
        metavar="N",
        help="limit on the tiles of each image, beside the overview; 1: the overview alone [the model's own limit]",
    )
    add_question_flags(parser, has_limit=True)
    add_sampling_flags(parser, text=True, has_seed=True)
    output = parser.add_argument_group("output")
    add_logprobs_flags(output)
    output.add_argument("--stream", action="store_true", help="print answers as they arrive")
    output.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    add_config_flag(parser)
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    if len(args.image) not in (0, 1, len(args.prompts)):
        raise SettingsError(
            f"{len(args.image)} images for {len(args.prompts)} prompts: give one, or one for each"
        )
    for file in args.image:
        if not os.path.exists(file):  # Known before the model is loaded, which takes time.
            raise CommandError(f"there is no image {file!r}")
    with told(args):
        return asyncio.run(_schedule(args, runtime_config(args)))


async def _schedule(args: argparse.Namespace, runtime: RuntimeConfig) -> int:
    images = [InCrops(image, args.max_crops) for image in args.image]
    if len(images) == 1:
        images *= len(args.prompts)
    started = time.monotonic()
    with LoadingProgress() as progress:
        engine = await InferenceEngine.create(runtime, progress=progress)
    async with engine:
        if not args.json:
            info = engine.info
            print(
                f"{info.model} on {info.device} ({info.dtype}), loaded in {time.monotonic() - started:.1f} s"
            )
        started = time.monotonic()
        results = await asyncio.gather(
            *(
                _ask(engine, args, number, prompt, images[number] if images else None)
                for number, prompt in enumerate(args.prompts)
            )
        )
        seconds = time.monotonic() - started
    for prompt, result in zip(args.prompts, results, strict=True):
        if args.json:
            shown = {"prompt": prompt, **asdict(result)}
            if result.logprobs is not None:
                shown["logprobs"] = [_token(each) for each in result.logprobs]
            print(json.dumps(shown, ensure_ascii=False, default=_text))
        else:
            _print_answer(prompt, result)
    if not args.json:
        _print_total(results, seconds)
    empty = [
        p
        for p, r in zip(args.prompts, results, strict=True)
        if not r.output["answer"].strip() and not r.abstained
    ]
    for prompt in empty:
        print(f"kestrel-grpc schedule: error: the answer to {prompt!r} is empty", file=sys.stderr)
    return EXIT_FAILED if empty else 0


async def _ask(
    engine: InferenceEngine,
    args: argparse.Namespace,
    number: int,
    prompt: str,
    image: InCrops | None,
) -> EngineResult:
    settings = sampling(args)
    if settings["constraint"] is not None:
        settings["constraint"] = asdict(settings["constraint"])
    arguments = {
        "question": prompt,
        "reasoning": args.reasoning,
        "system": args.system,
        "presupposes": args.presupposes,
    }
    try:
        async with await engine.submit("query", image, arguments, settings) as stream:
            if args.stream and not args.json:
                async for update in stream:
                    _print_piece(update.reasoning or update.text, number, len(args.prompts))
                if len(args.prompts) == 1:
                    print()
            return await stream.result()
    except KestrelError as error:
        raise CommandError(f"prompt {number + 1}: {error}") from None


def _print_piece(text: str, number: int, num_prompts: int) -> None:
    """Prints a piece of an answer. If there are several prompts, it is a line with the prompt's number."""
    if num_prompts == 1:
        print(text, end="", flush=True)
    else:
        print(f"[{number + 1}] {text!r}", flush=True)


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {**token._asdict(), "top": [_token(each) for each in token.top]}


def _print_answer(prompt: str, result: EngineResult) -> None:
    metrics = result.metrics
    print(f"\n{prompt}")
    if "reasoning" in result.output:
        print(f"  ({result.output['reasoning']['text']})")
    for each in result.absences:
        print(f"  {each.object}: absent with probability {each.absence:.3f}")
    print("  abstained" if result.abstained else f"  {result.output['answer']}")
    for token in result.logprobs or ():
        others = "".join(f"  {_text(each.utf8)!r} {each.logprob:.4f}" for each in token.top)
        print(f"  {token.logprob:10.4f}  {_text(token.utf8)!r}{others}")
    # The prefill gives the first token, decode steps the others.
    decoded = metrics.output_tokens - 1
    rate = ""
    if decoded > 0 and metrics.decode_time_ms:
        rate = f" at {1e3 * decoded / metrics.decode_time_ms:.1f}/s"
    thought = f" ({metrics.reasoning_tokens} of reasoning)" if metrics.reasoning_tokens else ""
    print(
        f"  first token {metrics.ttft_ms:.0f} ms (queue {metrics.queue_time_ms:.0f}, preprocess "
        f"{metrics.preprocess_time_ms:.0f}, prefill {metrics.prefill_time_ms:.0f} of {metrics.input_tokens} "
        f"positions, {metrics.cached_tokens} of them cached, {metrics.encoded_crops} crops encoded and "
        f"{metrics.reused_crops} reused), decode {max(decoded, 0)} tokens{rate}{thought}, "
        f"total {metrics.total_time_ms:.0f} ms, {result.finish_reason}"
    )


def _text(utf8: bytes) -> str:
    """A token may hold a part of a character."""
    return utf8.decode("utf-8", "replace")


def _print_total(results: list[EngineResult], seconds: float) -> None:
    tokens = sum(result.metrics.output_tokens for result in results)
    slowest = max(result.metrics.ttft_ms for result in results)
    prompts = "1 prompt" if len(results) == 1 else f"{len(results)} prompts"
    print(
        f"\n{prompts} in {seconds:.2f} s: {tokens} tokens, {tokens / seconds:.1f}/s; "
        f"slowest first token {slowest:.0f} ms"
    )
