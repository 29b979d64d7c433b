"""A page: lines of text at known places, with the boxes of their words and the centres of their characters."""

from dataclasses import dataclass, field

from PIL import Image, ImageDraw

from training.domains.ground import Rgb
from training.domains.picture import Box
from training.domains.text.fonts import advance, load


@dataclass(frozen=True)
class Word:
    text: str
    box: Box


@dataclass(frozen=True)
class Line:
    text: str
    box: Box
    words: tuple[Word, ...]
    size: int  # of the font in pixels


@dataclass
class Page:
    image: Image.Image
    lines: list[Line] = field(default_factory=list)
    characters: list[tuple[float, float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pen = ImageDraw.Draw(self.image)

    @property
    def size(self) -> tuple[int, int]:
        return self.image.size

    def put(self, x: float, y: float, text: str, font: str, size: int, ink: Rgb) -> Line:
        """Write ``text`` with its left end at x and its baseline at y."""
        face = load(font, size)
        words: list[Word] = []
        at, start, begun = x, x, ""
        middle = y - 0.28 * size
        for c in [*text, " "]:
            if c != " ":
                if not begun:
                    start = at
                begun += c
                self.characters.append((at + advance(font, size, c) / 2, middle, c))
            elif begun:
                left, top, right, bottom = face.getbbox(begun, anchor="ls")
                words.append(Word(begun, (start + left, y + top, start + right, y + bottom)))
                begun = ""
            at += advance(font, size, c)
        self.pen.text((x, y), text, ink, face, anchor="ls")
        line = Line(text, _around([w.box for w in words]), tuple(words), size)
        self.lines.append(line)
        return line


def _around(boxes: list[Box]) -> Box:
    return (
        min(b[0] for b in boxes), min(b[1] for b in boxes), max(b[2] for b in boxes), max(b[3] for b in boxes)
    )  # fmt: skip


def width_of(text: str, font: str, size: int) -> float:
    return sum(advance(font, size, c) for c in text)


def fit(text: str, font: str, size: int, room: float) -> int:
    """The size at which the text fits into ``room`` pixels: this one or a smaller one."""
    size = max(6, size)
    wide = width_of(text, font, size)
    return size if wide <= room else max(6, int(size * room / wide))


def wrap(words: list[str], font: str, size: int, room: float) -> list[str]:
    """Lines of words that fit; a word that is wider than the room is left out."""
    lines: list[str] = []
    for word in words:
        if width_of(word, font, size) > room:
            continue
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and width_of(longer, font, size) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
