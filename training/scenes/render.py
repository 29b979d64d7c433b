"""Drawing scenes with torch by signed distance: the same code on CPU (evaluation) and GPU (training)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.scenes import shapes as geo
from training.scenes.scenes import Scene
from training.scenes.vocabulary import MAX_OBJECTS

MAX_LINES = 6
SHAPE_FIELDS = 16  # cx cy radius cos sin kind style rgb rgb2 stroke period present
LINE_FIELDS = 9  # x0 y0 x1 y1 half-width rgb present
BACKGROUND_FIELDS = 11  # rgb rgb cos sin wave wave_x wave_y


def pack_scene(
    scene: Scene,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Arrays for the renderer: shapes [12, 16] in painting order, lines [6, 9], background [11]."""
    shapes = np.zeros((MAX_OBJECTS, SHAPE_FIELDS), np.float32)
    for row, index in enumerate(scene.order):
        s = scene.shapes[index]
        shapes[row] = (
            s.cx, s.cy, s.radius, math.cos(s.angle), math.sin(s.angle), s.kind, s.style,
            *s.rgb, *s.rgb2, s.stroke, s.period, 1.0,
        )  # fmt: skip
    lines = np.zeros((MAX_LINES, LINE_FIELDS), np.float32)
    for row, line in enumerate(scene.lines):
        lines[row] = (line.x0, line.y0, line.x1, line.y1, line.width / 2, *line.rgb, 1.0)
    b = scene.background
    background = np.array(
        (*b.first, *b.second, math.cos(b.angle), math.sin(b.angle), b.wave, b.wave_x, b.wave_y),
        np.float32,
    )
    return shapes, lines, background


def _outside(x: Tensor, y: Tensor, a: tuple[float, float], b: tuple[float, float]) -> Tensor:
    """Signed distance to the line a -> b, positive on the outside of a clockwise polygon (y down)."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    return ((x - a[0]) * dy - (y - a[1]) * dx) / math.hypot(dx, dy)


def _star(x: Tensor, y: Tensor) -> Tensor:
    """Fold the plane into one half of one of the five points, then measure to its edge."""
    c, s = math.cos(math.pi / 5), math.sin(math.pi / 5)
    x, y = x.abs(), -y
    for nx, ny in ((c, -s), (-c, -s)):
        twice = (x * nx + y * ny).clamp_min(0) * 2
        x, y = x - twice * nx, y - twice * ny
    return _outside(x.abs(), -y, (0.0, -1.0), (geo.STAR_INNER * s, -geo.STAR_INNER * c))


def _cross(x: Tensor, y: Tensor) -> Tensor:
    a, b = x.abs(), y.abs()
    across = torch.maximum(a - geo.CROSS_LENGTH, b - geo.CROSS_HALF)
    return torch.minimum(across, torch.maximum(a - geo.CROSS_HALF, b - geo.CROSS_LENGTH))


def _heart(x: Tensor, y: Tensor) -> Tensor:
    d, shift = geo.HEART_D, geo.HEART_SHIFT
    a = x.abs()
    box = (a + (y - shift).abs() - d) / math.sqrt(2)
    lobe = torch.sqrt((a - d / 2) ** 2 + (y - shift + d / 2) ** 2) - d / math.sqrt(2)
    return torch.minimum(box, lobe)


def _arrow(x: Tensor, y: Tensor) -> Tensor:
    b = y.abs()
    overlap = 0.1  # the shaft reaches into the head, so that no seam shows
    shaft = torch.maximum(
        torch.maximum(b - geo.ARROW_SHAFT, -1.0 - x), x - geo.ARROW_NECK - overlap
    )
    side = _outside(x, b, (1.0, 0.0), (geo.ARROW_NECK, geo.ARROW_HEAD))
    return torch.minimum(shaft, torch.maximum(side, geo.ARROW_NECK - x))


def distances(x: Tensor, y: Tensor, kind: Tensor) -> Tensor:
    """Signed distance in local units (negative inside) for each row's shape number ``kind``."""
    r = torch.sqrt(x * x + y * y)
    each = (
        r - 1.0,
        torch.maximum(x.abs(), y.abs()) - geo.SQUARE_HALF,
        torch.maximum(
            _outside(x.abs(), y, (0.0, geo.TRIANGLE_TOP), (1.0, geo.TRIANGLE_BASE)),
            y - geo.TRIANGLE_BASE,
        ),
        (x.abs() / geo.DIAMOND_X + y.abs() / geo.DIAMOND_Y - 1.0)
        * (geo.DIAMOND_X * geo.DIAMOND_Y / math.hypot(geo.DIAMOND_X, geo.DIAMOND_Y)),
        _star(x, y),
        _cross(x, y),
        _heart(x, y),
        torch.maximum(
            r - geo.CRESCENT_OUTER,
            geo.CRESCENT_INNER - torch.sqrt((x - geo.CRESCENT_OFFSET) ** 2 + y * y),
        ),
        _arrow(x, y),
        torch.maximum(
            torch.sqrt(x * x + (y - geo.SEMICIRCLE_Y) ** 2) - geo.SEMICIRCLE_R, y - geo.SEMICIRCLE_Y
        ),
    )
    result = each[0]
    for number, value in enumerate(each[1:], start=1):
        result = torch.where(kind == number, value, result)
    return result


