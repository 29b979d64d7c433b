"""Kinds of documents: each writes a page and returns what may be asked about it in particular."""

import math
import random
from collections.abc import Callable, Sequence

from training.domains.ground import Rgb, draw_ground, ink_for
from training.domains.phrasing import read, tell
from training.domains.picture import Ask, view_scale
from training.domains.text import words as w
from training.domains.text.fonts import draw_font
from training.domains.text.page import Page, fit, width_of, wrap
from training.scenes.phrases import WAYS

SMALLEST, LARGEST = 11.0, 48.0  # font size in pixels of the model's view
Document = Callable[[random.Random, int, int, bool], tuple[Page, list[Ask]]]


def draw_font_size(rng: random.Random, width: int, height: int, largest: float = LARGEST) -> int:
    """Pixels of the picture: so large that the model, which sees 640 pixels a side, can read it."""
    size = math.exp(rng.uniform(math.log(SMALLEST), math.log(largest))) / view_scale(width, height)
    return max(9, min(round(size), height // 3))


def lines(rng: random.Random, width: int, height: int, held: bool) -> tuple[Page, list[Ask]]:
    """One to four lines in fonts and places of their own."""
    image, ground = draw_ground(rng, width, height)
    page = Page(image)
    y = 0.0
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        font = draw_font(rng, held)
        size = draw_font_size(rng, width, height)
        text = w.phrase(rng, rng.choice((1, 1, 2, 3, 4, 6)))
        size = fit(text, font, size, width - 8)
        wide = width_of(text, font, size)
        low = y + 1.15 * size
        if low > height - 0.35 * size or wide > width - 4 or size < 8:
            break
        y = rng.uniform(low, min(height - 0.35 * size, low + 0.5 * height))
        x = rng.uniform(2, width - 2 - wide)
        page.put(x, y, text, font, size, ink_for(rng, ground))
        y += 0.4 * size
    return page, []


def paragraph(rng: random.Random, width: int, height: int, held: bool) -> tuple[Page, list[Ask]]:
    image, ground = draw_ground(rng, width, height, plain=0.7)
    page, ink = Page(image), ink_for(rng, ground)
    font, size = draw_font(rng, held), draw_font_size(rng, width, height, 32)
    left = rng.uniform(0.02, 0.2) * width
    room = rng.uniform(0.5, 0.97) * (width - left - 2)
    step = size * rng.uniform(1.15, 1.6)
    most = min(8, int((height * 0.95 - size) / step))
    pieces = [w.piece(rng) for _ in range(rng.randint(4, 45))]
    found = wrap(pieces, font, size, room)[: max(1, most)]
    y = rng.uniform(1.2 * size, max(1.2 * size, height - 0.4 * size - step * (len(found) - 1)))
    align = rng.choice((0, 0, 0, 0.5, 1))
    for text in found:
        if y < height - 0.3 * size:
            page.put(left + align * (room - width_of(text, font, size)), y, text, font, size, ink)
        y += step
    return page, []


def sign(rng: random.Random, width: int, height: int, held: bool) -> tuple[Page, list[Ask]]:
    """A panel with a few large words."""
    image, _ = draw_ground(rng, width, height, plain=0.3)
    page = Page(image)
    font, panel = draw_font(rng, held), ink_for(rng, (rng.choice((0, 255)),) * 3, 60)
    pw, ph = rng.uniform(0.45, 0.96) * width, rng.uniform(0.3, 0.9) * height
    x, y = rng.uniform(0, width - pw), rng.uniform(0, height - ph)
    corner = rng.choice((0, 0.05, 0.2)) * min(pw, ph)
    ink = ink_for(rng, panel, 110)
    edge = ink if rng.random() < 0.3 else None
    page.pen.rounded_rectangle((x, y, x + pw, y + ph), corner, panel, edge, 2)
    texts = [w.phrase(rng, rng.choice((1, 1, 2))) for _ in range(rng.randint(1, 3))]
    texts = [w.title(rng) if rng.random() < 0.5 else text for text in texts]
    if rng.random() < 0.4:
        texts = [t.upper() for t in texts]
    size = min(fit(t, font, int(ph / (1.3 * len(texts) + 0.4)), 0.9 * pw) for t in texts)
    top = y + (ph - 1.3 * size * len(texts)) / 2 + size
    for text in texts:
        if size >= 9:
            page.put(x + (pw - width_of(text, font, size)) / 2, top, text, font, size, ink)
        top += 1.3 * size
    return page, []


def _rows(
    page: Page, pairs: list[tuple[str, str]], left: float, right: float, y: float, step: float,
    font: str, size: int, ink: Rgb, beside: bool,
) -> None:  # fmt: skip
    """Two columns; the right one ends at ``right``, or begins in the middle if ``beside``."""
    for a, b in pairs:
        if a:
            page.put(left, y, a, font, size, ink)
        if b:
            at = (left + right) / 2 if beside else right - width_of(b, font, size)
            page.put(at, y, b, font, size, ink)
        y += step


def receipt(rng: random.Random, width: int, height: int, held: bool) -> tuple[Page, list[Ask]]:
    image, _ = draw_ground(rng, width, height, plain=0.3)
    page = Page(image)
    font = draw_font(rng, held)
    size = draw_font_size(rng, width, height, 24)
    step = size * rng.uniform(1.2, 1.6)
    rows = int(height * 0.96 / step)
    items = min(rng.randint(1, 8), rows - 5)
    if items < 1:
        return sign(rng, width, height, held)
    names = [*rng.sample(w.GOODS, items), *(w.title(rng, 18) for _ in range(items))]
    goods = [*dict.fromkeys(rng.sample(names, items) if rng.random() < 0.8 else names[:items])]
    sign_of_money = rng.choice(("", "", "$", "£", "€"))
    cents = [rng.randint(50, 4000) for _ in goods]
    extra = [rng.randint(50, 4000) for _ in range(4)]
    total = sum(cents)
    money = [f"{sign_of_money}{c / 100:.2f}" for c in (*cents, total, *extra)]
    shop = f"{w.title(rng, 14)} {rng.choice(w.SHOPS)}" if rng.random() < 0.5 else w.title(rng)
    when, clock = w.date(rng), w.time(rng)
    word = rng.choice(("Total", "TOTAL", "Total due", "SUM", "Amount"))
    rows_wide = [width_of(a + b, font, size) for a, b in zip(goods, money, strict=False)]
    wide = min(max(rows_wide) * rng.uniform(1.2, 1.8), 0.94 * width)
    wide = min(max(wide, width_of(when + " " + clock, font, size) + 2 * size), 0.97 * width)
    left = rng.uniform(4, max(4.1, width - wide - 4))
    paper = rng.randint(235, 255)
    around = (left - 0.6 * size, 0, left + wide + 0.6 * size, height)
    page.pen.rectangle(around, (paper, paper, paper - rng.randint(0, 12)))
    ink = (rng.randint(0, 70),) * 3
    y = 1.6 * size
    shop_size = fit(shop, font, round(size * rng.uniform(1, 1.4)), wide)
    page.put(left + (wide - width_of(shop, font, shop_size)) / 2, y, shop, font, shop_size, ink)
    spare, n = rows - 4 - len(goods), str(rng.choice((5, 7, 10, 19, 20)))
    more = iter([True] * min(spare, rng.choice((0, 1, 2, 3, 5, 6))))
    sums = (w.BEFORE_TOTAL, money[-4:-2]), (w.AFTER_TOTAL, money[-2:])
    before, after = (
        [(a.format(n=n), b) for a, b in zip(rng.sample(names, 2), have, strict=True) if next(more, False)]
        for names, have in sums
    )  # fmt: skip
    pairs = [(when, clock), *zip(goods, money, strict=False), *before, (word, money[len(goods)])]
    street = f"{rng.randint(1, 200)} {w.term(rng).capitalize()} {rng.choice(w.STREETS)}"
    pairs = [*([(street, "")] if next(more, False) else ()), *pairs, *after]
    thanks = rng.choice(w.THANKS).format(a=w.made_up(rng), n=rng.randint(1, 9999))
    pairs += [(thanks, "")] if next(more, False) else []
    if any(width_of(a + "  " + b, font, size) > wide for a, b in pairs):
        size = min(fit(a + "  " + b, font, size, wide) for a, b in pairs)
    _rows(page, pairs, left, left + wide, y + 1.2 * step, step, font, size, ink, False)
    if rng.random() < 0.5:
        for above in goods[0], (before or [(word, "")])[0][0]:  # rules above items and sums
            at = y + (1.2 + [a for a, _ in pairs].index(above) - 0.75) * step
            for x in range(round(left), round(left + wide) - 6, rng.choice((6, 9))):
                page.pen.line((x, at, x + 5, at), ink)
    k = rng.randrange(len(goods))
    asks = [read(rng, "text receipt total", WAYS["receipt total"], money[len(goods)])]
    asks += [read(rng, "text value", WAYS["value"], b, k=a) for a, b in (before + after)[:1]]
    bought = rng.choice((goods[k], goods[k].lower()))
    asks.append(read(rng, "text receipt price", WAYS["receipt price"], money[k], k=bought))
    asks.append(read(rng, "text receipt shop", WAYS["receipt shop"], shop))
    asks.append(read(rng, "text receipt date", WAYS["receipt date"], when))
    asks.append(read(rng, "text receipt time", WAYS["receipt time"], clock))
    asks.append(tell(rng, "text receipt count", WAYS["receipt count"], str(len(goods))))
    asks += [_missing(rng, WAYS["receipt price"], w.GOODS, goods) for _ in range(1 if held else 2)]
    return page, rng.sample(asks, 4 if held else 7)


def _missing(rng: random.Random, ways: str, every: Sequence[str], have: Sequence[str]) -> Ask:
    """A question about what the page hasn't got, in the same words as about what it has."""
    there = {word for each in have for word in each.lower().split()}
    names = [rng.choice(every), w.term(rng), w.title(rng, 16)]
    names = [each for each in names if not there & {*each.lower().split()}]
    name = rng.choice(names or [w.made_up(rng)])
    said = rng.choice((name, name.lower()))
    return tell(rng, "absent", ways, f"There is no {name.lower()}.", k=said)


def form(rng: random.Random, width: int, height: int, held: bool) -> tuple[Page, list[Ask]]:
    """Keys and values."""
    image, ground = draw_ground(rng, width, height, plain=0.8)
    page, ink = Page(image), ink_for(rng, ground, 110)
    font, size = draw_font(rng, held), draw_font_size(rng, width, height, 30)
    step = size * rng.uniform(1.3, 2.0)
    count = min(rng.randint(2, 8), int(height * 0.95 / step))
    named = [*w.KEYS, *(w.title(rng, 18) for _ in w.KEYS)]
    keys = [*dict.fromkeys(rng.sample(named, max(1, count)))]
    values = [w.value(rng, key) for key in keys]
    colon = rng.choice((":", ":", ""))
    left = rng.uniform(0.02, 0.15) * width
    beside = rng.random() < 0.6
    right = width - rng.uniform(0.02, 0.2) * width
    half = (right - left) / 2 if beside else right - left
    widest = max(max(width_of(k + ": ", font, size), width_of(v, font, size)) if beside
                 else width_of(f"{k}:  {v}", font, size) for k, v in zip(keys, values, strict=True))  # fmt: skip
    if widest > half:
        size = max(8, int(size * half / widest))
    y = rng.uniform(1.2 * size, max(1.21 * size, height - step * count))
    pairs = [(key + colon, value) for key, value in zip(keys, values, strict=True)]
    _rows(page, pairs, left, right, y, step, font, size, ink, beside)
    asks = []
    for k in rng.sample(range(len(keys)), min(2 if held else 4, len(keys))):
        key = rng.choice((keys[k], keys[k].lower()))
        asks.append(read(rng, "text value", WAYS["value"], values[k], k=key))
    asks += [_missing(rng, WAYS["value"], w.KEYS, keys) for _ in range(1 if held else 2)]
    return page, asks


def table(rng: random.Random, width: int, height: int, held: bool) -> tuple[Page, list[Ask]]:
    image, ground = draw_ground(rng, width, height, plain=0.9)
    page, ink = Page(image), ink_for(rng, ground, 110)
    font, size = draw_font(rng, held), draw_font_size(rng, width, height, 24)
    columns, rows = rng.randint(2, 5), rng.randint(2, 7)
    heads = [w.title(rng, 11) for _ in range(columns)]
    names = [w.title(rng, 14) for _ in range(rows)]
    makers = w.number, w.price, w.word, w.time, w.date, w.value
    kinds = rng.choices(makers, k=columns)
    cells = [[name, *(kind(rng) for kind in kinds[1:])] for name in names]
    step = min(size * rng.uniform(1.4, 2.2), (height - 4) / (rows + 1))
    written = zip(heads, *cells, strict=True)
    widths = [max(width_of(t, font, size) for t in column) + size for column in written]
    if sum(widths) > width - 8:
        size = int(size * (width - 8) / sum(widths))
        widths = [v * (width - 8) / sum(widths) for v in widths]
    size = min(size, int(step / 1.25))
    if size < 8 or len({*heads}) < columns or len({*names}) < rows:
        return form(rng, width, height, held)
    left = rng.uniform(2, max(2.1, width - sum(widths) - 4))
    top = rng.uniform(2, max(2.1, height - step * (rows + 1) - 2))
    style = rng.choice(("lines", "box", "plain", "bands"))
    whole = left + sum(widths)
    for r in range(rows + 2):
        y = top + r * step
        if style == "bands" and r % 2 and r <= rows:
            band = tuple((9 * g + i) // 10 for g, i in zip(ground, ink, strict=True))
            page.pen.rectangle((left, y, whole, y + step), band)  # type: ignore[arg-type]
        if style in ("lines", "box") or (style == "plain" and r == 1):
            page.pen.line((left, y, whole, y), ink)
    lefts = [left + sum(widths[:c]) for c in range(columns)]
    for x in (*lefts, whole) if style == "box" else ():
        page.pen.line((x, top, x, top + step * (rows + 1)), ink)
    for r, row in enumerate([heads, *cells]):
        for x, text in zip(lefts, row, strict=True):
            page.put(x + 0.45 * size, top + (r + 0.7) * step, text, font, size, ink)
    asks = []
    for _ in range(1 if held else 4):
        r, c = rng.randrange(rows), rng.randrange(1, columns)
        asks.append(read(rng, "text cell", WAYS["cell"], cells[r][c], h=heads[c], k=names[r]))
    ways = WAYS["cell"].replace("{h}", heads[c])
    asks += [_missing(rng, ways, w.dictionary(), names) for _ in range(1 if held else 2)]
    return page, asks


KINDS: tuple[tuple[Document, int], ...] = (
    (lines, 34), (paragraph, 20), (sign, 14), (receipt, 12), (form, 12), (table, 8),
)  # fmt: skip
