"""Compiled constraints against plain ones: for a language with few texts, the ids allowed after a beginning are those
with which one of the texts goes on."""

import itertools
import json
import os
import re
import signal
import time

import pytest

from kestrel_engine import InvalidRequest, SkillUnavailable
from kestrel_engine.processes.template import confined
from kestrel_engine.skills.constraints import grammars
from kestrel_engine.skills.constraints.grammar_process import GrammarProcess
from kestrel_engine.skills.constraints.grammars import Grammars
from kestrel_engine.skills.constraints.setting import read_constraint
from kestrel_engine.types.constraint import Constraint
from tests.engine.fakes import ByteCodec
from tests.engine.preprocess.decoders import decoders, state
from tests.waiting import until

EOS = 0
VOCAB = 400


class PairCodec(ByteCodec):
    """As ByteCodec, with ids 360 up for pairs of letters: a text has many ways into tokens."""

    PAIRS = tuple(a + b for a in 'ab{"t' for b in 'ab:r"')

    def encode(self, text):
        return [100 + byte for byte in text.encode()]

    def token_bytes(self, token_id):
        pair = token_id - 360
        if 0 <= pair < len(self.PAIRS):
            return self.PAIRS[pair].encode()
        return super().token_bytes(token_id)


@pytest.fixture(scope="module")
def compiler():
    compiler = Grammars(PairCodec(), VOCAB, EOS)
    yield compiler
    compiler.close()


def ids(mask):
    assert len(mask) == 52
    bits = int.from_bytes(mask, "little")
    return {i for i in range(VOCAB) if bits >> i & 1}


TOKENS = [PairCodec().token_bytes(i) for i in range(VOCAB)]


def plain_ids(texts, said):
    """The ids with which one of ``texts`` goes on after ``said``; EOS if ``said`` is one of them."""
    rest = tuple({text[len(said) :] for text in texts if text.startswith(said)})
    found = {
        i for i, token in enumerate(TOKENS) if token and any(r.startswith(token) for r in rest)
    }
    return found | ({EOS} if b"" in rest else set())


def check(grammar, texts, most=60):
    """Walks through all beginnings, by all tokens, and compares the masks."""
    texts = {text.encode() for text in texts}
    waiting, seen = [(b"", grammar.start())], set()
    while waiting and len(seen) < most:
        said, matcher = waiting.pop()
        found = ids(matcher.mask)
        assert found == plain_ids(texts, said), said
        for token in sorted(found - {EOS}):
            longer = said + TOKENS[token]
            if longer not in seen:
                seen.add(longer)
                again = grammar.start()
                for byte in longer:
                    follow(again, 100 + byte)
                waiting.append((longer, again))
    assert len(seen) > 3


def test_choices(compiler):
    choices = ("yes", "yes, both", "no", 'a"b\\', "größer 🐞", "a\nb\x07\x7f", "start: /x/")
    check(compiler.compile(Constraint("choices", choices)), choices)


@pytest.mark.parametrize(
    "pattern", ["a{1,3}|b+?a", "(ab|ba){0,2}[^ab]?", r"\d[./]\d", "t?r*?", r"^a|b$", "(?i)ab"]
)
def test_regular_expressions(compiler, pattern):
    grammar = compiler.compile(Constraint("regex", pattern))
    alphabet = "abtrAé.1/"
    texts = ["".join(e) for n in range(4) for e in itertools.product(alphabet, repeat=n)]
    plain = pattern.replace("^", "", 1).replace("$", "") if pattern[0] == "^" else pattern
    for text in [*texts, "abba%", "ababab", "baa", "aaab"]:
        assert accepts(grammar, text) == (re.fullmatch(plain, text) is not None), text


def accepts(grammar, text):
    matcher = grammar.start()
    for byte in text.encode():
        if not allows(matcher.mask, 100 + byte):
            return False
        follow(matcher, 100 + byte)
    return allows(matcher.mask, EOS)


def follow(matcher, token):
    """Takes ``token``, and computes the next mask in this thread."""
    matcher.take(token)
    matcher.compute()


