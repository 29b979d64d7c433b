"""The score of a perfect answer is perfect, of a wrong one not."""

from typing import Any

from training.scenes.evaluation_set import Task, example
from training.scenes.paths import path_tokens
from training.scenes.scenes import Scene
from training.scenes.scoring import score


def _box(scene: Scene, index: int) -> dict[str, float]:
    x0, y0, x1, y1 = scene.shapes[index].box
    return {
        "x_min": x0 / scene.width, "y_min": y0 / scene.height, "x_max": x1 / scene.width, "y_max": y1 / scene.height
    }  # fmt: skip


def _point(scene: Scene, index: int) -> tuple[float, float]:
    x, y = scene.shapes[index].anchor
    return x / scene.width, y / scene.height


def _perfect(scene: Scene, task: Task) -> dict[str, Any]:
    from training.scenes.captions import caption

    points = [_point(scene, i) for i in dict.fromkeys(task.targets)]
    match task.skill:
        case "query":
            return {"answer": task.answer}
        case "reasoning":
            return {
                "answer": task.answer,
                "reasoning": {"text": "", "grounding": [{"points": points}]},
            }
        case "caption":
            return {"caption": caption(scene, task.text)}
        case "point":
            return {"points": [{"x": x, "y": y} for x, y in points]}
        case "detect":
            return {"objects": [{**_box(scene, i), "score": 0.9} for i in task.targets]}
    if not task.targets:
        return {"segments": [{"svg_path": ""}]}
    index = task.targets[0]
    path = " ".join(
        t if t.isalpha() else str(int(t) / 960) for t in path_tokens(scene.shapes[index])
    )
    return {"segments": [{"svg_path": path, "bbox": _box(scene, index)}]}


def test_perfect_answers_are_right() -> None:
    for name in ("seen", "unseen-pairs"):
        for i in range(40):
            found = example(name, i)
            for task in found.tasks:
                assert score(found.scene, task, _perfect(found.scene, task))["ok"]


def test_wrong_answers_are_counted() -> None:
    found = example("seen", 0)
    for task in found.tasks:
        nothing: dict[str, Any] = {
            "answer": "x", "reasoning": {"grounding": []}, "caption": "", "points": [{"x": 2.0, "y": 2.0}],
            "objects": [{"x_min": 0.0, "y_min": 0.0, "x_max": 0.01, "y_max": 0.01}],
            "segments": [{"svg_path": "M 0 0 L 1 0 1 1 z", "bbox": {"x_min": 0, "y_min": 0, "x_max": 1, "y_max": 1}}],
        }  # fmt: skip
        assert not score(found.scene, task, nothing)["ok"]
