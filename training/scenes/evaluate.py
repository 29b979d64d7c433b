"""``python -m training.scenes.evaluate [--scenes N] [--max-crops N]``: kestrel-tiny's figures on its frozen set."""

import argparse
import asyncio

from kestrel_engine import RuntimeConfig
from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.preprocess.decoding.open_image import open_image
from training.domains.picture import Picture
from training.judging import figures_of, judge, table
from training.scenes.evaluation_set import Example, encode, example

SIZES = {"seen": 2000, "unseen-pairs": 300}
"""Scenes of the whole set: of the main part, and with pairs of colour and shape that training never shows."""


def picture_of(found: Example) -> Picture:
    """What the encoded file shows."""
    image = open_image(encode(found), ImageLimits())
    image.decode()
    return Picture(image.pixels, list(found.asks))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=100, help="at most, of each part [100]")
    parser.add_argument("--max-crops", type=int, default=0, help="tiles of an image [the model's]")
    given = parser.parse_args(arguments)
    numbered = [(part, i) for part, count in SIZES.items() for i in range(min(given.scenes, count))]
    examples = [(part, picture_of(example(part, i))) for part, i in numbered]
    config = RuntimeConfig(model_path="tests/models/kestrel-tiny")
    print(table(figures_of(asyncio.run(judge(config, examples, max_crops=given.max_crops)))))


if __name__ == "__main__":
    main()
