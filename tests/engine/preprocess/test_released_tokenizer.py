"""The released vocabulary: ids whose text crosses words, reserved ids, missing bytes, ids above the vocabulary."""

import json
import random
from dataclasses import replace

import pytest
import tokenizers

from kestrel_engine import InferenceEngine, RuntimeConfig
from kestrel_engine.maintenance.acceptance import check_tokenizer
from kestrel_engine.maintenance.releases import STARMIE
from kestrel_engine.preprocess.tokenizer import Tokenizer
from kestrel_engine.skills.constraints.grammars import Grammars
from kestrel_engine.skills.constraints.setting import read_constraint
from kestrel_engine.skills.text.detokenize import StreamingText
from tests.engine.released_tokenizer import KNOWN_IDS, MISSING, VOCABULARY, released_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["capital", "population"],
    "additionalProperties": False,
}
CONFIG = {
    "model_type": "moondream3",
    "config": {
        "text": {"dim": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ff_dim": 64, "vocab_size": VOCABULARY,
                 "tau_attn": True, "rotary_dim": 16, "moe": None},
        "vision": {"enc_dim": 32, "enc_n_layers": 1, "enc_n_heads": 2, "enc_ff_dim": 32, "crop_size": 126,
                   "overlap_margin": 1, "proj_inner_dim": 64, "proj_out_dim": 64},
        "region": {"dim": 64, "coord_feat_dim": 32, "coord_out_dim": 64, "size_feat_dim": 32, "size_out_dim": 64},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return released_tokenizer(tmp_path_factory.mktemp("released"))


@pytest.fixture(scope="module")
def codec(path):
    return Tokenizer.from_file(path, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def library(path):
    return tokenizers.Tokenizer.from_file(str(path))


def test_the_description_is_recognised(codec):
    assert check_tokenizer(codec, STARMIE).status == "ok"
    assert codec.append_only


def test_a_text_of_other_ids_only_warns_if_the_known_ids_have_its_text(codec):
    (whole,) = codec.encode(" for the")
    facts = replace(STARMIE, ids={" for the": [codec.encode(each)[0] for each in " for the"]})
    found = check_tokenizer(codec, facts)
    assert found.status == "warn" and f"' for the' has the ids [{whole}] instead" in found.message


def test_another_vocabulary_is_named():
    other = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()))
    found = check_tokenizer(other, STARMIE)
    assert (found.status, "0 ids instead of 51200" in found.message) == ("fail", True)


def test_reserved_ids_have_no_text_and_are_read_where_they_are_spelled(codec, library):
    assert codec.decode(list(range(21))) == ""
    assert [codec.token_bytes(number) for number in range(21)] == [b""] * 21
    for text in (
        "<|md_reserved_2|>",
        "a <|md_reserved_19|> b",
        "<|endoftext|>",
        "<|md_reserved_20|>",
    ):
        assert codec.encode(text) == library.encode(text).ids


def test_bytes_without_an_id_are_dropped_as_the_library_does(codec, library):
    text = "a\U000e0067\U0005fffdb"
    assert codec.encode(text) == library.encode(text).ids
    assert codec.decode(codec.encode(text)) == library.decode(library.encode(text).ids)
    assert all(library.token_to_id(character) is None for character in MISSING)


def test_a_blank_before_a_name_is_another_id(codec):
    """Detect and Point encode " apple", Segment "apple"."""
    assert (codec.encode(" apple"), codec.encode("apple")) == ([12913], [14299])


def test_tokens_across_words_stream_as_they_decode(codec):
    random_ids = random.Random(1)
    known = list(KNOWN_IDS.values())
    for _ in range(200):
        ids = random_ids.choices([*known, *range(21, 261)], k=random_ids.randint(1, 30))
        text = StreamingText(codec)
        assert "".join([*(text.push(i) for i in ids), text.finish()]) == codec.decode(ids)
    spelled = [number for number in known if number > 20]
    assert b"".join(map(codec.token_bytes, spelled)).decode() == codec.decode(spelled)


def test_ids_above_the_vocabulary_have_no_text(codec, library):
    assert (
        codec.decode([489, VOCABULARY, 70000]) == library.decode([489, VOCABULARY, 70000]) == "The"
    )
    assert codec.token_bytes(VOCABULARY) == b""


def test_a_constraint_leads_through_tokens_across_the_parts_of_json(codec):
    """The longest known token that is allowed and goes on with the answer, which is the released model's."""
    answer, ids = '{"capital": "Paris", "population": 2148327}', []
    texts = {number: codec.decode([number]) for number in [*KNOWN_IDS.values(), *range(21, 261)]}
    grammars = Grammars(codec, VOCABULARY, eos_id=0)
    try:
        matcher = grammars.compile(read_constraint({"json_schema": SCHEMA})).start()
        while rest := answer[len(codec.decode(ids)) :]:
            allowed = [
                number
                for number, text in texts.items()
                if text and rest.startswith(text) and matcher.mask[number // 8] >> number % 8 & 1
            ]
            ids.append(max(allowed, key=lambda number: len(texts[number])))
            matcher.take(ids[-1])
            matcher.compute()
        assert matcher.mask[0] & 1, "the answer may end here"
    finally:
        grammars.close()
    assert ids == [
        111,
        22,
        16035,
        2247,
        421,
        28605,
        22,
        32,
        421,
        13000,
        2247,
        225,
        38,
        14143,
        19919,
        113,
    ]


async def test_an_engine_with_the_vocabulary(path, codec, tmp_path):
    """Prompts hold the released ids, and answers, streams and alternatives the texts of theirs."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = RuntimeConfig(
        model_path=tmp_path / "config.json", tokenizer_path=path, random_weights=True, device="cpu"
    )
    question = "What is 17 + 26? Reply with just the number."
    async with await InferenceEngine.create(config) as engine:
        settings = {"max_tokens": 20, "temperature": 0, "logprobs": True, "top_logprobs": 3}
        stream = await engine.submit("query", None, {"question": question}, settings)
        async with stream:
            deltas = [update.text async for update in stream]
            result = await stream.result()
    assert result.metrics.input_tokens == len([0, 1, 15381, 2, *codec.encode(question), 3])
    text = codec.decode(result.token_ids)
    assert "".join(deltas) == result.output["answer"] == text
    assert b"".join(token.utf8 for token in result.logprobs).decode() == text
    assert all(token.utf8 == codec.token_bytes(token.id) for token in result.logprobs)
