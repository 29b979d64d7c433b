"""Make the data files of kestrel-small's renderers from npm packages and a word list; nothing of them is committed.

    npm install $(python -m training.sources packages)          # in an empty folder
    python -m training.sources make NODE_MODULES WORDS OUT CLONES    # needs fonttools and pyvips

CLONES is the folder of the repositories with photographs (training/README.md); without it, no photographs are packed.
OUT holds fonts.zip (latin subsets as TrueType), icons.npz (alpha masks), words.txt, photos.zip and emojis.zip; held/
has the last two for the figures. WORDS is Debian's /usr/share/dict/american-english-small (wamerican-small).
training/README.md lists the licences.
"""

import io
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

DOMAINS = Path(__file__).parent / "domains"
ICON_SETS = (
    "tabler", "ph", "bi", "fluent", "material-symbols", "lucide", "mdi", "heroicons", "carbon", "ri", "feather",
    "ion", "octicon", "mingcute", "uil", "iconoir",
)  # fmt: skip
HELD_SET = "iconoir"
ICON_SIDE = 64
CHARACTERS = (
    "".join(map(chr, range(32, 127))) + "£€°\u2013\u2014\u2018\u2019\u201c\u201déèüöäñç\u00d7•©®"
)
# What sets append to the name of a variant of the same drawing.
_VARIANT = re.compile(
    r"-(outline|outlined|rounded|round|sharp|fill|filled|line|thin|light|bold|duotone|solid|regular|16|20|24|28|32|48)$"
)


def families() -> dict[str, list[str]]:
    """Font families by use: "train" and "held"."""
    text = re.sub(r"#.*\n", "", (DOMAINS / "text" / "families.txt").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for word in text.split():
        if word.endswith(":"):
            found[word[:-1]] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def word_lists(folder: Path) -> dict[str, tuple[str, ...]]:
    """The lists of lists.txt in a folder: a line has a name and words that "|" divides."""
    lines = (folder / "lists.txt").read_text(encoding="utf-8").splitlines()
    return {name: tuple(words.split("|")) for name, _, words in (s.partition(": ") for s in lines)}


def icon_names(file: Path = DOMAINS / "icons" / "names.txt") -> dict[str, list[str]]:
    """The spoken name of every icon, and the names that sets use for it."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, others = line.partition(":")
            found[name] = others.split() or [name.replace(" ", "-")]
    return found


def _subset(data: bytes) -> bytes | None:
    """A web font with CHARACTERS alone, as TrueType; None if it lacks letters or digits."""
    from fontTools import subset
    from fontTools.ttLib import TTFont

    font = TTFont(io.BytesIO(data))
    if not {*range(33, 127)} <= set(font.getBestCmap()):
        return None
    options = subset.Options(hinting=False, layout_features=[], notdef_outline=True, name_IDs=[])
    options.drop_tables += ["GSUB", "GPOS", "GDEF", "DSIG", "kern"]
    cutter = subset.Subsetter(options)
    cutter.populate(text=CHARACTERS)
    cutter.subset(font)
    font.flavor = None
    out = io.BytesIO()
    font.save(out)
    return out.getvalue()


def make_fonts(modules: Path, out: Path) -> None:
    wanted = ("400-normal", "700-normal", "400-italic")
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for use, names in families().items():
            for name in names:
                files = modules / "@fontsource" / name / "files"
                for style in wanted:
                    path = files / f"{name}-latin-{style}.woff"
                    data = _subset(path.read_bytes()) if path.exists() else None
                    if data is not None:
                        archive.writestr(f"{use}/{name}-{style}.ttf", data)


def drawings(modules: Path, name: str, side: int = ICON_SIDE) -> Iterator[tuple[str, str]]:
    """(name, SVG of this many pixels a side) of every icon of a set."""
    data = json.loads((modules / "@iconify-json" / name / "icons.json").read_text(encoding="utf-8"))
    width, height = data.get("width", 16), data.get("height", 16)
    icons = dict(data["icons"])
    for alias, target in data.get("aliases", {}).items():
        if set(target) <= {"parent"} and target["parent"] in icons:
            icons[alias] = icons[target["parent"]]
    for key, icon in icons.items():
        w, h = icon.get("width", width), icon.get("height", height)
        yield (
            key,
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{side}" '
            f'height="{side}" viewBox="0 0 {w} {h}" color="black">{icon["body"]}</svg>',
        )


def make_icons(modules: Path, out: Path, most: int = 4) -> None:
    """At most ``most`` drawings of a name a set: outlined, filled and so on."""
    import pyvips

    spoken = icon_names()
    of = {other: name for name, others in spoken.items() for other in others}
    masks, names, sets = [], [], []
    for number, each in enumerate(ICON_SETS):
        count: dict[str, int] = {}
        seen = set()
        for plain, svg in drawings(modules, each):
            while (shorter := _VARIANT.sub("", plain)) != plain:
                plain = shorter
            name = of.get(plain)
            if name is None or count.get(name, 0) >= most or svg in seen:
                continue
            seen.add(svg)
            picture = pyvips.Image.svgload_buffer(svg.encode())
            alpha = np.asarray(picture.numpy()[..., 3])
            if alpha.shape != (ICON_SIDE, ICON_SIDE) or alpha.mean() < 6:
                continue
            count[name] = count.get(name, 0) + 1
            masks.append(alpha)
            names.append(name)
            sets.append(number)
    np.savez_compressed(
        out, masks=np.stack(masks), names=np.array(names), sets=np.array(sets, np.int8)
    )


def make_words(source: Path, out: Path) -> None:
    words = [
        w for w in source.read_text(encoding="utf-8").split() if re.fullmatch(r"[a-zA-Z]{1,14}", w)
    ]
    out.write_text("\n".join(words) + "\n", encoding="utf-8")


def main() -> None:
    from training.domains.photos import pack

    if sys.argv[1:] == ["packages"]:
        fonts = [f"@fontsource/{name}" for names in families().values() for name in names]
        print(*fonts, *(f"@iconify-json/{name}" for name in (*ICON_SETS, *pack.SETS)))
        return
    modules, words, out, *clones = map(Path, sys.argv[2:])
    (out / "held").mkdir(parents=True, exist_ok=True)
    if clones:
        pack.make_photos(clones[0], out)
    pack.make_emoji(modules, out)
    make_fonts(modules, out / "fonts.zip")
    make_icons(modules, out / "icons.npz")
    make_words(words, out / "words.txt")


if __name__ == "__main__":
    main()
