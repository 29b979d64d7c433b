"""What is bundled after the last slice: the weights in bfloat16, a calibration of their scores, and checksums.

    python -m training.release OUT/checkpoint FOLDER      # --each 0: without a calibration

FOLDER gets the files that the engine loads. The recipe has no refiner: the engine leaves outlines as they are.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from kestrel_engine import RuntimeConfig, maintenance
from kestrel_engine.checkpoint.checksums import NAME as SUMS_NAME
from kestrel_engine.checkpoint.checksums import checksum, write_sums
from kestrel_engine.maintenance.scores.calibration import CalibrationReport
from kestrel_engine.types.calibration import FILE_NAME
from training.held_out import SETS, write_labels
from training.kestrel_small import export
from training.learning import checkpoints

LARGEST = 60_000_000  # bytes of the weights in the wheel
SEED, ABSENT = 41, 3
OUTLINED = 4  # times as many pictures of shapes for the curve of outlines: each gives few
DOMAINS = tuple(domain for domains in SETS.values() for domain in domains)


def calibrate(folder: Path, domains: Sequence[str], each: int, device: str) -> CalibrationReport:
    """Fits the scores of the model in ``folder`` on ``each`` held-out pictures of a domain, every second one worn."""
    config = RuntimeConfig(model_path=folder, device=device, precision="bfloat16", refiner="off")
    with TemporaryDirectory() as made:
        write_labels(Path(made), domains, each, SEED)
        labels = Path(made, "annotations.json")
        images = maintenance.read_labelled_images(labels, Path(made), absent=ABSENT)
        return asyncio.run(maintenance.calibrate(config, images))


def release(checkpoint: Path, folder: Path, each: int, device: str = "cpu") -> None:
    """Writes the model's folder, with curves of ``each`` pictures a domain. Of outlines, the shapes' alone count: the
    model learns no others. Raises ValueError if the weights are too large, and KestrelError."""
    for name in (FILE_NAME, SUMS_NAME):  # of an earlier checkpoint
        (folder / name).unlink(missing_ok=True)
    export(checkpoints.load_quantised(checkpoint)["model"], folder)
    size = (folder / "model.safetensors").stat().st_size
    if size > LARGEST:
        raise ValueError(f"the weights have {size} bytes; the wheel holds {LARGEST}")
    if each:
        every = calibrate(folder, DOMAINS, each, device)
        shapes = calibrate(folder, ["shapes"], OUTLINED * each, device)
        outlines = {name: curve for name, curve in shapes.curves.items() if name == "segment"}
        curves = {name: every.curves[name] for name in every.curves if name != "segment"} | outlines
        for name, curve in curves.items():
            print(
                f"{name}: {curve.count} results, error {curve.raw_error:.3f} raw, {curve.error:.3f} calibrated"
            )
        report = replace(every, curves=curves)
        (folder / FILE_NAME).write_text(report.text, encoding="utf-8")
    write_sums(folder, {file.name: checksum(file) for file in folder.iterdir()})


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("checkpoint", type=Path, help="checkpoint pieces, of a slice or training/resume")
    p.add_argument("folder", type=Path)
    p.add_argument("--each", type=int, default=60, help="pictures of a domain to calibrate with")
    p.add_argument("--device", default="cpu")
    given = p.parse_args()
    release(given.checkpoint, given.folder, given.each, given.device)


if __name__ == "__main__":
    main()
