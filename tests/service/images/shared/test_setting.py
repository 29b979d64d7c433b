"""--shared-images: what may be set, and that no error shows a password."""

import pytest

from kestrel_engine import ConfigError
from kestrel_grpc.cli.program import main
from kestrel_grpc.settings.server import ServerConfig
from kestrel_grpc.settings.shared_images import SharedImagesConfig


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1",
        "redis://user@redis.example.org:6380/3",
        "rediss://[::1]:6379/",
    ],
)
def test_addresses(url):
    assert SharedImagesConfig(url=url).url == url


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://:secret@host:6379/0", "must hold no password"),
        ("redis://user:sec/ret@host:6379/0", "must"),
        ("redis://host:secret", "must be like"),
        ("redis://host/0?password=secret", "neither"),
        ("redis:///0", "must name a host"),
        ("redis://host/zero", "number of a database"),
        ("user:secret@host", "must begin with"),
        ("http://host/", "must begin with"),
        ("s3://bucket/prefix", "must begin with redis:// or rediss://"),
        ("redis://[::1/0", "must be like"),
    ],
)
def test_errors_show_no_password(url, told):
    with pytest.raises(ConfigError, match=told) as error:
        SharedImagesConfig(url=url)
    assert "secret" not in str(error.value) and "ret@" not in str(error.value)


def test_limits_fit_together():
    with pytest.raises(ConfigError, match="at least value_bytes"):
        SharedImagesConfig(url="redis://host", flight_bytes=100, value_bytes=200)
    with pytest.raises(ConfigError, match="above 0 with --shared-images"):
        ServerConfig(image_store_bytes=0, shared_images=SharedImagesConfig(url="redis://host"))
    assert SharedImagesConfig(flight_bytes=100, value_bytes=200).url is None


def test_the_command_line_hides_secrets(capsys, monkeypatch):
    assert main(["serve", "--shared-images", "redis://:secret@host", "--print-config"]) == 2
    shown = "".join(capsys.readouterr())
    assert "--shared-images=redis://host…: must hold no password" in shown and "secret" not in shown
    pytest.importorskip("redis")
    monkeypatch.setenv("KESTREL_SHARED_IMAGES_PASSWORD", "secret")
    assert main(["serve", "--shared-images", "redis://host", "--print-config"]) == 0
    shown = "".join(capsys.readouterr())
    assert '[shared-images]\nshared-images = "redis://host"' in shown and "secret" not in shown
    assert "KESTREL_SHARED_IMAGES_PASSWORD = (hidden)" in shown
