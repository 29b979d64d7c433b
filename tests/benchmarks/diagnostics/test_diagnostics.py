"""The diagnostics distinguish equal sides from different ones, and find where these differ. Kernels are interpreted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.diagnostics import compare_reference, inspect_kv, probe_tau
from benchmarks.diagnostics.compare_reference import Place, verdict
from benchmarks.models.sides import IN_FP8, Request, Side
from benchmarks.reports.report import Report
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.runtime.gpu.runtime import GpuRuntime
from kestrel_engine.runtime.torch_runtime import TorchRuntime
from kestrel_engine.skills import SkillContext, SkillRequest
from kestrel_engine.types.requests import Coord, ImageBlock, SamplingParams
from kestrel_engine.types.step import StepToken
from tests.engine.runtime.gpu.small_models import picture, small_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"num_pages": 30, "page_size": 17, "max_batch_size": 2, "max_seq_length": 200}
TOOLS = [compare_reference, inspect_kv, probe_tau]


class Letters:
    """One letter an id."""

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(chr(60 + i) for i in ids)


def plain(family="moondream3", change=None, kv_scales=None) -> Side:
    """TorchRuntime; ``change`` may alter its weights, ``kv_scales`` put its cache in FP8."""
    config, tensors = small_model(family)
    if change is not None:
        change(tensors)
    runtime = TorchRuntime(
        Moondream(config, tensors),
        config,
        device="cpu",
        dtype=torch.float32,
        kv_scales=kv_scales,
        **SIZES,
    )
    return Side("plain", runtime, config, Letters())


def kernels(kv_scales=None) -> Side:
    config, tensors = small_model("moondream3")
    own = {name: tensor.to(DEVICE, copy=True) for name, tensor in tensors.items()}
    return Side("kernels", GpuRuntime(config, own, kv_scales=kv_scales, **SIZES), config, Letters())


def request_for(side: Side, suffix=(20, 30, 40), skill="query") -> Request:
    image = picture("one", (1, 1), side.config, seed=3)
    settings = SkillRequest(
        skill=skill,
        prompt_suffix=suffix,
        sampling=SamplingParams(),
        options={"reasoning": False, "top_logprobs": 0, "penalties": None, "max_objects": 2},
    )
    block = ImageBlock(image.key, side.config.image_positions)
    context = SkillContext(model=side.config, codec=side.codec)
    return Request(settings, (0, block, *suffix), image, context, max_tokens=2)


def closing(*sides: Side) -> None:
    for side in sides:
        side.runtime.close()


@pytest.mark.slow
def test_kernels_and_plain_torch_say_the_same_and_store_the_same(capsys):
    left, right = plain(), kernels()
    request, report = request_for(left), Report("none")
    assert compare_reference.compare(left, right, request, report)
    rows = report.tables["along what the left side says"]
    assert len(rows) == 2 and all(row["drift"] < 1e-3 and row[""] == "" for row in rows)
    assert [row["tokens"] for row in report.tables["answers"]] == [2, 2]
    assert inspect_kv.inspect(left, right, request, report) is None
    (cache,) = (table for title, table in report.tables.items() if title.startswith("cache"))
    assert len(cache) == 2 * left.config.text.n_layers
    assert all(row["rms"] > 0 and 0 <= row["decoded"] < 1e-3 for row in cache)
    assert "well" in capsys.readouterr().out
    closing(left, right)


@pytest.mark.slow
def test_caches_in_fp8_are_compared_by_what_they_stand_for():
    scales = [(0.02, 0.01)] * 2
    left, right, exact = plain(kv_scales=scales), kernels(scales), plain()
    assert left.tolerance == right.tolerance == IN_FP8 > exact.tolerance
    assert exact.exact and not left.exact
    request = request_for(left)
    for sides in ((left, right), (exact, right)):
        assert inspect_kv.inspect(*sides, request, Report("none")) is None
        assert compare_reference.compare(*sides, request, Report("none"))
    # Largest numbers that most values are beyond.
    small = plain(kv_scales=[(1e-4, 1e-4)] * 2)
    found = inspect_kv.inspect(exact, small, request, Report("none"))
    assert found is not None and found.layer == 0
    closing(left, right, exact, small)


def test_values_are_compared_too():
    left, right = plain(), plain()
    report = Report("none")
    assert compare_reference.compare(left, right, request_for(left, skill="point"), report)
    assert report.tables["along what the left side says"][0]["left"].startswith("5 0.")
    closing(left, right)


def test_the_layer_that_differs_first_is_named(capsys):
    def spoil(tensors):
        # The values of the second block's second head: 64 queries and 64 keys come before them.
        tensors["text.blocks.1.attn.qkv.bias"][64 + 64 + 32 :] += 1.0

    # Without tau, for its factors read every head.
    left, right = plain("moondream2"), plain("moondream2", spoil)
    found = inspect_kv.inspect(left, right, request_for(left), Report("none"))
    assert found is not None
    assert (found.layer, found.tensor, found.position, found.phase, found.head) == (
        1,
        "values",
        0,
        "image",
        1,
    )
    assert "layer 1, values, position 0 (image), head 1" in capsys.readouterr().out
    closing(left, right)


def test_a_single_position_may_be_further_off_than_a_stretch():
    keys = torch.ones(1, 400, 2, 4)
    for error, expected in ((0.09, False), (0.11, True)):
        other = keys.clone()
        other[0, 300, 1] += error
        contents = (inspect_kv.Contents(keys, keys), inspect_kv.Contents(other, keys))
        found = inspect_kv.first_difference(*contents, {"prompt": slice(0, 400)}, 0.01)
        assert (found is not None) is expected
    stretch = {"prompt": slice(0, 400)}
    assert inspect_kv.first_difference(*contents, stretch, 0.01, strays=0.0025) is None
    other += 0.02
    found = inspect_kv.first_difference(
        contents[0], inspect_kv.Contents(other, keys), stretch, 0.01, strays=0.5
    )
    assert found is not None and found.position == 0


def test_what_is_not_a_number_differs():
    keys = torch.ones(1, 3, 2, 4)
    broken = keys.clone()
    broken[0, 2, 1, 0] = torch.nan
    found = inspect_kv.first_difference(
        inspect_kv.Contents(keys, keys),
        inspect_kv.Contents(keys, broken),
        {"prompt": slice(0, 2), "decoded": slice(2, 3)},
        0.1,
    )
    assert found is not None
    assert (found.tensor, found.position, found.phase) == ("values", 2, "decoded")


def test_a_tie_is_no_fault_and_anything_else_is():
    def place(right: StepToken, margin: float = 0.0, drift: float = 0.001) -> Place:
        return Place(StepToken(4), right, drift, drift, margin)

    assert verdict([place(StepToken(4))], 0.01)[1]
    told, well = verdict([place(StepToken(4)), place(StepToken(5), 0.005)], 0.01)
    assert well and "part first at token 1" in told and "ties" in told
    assert not verdict([place(StepToken(5), 0.5)], 0.01)[1]
    assert not verdict([place(StepToken(4), drift=0.02)], 0.01)[1]
    assert not verdict([place(StepToken(4, Coord(0.5)))], 0.01)[1]


def test_tau_factors_of_the_kernels_are_those_of_plain_torch(capsys):
    side, report = plain(), Report("none")
    if DEVICE != "cpu":
        pytest.skip("the weights lie on the CPU, where Triton does not interpret")
    assert probe_tau.run(side, request_for(side), report, tolerance=None, heads_of=1) == []
    factors, heads = report.tables.values()
    assert [row["layer"] for row in factors] == [0, 1]
    assert all(-0.5 < row["q low"] <= row["q high"] < 2.5 for row in factors)
    assert [row["head"] for row in heads] == [0, 1]
    assert all(abs(row["v mean"] - row["v kernel"]) < 1e-4 for row in heads)
    closing(side)


def test_a_wrong_factor_is_found(monkeypatch, capsys):
    if DEVICE != "cpu":
        pytest.skip("the weights lie on the CPU, where Triton does not interpret")
    probed = probe_tau.probe

    def off(model, layer):
        found = probed(model, layer)
        if found.index == 1:
            found = replace(found, decode_values=found.decode_values + 0.01)
        return found

    monkeypatch.setattr(probe_tau, "probe", off)
    side = plain()
    beyond = probe_tau.run(side, request_for(side), Report("none"), tolerance=None, heads_of=None)
    assert [found.index for found in beyond] == [1]
    assert "WRONG: layers 1 (0.01" in capsys.readouterr().out
    closing(side)


@pytest.mark.parametrize("tool", TOOLS)
def test_help(tool, capsys):
    with pytest.raises(SystemExit) as ended:
        tool.main(["--help"])
    assert ended.value.code == 0
    assert "kestrel-grpc serve" in capsys.readouterr().out


@pytest.mark.parametrize("tool", [compare_reference, inspect_kv])
@pytest.mark.slow
def test_two_types_of_the_bundled_model(tool, tmp_path: Path):
    path = tmp_path / "report.json"
    # How far bfloat16 drifts on a CPU depends on the instructions that it has.
    flags = ["--device", "cpu", "--no-image", "--quick", "--tolerance", "0.4", "--json", str(path)]
    with pytest.raises(SystemExit) as ended:
        tool.main([*flags, "--right=--no-compile --dtype bfloat16"])
    assert ended.value.code == 0
    assert json.loads(path.read_text())["tables"]
