"""``verify`` on a stand-in release: kestrel-tiny's weights under a released name. Each corruption is named."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from kestrel_engine import RuntimeConfig, maintenance
from kestrel_engine.checkpoint import catalog
from kestrel_engine.checkpoint.catalog import HubCheckpoint, HubFile
from kestrel_engine.checkpoint.checksums import write_sums
from kestrel_engine.maintenance.acceptance import distance_of
from kestrel_engine.maintenance.releases import (
    RELEASES,
    TOLERANCE,
    KnownAnswer,
    Picture,
    Release,
    TokenizerFacts,
    release_of,
)
from kestrel_engine.skills.base import SkillContext, SkillDefaults
from kestrel_engine.skills.registry import SkillRegistry
from tests.engine.fakes import ByteCodec, fake_model
from tests.tiny import TINY

NAME = "moondream3-preview"
SAMPLE = TINY / "sample.jpg"
COUNT = "How many red circles are there?"
SQUARE = {
    "x_min": 0.5709505439443281,
    "y_min": 0.07647939330932198,
    "x_max": 0.7415494560556719,
    "y_max": 0.30633310669067804,
}


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The release as its owner would publish it, and what is known of it."""
    folder = tmp_path / "release"
    folder.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        shutil.copy(TINY / name, folder)
    write_sums(folder, {"config.json": sha256(folder / "config.json")})
    picture = Picture("the sample", sha256=sha256(SAMPLE))
    circles = KnownAnswer("query", {"question": COUNT}, picture, output={"answer": "3"})
    answers = (
        circles,
        KnownAnswer("detect", {"object": "square"}, picture, output={"objects": [SQUARE]}),
        replace(circles, output={}, token_ids=(39,)),
        KnownAnswer("detect", {"object": "circle"}, picture, at_least=3),
        KnownAnswer("gaze", {"eye": (0.25, 0.5)}, picture, output={"gaze": None}),
        replace(circles, arguments={"question": COUNT, "reasoning": True}, grounds=3),
    )
    monkeypatch.setitem(RELEASES, NAME, Release(answers, facts(folder), stored=(176, "BF16")))
    known = catalog.KNOWN[NAME]
    weights = HubCheckpoint("o/r", "c", "model.safetensors", sha256(folder / "model.safetensors"))
    tokenizer = HubFile("o/t", "c", "tokenizer.json", sha256=sha256(folder / "tokenizer.json"))
    monkeypatch.setitem(catalog.KNOWN, NAME, replace(known, hub=weights, tokenizer=tokenizer))
    return folder


def facts(folder: Path) -> TokenizerFacts:
    ids = {" square": [406], COUNT: [394, 337, 377, 463, 384, 380, 51]}
    return TokenizerFacts(761, {**ids, "<|endoftext|>": [0]}, {"3": 1}, "o/t")


async def checked(
    folder: Path, *, image: Path = SAMPLE, answers: bool = True
) -> dict[str, list[str]]:
    """By check, the status and message of each finding. Answers are checked only if nothing before them failed."""
    config = RuntimeConfig(model=NAME, model_path=folder, device="cpu", cpu_threads=1)
    found = list(maintenance.verify(config, progress=lambda *report: None))
    if answers and all(finding.status != "fail" for finding in found):
        found += [each async for each in maintenance.accept(config, [str(image)])]
    checks: dict[str, list[str]] = {}
    for finding in found:
        checks.setdefault(finding.check, []).append(f"{finding.status}: {finding.message}")
    return checks


async def test_the_release_is_accepted(folder: Path) -> None:
    found = await checked(folder)
    assert {line.partition(":")[0] for lines in found.values() for line in lines} == {"ok"}, found
    assert found["checksums"] == [
        "ok: 3 files match the checksums recorded by the catalogue and SHA256SUMS"
    ]
    assert found["tokenizer"] == ["ok: 761 ids; 4 known texts have theirs"]
    assert len(found["answer"]) == 6 and len(found["speed"]) == len(found["memory"]) == 1


async def test_a_picture_that_nobody_gave_is_described(folder: Path, tmp_path: Path) -> None:
    grey = tmp_path / "grey.png"
    Image.new("RGB", (300, 200), (128, 128, 128)).save(grey)
    found = await checked(folder, image=grey)
    *missing, unknown = found["answer"]
    assert len(missing) == 6 and all("not checked: it is about the sample" in m for m in missing)
    assert unknown == f"warn: {grey}: is not a picture of a known answer"


Tensors = dict[str, torch.Tensor]


def flipped(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1000] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def other_text(old: str, new: str, name: str = "tokenizer.json") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def other_tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")

    return apply


def layer(tensors: Tensors, number: int) -> Tensors:
    start = f"model.text.blocks.{number}."
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


def exchange_layers(tensors: Tensors) -> None:
    second, third = layer(tensors, 2), layer(tensors, 3)
    tensors.update({f"model.text.blocks.3.{name}": each for name, each in second.items()})
    tensors.update({f"model.text.blocks.2.{name}": each for name, each in third.items()})


def widen(tensors: Tensors) -> None:
    tensors.update({name: each.float() for name, each in tensors.items()})


