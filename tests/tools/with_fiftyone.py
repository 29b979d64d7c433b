"""Registers the zoo source with FiftyOne, from an archive behind HTTP, and prints what its models say of an image.

Runs where FiftyOne is installed: ``with_fiftyone.py SERVER IMAGE FOLDER``. FiftyOne's datasets need a MongoDB server,
so the samples here are in no dataset.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fiftyone as fo
import fiftyone.zoo as foz
import numpy as np
from PIL import Image

server, image, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
TOOLS = Path(__file__).parents[2] / "clients/tools"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


shutil.make_archive(str(folder / "served/tools"), "zip", TOOLS.parent, TOOLS.name)
http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder / "served"))
threading.Thread(target=http.serve_forever, daemon=True).start()
source = f"http://127.0.0.1:{http.server_port}/tools.zip"
foz.register_zoo_model_source(source)
assert source in foz.list_zoo_model_sources()
listed = foz.list_zoo_models(source=source)

sample = fo.Sample(filepath=image)
pixels = np.asarray(Image.open(image).convert("RGB"))
crescents = {"server": server, "objects": ["green crescent", "red cross"]}
asked = {
    "boxes": ("kestrel-detect", crescents),
    "points": ("kestrel-point", crescents),
    "masks": ("kestrel-segment", crescents),
    "outlines": ("kestrel-segment", {**crescents, "outlines": "polylines"}),
    "caption": ("kestrel-caption", {"server": server, "length": "short"}),
    "answer": (
        "kestrel-query",
        {"server": server, "question": "How many green crescents are there?"},
    ),
}
for name, (model, settings) in asked.items():
    sample.add_labels(foz.load_zoo_model(model, **settings).predict(pixels, sample=sample), name)

detect = foz.load_zoo_model("kestrel-detect", **crescents)
assert detect.media_type == "image" and not detect.ragged_batches
fields = {name: sample.get_field(name) for name in asked}
mask = fields["masks"].detections[0].mask

# A field of the sample asks; a frame of a video has no file of its own; classes and thresholds are the caller's.
sample["wanted"] = ["green crescent"]
detect.needs_fields = {"prompt_field": "wanted"}
prompted = detect.predict(pixels, sample=sample)
detect.needs_fields = {}
video = fo.Sample(filepath="video.mp4")
several = detect.predict_all([pixels, pixels], samples=[video, sample])
detect.config.filter_classes = {"red cross"}
none = detect.predict(pixels)
detect.config.filter_classes = None
confidences = sorted(each.confidence for each in fields["boxes"].detections)
detect.config.confidence_thresh = confidences[1]
sure = detect.predict(pixels)

refused = []
for bad, part in (
    ({"objects": []}, "names of objects"),
    ({"outlines": "lines"}, "polylines"),
    ({"concurrency": 0}, "concurrency"),
):
    try:
        foz.load_zoo_model("kestrel-segment", **{**crescents, **bad}).predict(pixels)
    except ValueError as error:
        assert part in str(error), error
        refused.append(part)

print(
    json.dumps(
        {
            "models": listed,
            "boxes": [[d.label, d.bounding_box, d.confidence] for d in fields["boxes"].detections],
            "points": [[k.label, k.points, k.confidence] for k in fields["points"].keypoints],
            "mask": [fields["masks"].detections[0].bounding_box, int(mask.sum()), mask.shape],
            "masks": len(fields["masks"].detections),
            "outlines": [
                [p.label, len(p.points), p.closed, p.filled] for p in fields["outlines"].polylines
            ],
            "outline": fields["outlines"].polylines[0].points[0],
            "caption": fields["caption"].label,
            "answer": fields["answer"].label,
            "prompted": [d.bounding_box for d in prompted.detections],
            "several": [[d.bounding_box for d in each.detections] for each in several],
            "none": len(none.detections),
            "sure": len(sure.detections),
            "refused": len(refused),
        }
    )
)
