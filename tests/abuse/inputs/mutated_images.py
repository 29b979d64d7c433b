"""Mutated images of every supported format through decoding and tiling, in this process, whose memory is bounded.

python -m tests.abuse.inputs.mutated_images --count 10000 [--seed N] [--memory-mib N]

Prints one JSON object: how many were taken and refused by format, what took longest, the most memory, and every fault:
an error other than ImageError, or more than LIMIT_S of this process's time. A crash ends the process, and an image
that hangs does after HANG_S: the stack and the image's number are on standard error then. The same seed and number
make the same image, wherever it runs.
"""

import argparse
import base64
import faulthandler
import io
import json
import resource
import struct
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyvips
from PIL import Image

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import ImageError
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.open_image import open_image
from kestrel_engine.types.model_config import VisionConfig

LIMIT_S = 2.0
"""Of processor time for one image: a busy machine makes nothing slower by it."""

HANG_S = 60.0
"""Of time on the wall; then the process shows where it stands and ends."""

MEMORY_MIB = 2048
"""Address space, libraries and threads' stacks included. Two copies of the largest image taken are 600 MB."""

EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
"""Numbers at which a reader of 8, 16 or 32 bits goes wrong."""


def seeds() -> dict[str, list[bytes]]:
    """Small whole images by format, of each kind that its reader has other code for."""
    rng = np.random.default_rng(5)
    rgb = Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8))
    smooth = Image.linear_gradient("L").resize((80, 60)).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6

    def pil(fmt: str, image: Image.Image = rgb, **options: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, fmt, **options)
        return buffer.getvalue()

    vips = pyvips.Image.new_from_array(np.asarray(smooth))
    deep = (vips.cast("ushort") * 257).cast("ushort")
    turned = [rgb.rotate(180)]
    return {
        "JPEG": [
            pil("JPEG"),
            pil("JPEG", progressive=True, exif=exif),
            pil("JPEG", smooth.convert("CMYK")),
            pil("JPEG", smooth.convert("L"), restart_marker_blocks=2),
        ],
        "PNG": [
            pil("PNG"),
            pil("PNG", rgb.quantize(8), exif=exif),
            pil("PNG", smooth.convert("RGBA"), compress_level=0),
            deep.copy(interpretation="rgb16").pngsave_buffer(interlace=True),
        ],
        "WebP": [
            pil("WEBP"),
            pil("WEBP", lossless=True, exif=exif),
            pil("WEBP", save_all=True, append_images=turned),
        ],
        "TIFF": [
            pil("TIFF"),
            pil("TIFF", compression="tiff_lzw"),
            pil("TIFF", compression="jpeg"),
            pil("TIFF", smooth.convert("1"), compression="group4"),
            vips.cast("ushort").tiffsave_buffer(tile=True, tile_width=16, tile_height=16),
            deep.tiffsave_buffer(bigtiff=True, compression="deflate", predictor="horizontal"),
            vips.tiffsave_buffer(pyramid=True, tile=True, tile_width=16, tile_height=16),
        ],
        "GIF": [
            pil("GIF"),
            pil("GIF", smooth, interlace=1),
            pil("GIF", save_all=True, append_images=turned, duration=50, loop=0),
        ],
        "BMP": [pil("BMP"), pil("BMP", rgb.quantize(8)), pil("BMP", smooth.convert("1"))],
        "AVIF": [pil("AVIF"), pil("AVIF", smooth.convert("RGBA")), pil("AVIF", exif=exif)],
    }


