"""Sides: one model in two configurations, which get the same tokens, to find their first difference.

This module owns the flags for the two sides and the request, and runs the steps of one sequence on one side. Without
CUDA, Triton's interpreter runs the kernels in float32, which is slow and suits small models only.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from kestrel_engine.skills import SkillContext, SkillControl, SkillRegistry, SkillRequest
from kestrel_engine.skills.base import TextCodec
from kestrel_engine.types.model_config import ModelConfig
from kestrel_engine.types.requests import (
    ImageBlock,
    PreparedImage,
    Prompt,
    SamplingParams,
    num_positions,
)
from kestrel_engine.types.step import Row, SampleSpec, StepToken, TokenRule

from ..device.rates import synchronize
from ..reports.report import Report, benchmark_parser
from ..traffic.images import jpeg
from .hand_made_steps import HandMadeSteps
from .opening import ModelRuntime, model_arguments, parse

if TYPE_CHECKING:
    from torch import Tensor

    from kestrel_engine.runtime.kv_cache import KvCache

TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""By dtype: the allowed error of values after several layers, as a share of their root mean square."""
IN_FP8 = 6e-2
"""The allowed error with an FP8 KV cache. If one side rounds, the error of a number is 0.026. If both sides round, one
may round up and the other down."""


@dataclass(frozen=True)
class Request:
    """The request for both sides."""

    skill: SkillRequest
    prompt: Prompt
    image: PreparedImage | None
    context: SkillContext
    max_tokens: int

    @property
    def positions(self) -> int:
        """Positions of the prompt and of all sampled tokens."""
        return num_positions(self.prompt) + self.max_tokens

    def control(self) -> SkillControl:
        return (
            SkillRegistry.default()
            .get(self.skill.skill)
            .new_control(self.skill, self.max_tokens, self.context)
        )


@dataclass(frozen=True)
class Side:
    """A loaded runtime. ``label``: its type, dtype and flags."""

    label: str
    runtime: ModelRuntime
    config: ModelConfig
    codec: TextCodec

    @property
    def dtype(self) -> torch.dtype:
        return self.runtime.model.dtype

    @property
    def tolerance(self) -> float:
        """The allowed error of values on this side."""
        own = TOLERANCES[self.dtype]
        return max(own, IN_FP8) if self.cache.eight_bits else own

    @property
    def exact(self) -> bool:
        """Whether this side computes and stores everything in float32."""
        return self.dtype == torch.float32 and not self.cache.eight_bits

    @property
    def cache(self) -> KvCache:
        """The runtime's KV cache, a private attribute that only this diagnostic reads."""
        cache: KvCache = self.runtime._cache  # type: ignore[attr-defined]
        return cache


Comparison = Callable[[Side, Side, Request, Report, float | None], bool]
"""Compares two sides with a tolerance, by default that of their dtypes. Returns whether they agree."""


def compare_sides(
    module: str,
    description: str | None,
    tolerance: str,
    compare: Comparison,
    arguments: Sequence[str] | None,
) -> NoReturn:
    """Is the main function of ``benchmarks.<module>``, which compares two sides. Ends the process with status 1 if they
    differ. ``tolerance`` describes the flag."""
    parser = benchmark_parser(module, description)
    parser.add_argument(
        "--left",
        default="--no-compile",
        metavar="FLAGS",
        help="flags of the reference side, in one argument: --left='--dtype float32' [--no-compile: plain "
        "torch]",
    )
    parser.add_argument(
        "--right", default="", metavar="FLAGS", help="flags of the side to check [none: kernels]"
    )
    add_request_arguments(parser)
    parser.add_argument("--tolerance", type=float, help=tolerance)
    args, of_model = parse(parser, arguments)
    if args.quick:
        args.max_tokens = min(args.max_tokens, 3)
    report = Report(module.rpartition(".")[2], vars(args))
    left, right = (open_side(flags, of_model) for flags in (args.left, args.right))
    try:
        agree = compare(left, right, make_request(args, left), report, args.tolerance)
    finally:
        left.runtime.close()
        right.runtime.close()
    report.finish(args.json)
    sys.exit(0 if agree else 1)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skill",
        default="query",
        choices=("query", "caption", "point", "detect"),
        help="skill [query]",
    )
    parser.add_argument(
        "--text", default="What is in the picture?", help="question, or name of the object"
    )
    parser.add_argument("--image", metavar="FILE", help="the image [a drawn one]")
    parser.add_argument("--no-image", action="store_true", help="ask without an image (query)")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens to compare [16]")


