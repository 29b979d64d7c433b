"""What ``doctor`` says of a store of shared images: real ones that work, refuse, hang or are not there."""

import base64
import os
from dataclasses import replace

import pytest

from kestrel_grpc.cli.operation.doctor_checks import check_shared_images
from kestrel_grpc.settings.shared_images import PASSWORD_VARIABLE, SharedImagesConfig
from tests.service.images.shared.conftest import PASSWORD, RedisServer


def test_without_a_store() -> None:
    assert check_shared_images(SharedImagesConfig()).status == "ok"


def test_redis(redis_server: RedisServer, monkeypatch, tmp_path) -> None:
    config = SharedImagesConfig(url=redis_server.url, timeout_s=60)
    told = check_shared_images(config)
    assert told.status == "warn" and "can't write: AuthenticationError" in told.message, told
    assert "KESTREL_SHARED_IMAGES_PASSWORD" in told.remedy
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    told = check_shared_images(config)
    assert told.status == "ok" and "not encrypted" in told.message, told
    redis_server.freeze()
    told = check_shared_images(replace(config, timeout_s=0.3))
    redis_server.thaw()
    assert told.status == "warn" and "whether the store runs" in told.remedy, told
    redis_server.kill()
    told = check_shared_images(config)
    assert (told.status, PASSWORD in told.message) == ("warn", False), told
    assert "can't write: ConnectionError" in told.message


def test_redis_with_keys_keeps_nothing(redis_server: RedisServer, monkeypatch, tmp_path) -> None:
    pytest.importorskip("cryptography")
    import redis

    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    (keys := tmp_path / "keys").write_text(f"a {base64.b64encode(os.urandom(32)).decode()}\n")
    keys.chmod(0o600)
    config = SharedImagesConfig(url=redis_server.url, key_file=str(keys), timeout_s=60)
    told = check_shared_images(config)
    assert told.status == "ok" and ", encrypted" in told.message, told
    with redis.Redis(port=redis_server.port, password=PASSWORD) as store:
        assert not [key for key in store.keys() if b"img_" in key]
