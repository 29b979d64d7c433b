"""The made-up tokenizer: as many ids as asked for, text for each of them, and words of the trace in one token."""

from pathlib import Path

import pytest

from benchmarks.models.made_up_tokenizer import NUM_SPECIAL, tokenizer_file
from benchmarks.models.opening import model_arguments
from benchmarks.traffic.chart_trace import WORDS, make_trace
from kestrel_engine.preprocess.tokenizer import Tokenizer
from kestrel_engine.skills.text.detokenize import StreamingText


@pytest.mark.parametrize("vocab_size", [768, pytest.param(51200, marks=pytest.mark.slow)])
def test_every_id_has_text(vocab_size: int, tmp_path: Path):
    codec = Tokenizer.from_file(tokenizer_file(vocab_size, tmp_path), vocab_size=vocab_size)
    assert codec.vocab_size == vocab_size
    assert codec.append_only
    silent = [i for i in range(vocab_size) if not codec.decode([i])]
    assert silent == list(range(NUM_SPECIAL))
    streaming = StreamingText(codec)
    ids = list(range(vocab_size - 400, vocab_size))
    assert sum(bool(streaming.push(i)) for i in ids) == len(ids)


def test_words_are_tokens_and_text_comes_back(tmp_path: Path):
    path = tokenizer_file(51200, tmp_path)
    assert tokenizer_file(51200, tmp_path) == path
    codec = Tokenizer.from_file(path, vocab_size=51200)
    words = [word for word in WORDS if word.isalpha()]
    assert [len(codec.encode(f" {word}")) for word in words] == [1] * len(words)
    text = "How many? ¿Über 10 % of it, 年?"
    assert codec.decode(codec.encode(text)) == text


@pytest.mark.slow
def test_questions_have_their_length_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.traffic.chart_trace.draw_images", lambda n, **_: [b""] * n)
    codec = Tokenizer.from_file(tokenizer_file(51200, tmp_path), vocab_size=51200)
    trace = make_trace(codec.encode)
    assert {12, 30} <= {q.num_tokens for q in trace.questions} <= set(range(12, 31))


def test_weights_that_are_made_up_get_it_unless_one_is_named():
    config = model_arguments(["--model", "moondream2", "--random-weights", "--device", "cpu"])
    assert config.tokenizer_path is not None and "51200" in str(config.tokenizer_path)
    flags = ["--model", "moondream2", "--random-weights", "--tokenizer", "x.json"]
    assert str(model_arguments(flags).tokenizer_path) == "x.json"
    assert model_arguments(["--model", "moondream2"]).tokenizer_path is None
