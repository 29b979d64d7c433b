"""Features in place of an image on a GPU: the runtime takes them where its tower's output would be."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.test_features import check_all_skills


@pytest.mark.parametrize("name", ["md2", "md3"])
async def test_every_skill_answers_as_about_the_image(
    name: str, golden_folder: Callable[[str], Path], golden_images: Path
) -> None:
    await check_all_skills(golden_images, golden_folder(name), device="cuda")
