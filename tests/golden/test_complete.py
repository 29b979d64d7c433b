"""The complete golden set, where it exists: every stored array of both models, crops and tokenizer included."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import pyvips
from safetensors.torch import load_file

from kestrel_engine.types.requests import PreparedImage
from tests.golden.checks import BLOCK_CASES, check_blocks, check_case, check_vision
from tests.golden.goldens import COMPLETE, load_golden

pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(not COMPLETE.is_dir(), reason="the complete golden set is not here"),
]
OTHER_READINGS = ("_variant.", "_if_post_ln_first", "_pil")
"""Stored by the reference to recognise readings of the facts that we do not follow."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["md2", "md3"])
def test_every_stored_array(
    name: str, golden_folder: Callable[[str], Path], pictures: dict[str, PreparedImage]
) -> None:
    golden = load_golden(name, golden_folder(name), COMPLETE, pictures)
    for picture_name, picture in pictures.items():
        check_vision(golden, picture_name, picture)
    for case in golden.expected["cases"]:
        check_case(golden, case)
    for case_id in BLOCK_CASES:
        check_blocks(golden, golden.case(case_id))
    followed = {key for key in golden.arrays if not any(part in key for part in OTHER_READINGS)}
    assert golden.checked == followed


@pytest.mark.parametrize("name", ["md2", "md3"])
def test_what_the_repository_keeps_is_unchanged(
    name: str, golden_folder: Callable[[str], Path]
) -> None:
    stored = load_file(COMPLETE / name / "model.safetensors")
    kept = load_file(golden_folder(name) / "model.safetensors")
    assert stored.keys() == kept.keys()
    assert all(tensor.equal(kept[key]) for key, tensor in stored.items())
    for file in ("config.json", "tokenizer.json"):
        assert (COMPLETE / name / file).read_bytes() == (golden_folder(name) / file).read_bytes()


def test_crops_equal_the_stored_images(pictures: dict[str, PreparedImage]) -> None:
    for path in sorted((COMPLETE / "preprocess").glob("*.crops.png")):
        stored = pyvips.Image.new_from_file(str(path)).numpy()
        crops = pictures[path.name.removesuffix(".crops.png")].crops
        stored = stored.reshape(-1, *crops.shape[1:])
        assert np.array_equal(crops[: len(stored)], stored), path.name
