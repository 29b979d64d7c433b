"""One golden model under test: its cases, expected arrays and tolerances, and a runtime holding its images."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.open_image import open_image
from kestrel_engine.preprocess.tokenizer import Tokenizer
from kestrel_engine.runtime.torch_runtime import TorchRuntime
from kestrel_engine.skills.base import SkillContext
from kestrel_engine.types.model_config import ModelConfig
from kestrel_engine.types.requests import Coord, ImageBlock, PreparedImage, Prompt, Size, Token
from kestrel_engine.types.step import EncodeSlice, StepPlan
from tests.checkpoint_loading import load_checkpoint
from tests.golden.checkpoint import DATA

COMPLETE = Path(__file__).parents[3] / "shared" / "goldens"
"""The complete golden set, where it exists."""


@dataclass(frozen=True)
class Golden:
    """``name``: "md2" or "md3". ``arrays``: what tests/data/goldens keeps, or all of it for the complete set."""

    name: str
    config: ModelConfig
    weights: dict[str, Tensor]
    runtime: TorchRuntime
    context: SkillContext
    expected: dict[str, Any]
    arrays: dict[str, Tensor]
    tolerances: dict[str, Any]
    checked: set[str] = field(default_factory=set)
    """Keys of ``arrays`` that were compared."""

    def case(self, case_id: str) -> dict[str, Any]:
        return next(case for case in self.expected["cases"] if case["id"] == case_id)

    def prompt(self, case: dict[str, Any]) -> Prompt:
        """The whole prompt of a case; its spatial references are values, not ids."""
        ids = self.config.ids
        coords = iter(case.get("ref_coord_values", ()))
        sizes = iter(case.get("ref_size_values", ()))
        tokens: list[Token] = []
        if "image" in case:
            tokens += [ids.bos_id, ImageBlock(case["image"], self.config.image_positions)]
        for token in case["prompt_ids"]:
            if case.get("spatial_refs") and token == ids.coord_id:
                tokens.append(Coord(next(coords)))
            elif case.get("spatial_refs") and token == ids.size_id:
                tokens.append(Size(*next(sizes)))
            else:
                tokens.append(token)
        assert next(coords, None) is None and next(sizes, None) is None
        return tuple(tokens)

    def check(self, what: str, actual: Tensor, key: str) -> None:
        """Compares with the stored array ``key`` within the manifest's float32 tolerance for ``what``."""
        tolerance = self.tolerances["fp32"][what]
        self.checked.add(key)
        expected = self.arrays[key]
        torch.testing.assert_close(
            actual, expected, **tolerance, msg=lambda message: f"{self.name} {key}: {message}"
        )

    def new_runtime(
        self,
        *,
        page_size: int = 10,
        dtype: torch.dtype = torch.float32,
        num_pages: int | None = None,
        kv_scales: list[tuple[float, float]] | None = None,
    ) -> TorchRuntime:
        """A runtime of its own pool over the same weights (float32: by reference), with room for six sequences."""
        weights = self.weights
        if dtype != torch.float32:
            weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        return runtime_of(
            self.config,
            weights,
            num_pages=num_pages or 6 * 850 // page_size,
            page_size=page_size,
            dtype=dtype,
            kv_scales=kv_scales,
        )

    def encode(self, runtime: TorchRuntime, pictures: dict[str, PreparedImage]) -> None:
        """Makes ``runtime`` hold the embeddings of all images under their golden names."""
        named = tuple(
            EncodeSlice(replace(picture, key=name), 0, picture.num_crops)
            for name, picture in pictures.items()
        )
        runtime.collect(runtime.launch(StepPlan(0, encode=named)))


def runtime_of(
    config: ModelConfig,
    weights: dict[str, Tensor],
    *,
    num_pages: int = 6 * 85,
    page_size: int = 10,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> TorchRuntime:
    sizes = {"max_batch_size": 8, "max_seq_length": config.text.max_context, "page_size": page_size}
    model = Moondream(config, weights)
    return TorchRuntime(
        model, config, device="cpu", dtype=dtype, num_pages=num_pages, **sizes, **options
    )


def load_pictures() -> dict[str, PreparedImage]:
    """Every golden image, prepared from its encoded file. All golden models share one vision shape."""
    config = load_config_only("md2")
    return {
        path.stem: cut_crops(open_image(path, ImageLimits()), config.vision)
        for path in sorted((DATA / "images").iterdir())
    }


def load_config_only(name: str) -> ModelConfig:
    from kestrel_engine.types.model_config import parse_model_config

    return parse_model_config(json.loads((DATA / name / "config.json").read_text()))


def load_golden(name: str, folder: Path, data: Path, pictures: dict[str, PreparedImage]) -> Golden:
    """``folder``: an unpacked checkpoint. ``data``: where expected.json and expected.safetensors of ``name`` lie."""
    loaded = load_checkpoint(folder)
    golden = Golden(
        name=name,
        config=loaded.config,
        weights=loaded.tensors,
        runtime=runtime_of(loaded.config, loaded.tensors),
        context=SkillContext(
            model=loaded.config, codec=Tokenizer.from_file(folder / "tokenizer.json")
        ),
        expected=json.loads((data / name / "expected.json").read_text()),
        arrays=load_file(data / name / "expected.safetensors"),
        tolerances=json.loads((DATA / "manifest.json").read_text())["models"][name]["tolerances"],
    )
    golden.encode(golden.runtime, pictures)
    return golden


def case_ids() -> list[tuple[str, str]]:
    """(model, case) of every golden case."""
    return [
        (name, case["id"])
        for name in ("md2", "md3")
        for case in json.loads((DATA / name / "expected.json").read_text())["cases"]
    ]
