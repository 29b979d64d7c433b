"""DeviceCrops: makes the crops of images on the device, byte for byte equal to those that libvips makes on the CPU.

A group of images needs one copy of pixels for each image, one copy of tables, and at most four launches. These launches
are captured for an image that is alone and of a size that has come before. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from ....exact_resize import passes
from ....kernels.images.resample import BLOCK, JOB_WIDTH, ResampleJob, resample
from ....types.model_config import VisionConfig
from ....types.requests import PreparedImage
from ..footprint import ARENA_BYTES
from ..state.staging import ImageUploader, Uploader
from .crop_graphs import CropGraphs

KINDS = ((True, False, False), (False, False, False), (False, False, True), (True, True, False))
"""The kinds of passes as (vertical, wide_in, wide_out), in the order of their execution: shrink rows, shrink columns,
interpolate columns, interpolate rows. One launch runs all passes of a kind."""

LAYOUTS_KEPT = 256
"""The number of image sizes whose passes are cached, some 30 kB each."""

_ALIGN = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """All passes for images of one size. ``jobs``: the kind of each job, and the job with offsets relative to the
    image's own part of arena, crops and tables. ``tables``: [n] int32. ``num_bytes``: the image's part of the arena,
    for its pixels and intermediate results."""

    jobs: tuple[tuple[int, ResampleJob], ...]
    tables: np.ndarray
    num_bytes: int


class DeviceCrops:
    """Makes crops. ``graphs``: for images that are alone; None captures nothing. ``block``: that of `resample`."""

    def __init__(
        self,
        vision: VisionConfig,
        upload: Uploader,
        upload_pixels: ImageUploader,
        device: torch.device,
        *,
        graphs: CropGraphs | None = None,
        block: tuple[int, int] = BLOCK,
    ) -> None:
        self._vision, self._device, self._block = vision, device, block
        self._graphs = graphs
        self._upload, self._upload_pixels = upload, upload_pixels
        self._on_device = lru_cache(LAYOUTS_KEPT)(self._sent)
        """The tables and jobs of images that are alone in their group, which are the same for every image of a size."""

    def __call__(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        """Returns the distinct crops [n, S, S, 3] uint8 of each image, contiguous, made from its ``pixels``.

        ARENA_BYTES bounds the device memory beside the crops.
        """
        found: list[Tensor] = []
        for group in self.groups(images):
            found += self._make(group)
        return found

    def warm_up(self) -> None:
        side = self._vision.crop_size
        for width, height in ((side - 1, side - 1), (side + 1, side + 1)):
            pixels = np.zeros((height, width, 3), np.uint8)
            self([PreparedImage("", None, (1, 1), width, height, pixels)])

    def groups(
        self, images: Sequence[PreparedImage]
    ) -> Iterator[list[tuple[PreparedImage, _Layout]]]:
        group: list[tuple[PreparedImage, _Layout]] = []
        size = 0
        for image in images:
            layout = _layout(image.width, image.height, image.tiling, self._vision)
            if group and size + layout.num_bytes > ARENA_BYTES:
                yield group
                group, size = [], 0
            group.append((image, layout))
            size += layout.num_bytes
        if group:
            yield group

    def capture(self) -> None:
        """Captures launches that later images will need, if there are any. Call it when the device has work."""
        if self._graphs is not None:
            self._graphs.capture()

    def clear(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    def _make(self, group: Sequence[tuple[PreparedImage, _Layout]]) -> list[Tensor]:
        if len(group) == 1:
            return [self._make_alone(*group[0])]
        side = self._vision.crop_size
        counts = [image.num_distinct for image, _ in group]
        size = sum(layout.num_bytes for _, layout in group)
        arena = self._new_arena(size)
        crops = self._new_crops(sum(counts))
        by_kind: list[list[ResampleJob]] = [[] for _ in KINDS]
        begin = first_crop = first_entry = 0
        for (image, layout), count in zip(group, counts, strict=True):
            self._send_pixels(image, arena[begin:])
            for kind, job in layout.jobs:
                by_kind[kind].append(
                    _moved(kind, job, begin, first_crop * side**2 * 3, first_entry)
                )
            begin += layout.num_bytes
            first_crop += count
            first_entry += len(layout.tables)
        tables = np.concatenate([layout.tables for _, layout in group])
        on_device = self._upload({"tables": tables, "jobs": _job_rows(by_kind)})
        self._launch(by_kind, on_device, arena, crops)
        return list(crops.split(counts))

    def _make_alone(self, image: PreparedImage, layout: _Layout) -> Tensor:
        graph = None if self._graphs is None else self._graphs.find(layout)
        if graph is not None:
            self._send_pixels(image, graph.arena)
            graph.replay()
            return graph.crops.clone()
        arena = self._new_arena(layout.num_bytes)
        crops = self._new_crops(image.num_distinct)
        self._send_pixels(image, arena)
        launch = partial(self._launch, _by_kind(layout), self._on_device(layout))
        launch(arena, crops)
        if self._graphs is not None:
            self._graphs.note(layout, layout.num_bytes, len(crops), launch)
        return crops

    def _new_arena(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _new_crops(self, count: int) -> Tensor:
        side = self._vision.crop_size
        return torch.empty((count, side, side, 3), dtype=torch.uint8, device=self._device)

    def _send_pixels(self, image: PreparedImage, arena: Tensor) -> None:
        """Enqueues the copy of the image's pixels to the beginning of ``arena``."""
        assert image.pixels is not None, image
        self._upload_pixels(image.pixels, arena[: image.pixels.nbytes])

    def _launch(
        self,
        by_kind: Sequence[Sequence[ResampleJob]],
        on_device: Mapping[str, Tensor],
        arena: Tensor,
        crops: Tensor,
    ) -> None:
        """Enqueues the jobs of each kind, in this order."""
        first = 0
        for (vertical, wide_in, wide_out), same in zip(KINDS, by_kind, strict=True):
            last = first + len(same)
            if same:
                resample(
                    arena,
                    crops,
                    on_device["tables"],
                    on_device["jobs"][first:last],
                    same,
                    vertical=vertical,
                    wide_in=wide_in,
                    wide_out=wide_out,
                    block=self._block,
                )
            first = last

    def _sent(self, layout: _Layout) -> dict[str, Tensor]:
        return self._upload({"tables": layout.tables, "jobs": _job_rows(_by_kind(layout))})


