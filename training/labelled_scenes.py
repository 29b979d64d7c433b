"""Write held-out scenes as image files with labels in COCO's form, to calibrate scores with.

    python -m training.labelled_scenes --scenes 400 --out out/labelled
    kestrel-grpc calibrate --annotations out/labelled/annotations.json --images out/labelled

Neither training nor the evaluation has these scenes. The plain half has the files of the evaluation; the hard half is
reduced in size, blurred, noisy and compressed more, so that the model makes errors.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np

from kestrel_grpc.scenes.evaluation_set import Example, encode
from kestrel_grpc.scenes.phrases import Phrase, draw_absent, draw_present, object_words
from kestrel_grpc.scenes.scenes import Scene, draw_scene, draw_size

PRESENT, ABSENT = 8, 2
"""Phrases for each scene, at most. Outlines are asked for single objects only, so many phrases are needed."""


def labelled_scene(index: int) -> tuple[Scene, dict[str, Phrase], bool]:
    """Scene ``index``, its phrases by their words, and whether its image is hard to see."""
    rng = random.Random(f"kestrel-tiny/calibration/{index}")
    scene = draw_scene(rng, *draw_size(rng), held_out=index % 4 == 3)
    drawn = [draw_present(rng, scene) for _ in range(PRESENT)]
    drawn += [draw_absent(rng, scene) for _ in range(ABSENT)]
    phrases = {object_words(rng, phrase): phrase for phrase in drawn if phrase is not None}
    return scene, phrases, index % 2 == 1


def picture(scene: Scene, index: int, hard: bool) -> bytes:
    """The encoded image of a scene."""
    data = encode(Example("calibration", index, scene, ()))
    if not hard:
        return data
    import pyvips

    rng = random.Random(f"kestrel-tiny/calibration/hard/{index}")
    image = pyvips.Image.new_from_buffer(data, "")
    least = min(image.width, image.height)
    factor = max(math.exp(rng.uniform(math.log(0.15), math.log(0.8))), 40 / least)
    image = image.resize(min(factor, 1.0)).gaussblur(rng.uniform(0.3, 1.8))
    array = image.numpy().astype(np.float32)
    generator = np.random.default_rng(rng.randrange(2**32))
    array += generator.normal(0, rng.uniform(4, 40), array.shape).astype(np.float32)
    noisy = pyvips.Image.new_from_array(np.clip(np.round(array), 0, 255).astype(np.uint8))
    return bytes(noisy.copy(interpretation="srgb").write_to_buffer(".jpg", Q=rng.randint(20, 60)))


def write(folder: Path, count: int) -> None:
    """Write ``count`` scenes and annotations.json to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    categories: dict[str, int] = {}
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(count):
        scene, phrases, hard = labelled_scene(index)
        name = f"{index:05}.img"
        (folder / name).write_bytes(picture(scene, index, hard))
        absent = []
        for words, phrase in phrases.items():
            category = categories.setdefault(words, len(categories) + 1)
            found = phrase.find(scene)
            if not found:
                absent.append(category)
            for number in found:
                x0, y0, x1, y1 = scene.shapes[number].box
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": index,
                        "category_id": category,
                        "bbox": [x0, y0, x1 - x0, y1 - y0],
                        "area": (x1 - x0) * (y1 - y0),
                        "iscrowd": 0,
                    }
                )
        images.append(
            {
                "id": index,
                "file_name": name,
                "width": scene.width,
                "height": scene.height,
                "neg_category_ids": absent,
            }
        )
    coco = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": words} for words, number in categories.items()],
    }
    (folder / "annotations.json").write_text(json.dumps(coco) + "\n", encoding="utf-8")


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--scenes", type=int, default=400)
    p.add_argument("--out", type=Path, default=Path("out/labelled"), help="folder to write to")
    args = p.parse_args()
    write(args.out, args.scenes)


if __name__ == "__main__":
    main()
