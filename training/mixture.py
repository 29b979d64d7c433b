"""Which domains a step's pictures come from, and how large they are."""

import math
import random
from dataclasses import replace

from training.domains.charts.draw import draw as charts
from training.domains.charts.draw import draw_archived as webcharts
from training.domains.icons.draw import draw as icons
from training.domains.photos.draw import draw as photos
from training.domains.photos.draw import draw_emoji as emoji
from training.domains.picture import Domain, Picture
from training.domains.screens.draw import draw as screens
from training.domains.shapes.draw import draw as shapes
from training.domains.text.draw import draw as text
from training.kestrel_small import num_crops

# Share of the pictures.
DOMAINS: dict[str, tuple[Domain, float]] = {
    "shapes": (shapes, 0.14), "text": (text, 0.17), "charts": (charts, 0.15), "icons": (icons, 0.06),
    "screens": (screens, 0.1), "webcharts": (webcharts, 0.1), "photos": (photos, 0.19), "emoji": (emoji, 0.09),
}  # fmt: skip
# Kinds of requests that miss their bars weigh more than 1, and those that have met them less: by this, a request comes
# among those that fit into a row, and its loss counts, by 0.5 to 3.
WANTED = {
    "charts value": 3, "charts label": 3, "charts label reasoned": 1.5, "charts label here": 1.5, "charts labels": 2.5,
    "charts extreme": 2, "charts series here": 1.5, "charts series": 1.5, "charts value reasoned": 0.5,
    "charts table": 0.6, "charts value here": 0.3, "charts tick": 0.2, "charts axis": 0.3, "charts kind": 0.2,
    "charts title": 2, "charts trend": 0.6, "charts detect": 0.4, "charts caption": 0.2,
    "shapes caption short": 2, "shapes count": 4, "shapes detect": 2, "shapes segment": 2, "shapes count reasoned": 0.5,
    "shapes presence reasoned": 0.5,
    "icons count": 4, "icons point": 0.5, "icons caption": 2, "screens cell": 4, "screens field": 3, "screens state": 3,
    "screens click": 0.5, "screens element": 0.5, "screens elements": 2, "screens menu": 0.7, "screens heading": 2,
    "screens buttons": 1.5, "screens present": 2,
    "text value": 1.5, "text receipt shop": 2, "text receipt date": 1.5, "text receipt count": 3,
    "text receipt price": 1.5, "text cell": 4, "text line": 4, "text here": 4, "text read": 2, "absent": 2.5,
    "photo name": 4, "photo outside": 4, "photo caption": 0.5, "emoji name": 4, "emoji outside": 1,
}  # fmt: skip
TILED = 0.25  # share of the steps whose pictures need more than one crop
# Share of a step's images, by crops, so that steps take alike.
IMAGES = {1: 1.0, 3: 0.45, 4: 0.35, 5: 0.3}


def draw_size(rng: random.Random, tiled: float = TILED) -> tuple[int, int]:
    """Width and height of a step's pictures, 240 to 1600 on the longer side. tiled: share of several crops."""
    tiles = rng.random() < tiled
    while True:
        low, high = (800, 1600) if tiles else (240, 928)
        long = math.exp(rng.uniform(math.log(low), math.log(high)))
        aspect = rng.uniform(1, 1.6) if rng.random() < 0.8 else rng.uniform(1, 2.5)
        size = round(long), max(200, round(long / aspect))
        size = size if rng.random() < 0.6 else size[::-1]
        if (num_crops(*size) > 1) == tiles:
            return size


def images_of(size: tuple[int, int], images: int) -> int:
    """How many pictures of this size a step of ``images`` one-crop pictures has."""
    return max(1, round(images * IMAGES[num_crops(*size)]))


def wanted(kind: str) -> float:
    return WANTED.get(kind.removeprefix("web"), 1.0)


def draw_domain(rng: random.Random) -> str:
    return rng.choices(list(DOMAINS), [share for _, share in DOMAINS.values()])[0]


def draw_picture(
    rng: random.Random, name: str, size: tuple[int, int], held: bool = False
) -> Picture:
    return replace(DOMAINS[name][0](rng, *size, held), domain=name)
