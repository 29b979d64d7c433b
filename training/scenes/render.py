"""Draws scenes with torch by signed distance."""

import math

import torch
from torch import Tensor

from training.scenes import shapes as geo
from training.scenes.scenes import Scene, Shape
from training.scenes.vocabulary import STYLES


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
    end = x - geo.ARROW_NECK - 0.1  # the shaft reaches into the head, so that no seam shows
    shaft = torch.maximum(torch.maximum(b - geo.ARROW_SHAFT, -1.0 - x), end)
    side = _outside(x, b, (1.0, 0.0), (geo.ARROW_NECK, geo.ARROW_HEAD))
    return torch.minimum(shaft, torch.maximum(side, geo.ARROW_NECK - x))


def distances(x: Tensor, y: Tensor, kind: Tensor) -> Tensor:
    """Signed distance in local units (negative inside) for each row's shape number ``kind``."""
    r, a = torch.sqrt(x * x + y * y), x.abs()
    base, wide, high = geo.TRIANGLE_BASE, geo.DIAMOND_X, geo.DIAMOND_Y
    triangle = torch.maximum(_outside(a, y, (0.0, geo.TRIANGLE_TOP), (1.0, base)), y - base)
    diamond = (a / wide + y.abs() / high - 1.0) * (wide * high / math.hypot(wide, high))
    inner = torch.sqrt((x - geo.CRESCENT_OFFSET) ** 2 + y * y)
    crescent = torch.maximum(r - geo.CRESCENT_OUTER, geo.CRESCENT_INNER - inner)
    low = y - geo.SEMICIRCLE_Y
    semicircle = torch.maximum(torch.sqrt(x * x + low**2) - geo.SEMICIRCLE_R, low)
    square = torch.maximum(a, y.abs()) - geo.SQUARE_HALF
    each = (r - 1.0, square, triangle, diamond, _star(x, y), _cross(x, y), _heart(x, y), crescent,
            _arrow(x, y), semicircle)  # fmt: skip
    result = each[0]
    for number, value in enumerate(each[1:], start=1):
        result = torch.where(kind == number, value, result)
    return result


def _float(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def _over(canvas: Tensor, cover: Tensor, rgb: Tensor) -> Tensor:
    """The canvas [3, H, W] under a colour [3, 1, 1] or [3, H, W] that covers [H, W] of it, 0..1."""
    return canvas + (rgb - canvas) * cover


def paint_background(scene: Scene) -> Tensor:
    """Gradient, wave and clutter lines [3, H, W]."""
    b = scene.background
    x, y = _pixels(scene.width).view(1, -1), _pixels(scene.height).view(-1, 1)
    first, second = (_float(*rgb).view(3, 1, 1) for rgb in (b.first, b.second))
    cos, sin = _float(math.cos(b.angle), math.sin(b.angle))
    wave, wave_x, wave_y = _float(b.wave, b.wave_x, b.wave_y)
    reach = cos.abs() * scene.width + sin.abs() * scene.height
    t = ((x - scene.width / 2) * cos + (y - scene.height / 2) * sin) / reach + 0.5
    canvas: Tensor = first + (second - first) * t + wave * torch.sin(x * wave_x + y * wave_y)
    for line in scene.lines:
        x0, y0, x1, y1, half = _float(line.x0, line.y0, line.x1, line.y1, line.width / 2)
        ex, ey = x1 - x0, y1 - y0
        along = (((x - x0) * ex + (y - y0) * ey) / (ex * ex + ey * ey + 1e-6)).clamp(0, 1)
        dx, dy = x - x0 - along * ex, y - y0 - along * ey
        cover = (half - torch.sqrt(dx * dx + dy * dy) + 0.5).clamp(0, 1)
        canvas = _over(canvas, cover, _float(*line.rgb).view(3, 1, 1))
    return canvas


def paint_shape(canvas: Tensor, xs: Tensor, ys: Tensor, shape: Shape) -> Tensor:
    """One object over the canvas [3, H, W] whose pixels have the centres xs [W] and ys [H] -> new canvas."""
    cx, cy, radius, cos, sin, stroke, period = _float(
        shape.cx, shape.cy, shape.radius, math.cos(shape.angle), math.sin(shape.angle), shape.stroke,
        shape.period,
    )  # fmt: skip
    dx, dy = (xs.view(1, -1) - cx) / radius, (ys.view(-1, 1) - cy) / radius
    x, y = dx * cos + dy * sin, dy * cos - dx * sin
    d = distances(x, y, torch.tensor(shape.kind)) * radius
    cover = (0.5 - d).clamp(0, 1)
    rgb, gap_rgb = (_float(*rgb).view(3, 1, 1) for rgb in (shape.rgb, shape.rgb2))
    if STYLES[shape.style] == "outlined":
        cover = cover - (0.5 - (d + stroke)).clamp(0, 1)
    elif STYLES[shape.style] == "striped":
        phase = x * radius / period
        edge = (phase - torch.floor(phase) - 0.5).abs() - 0.19  # the gap takes 38 % of a period
        rgb = _over(rgb, (0.5 - edge * period).clamp(0, 1), gap_rgb)
    return _over(canvas, cover, rgb)


def _pixels(count: int) -> Tensor:
    """The centres of a row's pixels."""
    return torch.arange(count, dtype=torch.float32) + 0.5


def render_scene(scene: Scene) -> Tensor:
    """Float grey levels [3, H, W], 0..255, not yet rounded. It paints only the window around each object."""
    canvas = paint_background(scene)
    xs, ys = _pixels(scene.width), _pixels(scene.height)
    for index in scene.order:
        x0, y0, x1, y1 = scene.shapes[index].box
        a, b = max(math.floor(x0) - 2, 0), min(math.ceil(x1) + 2, scene.width)
        c, d = max(math.floor(y0) - 2, 0), min(math.ceil(y1) + 2, scene.height)
        window = canvas[:, c:d, a:b]
        canvas[:, c:d, a:b] = paint_shape(window, xs[a:b], ys[c:d], scene.shapes[index])
    return canvas.clamp(0, 1) * 255
