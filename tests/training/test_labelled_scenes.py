"""Labelled scenes as files, and the command that calibrates scores on them."""

import json
from pathlib import Path

import pytest

from kestrel_engine import RuntimeConfig
from kestrel_engine.building.factory import build
from kestrel_engine.maintenance import read_labelled_images
from kestrel_grpc.cli.parser import main
from training.labelled_scenes import labelled_scene, write


def test_the_labels_are_those_of_the_scene(tmp_path: Path) -> None:
    pytest.importorskip("pyvips")
    write(tmp_path, 2)
    images = read_labelled_images(tmp_path / "annotations.json", tmp_path, absent=9)
    for index, image in enumerate(images):
        scene, phrases, _ = labelled_scene(index)
        asked = {question.name: question.boxes for question in image.questions}
        assert asked.keys() == phrases.keys()
        for words, phrase in phrases.items():
            boxes = [scene.shapes[number].box for number in phrase.find(scene)]
            expected = [
                (x0 / scene.width, y0 / scene.height, x1 / scene.width, y1 / scene.height)
                for x0, y0, x1, y1 in boxes
            ]
            assert [*asked[words]] == [pytest.approx(box) for box in expected]


@pytest.mark.slow
def test_the_command_writes_a_calibration_and_a_drawing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyvips")
    write(tmp_path, 4)
    out, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    given = ["--annotations", str(tmp_path / "annotations.json"), "--images", str(tmp_path)]
    files = ["--out", str(out), "--plot", str(plot)]
    assert main(["calibrate", *given, *files, "--json", "--device", "cpu", "--threads", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["images"] == 4 and {"point", "detect", "absence"} <= told["curves"].keys()
    stored = json.loads(out.read_text())
    assert stored["curves"].keys() == told["curves"].keys() and plot.read_text().startswith("<svg")
    config = RuntimeConfig(device="cpu", cpu_threads=1, calibration=out)
    built = build(config)
    built.runtime.close()
    assert built.info.weights_fingerprint == stored["weights"]
    assert set(built.info.calibrated) == stored["curves"].keys() == set(built.calibration.curves)
