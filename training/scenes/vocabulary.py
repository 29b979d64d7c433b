"""The closed world of kestrel-tiny: shapes, colours, fill styles and the words for them."""

SHAPES = tuple("circle square triangle diamond star cross heart crescent arrow semicircle".split())
PLURALS: tuple[str, ...] = tuple("crosses" if s == "cross" else s + "s" for s in SHAPES)

# The measured colours, and eight more that only training scenes hold: they surround the measured ones, so that a
# model must distinguish a colour from its neighbours on every shape, also where the pair itself is held out.
COLOURS = tuple(
    "red orange yellow green blue purple pink brown black white "
    "lime teal cyan navy olive maroon magenta gray".split()
)
MEASURED_COLOURS = 10

# Hue (degrees, may wrap below zero), saturation and value ranges that count as each colour.
COLOUR_RANGES: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "red": ((-6, 6), (0.78, 1.0), (0.74, 1.0)), "orange": ((22, 40), (0.85, 1.0), (0.92, 1.0)),
    "yellow": ((51, 62), (0.75, 1.0), (0.9, 1.0)), "green": ((95, 150), (0.6, 1.0), (0.45, 1.0)),
    "blue": ((208, 244), (0.68, 1.0), (0.6, 1.0)), "purple": ((270, 300), (0.6, 1.0), (0.45, 0.78)),
    "pink": ((320, 350), (0.25, 0.6), (0.93, 1.0)), "brown": ((14, 31), (0.58, 0.88), (0.34, 0.56)),
    "black": ((0, 360), (0.0, 0.3), (0.0, 0.12)), "white": ((0, 360), (0.0, 0.03), (0.95, 1.0)),
    "lime": ((68, 86), (0.7, 1.0), (0.85, 1.0)), "teal": ((160, 178), (0.7, 1.0), (0.35, 0.6)),
    "cyan": ((180, 196), (0.6, 1.0), (0.85, 1.0)), "navy": ((215, 240), (0.7, 1.0), (0.22, 0.42)),
    "olive": ((52, 68), (0.6, 1.0), (0.32, 0.5)), "maroon": ((-12, 2), (0.65, 1.0), (0.32, 0.54)),
    "magenta": ((304, 316), (0.78, 1.0), (0.86, 1.0)), "gray": ((0, 360), (0.0, 0.05), (0.4, 0.65)),
}  # fmt: skip

STYLES: tuple[str, ...] = ("solid", "outlined", "striped")
STYLE_WORDS = (("solid", "filled", "plain"), ("outlined", "hollow"), ("striped",))

# Pairs (colour, shape) that no training image and no training text contains.
_HELD_OUT = "purple star|green heart|orange cross|blue crescent|yellow arrow|pink diamond"
HELD_OUT = frozenset(
    (COLOURS.index(colour), SHAPES.index(shape))
    for colour, shape in map(str.split, _HELD_OUT.split("|"))
)

# Words a user may say instead; (singular, plural).
SYNONYMS: dict[str, tuple[str, str]] = {
    "cross": ("plus sign", "plus signs"), "crescent": ("moon", "moons"), "semicircle": ("half circle", "half circles"),
}  # fmt: skip
ANY_NOUNS = tuple((noun, noun + "s") for noun in ("shape", "object", "thing", "figure"))

# Things that are never in an image; asking for one must give nothing.
FOREIGN_NOUNS = (
    "dog|cat|car|person|tree|house|bird|horse|chair|table|bottle|cup|face|hand|flower|boat|train|bus|phone|book|clock|"
    "hat|shoe|ball|banana|apple|cake|knife|bear|fish|plane|truck|bicycle|laptop|mouse|traffic light|stop sign|hexagon|"
    "pentagon|octagon|spiral|letter|number"
).split("|")

NUMBER_WORDS = "no one two three four five six seven eight nine ten eleven twelve".split()
