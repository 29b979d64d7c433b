"""Mean IoU of coarse and refined outlines on scenes of the frozen evaluation set, which training never uses.

    python -m training.refining.evaluate --scenes 200

One request for each scene gives both outlines, so they have the same coarse path.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from kestrel_engine import InferenceEngine, RuntimeConfig
from kestrel_engine.checkpoint.catalog import BUNDLED
from kestrel_engine.checkpoint.refiner_file import SPARE_NAME
from kestrel_grpc.scenes.evaluation_set import encode, example
from kestrel_grpc.scenes.scoring import segment_iou

BUNDLED_REFINER = BUNDLED / "kestrel_tiny" / SPARE_NAME


async def run(scenes: int, refiner: str | Path, threads: int) -> tuple[list[float], list[float]]:
    """Returns the IoUs of the coarse and of the final outlines of the segment tasks of ``scenes`` scenes."""
    coarse: list[float] = []
    final: list[float] = []
    config = RuntimeConfig(refiner=refiner, cpu_threads=threads, dtype="float32")
    async with await InferenceEngine.create(config) as engine:
        for index in range(scenes):
            scene = example("seen", index)
            for task in scene.tasks:
                if task.kind != "segment":
                    continue
                result = await engine.segment(encode(scene), task.text)
                segment = result.output["segments"][0]
                shape = scene.scene.shapes[task.targets[0]]
                outlines = (
                    (segment["coarse_path"], segment.get("coarse_bbox")),
                    (segment["svg_path"], segment.get("bbox")),
                )
                for ious, (path, box) in zip((coarse, final), outlines, strict=True):
                    ious.append(segment_iou(scene.scene, shape, path, box))
    return coarse, final


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument(
        "--refiner", default=BUNDLED_REFINER, help="as for the server: a file, auto or off"
    )
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    coarse, final = asyncio.run(run(args.scenes, args.refiner, args.threads))
    better = sum(b > a for a, b in zip(coarse, final, strict=True))
    print(
        f"{len(final)} segments: mean IoU {sum(coarse) / len(coarse):.4f} coarse, "
        f"{sum(final) / len(final):.4f} refined; better in {better}"
    )


if __name__ == "__main__":
    main()