def mutated(rng: np.random.Generator, data: bytes, others: list[bytes]) -> bytes:
    """``data`` with a few bytes set, cut, repeated or taken from another image; headers are hit most."""
    out = bytearray(data)
    for _ in range(min(6, int(rng.geometric(0.6)))):
        if not out:
            break
        reach = len(out) if rng.random() < 0.5 else min(len(out), 300)
        at = int(rng.integers(0, reach))
        match int(rng.integers(0, 10)):
            case 0 | 8:
                out[at] ^= 1 << int(rng.integers(0, 8))
            case 1 | 9:
                out[at] = int(rng.integers(0, 256))
            case 2 | 3:
                width = int(rng.choice([1, 2, 4]))
                order = "big" if rng.random() < 0.5 else "little"
                number = int(rng.choice(EDGES)) & (256**width - 1)
                out[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
            case 4:
                del out[at : at + int(rng.integers(1, 64))]
            case 5:
                out[at:at] = out[at : at + int(rng.integers(1, 200))] * int(rng.integers(1, 40))
            case 6:
                other = others[int(rng.integers(len(others)))]
                start = int(rng.integers(0, len(other)))
                out[at:at] = other[start : start + int(rng.integers(1, 200))]
            case 7:
                del out[len(out) - int(rng.integers(1, min(len(out), 400) + 1)) :]
    changed = bytes(out)
    return repaired_png(changed) if rng.random() < 0.9 else changed


def repaired_png(data: bytes) -> bytes:
    """A PNG with its chunks' checksums made right, so that more than a checksum is tested; others as they are."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    out, at = bytearray(data), 8
    while at + 12 <= len(out):
        (length,) = struct.unpack_from(">I", out, at)
        end = at + 8 + length
        if end + 4 > len(out):
            break
        struct.pack_into(">I", out, end, zlib.crc32(out[at + 4 : end]))
        at = end + 4
    return bytes(out)


def image(seed: int, number: int, formats: dict[str, list[bytes]]) -> tuple[str, bytes]:
    """The format that it comes from, and its bytes."""
    rng = np.random.default_rng([seed, number])
    name = list(formats)[number % len(formats)]
    kinds = formats[name]
    every = [data for kind in formats.values() for data in kind]
    return name, mutated(rng, kinds[int(rng.integers(len(kinds)))], every)


def run(count: int, seed: int, first: int = 0) -> dict[str, Any]:
    formats, limits, vision = seeds(), ImageLimits(), VisionConfig()
    for kinds in formats.values():
        for data in kinds:
            cut_crops(open_image(data, limits), vision)  # Untouched they are images.
    taken: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    slowest: dict[str, Any] = {"seconds": 0.0}
    for number in range(first, first + count):
        name, data = image(seed, number, formats)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        print(f"\r{number} ", end="", file=sys.stderr)
        began = time.process_time()
        fault = None
        try:
            cut_crops(open_image(data, limits), vision)
        except ImageError as error:
            refused[name] += 1
            if error.field != "image" or "\n" in str(error) or len(str(error)) > 300:
                fault = f"an unusable message: {error!r}"
        except Exception as error:  # Whatever else it is, is what is looked for.
            fault = f"{type(error).__name__}: {error}"
        else:
            taken[name] += 1
        seconds = time.process_time() - began
        if seconds > slowest["seconds"]:
            slowest = {"seconds": round(seconds, 3), "number": number, "format": name}
        if seconds > LIMIT_S:
            fault = fault or f"{seconds:.1f} s"
        if fault is not None:
            encoded = base64.b64encode(data).decode()
            faults.append({"number": number, "format": name, "fault": fault, "data": encoded})
    faulthandler.cancel_dump_traceback_later()
    return {
        "count": count,
        "seed": seed,
        "taken": dict(taken),
        "refused": dict(refused),
        "slowest": slowest,
        "peak_mib": peak_mib(),
        "faults": faults,
    }


def peak_mib() -> int:
    """This program's own peak: getrusage would count what the process that started it had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.abuse.inputs.mutated_images")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first image")
    parser.add_argument("--seed", type=int, default=20261120)
    parser.add_argument("--memory-mib", type=int, default=MEMORY_MIB)
    args = parser.parse_args()
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (args.memory_mib * 2**20,) * 2)
    print(json.dumps(run(args.count, args.seed, args.first)))


if __name__ == "__main__":
    main()
