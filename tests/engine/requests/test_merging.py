"""Merging the objects of several looks, and non-maximum suppression against a plain loop."""

import random

import pytest

from kestrel_engine import best_boxes
from kestrel_engine.requests.merging import merge, suppressed

WHOLE = (0.0, 0.0, 1.0, 1.0)
LEFT, RIGHT = (0.0, 0.0, 0.6, 1.0), (0.4, 0.0, 1.0, 1.0)


def box(x_min, y_min, x_max, y_max, score=0.5):
    edges = {"x_min": x_min, "y_min": y_min, "x_max": x_max, "y_max": y_max}
    return {**edges, "score": score}


def point(x, y, score=0.5):
    return {"x": x, "y": y, "score": score}


def test_an_object_of_several_looks_is_one_with_the_best_score():
    best = box(0.5, 0.5, 0.55, 0.55, 0.9)
    looks = [
        ([box(0.49, 0.5, 0.55, 0.56)], WHOLE),
        ([best], LEFT),
        ([box(0.5, 0.5, 0.56, 0.55)], RIGHT),
    ]
    assert merge(looks) == [best]
    far = box(0.1, 0.1, 0.2, 0.2, 0.95)
    assert merge([*looks, ([far], LEFT)]) == [far, best]
    assert merge([([], WHOLE), ([], LEFT)]) == []


def test_neighbours_that_one_look_tells_apart_both_stay():
    one, other = box(0.5, 0.5, 0.54, 0.54, 0.9), box(0.51, 0.5, 0.55, 0.54, 0.8)
    blurred = box(0.5, 0.5, 0.55, 0.54, 0.95)
    assert merge([([blurred], WHOLE), ([one, other], LEFT)]) == [blurred, other]
    assert merge([([one, other], LEFT), ([], RIGHT)]) == [one, other]


def test_a_box_that_a_tile_cuts_gives_way_to_the_whole_one():
    entire = box(0.2, 0.2, 0.9, 0.8, 0.6)
    pieces = [([box(0.2, 0.2, 0.6, 0.8, 0.9)], LEFT), ([box(0.4, 0.2, 0.9, 0.8, 0.8)], RIGHT)]
    assert merge([([entire], WHOLE), *pieces]) == [entire]
    # A tile inside the object sees several pieces of it.
    inside = [box(0.42, 0.3, 0.5, 0.4, 0.9), box(0.5, 0.6, 0.58, 0.7, 0.9)]
    middle = (0.4, 0.25, 0.6, 0.75)
    assert merge([([entire], WHOLE), (inside, middle)]) == [entire]
    # At the image's own edge nothing is cut, and a small box inside a large one is an object of its own.
    small = box(0.0, 0.2, 0.05, 0.3, 0.9)
    assert merge([([box(0.0, 0.0, 0.5, 0.9, 0.7)], WHOLE), ([small], LEFT)])[0] == small
    assert len(merge([([box(0.0, 0.0, 0.5, 0.9, 0.7)], WHOLE), ([small], LEFT)])) == 2


def test_points_merge_by_their_distance():
    near = [point(0.5, 0.5, 0.6), point(0.53, 0.5, 0.7)]
    looks = [([point(0.505, 0.5, 0.9)], WHOLE), (near, LEFT)]
    assert merge(looks) == [point(0.505, 0.5, 0.9), near[1]]
    # The distance is a part of the larger look.
    assert len(merge([([point(0.5, 0.5)], LEFT), ([point(0.515, 0.5)], RIGHT)])) == 2
    assert len(merge([([point(0.5, 0.5)], WHOLE), ([point(0.515, 0.5)], RIGHT)])) == 1


def test_objects_without_scores_keep_their_order():
    first, second = {"x": 0.1, "y": 0.1}, {"x": 0.9, "y": 0.9}
    assert merge([([first], WHOLE), ([second, dict(first)], LEFT)]) == [first, second]


def plain(edges, scores, limit):
    order = sorted(range(len(edges)), key=lambda i: (-scores[i], i))
    kept = []
    for i in order:
        if all(overlap(edges[i], edges[j]) <= limit for j in kept):
            kept.append(i)
    return [i in kept for i in range(len(edges))]


def overlap(a, b):
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    common = max(w, 0.0) * max(h, 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common
    return common / union if union > 0 else 0.0


@pytest.mark.parametrize("seed", range(20))
def test_suppression_equals_a_plain_loop(seed):
    rng = random.Random(seed)
    edges, scores = [], []
    for _ in range(rng.randrange(60)):
        x, y = rng.uniform(0, 0.9), rng.uniform(0, 0.9)
        edges.append((x, y, x + rng.choice((0, 0.1, 0.3)), y + rng.choice((0, 0.1, 0.3))))
        scores.append(rng.choice((0.2, 0.5, rng.random())))
    limit = rng.choice((0.1, 0.5, 0.9))
    assert best_boxes(edges, scores, limit) == plain(edges, scores, limit)
    boxes = [box(*e, s) for e, s in zip(edges, scores, strict=True)]
    kept = plain(edges, scores, limit)
    assert suppressed(boxes, limit) == [b for b, stays in zip(boxes, kept, strict=True) if stays]
    assert suppressed(boxes, None) == boxes