def _by_kind(layout: _Layout) -> list[list[ResampleJob]]:
    """Returns the jobs of an image that is alone, by kind."""
    return [[job for kind, job in layout.jobs if kind == wanted] for wanted in range(len(KINDS))]


def _job_rows(by_kind: Sequence[Sequence[ResampleJob]]) -> np.ndarray:
    """Returns the jobs in the order of their launches, [n, JOB_WIDTH] int32."""
    return np.array([job for same in by_kind for job in same], np.int32).reshape(-1, JOB_WIDTH)


def _moved(kind: int, job: ResampleJob, begin: int, crops: int, tables: int) -> ResampleJob:
    """Returns ``job`` with absolute offsets, for an image at byte ``begin`` of the arena, element ``crops`` of the
    crops and entry ``tables`` of the tables."""
    _, wide_in, wide_out = KINDS[kind]
    return job._replace(
        source=job.source + begin // (2 if wide_in else 1),
        result=job.result + (crops if job.kept else begin // (2 if wide_out else 1)),
        positions=job.positions + tables,
        weights=job.weights + tables,
    )


@lru_cache(LAYOUTS_KEPT)
def _layout(width: int, height: int, tiling: tuple[int, int], vision: VisionConfig) -> _Layout:
    side, window = vision.crop_size, vision.crop_window
    targets = [(side, side, (1, 1), 0)]
    if tiling != (1, 1):
        rows, columns = tiling
        to_width, to_height = window * (columns - 1) + side, window * (rows - 1) + side
        targets.append((to_width, to_height, tiling, 1))
    free = _aligned(width * height * 3)
    entries = 0
    jobs: list[tuple[int, ResampleJob]] = []
    tables: list[np.ndarray] = []
    for to_width, to_height, (down, across), first_crop in targets:
        steps = passes(width, height, to_width, to_height)
        source, now_width, now_height = 0, width, height
        for step in steps:
            pitch = now_width * 3
            if step.vertical:
                now_height = step.target
            else:
                now_width = step.target
            kept = step is steps[-1]
            result = first_crop * side**2 * 3 if kept else free
            job = ResampleJob(
                source=source // (2 if step.wide_in else 1),
                result=result // (2 if step.wide_out else 1),
                pitch=pitch,
                size=step.size,
                whole=step.whole,
                groups=step.groups,
                taps=step.taps,
                positions=entries,
                weights=entries + len(step.positions),
                tiles=down * across if kept else 1,
                across=across if kept else 1,
                window=window if kept else 0,
                rows=side if kept else now_height,
                columns=side if kept else now_width,
                kept=int(kept),
            )
            jobs.append((KINDS.index((step.vertical, step.wide_in, step.wide_out)), job))
            tables += [step.positions, step.weights.ravel()]
            entries += len(step.positions) + step.weights.size
            if not kept:
                source = free
                free += _aligned(now_width * now_height * 3 * (2 if step.wide_out else 1))
    return _Layout(tuple(jobs), np.concatenate(tables), free)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
