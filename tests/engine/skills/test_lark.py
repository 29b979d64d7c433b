"""Grammars whose rules require themselves without end are refused by name and place, and others are not."""

import random

import pytest

from kestrel_engine import InvalidRequest
from kestrel_engine.skills.constraints import grammar_text
from kestrel_engine.skills.constraints.grammars import Grammars
from kestrel_engine.skills.constraints.lark import endless_rule
from kestrel_engine.types.constraint import Constraint
from tests.engine.fakes import ByteCodec

BYTES = grammar_text.new_tokenizer([bytes([byte]) for byte in range(256)] + [b""], 256)


def problem(source):
    return grammar_text.problem(Constraint("grammar", source), BYTES)


ENDLESS = {
    'start: "(" start ")"': ("start", 1, 12),
    'start: "a" | b\nb: "x" b': ("b", 2, 8),
    'start: "a" b?\nb: "x" b': ("b", 2, 8),
    'start: "a" [b]\n?b: "x" (b | c)\n!c: b b': ("b", 2, 10),
    'start: ("a" start)+': ("start", 1, 13),
    'start: "a" start{1,2}': ("start", 1, 12),
    'start: "a" start~2..3': ("start", 1, 12),
    'start: /\\/"|[#]/ start // | "a"': ("start", 1, 18),
    'start: "a" b # b\n\n// ;\nb: "x" -> start\n | c\nc: %regex {"substring_words": "a b"} c': ("c", 6, 38),
    'start: "x" %lark {\nstart: "(" start ")" | NUMBER start\nNUMBER: /[0-9]+/\n}': ("start", 2, 12),
    'start: a::0x0\na::_: "x" a::set_bit(0) %if bit_clear(0)\n | a::set_bit(1) "y"': ("a", 2, 11),
    '%ignore /[ (]/\nT: /x/ & ("y" | "x")\nstart: T "a".."z" <[256]> start': ("start", 3, 27),
}  # fmt: skip


@pytest.mark.parametrize("source", ENDLESS)
def test_the_rule_that_has_no_end(source):
    name, line, column = ENDLESS[source]
    assert problem(source) == (
        f"rule {name} requires itself without end at line {line}, column {column}; add an alternative without it"
    )


@pytest.mark.parametrize(
    "source",
    [
        'start: "(" start ")" |',
        'start: "(" start? ")"',
        'start: "(" start* ")"',
        'start: "(" [start] ")"',
        'start: "(" start~0..2 ")"',
        'start: "(" start{,2} ")"',
        'start: "(" (start | "x") ")"',
        'start: "a"\nunused: "x" unused',
        'start: e\ne: e "+" e | NUMBER\n%import common.NUMBER',
        'start: s -> start\ns: /start/ "start"',
        'start: list\nlist: item ("," item)*\nitem: /[a-z]+/ | "[" list "]"',
        'start: %json {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]} | "(" start ")"',
    ],
)
def test_what_ends(source):
    assert problem(source) == ""


