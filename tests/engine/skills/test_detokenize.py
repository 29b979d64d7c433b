"""StreamingText: joined deltas equal one decode, characters stay whole, cost stays flat."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders

from kestrel_engine.preprocess.tokenizer import Tokenizer
from kestrel_engine.skills.text.detokenize import StreamingText
from tests.examples import given_examples

GOLDENS = Path(__file__).parents[2] / "data" / "goldens"
TOKENIZER = Tokenizer.from_file(GOLDENS / "tokenizer.json")
REPLACEMENT = "\ufffd"

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [*PRINTABLE, *(byte for byte in range(256) if byte not in PRINTABLE)]
"""The byte behind each of the ids 10..265, in the order of byte-level BPE alphabets."""


def byte_ids(data: bytes) -> list[int]:
    return [10 + BYTES.index(byte) for byte in data]


def stream(codec, ids) -> list[str]:
    streaming = StreamingText(codec)
    return [*(streaming.push(i) for i in ids), streaming.finish()]


def golden_texts():
    for model in ("md2", "md3"):
        for case in json.loads((GOLDENS / model / "expected.json").read_text())["cases"]:
            if "decode_all" in case:
                yield pytest.param(
                    case["ids"], case["decode_all"], case["text"], id=f"{model}-{case['id']}"
                )


@pytest.mark.golden
@pytest.mark.parametrize(("ids", "decode_all", "text"), list(golden_texts()))
def test_reference_texts(ids, decode_all, text):
    """In every stored case the reference's streamed text equals its one decode of all ids; so must ours."""
    assert "".join(stream(TOKENIZER, ids)) == decode_all == text


def test_byte_table_is_the_tokenizers():
    text = "Ünï\t中😀\n\x7f\xad"
    assert TOKENIZER.decode(byte_ids(text.encode())) == text


@given_examples(40, 300, ids=st.lists(st.integers(0, 1030), max_size=60))
def test_any_ids_join_to_one_decode(ids):
    """Random ids give invalid UTF-8 in the middle, special (0..9) and unknown (1024..) ids."""
    assert "".join(stream(TOKENIZER, ids)) == TOKENIZER.decode(ids)


pieces = st.one_of(
    st.text("az~é\xad中🐞\0", max_size=3).map(str.encode),
    st.binary(max_size=4),
    st.sampled_from(
        [b"\xf0\x9f\x98", b"\xe4\xb8", b"\x80", b"\xed\xa0\x80", b"\xf4\x90", REPLACEMENT.encode()]
    ),
)


@given_examples(
    10,
    300,
    data=st.lists(pieces, max_size=12).map(b"".join),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_bytes_one_by_one_with_special_ids_between(data, cuts):
    ids = byte_ids(data)
    for cut in cuts:
        ids.insert(min(cut, len(ids)), 5)
    assert "".join(stream(TOKENIZER, ids)) == data.decode(errors="replace")


def test_a_character_comes_whole_and_as_soon_as_it_is_complete():
    assert stream(TOKENIZER, byte_ids("a中😀b".encode())) == (
        ["a", "", "", "中", "", "", "", "😀", "b", ""]
    )


def test_broken_bytes_come_out_when_they_are_known_to_be_broken():
    assert stream(TOKENIZER, byte_ids(b"\xe4\xb8")) == ["", "", REPLACEMENT]
    assert stream(TOKENIZER, byte_ids(b"\xe4\xb8a")) == ["", "", REPLACEMENT + "a", ""]
    assert stream(TOKENIZER, byte_ids(b"\xff\xff\xff")) == [
        "",
        REPLACEMENT,
        REPLACEMENT,
        REPLACEMENT,
    ]


@given_examples(40, 300, ids=st.lists(st.integers(0, 1030), max_size=60))
def test_the_bytes_of_any_ids_join_to_their_text(ids):
    joined = b"".join(TOKENIZER.token_bytes(i) for i in ids)
    assert joined.decode(errors="replace") == TOKENIZER.decode(ids)


def test_the_bytes_of_every_byte_are_its_own():
    assert [TOKENIZER.token_bytes(10 + i) for i in range(256)] == [bytes([b]) for b in BYTES]


def test_a_genuine_replacement_character_survives():
    assert "".join(stream(TOKENIZER, byte_ids(f"x{REPLACEMENT}y{REPLACEMENT}".encode()))) == (
        f"x{REPLACEMENT}y{REPLACEMENT}"
    )


def test_finish_resets():
    streaming = StreamingText(TOKENIZER)
    assert streaming.finish() == ""
    assert streaming.push(byte_ids(b"\xe4")[0]) == ""
    assert streaming.finish() == REPLACEMENT
    assert streaming.finish() == ""
    assert streaming.push(byte_ids(b"a")[0]) == "a"


class Counting:
    """A codec that notes how many ids each decode is given."""

    def __init__(self, inner):
        self.inner, self.most = inner, 0

    def decode(self, ids):
        self.most = max(self.most, len(ids))
        return self.inner.decode(ids)


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([10 + (7919 * i) % 1014 for i in range(3000)], id="mixed"),
        pytest.param(byte_ids(b"\x80" * 3000), id="never valid"),
        pytest.param(byte_ids("😀".encode() * 750), id="four bytes a character"),
        pytest.param([74] + [5] * 3000, id="special ids"),
    ],
)
def test_cost_does_not_grow_with_the_text(ids):
    codec = Counting(TOKENIZER)
    assert "".join(stream(codec, ids)) == TOKENIZER.decode(ids)
    assert codec.most <= 5


WORDS = [
    "▁",
    "▁Hello",
    "lo",
    "▁▁x",
    "wor",
    "##ing",
    ".",
    "n't",
    "!</w>",
    "a</w>",
    "中",
    "<0xE4>",
    "<0xB8>",
    "<0xAD>",
    "<0xFF>",
]


def word_tokenizer(decoder) -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="▁"))
    if decoder is not None:
        inner.decoder = decoder
    return Tokenizer(inner)


OTHERS = {
    "none": (None, True),
    "metaspace": (decoders.Metaspace(), True),
    "metaspace-never": (decoders.Metaspace(prepend_scheme="never"), True),
    "wordpiece": (decoders.WordPiece(), True),
    "bpe": (decoders.BPEDecoder(), True),
    "sequence": (decoders.Sequence([decoders.Metaspace(), decoders.Fuse()]), True),
    "byte-fallback": (
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        False,
    ),
    "ctc": (decoders.CTC(), False),
}
OTHER_TOKENIZERS = {name: word_tokenizer(decoder) for name, (decoder, _) in OTHERS.items()}


@pytest.mark.parametrize("name", OTHERS)
@given_examples(40, 150, ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=16))
def test_other_decoders_stay_exact(name, ids):
    """Decoders that look across ids: spaces stripped or added, clean-up, runs of bytes."""
    _, append_only = OTHERS[name]
    codec = OTHER_TOKENIZERS[name]
    assert codec.append_only is append_only
    deltas = stream(codec, ids)
    assert "".join(deltas) == codec.decode(ids)
    if not append_only:
        assert not any(deltas[:-1])
