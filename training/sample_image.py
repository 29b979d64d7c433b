"""Draw the image that comes with the model: ``python -m training.sample_image OUT.jpg``."""

from __future__ import annotations

import math
import random
import sys

import numpy as np

from kestrel_grpc.scenes.render import render_scene
from kestrel_grpc.scenes.scenes import Background, Scene, Shape, draw_colour, stripe_gap
from kestrel_grpc.scenes.vocabulary import COLOURS, SHAPES, STYLES

# style, colour, shape, centre x and y, radius, turn in degrees; left to right by centre
OBJECTS: tuple[tuple[str, str, str, float, float, float, float], ...] = (
    ("solid", "red", "circle", 92, 108, 52, 0),
    ("solid", "yellow", "triangle", 128, 342, 74, 4),
    ("striped", "blue", "star", 268, 176, 78, -6),
    ("solid", "red", "circle", 318, 388, 44, 0),
    ("outlined", "green", "square", 420, 92, 58, 5),
    ("solid", "purple", "heart", 468, 290, 84, -5),
    ("solid", "red", "circle", 578, 158, 38, 0),
)


def sample_scene() -> Scene:
    """640 x 480, seven objects, three of them red circles."""
    rng = random.Random("kestrel-tiny/sample")
    shapes = []
    for style, colour, shape, x, y, radius, degrees in OBJECTS:
        rgb = draw_colour(rng, COLOURS.index(colour))
        shapes.append(
            Shape(
                SHAPES.index(shape), COLOURS.index(colour), STYLES.index(style), x, y, radius,
                math.radians(degrees), rgb, stripe_gap(COLOURS.index(colour), rgb), 0.2 * radius, 0.45 * radius,
            )
        )  # fmt: skip
    background = Background((0.95, 0.94, 0.9), (0.85, 0.89, 0.93), math.radians(60), 0.0, 0.0, 0.0)
    return Scene(640, 480, background, (), tuple(shapes), tuple(range(len(shapes))))


def main() -> None:
    import pyvips

    pixels = render_scene(sample_scene()).round().byte().permute(1, 2, 0).contiguous().numpy()
    image = pyvips.Image.new_from_array(np.ascontiguousarray(pixels)).copy(interpretation="srgb")
    image.jpegsave(sys.argv[1], Q=90, strip=True)


if __name__ == "__main__":
    main()