def paint_background(
    canvas: Tensor, xs: Tensor, ys: Tensor, background: Tensor, lines: Tensor
) -> Tensor:
    """Gradient, wave and clutter lines. canvas [B, 3, H, W]; xs [W], ys [H] pixel centres -> new canvas."""
    height, width = canvas.shape[-2:]
    x, y = xs.view(1, 1, 1, -1), ys.view(1, 1, -1, 1)
    p = background.view(-1, BACKGROUND_FIELDS, 1, 1, 1)
    first, second = (background[:, i : i + 3].view(-1, 3, 1, 1) for i in (0, 3))
    cos, sin = p[:, 6], p[:, 7]
    reach = cos.abs() * width + sin.abs() * height
    t = ((x - width / 2) * cos + (y - height / 2) * sin) / reach + 0.5
    wave = p[:, 8] * torch.sin(x * p[:, 9] + y * p[:, 10])
    out = first + (second - first) * t + wave + canvas
    for i in range(MAX_LINES):
        q = lines[:, i].view(-1, LINE_FIELDS, 1, 1, 1)
        ex, ey = q[:, 2] - q[:, 0], q[:, 3] - q[:, 1]
        along = (((x - q[:, 0]) * ex + (y - q[:, 1]) * ey) / (ex * ex + ey * ey + 1e-6)).clamp(0, 1)
        dx, dy = x - q[:, 0] - along * ex, y - q[:, 1] - along * ey
        cover = (q[:, 4] - torch.sqrt(dx * dx + dy * dy) + 0.5).clamp(0, 1) * q[:, 8]
        out = out + (lines[:, i, 5:8].view(-1, 3, 1, 1) - out) * cover
    return out.to(canvas.dtype)


def paint_shape(canvas: Tensor, xs: Tensor, ys: Tensor, p: Tensor) -> Tensor:
    """One object of every image over its canvas. canvas [B, 3, H, W]; p [B, 16] -> new canvas."""
    q = p.view(-1, SHAPE_FIELDS, 1, 1, 1)
    radius = q[:, 2] + (1 - q[:, 15])  # an absent row must not divide by zero
    dx, dy = (xs.view(1, 1, 1, -1) - q[:, 0]) / radius, (ys.view(1, 1, -1, 1) - q[:, 1]) / radius
    x, y = dx * q[:, 3] + dy * q[:, 4], dy * q[:, 3] - dx * q[:, 4]
    d = distances(x, y, q[:, 5]) * radius
    cover = (0.5 - d).clamp(0, 1)
    inner = (0.5 - (d + q[:, 13])).clamp(0, 1)
    cover = torch.where(q[:, 6] == 1, cover - inner, cover) * q[:, 15]
    period = q[:, 14] + (1 - q[:, 15])
    phase = x * radius / period
    edge = (phase - torch.floor(phase) - 0.5).abs() - 0.19  # the gap takes 38 % of a period
    gap = torch.where(q[:, 6] == 2, (0.5 - edge * period).clamp(0, 1), torch.zeros_like(edge))
    rgb, rgb2 = p[:, 7:10].view(-1, 3, 1, 1), p[:, 10:13].view(-1, 3, 1, 1)
    under = canvas.float()
    return (under + (rgb + (rgb2 - rgb) * gap - under) * cover).to(canvas.dtype)


Paint = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def render(
    shapes: Tensor,
    lines: Tensor,
    background: Tensor,
    width: int,
    height: int,
    paint: Paint = paint_shape,
    ground: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = paint_background,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Images of one size as float grey levels [B, 3, H, W], 0..255, not yet rounded.

    shapes [B, n, 16], lines [B, 6, 9], background [B, 11]; ``paint`` and ``ground`` may be compiled.  The canvas
    may be float16: its steps are an eighth of a grey level at most.
    """
    device = shapes.device
    xs = torch.arange(width, device=device, dtype=torch.float32) + 0.5
    ys = torch.arange(height, device=device, dtype=torch.float32) + 0.5
    canvas = torch.zeros(len(shapes), 3, height, width, device=device, dtype=dtype)
    canvas = ground(canvas, xs, ys, background, lines)
    for i in range(shapes.shape[1]):
        canvas = paint(canvas, xs, ys, shapes[:, i].clone())
    return canvas.clamp(0, 1) * 255


def render_scenes(scenes: Sequence[Scene]) -> Tensor:
    """Scenes of one size, on the CPU: [B, 3, H, W] float grey levels."""
    packed = [pack_scene(s) for s in scenes]
    shapes, lines, background = (
        torch.from_numpy(np.stack(part)) for part in zip(*packed, strict=True)
    )
    used = max(len(s.shapes) for s in scenes)
    return render(shapes[:, :used], lines, background, scenes[0].width, scenes[0].height)


def render_scene(scene: Scene) -> Tensor:
    """One scene on the CPU, painting only the window around each object: [3, H, W] float grey levels."""
    shapes, lines, background = (torch.from_numpy(part)[None] for part in pack_scene(scene))
    xs = torch.arange(scene.width, dtype=torch.float32) + 0.5
    ys = torch.arange(scene.height, dtype=torch.float32) + 0.5
    canvas = paint_background(
        torch.zeros(1, 3, scene.height, scene.width), xs, ys, background, lines
    )
    for row, index in enumerate(scene.order):
        x0, y0, x1, y1 = scene.shapes[index].box
        a, b = max(math.floor(x0) - 2, 0), min(math.ceil(x1) + 2, scene.width)
        c, d = max(math.floor(y0) - 2, 0), min(math.ceil(y1) + 2, scene.height)
        canvas[..., c:d, a:b] = paint_shape(canvas[..., c:d, a:b], xs[a:b], ys[c:d], shapes[:, row])
    return canvas[0].clamp(0, 1) * 255
