"""Loads the auto-annotation function as cvat-cli does, runs it as cvat_sdk's driver does, and prints what the driver
would send to CVAT. A CVAT server is not needed for that: ``with_cvat.py SERVER IMAGE``."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import PIL.Image
from cvat_cli._internal.common import FunctionLoader
from cvat_cli._internal.parsers import parse_function_parameter
from cvat_sdk import auto_annotation as cvataa
from cvat_sdk import models
from cvat_sdk.auto_annotation import driver
from cvat_sdk.masks import decode_mask

server, image = sys.argv[1], PIL.Image.open(sys.argv[2])
FUNCTION = Path(__file__).parents[2] / "clients/tools/kestrel_cvat.py"


def loaded(**parameters: str) -> cvataa.DetectionFunction:
    given = {"server": f"str:{server}", **{name: f"str:{v}" for name, v in parameters.items()}}
    parsed = dict(parse_function_parameter(f"{name}={value}") for name, value in given.items())
    return FunctionLoader(None, FUNCTION, parsed).load()


def annotated(function: cvataa.DetectionFunction, **options: object) -> list[list[object]]:
    """Label (as a task has it), type, points, group of each shape, for a task whose labels have other ids."""
    assert isinstance(function.spec, cvataa.DetectionFunctionSpec)
    ids = {label.name: 100 + number for number, label in enumerate(function.spec.labels)}
    labels = [
        models.Label(name=name, id=number, type="any", attributes=[], sublabels=[])
        for name, number in ids.items()
    ]
    mapper = driver._AnnotationMapper(
        logging.getLogger(),
        function.spec.labels,
        labels,
        allow_unmatched_labels=False,
        conv_mask_to_poly=bool(options.get("conv_mask_to_poly")),
    )
    context = driver._DetectionFunctionContextImpl(frame_name="a.jpg", **options)
    tags, shapes = mapper.validate_and_remap(function.detect(context, image), 7)
    assert not tags and all(shape.frame == 7 and shape.source == "auto" for shape in shapes)
    names = {number: name for name, number in ids.items()}
    return [[names[shape.label_id], shape.type.value, shape.points] for shape in shapes]


labels = "Moon=green crescent, red cross,unicorn"
said: dict[str, object] = {
    shape: annotated(loaded(labels=labels, shape=shape))
    for shape in ("rectangle", "points", "polygon")
}
mask = loaded(labels="green crescent", shape="mask")
((_, kind, points),) = annotated(mask)
drawn = decode_mask(points, image_width=image.width, image_height=image.height)
said["mask"] = [kind, points[-4:], int(drawn.sum())]
said["converted"] = [kind for _, kind, _ in annotated(mask, conv_mask_to_poly=True)]
said["sure"] = annotated(loaded(labels=labels), conf_threshold=1.0)
many = ",".join(f"{number}=green crescent" for number in range(33))
said["many"] = len({label for label, _, _ in annotated(loaded(labels=many))})
refused = 0
for bad in ({"labels": ""}, {"labels": "=car"}, {"labels": "car", "shape": "ellipse"}):
    try:
        loaded(**bad)
    except cvataa.BadFunctionError:
        refused += 1
said["refused"] = refused
print(json.dumps(said))
