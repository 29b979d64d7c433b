"""What an image that controls its decoder may answer: each answer is one clean error, and the next image is decoded."""

import json
import sys
from pathlib import Path

import pytest

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import KestrelError
from kestrel_engine.preprocess import pool
from kestrel_engine.preprocess.pool import PreprocessPool
from kestrel_engine.preprocess.processes import decoder_process
from kestrel_engine.processes import Template
from kestrel_engine.processes.template import start_confined
from kestrel_engine.types.model_config import VisionConfig
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

DONE = {"keys": ["0" * 64], "crop_keys": None, "width": 32, "height": 24, "seconds": 0.1}
COST = {"pixels": 100, "num_bytes": 100, "seconds": 0.1}
ANSWERS = {
    "no JSON": b"{",
    "no object": b"[1]",
    "levels without end": b"[" * 30_000,
    "another encoding": b"\xff\xfe{}",
    "nothing": b"{}",
    "a segment of less": {"done": DONE},
    "no width": {"done": DONE | {"width": 0}},
    "a negative size": {"done": DONE | {"width": -32, "height": -24}},
    "a huge size": {"done": DONE | {"width": 10**9, "height": 10**9}},
    "a list": {"done": [1]},
    "no cost": {"cost": 5},
    "a negative cost": {"cost": COST | {"num_bytes": -(10**12)}},
    "negative pixels": {"cost": COST | {"pixels": -(10**12)}},
    "more pixels than allowed": {"cost": COST | {"pixels": 10**12}},
    "a cost that is no number": {"cost": COST | {"seconds": float("nan")}},
    "an unknown error": {"error": ["SystemExit", "a", "b"]},
    "an error of another form": {"error": [["a"], "b", "c"]},
    "a long error": {"error": ["ImageDecodeError", "f" * 9000, "t" * 40_000]},
    "a long fault": {"fault": "f" * 60_000},
    "its own end": {"ended": 0},
    "an end that is no number": {"ended": "x", "call": "y"},
    "an end by an unknown signal": {"ended": -5000},
}


def framed(answer) -> bytes:
    data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return len(data).to_bytes(4, "little") + data


def decoders() -> str:
    pid = decoder_process.confined.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


@pytest.fixture(scope="module")
def lying():
    with pytest.MonkeyPatch.context() as patched:
        template = Template(start_confined)
        patched.setattr(pool, "confined", template)
        patched.setattr(decoder_process, "confined", template)
        for module in (pool, decoder_process):
            patched.setattr(module, "MODULE", "tests.engine.confinement.liar")
        yield
        template.stop()


@pytest.mark.parametrize("name", [*ANSWERS, "a message without end", "two answers"])
async def test_an_answer_of_a_decoder_that_an_image_controls(lying, name):
    images = PreprocessPool(1, ImageLimits(), VisionConfig())
    if name == "a message without end":
        answer = b"\xff\xff\xff\xff"
    elif name == "two answers":
        answer = framed({"fault": "first"}) + framed({"fault": "second"})
    else:
        answer = framed(ANSWERS[name])
    for number in range(2):
        with pytest.raises(KestrelError) as caught:
            await images.prepare(answer + bytes(number))
        assert len(str(caught.value)) < 2300
    images.close()
    await until(lambda: not decoders())  # None is left behind, whatever it says of its end.
    load = images.load
    assert (load.expensive_bytes, load.waiting_pixels, load.running) == (0, 0, 0)
