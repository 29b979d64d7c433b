"""What an image takes to decode, by format, is within what costs.py reserves for it."""

import os

import pytest

from tests.engine.preprocess.decoding.measured_costs import FORMS, contents, measurer

SIDE = int(os.environ.get("KESTREL_COST_SIDE", "300"))
"""Of the images. With 3000, pytest -s prints the figures of costs.py; small ones have mostly what every image costs."""


@pytest.mark.slow
def test_no_image_takes_more_memory_than_is_reserved_for_it(tmp_path):
    path = tmp_path / "image"
    with measurer() as measured:
        for content, image in contents(SIDE).items():
            for form, save in FORMS.items():
                path.write_bytes(save(image))
                found = measured(path)
                assert found is not None, (form, content)
                bytes_each = max(found["bytes"], found["private bytes"]) / found["pixels"]
                ns_each = 1e9 * found["seconds"] / found["pixels"]
                print(f"{form}, {content}: {bytes_each:.1f} bytes, {ns_each:.0f} ns a pixel")
                assert found["bytes"] <= found["reserved bytes"], (form, content, found)
