"""Can this machine compute? Torch and its CUDA, driver and cards, the kernels' libraries, libvips and its loaders."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import RuntimeConfig
from ..errors import KestrelError
from .finding import Finding, Status

if TYPE_CHECKING:
    import torch

_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s")
_OTHER_DRIVER = "install the driver that the card needs, at least as new as torch's CUDA"
_CUDA_TORCH = "install torch's CUDA build; the one that is here computes on the CPU only"
_FORMATS = ("JPEG", "PNG", "WebP", "TIFF", "GIF", "AVIF", "HEIC", "BMP")


def check_device(config: RuntimeConfig) -> Iterator[Finding]:
    """Torch, then what ``config.device`` needs."""
    import torch

    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
    yield Finding("torch", "ok", f"{torch.__version__}, built {built}")
    if config.device == "cpu":
        yield _cpu(torch.get_num_threads(), "as configured")
        return
    found, driver = _cuda_problem(), driver_version()
    if found is None:
        yield from _cards(config, driver)
    elif config.device != "auto":
        yield Finding("gpu", "fail", f"--device {config.device}: {found}", _remedy(driver))
    elif driver is not None:
        yield Finding("gpu", "warn", f"driver {driver} is here, and {found}", _remedy(driver))
        yield _cpu(torch.get_num_threads(), "computes instead")
    else:
        yield _cpu(torch.get_num_threads(), "computes: there is no NVIDIA driver")


def driver_version() -> str | None:
    """The NVIDIA driver's, by the kernel or the CUDA that it supports; None if there is none."""
    try:
        match = _DRIVER_VERSION.search(_DRIVER.read_text())
        if match is not None:
            return match[1]
    except OSError:
        pass
    try:
        supported = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(supported)) == 0:
            return f"for CUDA {supported.value // 1000}.{supported.value % 1000 // 10}"
    except (OSError, AttributeError):
        pass
    return None


def check_images() -> Iterator[Finding]:
    """Which formats can be decoded."""
    import pyvips

    from ..preprocess.images import FORMATS

    version = ".".join(str(pyvips.version(part)) for part in range(3))
    missing = [name for name in _FORMATS if name not in FORMATS]
    told = f"libvips {version} and Pillow decode {', '.join(FORMATS)}"
    if not missing:
        yield Finding("images", "ok", told)
        return
    told += f"; not {', '.join(missing)}"
    if missing == ["HEIC"]:
        # pyvips-binary leaves its decoder out, because of patents.
        remedy = (
            "pyvips without its binary package, over the system's libvips and libheif with libde265"
        )
        yield Finding("images", "warn", told, remedy)
    else:
        status: Status = "fail" if "JPEG" in missing or "PNG" in missing else "warn"
        yield Finding("images", status, told, "install pyvips[binary]")


def _cuda_problem() -> str | None:
    """Why torch can't use CUDA; None if it can."""
    import torch

    if not torch.version.cuda:
        return "this torch has no CUDA"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return None
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            return f"torch can't use it: {str(error).partition(chr(10))[0]}"
    return "torch sees no card"


def _remedy(driver: str | None) -> str:
    import torch

    remedies = [] if torch.version.cuda else [_CUDA_TORCH]
    if driver is None:
        remedies.append(f"{_OTHER_DRIVER}; in a container, run it with the GPUs (--gpus all)")
    return "; ".join(remedies) or _OTHER_DRIVER


def _cpu(threads: int, why: str) -> Finding:
    name = platform.processor() or platform.machine()
    return Finding("cpu", "ok", f"{name}, {os.cpu_count()} processors, {threads} threads; {why}")


def _cards(config: RuntimeConfig, driver: str | None) -> Iterator[Finding]:
    import torch

    from ..runtime.gpu.device import capabilities, require_supported

    yield Finding("driver", "ok", f"NVIDIA {driver or 'of unknown version'}")
    index = torch.device(config.device).index if config.device != "auto" else None
    wanted = 0 if index is None else index
    count = torch.cuda.device_count()
    if wanted >= count:
        told = f"--device {config.device}: there are {count} cards, from cuda:0 to cuda:{count - 1}"
        yield Finding(
            "gpu", "fail", told, "name one that is there, or look at CUDA_VISIBLE_DEVICES"
        )
        return
    device = torch.device("cuda", wanted)
    found = capabilities(device)
    capability = found.compute_capability
    told = f"cuda:{wanted} is a {found.name} of {found.memory / 2**30:.0f} GiB, compute capability "
    told += f"{capability[0]}.{capability[1]}"
    try:
        require_supported(device)
    except KestrelError:
        remedy = "8.0 (Ampere) is the oldest that works; --device cpu works on any machine"
        yield Finding("gpu", "fail", told, remedy)
        return
    if not _compiled_for(capability, torch.cuda.get_arch_list()):
        remedy = "install a torch that is built for this card"
        yield Finding("gpu", "fail", f"{told}, for which this torch has no kernels", remedy)
        return
    fast = [
        "FP8" if found.fp8 else "no FP8",
        "attention kernels fa3" if found.fa3 else "attention kernels fa2",
    ]
    yield Finding("gpu", "ok", f"{told}; {', '.join(fast)}")
    yield from _libraries(config, device)


def _compiled_for(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Whether torch's kernels run on a card: those of its generation up to its own, or any older code that the driver
    compiles."""
    if not built_for:
        return True
    for built in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", built)
        if match is None:
            continue
        made_for = int(match[2]), int(match[3])
        same = made_for[0] == capability[0] or match[1] == "compute"
        if same and made_for <= capability:
            return True
    return False


def _libraries(config: RuntimeConfig, device: torch.device) -> Iterator[Finding]:
    from ..runtime.gpu.device import library_version

    extra = "pip install '.[gpu]' in the repository"
    if not config.compile:
        yield Finding(
            "triton", "warn", "not used: --no-compile", "leave --no-compile out to be fast"
        )
        return
    triton = library_version("triton")
    if triton is None:
        told = "can't be imported: plain torch computes, at a fraction of the speed"
        yield Finding("triton", "warn", told, extra)
        return
    try:
        _compile_something(device)
    except Exception as error:  # A broken tool chain raises whatever its first mistake raises.
        told = f"{triton} can't compile here: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield Finding(
            "triton", "fail", told, "it needs a C compiler and Python's headers, or --no-compile"
        )
        return
    yield Finding("triton", "ok", f"{triton}, compiles")
    flashinfer = library_version("flashinfer")
    if flashinfer is not None:
        yield Finding("flashinfer", "ok", flashinfer)
    elif config.attention == "flashinfer":
        told = "can't be imported, and --attention asks for it"
        yield Finding("flashinfer", "fail", told, "pip install flashinfer-python")


def _compile_something(device: torch.device) -> None:
    """Compiles one of our kernels, which takes seconds once, and checks that it adds."""
    import torch

    from ..kernels.probe import add_one

    numbers = torch.arange(4, dtype=torch.float32, device=device)
    add_one(numbers)
    if numbers.tolist() != [1.0, 2.0, 3.0, 4.0]:
        raise RuntimeError(f"adding 1 gave {numbers.tolist()}")
