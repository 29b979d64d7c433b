"""Files that settings name are read whole, or refused in one line: a FIFO or a device would hold the server."""

import os

import pytest

from kestrel_engine.checkpoint.config_file import read_config
from kestrel_engine.checkpoint.files import shard_names
from kestrel_engine.checkpoint.tokenizer_file import _problem
from kestrel_engine.errors import CheckpointError, ConfigError
from kestrel_engine.preprocess.tokenizer import Tokenizer
from kestrel_engine.small_files import read_small_file, read_small_json
from kestrel_engine.types.model_config import parse_model_config
from tests.engine.fakes import SMALL

DEEP = "[" * 200_000


def test_a_regular_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to("a")
    assert read_small_file(tmp_path / "link", 10) == b"x" * 10
    with pytest.raises(OSError, match="has more than 9 bytes"):
        read_small_file(tmp_path / "a", 9)


def test_what_is_no_regular_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero", "/dev/null"):
        with pytest.raises(OSError) as caught:
            read_small_file(path)
        assert caught.value.strerror == "is not a regular file; copy its contents to a file"
    with pytest.raises(IsADirectoryError):
        read_small_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_small_file(tmp_path / "none")


def test_a_file_nested_too_deeply_is_refused_in_one_line(tmp_path):
    (tmp_path / "a.json").write_text(DEEP)
    with pytest.raises(ValueError, match=r"\Ais nested too deeply\Z"):
        read_small_json(tmp_path / "a.json")
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_config(tmp_path / "a.json")
    with pytest.raises(CheckpointError, match="nested too deeply"):
        shard_names(tmp_path / "a.json")
    with pytest.raises(CheckpointError, match=r"is not a valid tokenizer\.json"):
        Tokenizer.from_file(tmp_path / "a.json")
    model = parse_model_config(SMALL, family="moondream3")
    assert "nested too deeply" in _problem(tmp_path / "a.json", model)