def open_side(flags: str, shared: Sequence[str]) -> Side:
    """Loads the model for ``shared`` and ``flags``, which are flags of ``kestrel-grpc serve``.

    The side uses plain torch with --no-compile, else the kernels.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from kestrel_engine.building.device import kv_scales_of
    from kestrel_engine.checkpoint.open import load_weights, open_model
    from kestrel_engine.preprocess.tokenizer import Tokenizer
    from kestrel_engine.runtime.torch_runtime import TorchRuntime

    config = model_arguments([*shared, *shlex.split(flags)])
    cuda = torch.cuda.is_available() and config.device != "cpu"
    device = torch.device(config.device if config.device != "auto" else "cuda" if cuda else "cpu")
    default = torch.bfloat16 if cuda else torch.float32
    dtype = default if config.dtype == "auto" else getattr(torch, str(config.dtype))
    opened = open_model(config)
    model = opened.config
    # Both sides use the same weights, although plain torch does not benefit from FP8.
    keep_fp8 = config.fp8_experts == "keep" or (config.fp8_experts == "auto" and cuda)
    tensors = load_weights(opened, dtype=dtype, device=device, keep_fp8=keep_fp8).tensors
    page_size = config.page_size or max(n for n in range(1, 17) if model.image_prefix % n == 0)
    length = min(config.max_seq_length or model.text.max_context, model.text.max_context)
    # The KV cache holds two sequences: the compared one, and a reserve.
    sizes: dict[str, Any] = {
        "num_pages": 2 * -(-length // page_size),
        "page_size": page_size,
        "max_batch_size": 2,
        "max_seq_length": length,
    }
    sizes["kv_scales"] = kv_scales_of(config, opened, device, dtype, config.compile and cuda)
    runtime: ModelRuntime
    if config.compile:
        from kestrel_engine.runtime.gpu.runtime import GpuRuntime

        runtime = GpuRuntime(
            model, tensors, attention=config.attention, cuda_graphs=config.cuda_graphs, **sizes
        )
    else:
        from kestrel_engine.models.moondream import Moondream

        runtime = TorchRuntime(
            Moondream(model, tensors), model, device=device, dtype=dtype, **sizes
        )
    codec = Tokenizer.from_file(opened.tokenizer_path, vocab_size=model.text.vocab_size)
    label = f"{type(runtime).__name__} {str(dtype).removeprefix('torch.')} {flags}".strip()
    return Side(label, runtime, model, codec)


def make_request(args: argparse.Namespace, side: Side) -> Request:
    """Returns the greedy request for the flags."""
    from kestrel_engine.config.images import ImageLimits
    from kestrel_engine.preprocess.crops import prepare
    from kestrel_engine.preprocess.decoding.images import open_image

    config = side.config
    image = None
    if not args.no_image:
        source = args.image or jpeg(0, 320, 240)
        image = prepare(open_image(source, ImageLimits()), config.vision)
    context = SkillContext(model=config, codec=side.codec)
    named = {"query": {"question": args.text}, "caption": {}}
    arguments = named.get(args.skill, {"object": args.text})
    greedy = {"temperature": 0.0} if args.skill in named else {}
    skill = SkillRegistry.default().get(args.skill).build(arguments, greedy, context)
    blocks = [] if image is None else [ImageBlock(image.key, config.image_positions)]
    prompt = (config.ids.bos_id, *blocks, *skill.prompt_suffix)
    request = Request(skill, prompt, image, context, args.max_tokens)
    limit = side.runtime.limits.max_seq_length
    assert request.positions <= limit, f"{request.positions} positions of {limit}"
    return request


class Talk:
    """One greedy sequence on one side: a prompt, then tokens one by one."""

    def __init__(self, side: Side, request: Request) -> None:
        self._side, self._request = side, request
        self._steps = HandMadeSteps(side.runtime)
        self._held = self._steps.hold(request.positions)
        self._position = 0
        self._count = 0
        if request.image is not None:
            self._steps.encode([request.image])

    @property
    def positions(self) -> int:
        """The positions whose keys and values are stored."""
        return self._position

    @property
    def pages(self) -> tuple[int, ...]:
        return self._held.pages

    def begin(self, rule: TokenRule) -> StepToken:
        """Prefills the prompt and samples."""
        row = self._row(self._request.prompt, rule)
        self._position = num_positions(self._request.prompt)
        return self._sampled(self._steps.prefill([row]).tokens)

    def feed(self, token: StepToken, rule: TokenRule) -> StepToken:
        """Runs one decode step with the input ``token``, and samples."""
        row = self._row((token.as_input(),), rule)
        self._position += 1
        return self._sampled(self._steps.decode([row]).tokens)

    def logits(self, token: StepToken | None) -> Tensor:
        """Returns the logits [vocab] float32 on the CPU, after the prompt (None) or after ``token`` at the next
        position.

        It runs a prefill pass, which stores keys and values. Call begin() or feed() with the same token afterwards.
        """
        tokens = self._request.prompt if token is None else (token.as_input(),)
        hidden = self._side.runtime.hidden([self._row(tokens, None)])
        synchronize(hidden.device)
        with torch.inference_mode():
            return self._side.runtime.model.text.logits(hidden)[0].float().cpu()

    def end(self) -> None:
        image = self._request.image
        self._steps.end([self._held], [] if image is None else [image.key])

    def _row(self, tokens: Prompt, rule: TokenRule | None) -> Row:
        spec = None if rule is None else SampleSpec(rule, SamplingParams(), self._count)
        row = self._steps.row(self._held, tokens, self._position)
        return Row(row.sequence_id, row.tokens, row.start, row.page_table, spec)

    def _sampled(self, tokens: dict[int, StepToken]) -> StepToken:
        self._count += 1
        return tokens[self._held.sequence_id]


def answer(talk: Talk, request: Request) -> list[StepToken]:
    """Returns the tokens that a side generates, including its stop token."""
    control, said = request.control(), list[StepToken]()
    while len(said) < request.max_tokens:
        rule = control.rule(len(said))
        assert rule is not None, "every earlier token was accepted"
        said.append(talk.feed(said[-1], rule) if said else talk.begin(rule))
        if control.accept(said[-1]) is not None:
            break
    return said


def follow(talk: Talk, request: Request, said: Sequence[StepToken]) -> list[StepToken]:
    """Returns the tokens that a side prefers at each position of ``said``, the answer of the other side."""
    control, picked = request.control(), list[StepToken]()
    for index, token in enumerate(said):
        rule = control.rule(index)
        assert rule is not None, "every earlier token was accepted"
        picked.append(talk.feed(said[index - 1], rule) if index else talk.begin(rule))
        control.accept(token)
    return picked
