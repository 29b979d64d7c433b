"""The Python examples that the vendor's users know run with nothing changed but the package's name.

Without a CUDA device, "cuda" is "cpu". The dog to outline is a red circle, because kestrel-tiny knows no dogs. The hub
and the tuning API are stand-ins.
"""

import ast
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from kestrel_engine import InferenceEngine, RuntimeConfig
from kestrel_engine.checkpoint import open as opening
from kestrel_engine.checkpoint.catalog import KNOWN, STARMIE
from kestrel_engine.checkpoint.hub import Hub
from kestrel_engine.config import adapters
from kestrel_engine.moondream import config as moondream_config
from tests.code_blocks import code_blocks
from tests.engine.adapters.random_adapters import random_tensors
from tests.hub_stand import Stand, stand
from tests.tiny import TINY
from tests.tuning_stand import KEY, TuningStand, tuning

__all__ = ["stand", "tuning"]

HERE = Path(__file__).parent
EARLY = [block.text for block in code_blocks(HERE / "early_readme.md")]
LATER = [block.text for block in code_blocks(HERE / "readme_0_2_1.md")]


async def run(examples: Iterable[str], names: dict[str, Any]) -> None:
    """One after the other, with ``await`` at their top."""
    for example in examples:
        example = example.replace('"dog"', '"red circle"')
        if not torch.cuda.is_available():
            example = example.replace('"cuda"', '"cpu"')
        code = compile(example, "example", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.isawaitable(running := eval(code, names)):
            await running


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder and the home folder, with the images that the examples name."""
    shutil.copy(TINY / "sample.jpg", tmp_path / "demo.jpg")
    shutil.copy(TINY / "sample.jpg", tmp_path / "photo.jpg")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def downloads(stand: Stand, home: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    """The hub has no model yet, but the tokenizer."""
    hub = partial(Hub, endpoint=stand.url, cache_dir=home / "hub")
    monkeypatch.setattr(opening, "Hub", hub)
    return stand


def publish(stand: Stand, model: str, folder: Path) -> None:
    """Stores a checkpoint under the released repository of ``model``."""
    released = KNOWN[model].hub
    assert released is not None
    for name in ("config.json", "model.safetensors"):
        stand.add(name, (folder / name).read_bytes(), repo=released.repo)
    tensors = load_file(folder / "model.safetensors")
    index = json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")})
    stand.add("model.safetensors.index.json", index.encode(), repo=released.repo)
    tokenizer = (folder / "tokenizer.json").read_bytes()
    stand.add("tokenizer.json", tokenizer, repo=STARMIE.repo)
    stand.revisions |= {released.revision: stand.revisions["main"]}
    stand.revisions |= {STARMIE.revision: stand.revisions["main"]}


@pytest.mark.slow
async def test_the_examples_of_the_early_readme(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = home / "code/moondream"
    folder.mkdir(parents=True)
    torch.save(load_file(TINY / "model.safetensors"), folder / "model.pt")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(TINY / name, folder)
    load = moondream_config.load_config
    assert load(None).text.moe.num_experts == 64
    # The examples' default is the released shape, to which no small model has a LoRA.
    monkeypatch.setattr(moondream_config, "load_config", lambda path: load(TINY / "config.json"))
    names: dict[str, Any] = {}
    asking, streaming, adapting = EARLY
    await run((asking, streaming), names)
    await names["engine"].shutdown()
    printed = capsys.readouterr().out
    assert "answer += " in printed and "final " in printed
    assert len(names["point_result"].output["points"]) <= 2
    await run((adapting,), names)
    async with names["engine"] as engine:
        result = await engine.caption(names["image"], settings={"temperature": 0})
    assert result.output["caption"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # The examples leave their files open.
def test_the_quick_start(
    downloads: Stand, golden_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    publish(downloads, "moondream2", golden_folder("md2"))
    exec(LATER[0], {"__name__": "__main__"})
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_the_other_examples(
    downloads: Stand,
    tuning: TuningStand,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    publish(downloads, "moondream3-preview", TINY)
    monkeypatch.setattr(adapters, "TUNING_API", tuning.url)
    (fine_tune,) = re.findall(r'"adapter": "(.+)"', "".join(LATER))
    model = moondream_config.load_config(TINY / "config.json")
    tuning.files[fine_tune] = save(random_tensors(model, 1, only=".mlp."))
    config = RuntimeConfig(model="moondream3-preview")
    names = {"RuntimeConfig": RuntimeConfig, "image": (home / "photo.jpg").read_bytes()}
    async with await InferenceEngine.create(config, api_key=KEY) as engine:
        await run(LATER[1:], names | {"engine": engine})
        assert engine.adapter_counts.loaded == (fine_tune,)
    printed = capsys.readouterr().out
    assert "Generated" in printed and "'x_min': " in printed
    assert [asked["X-Moondream-Auth"] for asked in tuning.asked("/v1")] == [KEY]
