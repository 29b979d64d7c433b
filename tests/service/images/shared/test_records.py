"""Values of the shared store: which of them the server accepts."""

import base64

import numpy as np
import pytest

from kestrel_engine import ConfigError
from kestrel_grpc.images.shared.records import OVERHEAD_BYTES, Deleted, Keys, Records, Unreadable
from kestrel_grpc.images.store import StoredImage

ID = "img_" + "5" * 32
OTHER_ID = "img_" + "6" * 32
ENCODED = StoredImage(ID, b"encoded" * 9, 60, 40)
PIXELS = StoredImage(ID, np.arange(4 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3)[:, :, ::-1], 3, 4)


def key(number):
    return base64.b64encode(bytes([number]) * 32).decode()


def keys(tmp_path, *lines):
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    return Keys.read(str(file))


@pytest.fixture(params=["plain", "sealed"])
def records(request, tmp_path):
    if request.param == "sealed":
        pytest.importorskip("cryptography")
        return Records(60, keys(tmp_path, f"a {key(1)}"))
    return Records(60)


@pytest.mark.parametrize("image", [ENCODED, PIXELS], ids=["encoded", "pixels"])
def test_an_image_comes_back(records, image):
    value = records.pack("tenant", image)
    found = records.unpack("tenant", ID, value)
    assert (found.image_id, found.width, found.height) == (ID, image.width, image.height)
    assert type(found.source) is type(image.source)
    assert np.array_equal(np.asarray(found.source), np.asarray(image.source))
    assert image.num_bytes < len(value) <= image.num_bytes + OVERHEAD_BYTES


def test_no_other_owner_and_no_other_id(records):
    value = records.pack("tenant", ENCODED)
    for owner, image_id in (("", ID), ("tenan", "t" + ID), ("tenant", OTHER_ID)):
        with pytest.raises(Unreadable, match="another caller"):
            records.unpack(owner, image_id, value)


def test_no_flipped_bit_and_no_cut_is_taken(records):
    value = records.pack("tenant", PIXELS)
    for place in range(len(value)):
        for bit in (1, 128):
            flipped = bytearray(value)
            flipped[place] ^= bit
            with pytest.raises(Unreadable):
                records.unpack("tenant", ID, bytes(flipped))
    for end in range(len(value)):
        with pytest.raises(Unreadable):
            records.unpack("tenant", ID, value[:end])
    with pytest.raises(Unreadable):
        records.unpack("tenant", ID, value + b"x")


def test_a_deletion_is_as_safe_as_an_image(records):
    value = records.pack_deleted("tenant", ID)
    assert len(value) <= OVERHEAD_BYTES
    with pytest.raises(Deleted):
        records.unpack("tenant", ID, value)
    for owner, image_id in (("other", ID), ("tenant", OTHER_ID)):
        with pytest.raises(Unreadable, match="another caller"):
            records.unpack(owner, image_id, value)


def test_a_value_expires(still_clock):
    records = Records(60)
    value = records.pack("", ENCODED)
    still_clock.advance(59.9)
    records.unpack("", ID, value)
    still_clock.advance(0.1)
    with pytest.raises(Unreadable, match="expired"):
        records.unpack("", ID, value)


def test_keys_rotate(tmp_path):
    pytest.importorskip("cryptography")
    old = Records(60, keys(tmp_path, f"a {key(1)}"))
    new = Records(60, keys(tmp_path, "# the newest first", f"b {key(2)}", f"a {key(1)}"))
    assert new.unpack("t", ID, old.pack("t", ENCODED)).source == ENCODED.source
    sealed = new.pack("t", ENCODED)
    assert ENCODED.source not in sealed and sealed != new.pack("t", ENCODED)
    with pytest.raises(Unreadable, match="does not have"):
        old.unpack("t", ID, sealed)
    with pytest.raises(Unreadable, match="no keys"):
        Records(60).unpack("t", ID, sealed)
    # A value that somebody wrote without a key is not taken for one of ours.
    with pytest.raises(Unreadable, match="not encrypted"):
        new.unpack("t", ID, Records(60).pack("t", ENCODED))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "holds 0 keys"),
        (["a secret"], "line 1 must be"),
        ([f"a {key(1)[:-8]}===="], "line 1 must be"),
        ([f"a {key(1)}", f"a {key(2)}"], "line 2 repeats"),
        ([f"k{n} {key(n)}" for n in range(17)], "holds 17 keys"),
    ],
)
def test_a_bad_file_of_keys_is_refused_without_showing_keys(tmp_path, lines, told):
    with pytest.raises(ConfigError, match=told) as error:
        keys(tmp_path, *lines)
    assert "secret" not in str(error.value) and key(1)[:8] not in str(error.value)
    with pytest.raises(ConfigError, match="can't be read"):
        Keys.read(str(tmp_path / "absent"))
