"""The scenes as a data set of ``eval``."""

import json

import pytest

from kestrel_client.commands.evaluation.benchmark import Asking
from training.scenes.benchmark import BENCHMARK
from training.scenes.captions import caption
from training.scenes.evaluate import evaluate

EDGES = ("x_min", "y_min", "x_max", "y_max")


def test_scenes_score_the_results_of_the_client():
    """A perfect answer in the form of the SDK has the full score, and none at all has no score."""
    groups = set()
    for item in BENCHMARK.items(Asking(), 25):
        for case in item.cases.values():
            scene, task = case.truth
            shapes = [scene.shapes[i] for i in task.targets]
            sides = (scene.width, scene.height, scene.width, scene.height)
            boxes = [
                dict(zip(EDGES, (at / n for at, n in zip(s.box, sides, strict=True)), strict=True))
                for s in shapes
            ]
            points = [
                {"x": s.anchor[0] / scene.width, "y": s.anchor[1] / scene.height} for s in shapes
            ]
            answers = [{"text": task.answer, "reasoning": {"grounding": [{"points": points}]}}]
            outcome = {
                "answer": task.answer,
                "answers": answers,
                "points": points,
                "objects": boxes,
            }
            if task.skill == "caption":
                outcome["caption"] = caption(scene, task.text)
            if task.skill == "segment" and shapes:
                continue
            groups.add(case.group)
            right = BENCHMARK.score(case, outcome)
            assert right.value == 1 and right.counts["right"] == (1, 1), (task, right)
            assert BENCHMARK.score(case, None).counts["right"] == (0, 1)
    assert {"query", "reasoning", "caption", "point", "detect", "absent"} <= groups
    assert any(group.startswith("unseen pairs") for group in groups)


@pytest.mark.slow
def test_the_bundled_model_answers_its_scenes(tmp_path, capsys):
    flags = ["--in-process", "--quiet", "--json", "--output", str(tmp_path)]
    assert evaluate(["--limit", "3", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["models"] == ["kestrel-tiny"] and report["images"] == 3
    assert report["metrics"][0]["metric"] == "right" and report["metrics"][0]["value"] > 0.9
    page = (tmp_path / "report.html").read_text()
    assert 'class="truth"' in page or "worst" not in page
