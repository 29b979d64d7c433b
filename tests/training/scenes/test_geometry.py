"""Signed distances, outlines and paths describe the same shapes."""

import math
import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from kestrel_client.commands.evaluation.answers import outline_iou
from kestrel_client.commands.evaluation.place_metrics import in_polygon
from training.held_out import path_outline
from training.scenes.paths import GRID_VALUES, outline, path_tokens
from training.scenes.render import distances, paint_background, paint_shape, render_scene
from training.scenes.scenes import draw_scene, draw_size
from training.scenes.shapes import geometry, place
from training.scenes.vocabulary import SHAPES


@pytest.mark.parametrize("kind", range(len(SHAPES)), ids=SHAPES)
def test_signed_distance_agrees_with_the_outline(kind: int) -> None:
    points, side = geometry(kind).outline, 400
    image = Image.new("1", (side, side))
    ImageDraw.Draw(image).polygon([tuple(p) for p in (points + 1.2) / 2.4 * (side - 1)], fill=1)
    drawn = torch.from_numpy(np.array(image))
    at = torch.linspace(-1.2, 1.2, side)
    x, y = at.view(1, -1).expand(side, side), at.view(-1, 1).expand(side, side)
    measured = distances(x, y, torch.tensor(float(kind))) < 0
    assert int((drawn & measured).sum()) > 0.975 * int((drawn | measured).sum())
    on = torch.from_numpy(points).float()
    edge = distances(on[:, 0], on[:, 1], torch.full((len(on),), float(kind)))
    assert float(edge.abs().max()) < 0.02


@pytest.mark.parametrize("kind", range(len(SHAPES)), ids=SHAPES)
def test_the_anchor_lies_inside_whatever_the_turn(kind: int) -> None:
    shape = geometry(kind)
    for degrees in range(0, 360, 30):
        polygon = place(shape.outline, 50, 60, 20, math.radians(degrees))
        x, y = place(np.array([shape.anchor]), 50, 60, 20, math.radians(degrees))[0]
        assert in_polygon(x, y, polygon.tolist())


def test_paths_come_back_as_the_shape() -> None:
    rng = random.Random(8)
    ious = []
    for _ in range(30):
        for shape in draw_scene(rng, *draw_size(rng)).shapes:
            tokens = path_tokens(shape)
            assert all(t.isalpha() or int(t) in GRID_VALUES for t in tokens)
            polygon = path_outline(tokens, shape.box)
            ious.append(outline_iou([polygon.tolist()], [outline(shape).tolist()]))
    assert min(ious) > 0.94
    assert sum(ious) / len(ious) > 0.975


def test_painting_only_windows_changes_nothing() -> None:
    scene = draw_scene(random.Random(9), 300, 200, count=8)
    whole = paint_background(scene)
    xs, ys = torch.arange(300) + 0.5, torch.arange(200) + 0.5
    for index in scene.order:
        whole = paint_shape(whole, xs, ys, scene.shapes[index])
    assert float((render_scene(scene) - whole.clamp(0, 1) * 255).abs().max()) < 1e-3
