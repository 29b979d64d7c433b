"""A tiny scheduler for tests: gives sequences scattered pages and drives skill states through StepPlans."""

import random
from dataclasses import dataclass, field

from torch import Tensor

from kestrel_engine.runtime.torch_runtime import TorchRuntime
from kestrel_engine.skills.base import SkillControl, SkillOutput
from kestrel_engine.types.requests import Prompt, SamplingParams, Token, num_positions
from kestrel_engine.types.step import Row, SampleSpec, StepPlan, StepToken, TokenRule


@dataclass
class Feed:
    """Feeds one sequence token by token or in chunks and gives the hidden state after each; samples nothing."""

    runtime: TorchRuntime
    pages: tuple[int, ...]
    sequence_id: int = 0
    position: int = 0

    def __call__(self, *tokens: Token) -> Tensor:
        """[dim]: the residual stream at the last of ``tokens``."""
        row = Row(self.sequence_id, tokens, self.position, self.pages, None)
        self.position += num_positions(tokens)
        return self.runtime.hidden([row])[0]


def pages_for(runtime: TorchRuntime, positions: int, *, seed: int | None = None) -> tuple[int, ...]:
    """Enough pages for ``positions``: the first ones in order, or scattered over the pool by ``seed``."""
    limits = runtime.limits
    count = -(-positions // limits.page_size)
    if seed is None:
        return tuple(range(count))
    return tuple(random.Random(seed).sample(range(limits.num_pages), count))


@dataclass
class Job:
    """One request: ``control`` gives the rules, ``output`` makes text and objects; ``tokens``: what was sampled."""

    prompt: Prompt
    control: SkillControl
    output: SkillOutput
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tokens: list[StepToken] = field(default_factory=list)
    rules: list[TokenRule] = field(default_factory=list)
    pages: tuple[int, ...] = ()
    position: int = 0
    finish: str | None = None

    def row(self, sequence_id: int) -> Row:
        tokens = (self.tokens[-1].as_input(),) if self.tokens else self.prompt
        rule = self.control.rule(len(self.tokens))
        assert rule is not None
        self.rules.append(rule)
        spec = SampleSpec(rule, self.sampling, len(self.tokens))
        return Row(sequence_id, tokens, self.position, self.pages, spec)

    def take(self, token: StepToken) -> None:
        """At the limit one more decision is made, as in the reference: if it is the end, the text was complete."""
        self.position += 1 if self.tokens else num_positions(self.prompt)
        if len(self.tokens) == self.max_tokens:
            self.finish = "stop" if token.id == self.rules[-1].stop else "length"
        else:
            self.tokens.append(token)
            self.finish = self.control.accept(token)
            if self.finish != "stop":
                self.output.push(token)
        if self.finish is not None:
            self.output.finish()


def run_jobs(
    runtime: TorchRuntime, jobs: list[Job], *, starts_per_step: int = 8, seed: int = 1
) -> None:
    """Runs all jobs to their end, together; ``starts_per_step`` of them begin in each step."""
    free = list(range(runtime.limits.num_pages))
    random.Random(seed).shuffle(free)
    for job in jobs:
        count = -(-(num_positions(job.prompt) + job.max_tokens + 1) // runtime.limits.page_size)
        job.pages, free = tuple(free[:count]), free[count:]
        assert len(job.pages) == count, "the test's pool is too small"
    waiting, running = dict(enumerate(jobs)), dict[int, Job]()
    step_id = 0
    while waiting or running:
        starting = {i: waiting.pop(i) for i in list(waiting)[:starts_per_step]}
        plan = StepPlan(
            step_id,
            prefill=tuple(job.row(i) for i, job in starting.items()),
            decode=tuple(job.row(i) for i, job in running.items()),
        )
        result = runtime.collect(runtime.launch(plan))
        running |= starting
        assert set(result.tokens) == set(running)
        for i, token in result.tokens.items():
            running[i].take(token)
        running = {i: job for i, job in running.items() if job.finish is None}
        step_id += 1
