"""ImageStore by its rules: bounds, order, owners; random operations against a plain model of it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kestrel_engine.preprocess.prepared_cache import source_digest
from kestrel_grpc.edge.failures.errors import ImageNotFound, ImagesFull
from kestrel_grpc.images import store as store_module
from kestrel_grpc.images.store import RECORD_BYTES, ImageStore

SIZE = (4, 3)


@pytest.fixture(autouse=True)
def no_records(request, monkeypatch):
    """Most tests are about bytes alone."""
    if "records" not in request.node.name:
        monkeypatch.setattr(store_module, "RECORD_BYTES", 0)


def put(store, source, owner="", weight=1.0):
    return store.put(owner, source_digest(source), source, SIZE, weight=weight)


def test_images_of_a_few_bytes_count_with_their_records():
    """What is kept of a thousand of them takes far more memory than their bytes."""
    store = ImageStore(100_000)
    for number in range(1000):
        assert put(store, number.to_bytes(2, "big")) is not None
        store.check()
    assert len(store) == 100_000 // (RECORD_BYTES + 2) and store.size_bytes <= 100_000
    assert put(ImageStore(RECORD_BYTES), b"a") is None
    assert put(ImageStore(RECORD_BYTES + 1), b"a") is not None


def test_ids_cannot_be_guessed():
    store = ImageStore(10_000)
    ids = [put(store, bytes([n])).image_id for n in range(200)]
    assert len(set(ids)) == 200
    for image_id in ids:
        prefix, _, digits = image_id.partition("_")
        assert prefix == "img" and len(digits) == 32 and int(digits, 16) >= 0


def test_gone_says_what_to_do():
    store = ImageStore(1000)
    with pytest.raises(ImageNotFound) as caught:
        store.get("", "img_gone")
    assert caught.value.field == "image.image_id"
    for words in ("'img_gone'", "send the image again", "1000 bytes", "least recently"):
        assert words in caught.value.message
    with pytest.raises(ImageNotFound) as caught:
        store.get("", "x" * 10_000)
    assert len(caught.value.message) < 400
    with pytest.raises(ImageNotFound, match="stores no images"):
        ImageStore(0).get("", "img_gone")


def test_a_store_of_nothing_and_a_image_beyond_the_store():
    assert put(ImageStore(0), b"") is None
    store = ImageStore(10)
    kept = put(store, b"1234")
    assert put(store, b"12345678901") is None
    assert store.get("", kept.image_id) is kept, "what can't be kept pushes nothing out"


def held(store, owner, images):
    """Ids of those of ``images`` that the owner still has."""
    left = []
    for image in images:
        try:
            left.append(store.get(owner, image.image_id).image_id)
        except ImageNotFound:
            pass
    return left


def test_weights_set_the_shares():
    store = ImageStore(100)
    for number in range(10):
        put(store, bytes([number]) * 10, "light")
    heavy = [put(store, bytes([number]) * 10, "heavy", weight=4.0) for number in range(10)]
    assert len(held(store, "heavy", heavy)) == 8


def test_an_image_beyond_the_share_is_refused_and_drops_nothing():
    store = ImageStore(100)
    mine, theirs = put(store, b"m" * 45, "me"), put(store, b"t" * 30, "you")
    with pytest.raises(ImagesFull, match="60 bytes; the share of you is 50") as caught:
        put(store, b"T" * 60, "you")
    assert caught.value.quota.held == 30
    assert held(store, "me", [mine]) and held(store, "you", [theirs])
    assert put(store, b"T" * 55, "you") is not None


OWNERS = st.sampled_from(["", "a", "b"])
CONTENTS = st.integers(0, 4)


class StoreMachine(RuleBasedStateMachine):
    """Against a list of (owner, id, content), the least recently used first. Content n has 10 n bytes. Shares of three
    owners are never below 40, so that contents up to 4 are never refused."""

    def __init__(self):
        super().__init__()
        self.store = ImageStore(120)
        self.model = []
        self.gone = []

    def touch(self, entry):
        self.model.remove(entry)
        self.model.append(entry)

    @rule(owner=OWNERS, content=CONTENTS)
    def put(self, owner, content):
        kept = put(self.store, bytes([content]) * (10 * content), owner)
        assert kept is not None
        entry = (owner, kept.image_id, content)
        if entry in self.model:
            self.touch(entry)
            return
        assert all((o, c) != (owner, content) for o, _, c in self.model)
        self.model.append(entry)
        share = 120 / len({o for o, _, _ in self.model})
        while sum(10 * c for _, _, c in self.model) > 120:
            size = {o: sum(10 * c for p, _, c in self.model if p == o) for o, _, _ in self.model}
            loser = owner if size[owner] > share else max(size, key=lambda o: (size[o], o))
            dropped = next(e for e in self.model if e[0] == loser and e != entry)
            self.model.remove(dropped)
            self.gone.append(dropped)

    @rule(data=st.data(), owner=OWNERS)
    def get(self, data, owner):
        if not self.model + self.gone:
            return
        whose, image_id, content = entry = data.draw(st.sampled_from(self.model + self.gone))
        if whose == owner and entry in self.model:
            assert self.store.get(owner, image_id).source == bytes([content]) * (10 * content)
            self.touch(entry)
            return
        with pytest.raises(ImageNotFound):
            self.store.get(owner, image_id)

    @rule(data=st.data(), owner=OWNERS)
    def delete(self, data, owner):
        if not self.model:
            return
        entry = data.draw(st.sampled_from(self.model))
        assert self.store.delete(owner, entry[1]) == (entry[0] == owner)
        if entry[0] == owner:
            self.model.remove(entry)
            self.gone.append(entry)

    @invariant()
    def agrees(self):
        self.store.check()
        assert len(self.store) == len(self.model)
        assert self.store.size_bytes == sum(10 * c for _, _, c in self.model)


StoreMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestStore = StoreMachine.TestCase