def allows(mask, token):
    return mask[token // 8] >> token % 8 & 1 == 1


def test_a_grammar(compiler):
    """Balanced brackets, which no regular expression describes."""
    lark = 'start: pair+\npair: "a" pair* "b"'
    grammar = compiler.compile(Constraint("grammar", lark))
    for n in range(1, 7):
        for each in itertools.product("ab", repeat=n):
            depth, good = 0, True
            for letter in each:
                depth += 1 if letter == "a" else -1
                good = good and depth >= 0
            assert accepts(grammar, "".join(each)) == (good and depth == 0), each


def test_a_schema(compiler):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["b", True]}, "t": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = compiler.compile(Constraint("json_schema", json.dumps(schema)))
    texts = []
    for a, t in itertools.product(('"b"', "true"), (None, "true", "false")):
        parts = ["{", '"a"', ":", a] + ([] if t is None else [",", '"t"', ":", t]) + ["}"]
        texts += [
            "".join(parts),
            *(" ".join(["".join(parts[:i]), "".join(parts[i:])]) for i in range(1, len(parts))),
        ]
    good = {text for text in texts if accepts(grammar, text)}
    # A blank may stand where JSON permits white space; without any, every value is there.
    assert {text for text in texts if " " not in text} <= good
    assert all(json.loads(text) for text in good) and len(good) > 12
    tight = Constraint("json_schema", json.dumps({**schema, "properties": {"a": {"enum": ["b"]}}}))
    places = itertools.product(("", " "), repeat=4)
    texts = [f'{{{a}"a"{b}:{c}"b"{d}}}' for a, b, c, d in places]
    grammar = compiler.compile(tight)
    check(grammar, [text for text in texts if accepts(grammar, text)])


def test_a_schema_of_any_object(compiler):
    grammar = compiler.compile(Constraint("json_schema", '{"type": "object"}'))
    for text in ("{}", '{"x": [1, {"y": null}], "é": "\\n"}'):
        assert accepts(grammar, text), text
    for text in ("[]", "{} ", "{'x': 1}", '{"x": 01}', '{"x": "\n"}', '{"x":\n1}'):
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        ({}, "constraint", "exactly one"),
        ("yes", "constraint", "must be an object"),
        ({"regex": "a", "choices": ["a"]}, "constraint", "2 are set"),
        ({"xml": "a"}, "constraint.xml", "known: choices"),
        ({"choices": []}, "constraint.choices", "must have 1 to 256"),
        ({"choices": ["a"] * 257}, "constraint.choices", "has 257"),
        ({"choices": "ab"}, "constraint.choices", "list of texts"),
        ({"choices": ["a", ""]}, "constraint.choices[1]", "not be empty"),
        ({"choices": ["a", 3]}, "constraint.choices[1]", "must be text"),
        (
            {"choices": ["é" * 513]},
            "constraint.choices[0]",
            "has 1026 UTF-8 bytes, the limit is 1024",
        ),
        ({"regex": "\ud800"}, "constraint.regex", "lone surrogate"),
        ({"regex": "a" * 32768}, "constraint.regex", "the limit is 32767"),
        ({"regex": 3}, "constraint.regex", "must be text"),
        ({"json_schema": {"a": {1, 2}}}, "constraint.json_schema", "is not JSON"),
        ({"json_schema": {"a": float("nan")}}, "constraint.json_schema", "is not JSON"),
    ],
)
def test_what_is_refused_before_it_is_compiled(value, field, words):
    with pytest.raises(InvalidRequest) as caught:
        read_constraint(value)
    assert caught.value.field == field and words in caught.value.message


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "ye(s|no", "unclosed group at character 3"),
        ("regex", "[a", "unclosed character class at character 1"),
        ("regex", "a(?=b)", "look-ahead"),
        ("regex", r"\bfoo", "not supported"),
        ("regex", "(a)\\1", "backreferences are not supported at character 4"),
        ("grammar", 'start: "a"\n  | b', 'unknown name: "b" at line'),
        ("grammar", 'start: "a"\n  | )', "at line 2, column 5"),
        ("grammar", 'a: "b"', "no start rule"),
        ("grammar", "start: A\nA: /x(?!a)/", "look-behind, is not supported at line 2, column 4"),
        (
            "json_schema",
            '{"properties": {"a": {"pattern": "^(?!0)a"}}}',
            "at /properties/a: look-around",
        ),
        ("json_schema", '{"patternProperties": {"(a": {}}}', "unclosed group"),
        ("grammar", "start: " + "(" * 500 + '"a"' + ")" * 500, "too deeply nested"),
        (
            "json_schema",
            "{",
            "is not JSON: Expecting property name enclosed in double quotes at line 1, column 2",
        ),
        ("json_schema", "[]", "must be a JSON object"),
        ("json_schema", '{"type": "objec"}', "Invalid type: objec"),
        (
            "json_schema",
            '{"properties": {"a": {"items": {"type": 3}}}}',
            "at /properties/a/items: ",
        ),
        ("json_schema", '{"properties": {"a/b": 3}}', "at /properties/a~1b: "),
        (
            "json_schema",
            '{"anyOf": [{}, {"not": {"type": "string"}}]}',
            "at /anyOf/1/not: this keyword cannot be enforced",
        ),
        ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', ""),
        ("json_schema", "[" * 100_000, "nested too deeply"),
        ("json_schema", '{"$ref": "#"}', "at /$ref: requires itself without end"),
    ],
)
def test_the_place_of_an_error(compiler, kind, source, words):
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(Constraint(kind, source))
    assert caught.value.field == f"constraint.{kind}"
    assert words in caught.value.message, caught.value.message
    assert "\n" not in caught.value.message


