"""Labelled images, and the questions that are asked about them: which object, and where it is."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from ...coco_labels import CocoLabels
from ...errors import ConfigError
from ...types.requests import Edges


@dataclass(frozen=True, slots=True)
class Question:
    """An object to find in an image, and the boxes of all such objects; none if it is absent."""

    name: str
    boxes: tuple[Edges, ...]


@dataclass(frozen=True, slots=True)
class LabelledImage:
    path: Path
    questions: tuple[Question, ...]


def read_labelled_images(
    annotations: Path, folder: Path, *, absent: int = 1, seed: int = 0
) -> list[LabelledImage]:
    """Returns the images of a file in COCO's form, with a question for each of their categories. ``absent``: questions
    about absent objects for each image, drawn with ``seed`` from the image's ``neg_category_ids``, as in LVIS, else
    from all categories that the image has no box of. Boxes with ``iscrowd`` make their category unusable for their
    image. Raises ConfigError, which names the file or the entry."""
    labels = CocoLabels(annotations, "annotations")
    names, rng = labels.categories, random.Random(seed)
    found = []
    for image in labels.images:
        path = folder / image.name
        if not path.is_file():
            raise ConfigError("images", str(folder), f"has no file {image.name!r}")
        questions = [
            Question(names[category], tuple(own))
            for category, own in image.boxes.items()
            if category not in image.crowded
        ]
        others = names if image.absent is None else image.absent
        candidates = [category for category in others if category not in image.boxes]
        chosen = rng.sample(candidates, min(absent, len(candidates)))
        questions += [Question(names[category], ()) for category in chosen]
        found.append(LabelledImage(path, tuple(questions)))
    return found
