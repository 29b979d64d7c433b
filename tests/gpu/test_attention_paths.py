"""With and without captured graphs: the same greedy tokens, up to ties of bfloat16."""

import pytest
import torch

from kestrel_engine.runtime.gpu.parts import Options
from kestrel_engine.runtime.gpu.runtime import GpuRuntime
from kestrel_engine.types.requests import Coord, Size
from kestrel_engine.types.step import StepToken, TokenRule
from tests.checkpoint_loading import load_checkpoint
from tests.golden.checkpoint import DATA
from tests.golden.checks import check_job, new_job
from tests.golden.driver import Feed, Job, pages_for, run_jobs
from tests.golden.goldens import Golden, load_golden, load_pictures


class Model:
    """A golden model, and what came of all its cases in bfloat16."""

    def __init__(self, golden: Golden, folder, pictures) -> None:
        self.golden, self._folder, self._pictures = golden, folder, pictures

    def runtime(self, cuda_graphs: bool, dtype: torch.dtype) -> GpuRuntime:
        runtime = GpuRuntime(
            self.golden.config,
            load_checkpoint(self._folder, dtype=dtype, device="cuda").tensors,
            Options(
                num_pages=6 * 85,
                page_size=10,
                max_batch_size=8,
                max_seq_length=self.golden.config.text.max_context,
                cuda_graphs=cuda_graphs,
            ),
        )
        self.golden.encode(runtime, self._pictures)
        return runtime

    def generate(self, cuda_graphs: bool, dtype: torch.dtype) -> list[Job]:
        runtime = self.runtime(cuda_graphs, dtype)
        jobs = [new_job(self.golden, case) for case in self.golden.expected["cases"]]
        for begin in range(0, len(jobs), 6):
            # Jobs begin and end at different times, so steps of all sizes occur.
            run_jobs(runtime, jobs[begin : begin + 6], starts_per_step=2)
        runtime.close()
        return jobs

    def margin(self, job: Job, index: int, a: StepToken, b: StepToken) -> float:
        """How far apart float32 sees two answers after the first ``index`` tokens of ``job``."""
        runtime = self.golden.runtime
        fed = [token.as_input() for token in job.tokens[:index]]
        with torch.inference_mode():
            hidden = Feed(runtime, pages_for(runtime, 900, seed=7))(*job.prompt, *fed)[None]
            if a.id != b.id:
                logits = runtime.model.text.logits(hidden)[0].float()
                sides = [_score(logits, token.id, job.rules[index]) for token in (a, b)]
                return abs(sides[0] - sides[1])
            region = runtime.model.region
            if isinstance(a.value, Coord):
                assert isinstance(b.value, Coord)
                bins = [[round(token.value.value * 1024) for token in (a, b)]]
                logits = region.coord_logits(hidden)
            else:
                assert isinstance(a.value, Size) and isinstance(b.value, Size)
                embedded = [(t.value.width, t.value.height) for t in (a, b)]
                logits = region.size_logits(hidden)[0]
                sizes = 2 ** (10 * torch.arange(1024) / 1023 - 10)
                bins = [
                    [int((sizes - side).abs().argmin()) for side in sides]
                    for sides in zip(*embedded, strict=True)
                ]
            return max(
                abs(float(row[first] - row[second]))
                for row, (first, second) in zip(logits, bins, strict=True)
            )


def _score(logits: torch.Tensor, token: int, rule: TokenRule) -> float:
    """The logit that let ``token`` win; any other than the end may have become ``otherwise``."""
    if rule.otherwise is None or token != rule.otherwise:
        return float(logits[token])
    left = logits.clone()
    left[rule.stop] = -torch.inf
    return float(left.max())


@pytest.fixture(scope="module")
def pictures():
    return load_pictures()


@pytest.fixture(scope="module", params=["md2", "md3"])
def model(request, golden_folder, pictures):
    folder = golden_folder(request.param)
    with torch.inference_mode():
        golden = load_golden(request.param, folder, DATA, pictures)
    return Model(golden, folder, pictures)


def test_bfloat16_differs_by_ties_alone(model):
    limits = model.golden.tolerances["bf16"]
    allowed = limits["teacher_forced_argmax_must_match_when_margin_at_least"]
    base, jobs = (model.generate(graphs, torch.bfloat16) for graphs in (True, False))
    margins = {}
    for case, wanted, job in zip(model.golden.expected["cases"], base, jobs, strict=True):
        pairs = zip(wanted.tokens, job.tokens, strict=False)
        differs = next(
            (i for i, (a, b) in enumerate(pairs) if (a.id, a.value) != (b.id, b.value)), None
        )
        if differs is None:
            assert len(wanted.tokens) == len(job.tokens), case["id"]
            continue
        a, b = wanted.tokens[differs], job.tokens[differs]
        margins[case["id"], differs] = model.margin(wanted, differs, a, b)
    print(f"{model.golden.name}: {len(margins)} of {len(jobs)}", margins)
    # Where another expert is chosen for a tie, logits move by more than rounding: seen once in 29 cases, by 0.38.
    large = [margin for margin in margins.values() if margin >= allowed]
    assert len(large) <= (model.golden.config.text.moe is not None), margins
    assert all(margin < 2 * allowed for margin in large), margins
    assert len(margins) <= len(jobs) // 2, "so many ties are none"


@pytest.mark.parametrize("graphs", [True, False])
def test_float32_gives_the_references_tokens(model, graphs):
    jobs = model.generate(graphs, torch.float32)
    for case, job in zip(model.golden.expected["cases"], jobs, strict=True):
        check_job(case, job)