HOSTILE = {
    "repeats": ("regex", "((a{1000}){1000}){1000}"),
    "states": ("regex", "(a|b)*a(a|b){1000}"),
    "groups": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "and": ("grammar", "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(40))),
    "not": ("grammar", "start: A\nA: ~/[ab]*a[ab]{20}/ & /[ab]*a[ab]{20}/"),
    "doubling": (
        "grammar",
        "start: r0\n"
        + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(999))
        + '\nr999: "a" | ""',
    ),
    "all of": (
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {
                        "anyOf": [
                            {"properties": {f"a{i}": {"const": 1}}},
                            {"properties": {f"b{i}": {"const": 2}}},
                        ]
                    }
                    for i in range(40)
                ]
            }
        ),
    ),
    "deep": ("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000),
    "long": ("json_schema", '{"type": "string", "minLength": 1000000000}'),
    "many": ("json_schema", '{"type": "array", "minItems": 1000000, "items": {"type": "integer"}}'),
    "properties": ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(2000)}})),
    "cycle": ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_end_soon(compiler, name):
    """Compiled, refused, or given up while a text is followed, each within a bound on the server's own time."""
    kind, source = HOSTILE[name]
    assert len(source) < 32768
    began = time.process_time()
    try:
        matcher = compiler.compile(Constraint(kind, source)).start()
        for _ in range(20):
            allowed = sorted(ids(matcher.mask))
            if allowed == [EOS]:
                break
            follow(matcher, allowed[-1] if allowed[-1] != EOS else allowed[0])
    except InvalidRequest as error:
        assert error.field.startswith("constraint")
    assert time.process_time() - began < 5


def test_the_limit_holds_where_the_parent_ignores_the_signals():
    before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGPROF, signal.SIGALRM)]
    process = GrammarProcess()
    try:
        hostile = Constraint(*HOSTILE["and"])
        assert process.problem(hostile) == "takes too much time or memory to compile"
        assert process.problem(Constraint("regex", "a")) == ""
    finally:
        process.close()
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])


async def test_a_killed_process_does_not_stay_a_zombie_and_is_started_again():
    before, process = decoders(), GrammarProcess()
    try:
        assert process.problem(Constraint("regex", "a")) == ""
        (killed,) = decoders() - before
        os.kill(killed, signal.SIGKILL)
        assert process.problem(Constraint("regex", "a")) == ""
        await until(lambda: not state(killed))
        confined.stop()  # As if it had been killed: its forks end with it.
        assert process.problem(Constraint("regex", "a")) == ""
    finally:
        process.close()


def test_matchers_of_one_grammar_are_independent(compiler):
    grammar = compiler.compile(Constraint("choices", ("ab", "ba")))
    one, other = grammar.start(), grammar.start()
    follow(one, 100 + ord("a"))
    assert ids(other.mask) == plain_ids([b"ab", b"ba"], b"")
    assert ids(one.mask) == {100 + ord("b")}


def test_without_the_library_constraints_are_refused(compiler, monkeypatch):
    monkeypatch.setattr(grammars, "AVAILABLE", False)
    with pytest.raises(SkillUnavailable, match="llguidance"):
        compiler.compile(Constraint("regex", "a+"))
