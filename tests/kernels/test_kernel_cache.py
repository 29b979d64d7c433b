"""Carried kernels are found where the folder lies now, without a write; others go to Triton's own cache."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.cache import FileCacheManager

from kestrel_engine.kernels import kernel_cache
from kestrel_engine.kernels.kernel_cache import CarriedKernels, use_carried_kernels


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A carried folder with one kernel, which was moved there after it was filled; and Triton's own folder."""
    filled, carried, own = tmp_path / "filled", tmp_path / "carried", tmp_path / "own"
    with knobs.cache.scope():
        knobs.cache.dir = str(filled)
        cache = FileCacheManager("KERNEL")
        paths = {name: cache.put(name.encode(), name) for name in ("k.cubin", "k.json")}
        cache.put_group("k.json", paths)
        shutil.move(filled, carried)
        knobs.cache.dir = str(own)
        use_carried_kernels(tmp_path)  # It has none.
        use_carried_kernels(carried)
        yield carried, own
    kernel_cache._folders.clear()


def test_a_moved_folder_is_read(folders: tuple[Path, Path]) -> None:
    carried, _ = folders
    assert knobs.cache.manager_class is CarriedKernels
    found = CarriedKernels("KERNEL").get_group("k.json")
    assert found == {name: str(carried / "KERNEL" / name) for name in ("k.cubin", "k.json")}
    assert CarriedKernels("KERNEL").get_file("k.cubin") == str(carried / "KERNEL" / "k.cubin")


def test_other_kernels_go_to_tritons_own_folder(folders: tuple[Path, Path]) -> None:
    carried, own = folders
    before = sorted(carried.rglob("*"))
    cache = CarriedKernels("OTHER")
    assert cache.get_group("k.json") is None and cache.get_file("k.cubin") is None
    cache.put_group("k.json", {"k.json": cache.put(b"{}", "k.json")})
    assert CarriedKernels("OTHER").get_group("k.json") == {"k.json": str(own / "OTHER" / "k.json")}
    assert sorted(carried.rglob("*")) == before


@pytest.mark.parametrize(
    "group",
    [
        "",
        "[]",
        "{}",
        '{"child_paths": {}}',
        '{"child_paths": 3}',
        json.dumps({"child_paths": {"gone": "x"}}),
    ],
)
def test_a_damaged_kernel_is_compiled_again(folders: tuple[Path, Path], group: str) -> None:
    carried, _ = folders
    (carried / "KERNEL" / "__grp__k.json").write_text(group)
    assert CarriedKernels("KERNEL").get_group("k.json") is None


def test_carried_kernels_need_no_folder_of_triton(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("a read-only file system")

    monkeypatch.setattr("os.makedirs", refused)
    assert CarriedKernels("KERNEL").get_group("k.json")
    with pytest.raises(PermissionError):
        CarriedKernels("OTHER")
