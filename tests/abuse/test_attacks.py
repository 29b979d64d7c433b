"""The attacks on ``kestrel-grpc serve`` with default flags: memory stays within what the flags promise, the
polite caller is answered, and the server lives. ``python -m tests.abuse.attacks`` measures how long he waits.

All are slow. test_flood.py and test_connections.py try those of strangers on a server with the fake runtime."""

import pytest

from tests.abuse.attacks import ATTACKS, run
from tests.abuse.target import Target
from tests.forking.process import ForkedProcess

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STRANGERS = 160
"""MiB that strangers may move: nothing of theirs is read, but gRPC's buffers and the allocator's slack."""
HELD = 1024
"""MiB of --max-held-bytes."""
DECODING = 1024 + 512
"""MiB of images that are being decoded, and of the decoders' processes."""

MOST_MIB = {
    "bombs_of_strangers": STRANGERS,
    "header_tables": STRANGERS,
    "bombs": HELD,
    "bombs_within_the_limit": HELD,
    "unfinished_messages": HELD,
    "unfinished_messages_of_strangers": STRANGERS,
    "large_messages": HELD,
    "small_fields": HELD,
    "long_texts": HELD,
    "many_streams": 512,
    "pings_and_settings": STRANGERS,
    "resets": STRANGERS,
    "large_metadata": STRANGERS,
    "cancels": 512,
    "one_principal_with_700_calls": 512,
    "stored_images": HELD + 512,
    "stalled_uploads": HELD + 512,
    "watchers": STRANGERS,
    "slow_readers": STRANGERS,
    "ambiguous_grammars": 512,
    "new_schemas": 512,
    "expensive": DECODING,
    "two_lengths": STRANGERS,
    "line_feed_heads": STRANGERS,
    "longest_heads": STRANGERS,
    "small_requests": STRANGERS,
    "tiny_chunks": HELD,
}
CONNECTIONS = {"many_connections", "continuations"}
"""Measured by test_connections.py, where the polite caller has another address."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    with Target(tmp_path_factory.mktemp("target"), start=ForkedProcess) as running:
        yield running


def test_every_attack_is_tried():
    assert {*MOST_MIB, *CONNECTIONS} == set(ATTACKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST_MIB)
async def test_memory_stays_within_what_the_flags_promise(target, name):
    # "expensive" alone takes longer: its images wait for the one process that decodes such. All are sent within a
    # second.
    outcome = await run(target, name, settle_s=0.5, most_s=40.0, pause_s=0.1)
    print(outcome)
    assert target.popen.poll() is None, target.log.read_text()[-4000:]
    assert outcome.peak_mib - outcome.rest_mib <= 1.1 * MOST_MIB[name], str(outcome)
    assert outcome.problems == [], str(outcome)
    assert not outcome.polite.failed, str(outcome)
