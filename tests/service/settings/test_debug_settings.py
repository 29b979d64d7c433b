"""The flags that allow profiles and captures; without them nothing is written anywhere."""

import asyncio
import os

import pytest

from kestrel_grpc.cli.program import main
from kestrel_grpc.settings.debug import DebugConfig
from kestrel_grpc.settings.flags import SettingsError
from kestrel_grpc.settings.security import SecurityConfig
from tests.service.conftest import NO_END, EndlessRuntime
from tests.service.security.test_admin import METADATA, Admin, query
from tests.service.settings.test_configuration import whole_configuration


def settled(*flags, **environ):
    return whole_configuration(*flags, **environ).server.debug


def test_by_default_nothing_is_allowed():
    assert settled() == DebugConfig() == DebugConfig(profile_dir=None, capture_dir=None)
    assert not settled().capture_images


def test_flags_and_variables_reach_their_fields(tmp_path):
    folder = str(tmp_path)
    told = settled("--profile-dir", folder, "--capture-images", KESTREL_CAPTURE_DIR=folder)
    assert told == DebugConfig(profile_dir=folder, capture_dir=folder, capture_images=True)


@pytest.mark.parametrize("flag", ["--profile-dir", "--capture-dir"])
def test_a_folder_that_is_of_no_use_is_named(flag, tmp_path, capsys):
    with pytest.raises(SystemExit):
        settled(flag, str(tmp_path / "gone"))
    told = capsys.readouterr().err
    assert flag in told and "the folder does not exist" in told
    variable = f"KESTREL_{flag[2:].upper().replace('-', '_')}"
    with pytest.raises(SettingsError, match=f"{variable}=.*: the folder does not exist"):
        settled(**{variable: str(tmp_path / "gone")})
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o500)
    if not os.access(sealed, os.W_OK):  # root may write anywhere.
        with pytest.raises(SystemExit):
            settled(flag, str(sealed))
        assert "may not write to the folder" in capsys.readouterr().err


@pytest.mark.slow
async def test_the_command_records_and_waits(serve, tmp_path, monkeypatch, capsys):
    key = METADATA[0][1].removeprefix("Bearer ")
    monkeypatch.setenv("KESTREL_TOKEN", key)
    config = {
        "security": SecurityConfig(api_key=key),
        "debug": DebugConfig(profile_dir=str(tmp_path)),
    }
    served = await serve(EndlessRuntime(), server_config=config)
    server = ("--server", served.server.addresses[0])
    running = asyncio.ensure_future(
        served.vision.Query(query(max_tokens=NO_END), metadata=METADATA)
    )
    words = ("profile", "--seconds", "0.3", "--steps", "5")
    assert await asyncio.to_thread(main, ["admin", *server, *words]) == 0
    told = capsys.readouterr().out.splitlines()
    [path] = tmp_path.iterdir()
    assert told[0] == f"recording {path.name}, for 0.3 s or 5 steps"
    steps = (await Admin(served).StopProfile()).steps
    assert steps <= 5
    words = f"profile {path.name}: {path.stat().st_size} bytes, {steps} steps in "
    assert told[1].startswith(words)
    running.cancel()
