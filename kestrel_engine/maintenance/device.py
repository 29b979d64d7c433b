"""Checks of the machine: torch, CUDA, driver, GPUs, kernel libraries, libvips, and what confines decoders."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.runtime import RuntimeConfig
from ..confinement import trial
from ..errors import ConfigError, KestrelError
from .finding import Finding, Status

if TYPE_CHECKING:
    import torch

_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s")
_OTHER_DRIVER = "install the driver that the card needs, at least as new as torch's CUDA"
_CUDA_TORCH = "install torch's CUDA build; the installed build computes on the CPU only"
_FORMATS = ("JPEG", "PNG", "WebP", "TIFF", "GIF", "AVIF", "HEIC", "BMP")


def check_device(config: RuntimeConfig) -> Iterator[Finding]:
    """Checks torch, then the driver, the GPU and the libraries that ``config.device`` needs."""
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
        yield Finding("gpu", "warn", f"driver {driver} is installed, but {found}", _remedy(driver))
        yield _cpu(torch.get_num_threads(), "used instead of a GPU")
    else:
        yield _cpu(torch.get_num_threads(), "used because there is no NVIDIA driver")


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver, or the CUDA version that it supports; None without a driver."""
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
    import pyvips

    from ..preprocess.decoding.open_image import IMAGE_FORMATS

    version = ".".join(str(pyvips.version(part)) for part in range(3))
    missing = [name for name in _FORMATS if name not in IMAGE_FORMATS]
    message = f"libvips {version} and Pillow decode {', '.join(IMAGE_FORMATS)}"
    if not missing:
        yield Finding("images", "ok", message)
        return
    message += f"; not {', '.join(missing)}"
    if missing == ["HEIC"]:
        # pyvips-binary has no HEIC decoder because of patents.
        remedy = (
            "install pyvips without pyvips-binary, and the system's libvips and libheif with "
            "libde265"
        )
        yield Finding("images", "warn", message, remedy)
    else:
        status: Status = "fail" if "JPEG" in missing or "PNG" in missing else "warn"
        yield Finding("images", status, message, "install pyvips[binary]")


def check_confinement(mode: str) -> Iterator[Finding]:
    try:
        found = trial.check(mode)
    except ConfigError as error:
        yield Finding("decoders", "fail", error.limit, "docs/run/security.md, Decoders")
    except OSError as error:
        yield Finding("decoders", "fail", f"no process can be started: {error.strerror}")
    else:
        status: Status = "ok" if mode != "off" and trial.found().suffices else "warn"
        yield Finding(
            "decoders", status, found, "" if status == "ok" else "docs/run/security.md, Decoders"
        )


def _cuda_problem() -> str | None:
    """Returns why torch can't use CUDA; None if it can."""
    import torch

    if not torch.version.cuda:
        return "this torch build has no CUDA"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return None
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            return f"torch can't use it: {str(error).partition(chr(10))[0]}"
    return "torch sees no GPU"


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
        message = f"--device {config.device}: there are {count} GPUs, cuda:0 to cuda:{count - 1}"
        yield Finding("gpu", "fail", message, "name one of them, or check CUDA_VISIBLE_DEVICES")
        return
    device = torch.device("cuda", wanted)
    found = capabilities(device)
    capability = found.compute_capability
    message = f"cuda:{wanted} is a {found.name} of {found.memory / 2**30:.0f} GiB, compute "
    message += f"capability {capability[0]}.{capability[1]}"
    try:
        require_supported(device)
    except KestrelError:
        remedy = "use a GPU of compute capability 8.0 (Ampere) or newer, or --device cpu"
        yield Finding("gpu", "fail", message, remedy)
        return
    if not compiled_for(capability, torch.cuda.get_arch_list()):
        remedy = "install a torch build for this GPU"
        yield Finding("gpu", "fail", f"{message}; this torch has no kernels for it", remedy)
        return
    yield Finding("gpu", "ok", f"{message}; {'FP8' if found.fp8 else 'no FP8'}")
    yield from _libraries(config, device)


def compiled_for(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Returns whether torch's kernels run on a GPU of ``capability``. A GPU runs machine code ("sm") for its generation
    that is not newer than the GPU. The driver compiles intermediate code ("compute") of any older generation.
    """
    if not built_for:
        return True
    for built in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", built)
        if match is None:
            continue
        target = int(match[2]), int(match[3])
        compatible = target[0] == capability[0] or match[1] == "compute"
        if compatible and target <= capability:
            return True
    return False


def _libraries(config: RuntimeConfig, device: torch.device) -> Iterator[Finding]:
    from ..runtime.gpu.device import library_version

    extra = "pip install ./clients/python '.[gpu]' in the repository"
    if not config.compile:
        yield Finding("triton", "warn", "not used because of --no-compile", "omit --no-compile")
        return
    triton = library_version("triton")
    if triton is None:
        message = "can't be imported; plain torch computes instead, which is much slower"
        yield Finding("triton", "warn", message, extra)
        return
    try:
        _compile_something(device)
    except Exception as error:  # A broken tool chain can raise any exception.
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        message = f"{triton} can't compile here: {reason}"
        remedy = "install a C compiler and Python's headers, or use --no-compile"
        yield Finding("triton", "fail", message, remedy)
        return
    yield Finding("triton", "ok", f"{triton}, compiles")
    flashinfer = library_version("flashinfer")
    if flashinfer is not None:
        yield Finding("flashinfer", "ok", flashinfer)
    elif config.attention == "flashinfer":
        message = "can't be imported, but --attention flashinfer needs it"
        yield Finding("flashinfer", "fail", message, "pip install flashinfer-python")


def _compile_something(device: torch.device) -> None:
    """Compiles a small kernel, which takes seconds the first time, and checks its result. Raises any exception."""
    import torch

    from ..kernels.probe import add_one

    numbers = torch.arange(4, dtype=torch.float32, device=device)
    add_one(numbers)
    if numbers.tolist() != [1.0, 2.0, 3.0, 4.0]:
        raise RuntimeError(f"adding 1 gave {numbers.tolist()}")
