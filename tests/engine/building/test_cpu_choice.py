"""What a CPU chooses for a model, what stays as it was set, and what reports it."""

import os
from dataclasses import replace

import pytest
import torch

from kestrel_engine import ConfigError, RuntimeConfig
from kestrel_engine.building import cpu_choice
from kestrel_engine.building.cpu_choice import completed, described, quota
from kestrel_engine.checkpoint.open import open_model
from kestrel_engine.checkpoint.weights import memory
from tests.tiny import TINY

GIB = 2**30


def chosen(monkeypatch, *, total=32, available=30, bfloat16=True, **settings):
    """The completed settings of Moondream 2 on a machine with 3 threads."""
    monkeypatch.setattr(memory, "host_total", lambda: int(total * GIB))
    monkeypatch.setattr(memory, "host_available", lambda: int(available * GIB))
    monkeypatch.setattr(cpu_choice, "multiplies_bfloat16", lambda: bfloat16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    config = RuntimeConfig(model="moondream2", random_weights=True, device="cpu", **settings)
    return config, completed(config, open_model(config))


@pytest.mark.parametrize(
    ("machine", "precision", "tiles"),
    [
        ({}, "bfloat16", 6),
        ({"bfloat16": False}, "float32", 3),
        ({"bfloat16": False, "total": 16}, "int8", 3),
        ({"total": 8, "available": 7}, "int8", 6),
        ({"available": 3}, "int8", 6),
    ],
)
def test_memory_and_processor_decide(monkeypatch, machine, precision, tiles):
    config, found = chosen(monkeypatch, **machine)
    assert (found.precision, found.cpu_threads, found.max_crops) == (precision, 3, tiles)
    text = described(found, config)
    for flag in (f"--precision {precision}", "--threads 3", f"at most {tiles} tiles"):
        assert flag in text
    assert ("rounds weights" in text) == (precision == "int8")


def test_what_is_set_stays(monkeypatch):
    config, found = chosen(monkeypatch, cpu_threads=7, max_crops=2)
    assert (found.cpu_threads, found.max_crops) == (7, 2)
    config, found = chosen(monkeypatch, cpu_threads=7)
    assert found.max_crops is None, "all tiles of the model"
    config, found = chosen(monkeypatch, kv_cache_dtype="fp8")
    assert (found.precision, found.kv_cache_dtype) == ("bfloat16", "fp8")
    for precision in ("float32", "int4"):
        config, found = chosen(monkeypatch, precision=precision, total=4, cpu_threads=2)
        assert found == config
    config, found = chosen(monkeypatch, dtype="float32", total=4, cpu_threads=2)
    assert found == config
    tiny = RuntimeConfig(model_path=TINY, device="cpu")
    assert completed(tiny, open_model(tiny)) is tiny


def test_a_model_that_is_not_large_takes_bfloat16_where_it_is_faster(monkeypatch):
    config = RuntimeConfig(device="cpu")
    opened = open_model(config)
    for is_faster, precision in ((True, "bfloat16"), (False, "auto")):
        monkeypatch.setattr(cpu_choice, "multiplies_bfloat16", lambda found=is_faster: found)
        found = completed(config, opened)
        assert (found.precision, found.cpu_threads, found.max_crops) == (precision, None, None)
        exact = replace(config, precision="float32")
        assert completed(exact, opened) is exact


def test_the_model_limits_the_tiles_that_are_set():
    with pytest.raises(ConfigError, match="must be at most 4, the model's own"):
        open_model(RuntimeConfig(max_crops=13))


@pytest.mark.parametrize(
    ("own", "above", "found"),
    [("max 100000", "max 100000", None), ("250000 100000", "max 1", 3), ("max 1", "9 10", 1)],
)
def test_a_quota_of_processor_time_limits_the_threads(tmp_path, own, above, found):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("1:cpu:/x\n0::/pod/box\n")
    group = tmp_path / "cgroups/pod/box"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(own)
    (group.parent / "cpu.max").write_text(above)
    assert quota(proc=tmp_path, cgroups=tmp_path / "cgroups") == found
    assert quota(proc=tmp_path / "none", cgroups=tmp_path) is None


@pytest.mark.parametrize(
    ("own", "above", "found"), [(-1, -1, None), (250000, 100000, 1), (150000, -1, 2)]
)
def test_a_quota_of_version_1_limits_them_too(tmp_path, own, above, found):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("4:cpuset:/x\n3:cpu,cpuacct:/pod/box\n0::/y\n")
    group = tmp_path / "cgroups/cpu/pod/box"
    group.mkdir(parents=True)
    for folder, limit in ((group, own), (group.parent, above)):
        (folder / "cpu.cfs_quota_us").write_text(f"{limit}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert quota(proc=tmp_path, cgroups=tmp_path / "cgroups") == found


@pytest.mark.parametrize(
    ("folder", "mounts"),
    [
        ("cpu,cpuacct/docker/a b", ""),
        ("cpu,cpuacct", ""),
        # A container's group, and one inside it: the mounted folder is that of the container.
        ("elsewhere", "9 8 0:3 /docker {0}/elsewhere ro shared:1 - cgroup cgroup rw,cpuacct,cpu"),
        ("x/a b", "9 8 0:3 /docker {0}/x ro - cgroup cgroup rw,cpuacct,cpu"),
        ("x y/a b", "9 8 0:3 /docker {0}/x\\040y ro - cgroup c rw,cpu\nbroken - \n1 - cgroup"),
    ],
)
def test_where_version_1_is_mounted(tmp_path, folder, mounts):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("3:cpu,cpuacct:/docker/a b\n")
    (tmp_path / "self/mountinfo").write_text(mounts.format(tmp_path))
    group = (tmp_path if mounts else tmp_path / "cgroups") / folder
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("200000")
    (group / "cpu.cfs_period_us").write_text("100000")
    assert quota(proc=tmp_path, cgroups=tmp_path / "cgroups") == 2


@pytest.mark.parametrize(("root", "found"), [("/pods/other", None), ("/../..", 1)])
def test_the_group_of_others_limits_nothing(tmp_path, root, found):
    """A container's group is mounted at its own folder, too. A group above a namespace limits what is in it."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/user\n")
    (tmp_path / "self/mountinfo").write_text(
        f"9 8 0:3 {root} {tmp_path}/other rw - cgroup2 none rw\n"
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other/cpu.max").write_text("100000 100000")
    assert quota(proc=tmp_path, cgroups=tmp_path / "cgroups") == found


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"cpu.max": ""}, 3),
        ({"cpu.max": "200000 0"}, 3),
        ({"cpu.max": "200000"}, 3),
        ({"cpu.max": "-5 100000"}, 3),
        ({"cpu.max": f"{10**40} 100000"}, 3),
        ({"cpu.max": "0 100000"}, 1),
        ({"cpu.cfs_quota_us": "200000"}, 3),
        ({"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "0"}, 3),
    ],
)
def test_a_limit_that_is_none_leaves_those_above_it(tmp_path, files, found):
    group = tmp_path / "cgroups/pod" / os.fsdecode(b"b\xff")
    group.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_bytes(b"without colons\n0::/pod/b\xff\n")
    (group.parent / "cpu.max").write_text("300000 100000")
    for name, text in files.items():
        (group / name).write_text(text)
    assert quota(proc=tmp_path, cgroups=tmp_path / "cgroups") == found
