"""The tokenizer wrapper: the library's defaults, nothing cut, clear errors."""

import json
import threading
from pathlib import Path

import pytest
import tokenizers

from kestrel_engine.errors import CheckpointError
from kestrel_engine.preprocess.tokenizer import LONG_TEXT, Tokenizer
from kestrel_engine.skills.base import TextCodec

GOLDENS = Path(__file__).parents[2] / "data" / "goldens"
PATH = GOLDENS / "tokenizer.json"
TEXTS = ["What is in the image?", " a red circle", "中文 and 😀\n\n", "", "a<|endoftext|>b", "Ω≈ç√"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(PATH, vocab_size=1024)


def test_is_a_text_codec(tokenizer):
    codec: TextCodec = tokenizer
    assert codec.decode(tuple(codec.encode("so it is"))) == "so it is"


@pytest.mark.parametrize("text", TEXTS)
def test_equals_the_library(tokenizer, text):
    library = tokenizers.Tokenizer.from_file(str(PATH))
    assert tokenizer.encode(text) == library.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == library.decode(library.encode(text).ids)
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|endoftext|>", "")


@pytest.mark.golden
@pytest.mark.parametrize("model", ["md2", "md3"])
def test_encodes_the_words_of_the_stored_prompts(tokenizer, model):
    """Each stored query prompt without spatial references holds the question's ids between prefix and suffix."""
    rows = json.loads((GOLDENS / model / "expected.json").read_text())["prompt_table"]
    checked = 0
    for row in rows:
        if row.get("question") and not row.get("spatial_refs"):
            ids, question = row["ids"], tokenizer.encode(row["question"])
            assert any(ids[i : i + len(question)] == question for i in range(len(ids))), row
            checked += 1
    assert checked >= 3


def test_special_ids_are_left_out_of_text(tokenizer):
    ids = [0, 5, *tokenizer.encode("one"), 6, 3, *tokenizer.encode(" two"), 9]
    assert tokenizer.decode(ids) == "one two"


def test_vocabulary(tokenizer):
    assert tokenizer.vocab_size == 1024
    assert tokenizer.append_only
    with pytest.raises(CheckpointError, match=r"ids up to 1023, the model only 1000"):
        Tokenizer.from_file(PATH, vocab_size=1000)
    assert Tokenizer.from_file(PATH, vocab_size=51200).vocab_size == 1024


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    library = tokenizers.Tokenizer.from_file(str(PATH))
    library.enable_truncation(max_length=4)
    library.enable_padding(length=16)
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    text = "many more than four ids"
    expected = Tokenizer.from_file(PATH).encode(text)
    assert len(expected) > 4 and len(expected) != 16
    assert Tokenizer.from_file(path).encode(text) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a valid tokenizer.json"),
        (b"{", "not a valid tokenizer.json"),
        (b"[]", "not a valid tokenizer.json"),
        (b'{"version": "1.0", "model": {"type": "Unheard"}}', "not a valid tokenizer.json"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_broken_files(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.from_file(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_files(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        Tokenizer.from_file(tmp_path / "none.json")
    with pytest.raises(CheckpointError, match="directory"):
        Tokenizer.from_file(tmp_path)


def test_a_long_text_has_the_ids_of_the_library(tokenizer):
    for text in (
        "a " * LONG_TEXT,
        "Wörter, 12345 \u4e2d\n" * 999,
        "<|endoftext|>" * 999,
        "x" * LONG_TEXT,
    ):
        assert len(text) >= LONG_TEXT
        assert tokenizer.encode(text) == tokenizer._inner.encode(text).ids


def test_threads_share_one_tokenizer(tokenizer):
    texts = [f"{i} " + "a picture of a bird " * (1 + i % 7) for i in range(200)]
    expected = [tokenizer.encode(text) for text in texts]
    wrong: list[str] = []

    def work() -> None:
        for text, ids in zip(texts, expected, strict=True):
            if tokenizer.encode(text) != ids or tokenizer.decode(ids) != text:
                wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