class Drawn:
    """A random grammar: its notation, and for each rule the alternatives of its tree.

    An item is a text (a terminal), the name of a rule, or a list of alternatives with whether it may be absent.
    """

    def __init__(self, rng):
        self.rng = rng
        self.names = ["start", *(f"r_{i}-x" for i in range(rng.randrange(5)))]
        self.rules = {name: self.alternatives(2) for name in self.names}

    def alternatives(self, depth):
        return [self.sequence(depth) for _ in range(self.rng.choice((1, 1, 1, 2, 3)))]

    def sequence(self, depth):
        return [self.item(depth) for _ in range(self.rng.choice((0, 1, 1, 2, 3)))]

    def item(self, depth):
        rng = self.rng
        kind = rng.choice(("text", "rule", "rule", "group" if depth else "text"))
        match kind:
            case "text":
                return (
                    "text",
                    rng.choice(('"a"', '"|"', '"r_0-x\\")"', "/b[|)]/", '"c".."d"', "T", '"x"i')),
                )
            case "rule":
                inner = ("rule", rng.choice(self.names))
            case _:
                inner = ("group", self.alternatives(depth - 1))
        how = rng.choice(("", "", "", "+", "?", "*", "{,2}", "{1,2}", "{0,3}", "~2", "~0..2", "[]"))
        return ("repeat", inner, how)

    def text(self):
        rng, lines = self.rng, ["T: /t|u/ // T: x"]
        for name, alternatives in self.rules.items():
            bar = rng.choice((" | ", "|", "\n  | ", "\r\n|"))
            lines.append(
                f"{rng.choice(('', '?', '!'))}{name}{rng.choice((':', ' : '))}{self.of(alternatives, bar)}"
            )
        rng.shuffle(lines)
        return rng.choice(("\n", "\n\n", ' # start: "\n')).join(lines)

    def of(self, alternatives, bar):
        return bar.join(" ".join(map(self.of_item, each)) for each in alternatives)

    def of_item(self, item):
        match item:
            case ("text", text) | ("rule", text):
                return text
            case ("group", alternatives):
                return f"({self.of(alternatives, ' | ')})"
            case ("repeat", inner, "[]"):
                return f"[{self.of_item(inner)}]"
            case ("repeat", inner, how):
                return self.of_item(inner) + how

    def shortest(self):
        """The number of terminals of each rule's shortest text, found by trying longer and longer derivations."""
        best = dict.fromkeys(self.names, float("inf"))
        for _ in range(len(self.names) + 1):
            best = {name: self.least(rule, best) for name, rule in self.rules.items()}
        return best

    def least(self, alternatives, best):
        return min(sum(self.least_of(item, best) for item in each) for each in alternatives)

    def least_of(self, item, best):
        match item:
            case ("text", _):
                return 1
            case ("rule", name):
                return best[name]
            case ("group", alternatives):
                return self.least(alternatives, best)
            case ("repeat", inner, how):
                return (
                    0
                    if how in ("?", "*", "{,2}", "{0,3}", "~0..2", "[]")
                    else self.least_of(inner, best)
                )

    def reached(self):
        found = ["start"]
        for name in found:  # It grows meanwhile.
            waiting = [self.rules[name]]
            while waiting:
                for item in (item for each in waiting.pop() for item in each):
                    while item[0] == "repeat":
                        item = item[1]
                    if item[0] == "group":
                        waiting.append(item[1])
                    elif item[0] == "rule" and item[1] not in found:
                        found.append(item[1])
        return found


def check_drawn(seed):
    drawn = Drawn(random.Random(seed))
    source = drawn.text()
    shortest = drawn.shortest()
    bad = {name for name in drawn.reached() if shortest[name] == float("inf")}
    rule = endless_rule(source)
    assert (rule is not None) == bool(bad), source
    assert rule is None or rule[0] in bad, source
    return source, bad


def test_random_grammars():
    compared = [0, 0]
    for seed in range(200):
        source, bad = check_drawn(seed)
        if (told := grammar_text.new_matcher(BYTES, source).get_error()) == "":
            compared[bool(bad)] += 1
            assert problem(source).startswith("rule ") == bool(bad), source
        else:  # Only for what the library does not take, such as a rule without any text.
            assert "circular" not in told
    assert min(compared) > 30, compared


def test_an_answer_that_comes_to_a_part_without_texts():
    compiler = Grammars(ByteCodec(), 400, 0)
    try:
        matcher = compiler.compile(
            Constraint("grammar", 'start: "x" | "y" A\nA: /a/ & /b/')
        ).start()
        matcher.take(100 + ord("y"))
        with pytest.raises(InvalidRequest, match="has a part that matches no text"):
            matcher.compute()
    finally:
        compiler.close()


def test_schemas_in_a_grammar_are_checked_as_others():
    object_ = '{"type": "object", "properties": {"a": {"$ref": "#"}},\n "required": ["a"]}'
    assert problem(f'T: "a"\nstart: T %json {object_}') == (
        "at /properties/a/$ref: requires itself without end; make a property optional, or permit null, "
        "in %json at line 2, column 10"
    )
    large = '{"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]}'
    assert "too large to be combined, in %json at line 1, column 8" in problem(
        f"start: %json {large}"
    )
    lenient = '{"x-guidance": {"lenient": true}, "not": {}}'
    assert problem(f"start: %json {lenient}").startswith("at /x-guidance: options of the library")
    formats = 'start: "a" %json {\n"format": "date",\n"type": "string"} | )'
    assert problem(formats).endswith("at line 3, column 21")
    assert problem('start: "%json {" /%json [{]/ | %json {"uniqueItems": false} // %json {') == ""
