"""The map of the rooms is made from the code; ``make check`` finds a stale one."""

from pathlib import Path

import pytest

from tests.docs import room_map


def test_a_rooms_purpose_is_the_first_sentence_of_its_docstring(tmp_path: Path):
    (tmp_path / "__init__.py").write_text('"""Pages: which are free. Knows\nno torch."""\n')
    assert room_map.purpose(tmp_path) == "Pages: which are free"


def test_a_room_without_a_purpose_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room_map, "ROOT", tmp_path)
    (tmp_path / "__init__.py").touch()
    with pytest.raises(SystemExit, match="does not say what the room is for"):
        room_map.purpose(tmp_path)


def test_a_new_room_makes_the_list_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = room_map.listing()
    assert room_map.main(["--check"]) == 0
    monkeypatch.setattr(room_map, "rooms", lambda parent: [])
    assert room_map.listing() != before
    assert room_map.main(["--check"]) == 1
