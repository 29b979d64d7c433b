"""Every value of config.json is checked: a checkpoint may come from a stranger."""

import pytest

from kestrel_engine.errors import ConfigError
from kestrel_engine.types.model_config import parse_model_config

WRONG = [
    ({"config": []}, "config=[]: must be an object"),
    ({"config": {"text": 3}}, "text=3: must be an object"),
    ({"config": {"text": {"dim": "2048"}}}, "text.dim='2048': must be a whole number from 1"),
    ({"config": {"text": {"dim": 0}}}, "text.dim=0: must be a whole number from 1"),
    ({"config": {"text": {"dim": 2048.0}}}, "text.dim=2048.0: must be a whole number"),
    ({"config": {"text": {"n_layers": True}}}, "text.n_layers=True: must be a whole number"),
    ({"config": {"text": {"tau_attn": 1}}}, "text.tau_attn=1: must be true or false"),
    ({"config": {"text": {"rope_theta": float("inf")}}}, "text.rope_theta=inf: must be above 0"),
    ({"config": {"text": {"rope_theta": -1.0}}}, "text.rope_theta=-1.0: must be above 0"),
    ({"config": {"text": {"moe": [64]}}}, "moe=[64]: must be an object"),
    ({"config": {"text": {"moe": {"n_experts": -1}}}}, "text.moe.num_experts=-1: must be a whole"),
    ({"config": {"vision": {"crop_size": 1 << 31}}}, "vision.crop_size=2147483648: must be"),
    ({"config": {"region": {"decoder": "rnn"}}}, "region.decoder='rnn': must be one of mlp"),
    ({"config": {"tokenizer": {"eos_id": -1}}}, "tokenizer.eos_id=-1: must be a whole number"),
    ({"config": {"tokenizer": {"templates": {"query": {"prefix": "1"}}}}}, "must be a list of ids"),
    (
        {"config": {"tokenizer": {"templates": {"caption": {"short": [[1]]}}}}},
        "caption.short=[[1]]",
    ),
    ({"config": {"tokenizer": {"templates": {"point": {"suffix": [51200]}}}}}, "ids below 51200"),
]


@pytest.mark.parametrize(("raw", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_value_is_named(raw: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model_config(raw)
    assert message in str(caught.value)


def test_null_and_unknown_keys_mean_the_default() -> None:
    raw = {"config": {"text": {"dim": None, "group_size": None, "rope_theta": 10000}}}
    assert parse_model_config(raw).text == parse_model_config({}).text
    assert parse_model_config({"model_type": 3, "architectures": 7}).family == "moondream2"
