"""Measures memory and CPU time of decoding an image, by format.

Each image is prepared in a process of its own, a fork of one that has only imported what it needs, as a decoder is.
Noise is the most expensive content; a single colour makes the smallest file.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyvips

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.open_image import EncodedImage
from kestrel_engine.types.model_config import VisionConfig

LIMITS, VISION = ImageLimits(), VisionConfig()

Save = Callable[[pyvips.Image], bytes]


def turned(image: pyvips.Image) -> pyvips.Image:
    """Returns the image with an EXIF orientation of a quarter turn."""
    image = image.copy()
    image.set_type(pyvips.GValue.gint_type, "orientation", 6)
    return image


def deep(image: pyvips.Image) -> pyvips.Image:
    """Returns the image with 16 bits a channel and an alpha channel."""
    image = image.cast("ushort", shift=True).copy(interpretation="rgb16")
    return image.bandjoin(65535)


def jpeg_of_many_scans(image: pyvips.Image) -> bytes:
    """Returns a progressive JPEG with 99 scans, most of them empty."""
    data: bytes = image.jpegsave_buffer(interlace=True)
    at = data.rindex(b"\xff\xda")
    components = data[at + 4]
    # The last scan's tables and numbers, for one component, without data: all blocks end at once.
    scan = bytearray(b"\xff\xda\x00\x08\x01" + data[at + 5 : at + 7] + b"\x01\x3f\x00")
    if components != 1:
        scan[5:7] = b"\x01\x00"
    scans = data.count(b"\xff\xda")
    return data[:-2] + bytes(scan) * (99 - scans) + b"\xff\xd9"


FORMS: dict[str, Save] = {
    "JPEG": lambda image: image.jpegsave_buffer(Q=90),
    "JPEG, turned": lambda image: turned(image).jpegsave_buffer(Q=90),
    "JPEG, progressive": lambda image: image.jpegsave_buffer(Q=90, interlace=True),
    "JPEG, progressive, 4:4:4": lambda image: image.jpegsave_buffer(
        Q=100, interlace=True, subsample_mode="off"
    ),
    "JPEG, 99 scans": jpeg_of_many_scans,
    "PNG": lambda image: image.pngsave_buffer(compression=1),
    "PNG, 16 bits, alpha": lambda image: deep(image).pngsave_buffer(compression=1),
    "PNG, interlaced": lambda image: image.pngsave_buffer(compression=1, interlace=True),
    "PNG, interlaced, 16 bits, alpha": lambda image: deep(image).pngsave_buffer(
        compression=1, interlace=True
    ),
    "WebP": lambda image: image.webpsave_buffer(effort=0, Q=90),
    "WebP, lossless": lambda image: image.webpsave_buffer(effort=0, lossless=True),
    "WebP, alpha": lambda image: image.bandjoin(128).webpsave_buffer(effort=0),
    "AVIF": lambda image: image.heifsave_buffer(compression="av1", effort=0, Q=90),
    "AVIF, 4:4:4": lambda image: image.heifsave_buffer(
        compression="av1", effort=0, Q=90, subsample_mode="off"
    ),
    "AVIF, 12 bits, alpha": lambda image: deep(image).heifsave_buffer(
        compression="av1", effort=0, Q=90, bitdepth=12
    ),
    "GIF": lambda image: image.gifsave_buffer(effort=1),
    "TIFF": lambda image: image.tiffsave_buffer(),
    "TIFF, tiles, deflate": lambda image: image.tiffsave_buffer(
        compression="deflate", tile=True, tile_width=256, tile_height=256
    ),
    "TIFF, 16 bits, alpha": lambda image: deep(image).tiffsave_buffer(compression="lzw"),
}


def contents(side: int) -> dict[str, pyvips.Image]:
    """Images of ``side`` x ``side`` pixels."""
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    image = pyvips.Image.new_from_memory(noise.data, side, side, 3, "uchar")
    flat = pyvips.Image.black(side, side, bands=3)
    return {
        "noise": image.copy(interpretation="srgb").copy_memory(),
        "one colour": flat.copy(interpretation="srgb").copy_memory(),
    }


def _status(name: str) -> int:
    """Returns a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


class _PrivateMemory:
    """Measures the peak growth of this process's memory as RLIMIT_DATA counts it, including untouched allocations."""

    def __init__(self) -> None:
        self._ended, self._before, self.bytes = threading.Event(), 0, 0
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(1e-3):
            self.bytes = max(self.bytes, _status("VmData:") - self._before)

    def __enter__(self) -> _PrivateMemory:
        self._thread.start()
        self._before = _status("VmData:")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()


def measure(path: Path) -> dict[str, float]:
    """Prepares the image of a file in this process and returns its measured and its reserved cost."""
    data = path.read_bytes()
    with _PrivateMemory() as private:
        Path("/proc/self/clear_refs").write_text("5")  # Resets the recorded peak.
        before = _status("VmRSS:") - len(data)
        spent = time.process_time()
        image = EncodedImage(data, LIMITS)
        cut_crops(image.begin(), VISION)
        spent = time.process_time() - spent
    return {
        "pixels": image.cost.pixels,
        "bytes": _status("VmHWM:") - before,
        "private bytes": private.bytes + len(data),
        "seconds": spent,
        "reserved bytes": image.cost.num_bytes,
        "reserved seconds": image.cost.seconds,
    }


def measure_each(paths: Iterable[str]) -> None:
    """Measures each image in a fork of this process. Prints a line of JSON for each, or nothing if its fork failed."""
    for path in paths:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                print(json.dumps(measure(Path(path.rstrip("\n")))), flush=True)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, ended = os.waitpid(pid, 0)
        if ended:
            print("null", flush=True)


@contextlib.contextmanager
def measurer() -> Iterator[Callable[[Path], dict[str, float] | None]]:
    """Gives a function that measures the image of a file in a process of its own. It returns None if that failed."""
    command = [sys.executable, "-m", "tests.engine.preprocess.decoding.measured_costs"]
    # OpenBLAS would start threads, which do not survive a fork.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        asked, told = process.stdin, process.stdout
        assert asked is not None and told is not None

        def ask(path: Path) -> dict[str, float] | None:
            asked.write(f"{path}\n")
            asked.flush()
            found: dict[str, float] | None = json.loads(told.readline() or "null")
            return found

        yield ask


if __name__ == "__main__":
    measure_each(sys.stdin)
