"""RefCOCO: the box of the object that an expression means, right if its IoU with the true box is at least 0.5.

Rows: ``answer`` (the expressions) and ``bbox`` (x, y, width, height in pixels); or ``samples``, a list of objects with
``sentences`` and ``bbox``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ...parser import CommandError
from ..benchmark import Asking, Benchmark, Case, Hub, Outcome, Score
from ..place_metrics import found_boxes, iou, size_of, to_pixels
from ..reading import image_file, json_file, objects_of
from ..records import Edges, Record

_PARTS = ("val", "testA", "testB", "test")


def _cases(record: Record, asking: Asking) -> list[Case]:
    parts = [record]
    if record.has("samples"):
        parts = [
            Record(record.place, record.number, sample, record.image, record.load)
            for sample in record.rows("samples")
        ]
    group = record.text("split") if record.has("split") else ""
    found = []
    for part in parts:
        box = part.box("bbox")
        for expression in part.texts("answer", "sentences"):
            found.append(_case(expression, box, group, asking))
    return found


def _case(expression: str, box: Edges, group: str, asking: Asking) -> Case:
    return Case(
        task=asking.detect(expression),
        truth=box,
        question=expression,
        expected="its box",
        group=group,
        boxes=[box],
        frame=None,
    )


def _score(case: Case, outcome: Outcome | None) -> Score:
    boxes = [] if outcome is None else found_boxes(outcome)
    best = iou(to_pixels(boxes[0][0], size_of(outcome)), case.truth) if boxes and outcome else 0.0
    right = float(best >= 0.5)
    said = f"{len(boxes)} found, IoU {best:.2f}"
    return Score(best, {"accuracy at IoU 0.5": (right, 1.0), "mean IoU": (best, 1.0)}, said)


def _layout(folder: Path) -> Iterator[dict[str, Any]] | None:
    """``refs(unc).p`` (or another) and ``instances.json``, with COCO's images in ``train2014``."""
    refs = next(iter(sorted(folder.glob("refs(*).p"))), None)
    if refs is None or not (folder / "instances.json").is_file():
        return None
    return _rows(folder, refs)


def _rows(folder: Path, file: Path) -> Iterator[dict[str, Any]]:
    instances = folder / "instances.json"
    whole = json_file(instances)
    boxes = {each.get("id"): each for each in objects_of(whole, instances, "annotations")}
    images = {each.get("id"): each for each in objects_of(whole, instances, "images")}
    for ref in objects_of(_plain_pickle(file), file):
        if ref.get("split") not in _PARTS:
            continue  # what models are trained on
        image = images.get(ref.get("image_id"), {}).get("file_name")
        path = image_file(folder, image, "train2014", "images")
        yield {
            "image": str(Path(path).relative_to(folder)),
            "answer": [each.get("sent") for each in objects_of(ref.get("sentences"), file)],
            "bbox": boxes.get(ref.get("ann_id"), {}).get("bbox"),
            "split": ref["split"],
        }


class _PlainUnpickler(pickle.Unpickler):
    """Reads lists, dictionaries, texts and numbers. A pickle may name any code to run; this reader refuses it."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no plain value")


def _plain_pickle(file: Path) -> Any:
    try:
        return _PlainUnpickler(io.BytesIO(file.read_bytes()), encoding="utf-8").load()
    except OSError as error:
        raise CommandError(f"cannot read {str(file)!r}: {error.strerror or error}") from None
    except Exception as error:  # A broken pickle raises errors of any kind.
        raise CommandError(f"{str(file)!r} is not a list of references: {error}") from None


BENCHMARK = Benchmark(
    name="refcoco",
    title="RefCOCO",
    source="https://aclanthology.org/D14-1086",
    skills=("detect",),
    cases=_cases,
    score=_score,
    hub=Hub("moondream/refcoco-m", "validation"),
    layout=_layout,
    groups=_PARTS,
)