PROJ = "model.text.blocks.1.attn.proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a flipped bit": (flipped, "checksums", "fail: model.safetensors: differs from the checksum"),
    "another tokenizer": (other_text(" ", "  "), "checksums", "fail: tokenizer.json: differs"),
    "half a file": (cut, "files", "fail: "),
}
UNKNOWN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "exchanged ids": (
        other_text('square": 406', 'square": 405'), "tokenizer", "' square' has the ids"),
    "a missing tensor": (other_tensors(lambda t: t.pop(PROJ)), "tensors", "1 missing: model.text.blocks.1.attn.proj"),
    "a wrong shape": (
        other_tensors(lambda t: t.update({PROJ: t[PROJ][:, :128]})), "tensors", "text.blocks.1.attn.proj.weight"),
    "a tensor too many": (
        other_tensors(lambda t: t.update({"extra": torch.zeros(2)})), "tensors", "fail: "),
    "another dtype": (other_tensors(widen), "tensors", "but the release has 176 tensors of BF16"),
    "a NaN": (
        other_tensors(lambda t: t[PROJ].view(-1)[:1].fill_(float("nan"))), "values", "NaN or infinite: text.blocks.1"),
    "an empty matrix": (other_tensors(lambda t: t[PROJ].zero_()), "values", "the same value everywhere: text.blocks.1"),
    "exchanged layers": (other_tensors(exchange_layers), "answer", "fail: "),
    "a transposed matrix": (
        other_tensors(lambda t: t.update({PROJ: t[PROJ].T})), "answer", "fail: "),
    "a wrong sign": (
        other_tensors(lambda t: t.update({PROJ: -t[PROJ]})), "answer", "fail: "),
    "another id of coordinates": (
        other_text('"coord_id": 5', '"coord_id": 8', "config.json"), "answer", "fail: "),
}  # fmt: skip
"""Corruptions, the check that names each, and its words. Those of UNKNOWN have no checksum to differ from."""


@pytest.mark.slow_with("a transposed matrix", "a wrong sign", "another id of coordinates")
@pytest.mark.parametrize("fault", [*BROKEN, *UNKNOWN])
async def test_a_corruption_is_named(folder: Path, monkeypatch, fault: str) -> None:
    change, check, words = (BROKEN | UNKNOWN)[fault]
    if fault in UNKNOWN:
        known = replace(catalog.KNOWN[NAME], hub=None, tokenizer=folder / "tokenizer.json")
        monkeypatch.setitem(catalog.KNOWN, NAME, known)
        (folder / "SHA256SUMS").unlink()
    change(folder)
    found = await checked(folder, answers=check == "answer")
    assert any(words in line for line in found[check]), found
    if "fail" in words:
        assert any(line.startswith("fail") for line in found[check])


def test_answers_may_differ_as_far_as_rounding_goes() -> None:
    _, _, point, box, gaze, *_ = RELEASES[NAME].answers
    assert distance_of(point.output, {"points": [{"x": 289 / 1024, "y": 326 / 1024}]}) == 0
    near = {"points": [{"x": 291 / 1024, "y": 325 / 1024}]}
    assert distance_of(point.output, near) == 2 / 1024 < TOLERANCE
    assert distance_of(point.output, {"points": []}) == float("inf")
    assert distance_of(point.output, box.output) == float("inf")
    assert distance_of(gaze.output, {"gaze": {"x": 583 / 1024, "y": 358 / 1024}}) == 1 / 1024
    assert distance_of(gaze.output, {"gaze": None}) == float("inf")
    # The golden box is that of centre bins 269 and 284 and size bins 780 and 838 (moondream.md section 7).
    (told,) = box.output["objects"]
    width, height = (2 ** (10 * b / 1023 - 10) for b in (780, 838))
    assert told["x_max"] == pytest.approx(269 / 1024 + width / 2, abs=1e-6)
    assert told["y_min"] == pytest.approx(284 / 1024 - height / 2, abs=1e-6)


@pytest.mark.parametrize("name", RELEASES)
def test_the_known_requests_are_valid_and_their_ids_are_those_of_a_result(name: str) -> None:
    model = fake_model("moondream2" if name == "moondream2" else "moondream3")
    context = SkillContext(model=model, codec=ByteCodec(), defaults=SkillDefaults())
    for known in RELEASES[name].answers:
        SkillRegistry.default().get(known.skill).build(known.arguments, {}, context)
        # Results leave out the id between a reasoning and its answer.
        assert not {model.ids.answer_id, model.ids.eos_id} & set(known.token_ids)


def test_a_release_is_known_by_its_hub_id_too() -> None:
    assert release_of("vikhyatk/moondream2@main") == ("moondream2", RELEASES["moondream2"])
    name, release = release_of("moondream/moondream3.1-9B-A2B")
    assert name == "moondream3.1-9b-a2b" and release and release.tokenizer is not None


@pytest.mark.slow
async def test_without_a_known_answer_speed_and_memory_are_still_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RELEASES, NAME, replace(RELEASES[NAME], answers=()))
    found = await checked(folder)
    assert found["answers"] == [f"warn: not checked: no answer is known for {NAME}"]
    assert len(found["speed"]) == len(found["memory"]) == 1


async def test_weights_of_unknown_origin_have_no_known_answer(folder: Path) -> None:
    (found,) = [each async for each in maintenance.accept(RuntimeConfig(model_path=folder))]
    assert found.status == "warn" and found.remedy
    assert f"known for {folder}, only for kestrel-small, moondream2" in found.message
