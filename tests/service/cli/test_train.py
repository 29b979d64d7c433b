"""The command ``train`` on the bundled model: an adapter is taught, measured, published and served."""

import asyncio
import json
from pathlib import Path

import pytest

from kestrel_engine import InferenceEngine, RuntimeConfig
from tests.engine.teaching.labelled_images import data
from tests.service.command_line import here
from tests.tiny import TINY

__all__ = ["data"]


async def answer(config: RuntimeConfig, image: Path) -> object:
    async with await InferenceEngine.create(config) as engine:
        settings = {"temperature": 0.0, "adapter": "ada"}
        result = await engine.query(image, "Who made it?", settings=settings)
        return result.output["answer"]


@pytest.mark.slow
def test_an_adapter_is_taught_published_and_served(data: Path) -> None:
    adapters = data.parent / "adapters"
    given = ["--adapter", "ada", "--data", data, "--adapters-dir", adapters, "--device", "cpu"]
    given += ["--epochs", 12, "--rows", 3, "--lr", 0.003, "--patience", 12, "--replay", 0.1]
    done = here("train", *given, "--json", "--layers", "all")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    answers = report["scores"]["answers"]
    assert (
        answers["before"]["right"] == 0
        and answers["after"]["right"] == answers["after"]["examples"]
    )
    assert report["images"] == 4 and report["held_out_images"] == 1 and report["replayed_examples"]
    assert report["training"]["best_loss"] < 0.5 * report["training"]["first_loss"]
    assert "training: " in done.stderr
    assert sorted(file.name for file in adapters.iterdir()) == [
        "ada.report.json",
        "ada.safetensors",
    ]
    assert json.loads((adapters / "ada.report.json").read_text()) == report
    config = RuntimeConfig(model_path=TINY, device="cpu", cpu_threads=1, adapters_dir=adapters)
    assert asyncio.run(answer(config, data / "2.png")) == "Ada"
    again = here("train", *given)
    assert again.returncode == 2 and "set --overwrite" in again.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--adapter", "../ada"], "--adapter=../ada: '../ada' is not the name of an adapter"),
        (["--rank", "0"], "--rank=0: must be a whole number from 1 to 128"),
        (["--lr", "2"], "--lr=2.0: must be a finite number above 0 and of at most 1"),
        (["--minutes", "0"], "--minutes=0.0: must be a finite number above 0"),
        (["--validation", "0.9"], "--validation=0.9: must be a finite number from 0 to 0.5"),
        (["--vary", "0.9"], "--vary=0.9: must be a finite number from 0 to 0.5"),
        (["--mirror"], "--mirror=True: needs views; set --vary above 0"),
        (["--adapters-dir", "none"], "--adapters-dir=none: is not a folder"),
        (["--data", "none"], "--data=none: is not a folder"),
    ],
)
def test_a_wrong_flag_is_named(data: Path, flags: list[str], message: str) -> None:
    given = ["--adapter", "ada", "--data", data, "--adapters-dir", data.parent / "adapters"]
    done = here("train", *given, *flags)
    assert done.returncode == 2 and message in done.stderr, done.stderr
