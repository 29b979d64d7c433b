"""``download`` and ``verify`` as users run them."""

import json
from pathlib import Path

import pytest

from tests.service.command_line import here
from tests.tiny import TINY


def test_a_model_goes_into_a_folder_and_is_verified_there(tmp_path):
    done = here("download", TINY, "--to", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    *files, last = done.stdout.splitlines()
    names = [
        "model.safetensors",
        "config.json",
        "score_calibration.json",
        "tokenizer.json",
    ]
    assert [Path(file).name for file in files] == names
    assert last == "kestrel-tiny: 4 files, 21.7 MB"
    weights = {"KESTREL_WEIGHTS": str(tmp_path / "model"), "KESTREL_OFFLINE": "on"}
    done = here("verify", "--json", "--no-answer", **weights)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [f["check"] for f in told] == ["versions", "files", "checksums", "tensors", "values"]
    assert {f["status"] for f in told} == {"ok"}
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    done = here("verify", **weights)
    assert done.returncode == 1
    assert (
        "FAIL  checksums: tokenizer.json: differs from the checksum recorded by SHA256SUMS\n"
        "      -> "
    ) in done.stdout
    assert "warn  answers: not checked, because another check failed" in done.stdout
    assert "1 of 6 checks failed" in done.stderr


@pytest.mark.slow
def test_the_bundled_model_verifies():
    done = here("verify", KESTREL_MODEL="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok    answer: ") == 2
    assert "ok    speed: first token about a new picture after " in done.stdout


def test_a_setting_that_does_not_fit_has_the_name_of_its_flag(tmp_path):
    folder = tmp_path / "model"
    here("download", "--to", folder)
    (folder / "config.json").write_text("{")
    done = here("verify", "--weights", folder, "--offline")
    assert done.returncode == 1
    assert f"FAIL  files: config.json='{folder}/config.json': can't be read" in done.stdout
    done = here("verify", "--precision", "fp8", "--device", "cpu", KESTREL_MODEL="")
    assert "FAIL  answers: --precision=fp8: sets fp8_gemms to all: needs CUDA" in done.stdout


@pytest.mark.parametrize("command", ["download", "verify"])
def test_the_file_says_which_model(command, tmp_path):
    file = tmp_path / "kestrel.toml"
    file.write_text('[model]\nmodel = "moondream2"\noffline = true\n[server]\ngrace = 1\n')
    done = here(command, "--config", file, HF_HOME=str(tmp_path / "empty"), KESTREL_MODEL="")
    assert done.returncode == 1
    assert "vikhyatk/moondream2" in done.stdout + done.stderr
    assert "not in the cache" in done.stdout + done.stderr
    file.write_text('[model]\nmodle = "moondream2"\n')
    done = here(command, "--config", file)
    assert done.returncode == 2
    assert "model.modle: unknown key; did you mean model?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["download", "moondrem2"], "did you mean moondream2?"),
        (["download", "--weights", "/nowhere"], "--weights=/nowhere: no such file or folder"),
        (["download", "--weights", "~nobody7/x"], "--weights=~nobody7/x: no such file or folder"),
        (["verify", "--precision", "int3"], "--precision: invalid choice: 'int3'"),
        (["verify", "--no-answer", "--image", "x.jpg"], "--image is for known answers"),
        (["verify", "--image", "/nowhere.jpg"], "--image=/nowhere.jpg: no such file"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, words):
    done = here(*arguments)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1
