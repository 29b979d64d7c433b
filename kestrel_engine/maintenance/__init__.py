"""Maintenance of a model and a machine: downloading, verifying and diagnosing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..confinement.own_confinement import hide_memory
from ..lazy import lazily
from .finding import Finding

if TYPE_CHECKING:
    from ..checkpoint.catalog import is_name
    from ..compiling.models import compile_kernels
    from .acceptance import accept
    from .diagnosis import check_slow_device, diagnose
    from .model_cache import downloaded, remove
    from .model_download import download
    from .model_names import check_choices, check_names, served_name
    from .model_verification import verify
    from .scores.calibration import calibrate
    from .scores.labelled_images import read_labelled_images
else:
    __getattr__ = lazily(
        __name__,
        {
            "..compiling.models": ("compile_kernels",),
            ".diagnosis": ("check_slow_device", "diagnose"),
            ".acceptance": ("accept",),
            ".scores.labelled_images": ("read_labelled_images",),
            ".model_cache": ("downloaded", "remove"),
            ".model_download": ("download",),
            "..checkpoint.catalog": ("is_name",),
            ".model_names": ("check_choices", "check_names", "served_name"),
            ".model_verification": ("verify",),
            ".scores.calibration": ("calibrate",),
        },
    )

__all__ = [
    "Finding",
    "accept",
    "calibrate",
    "check_choices",
    "check_names",
    "check_slow_device",
    "compile_kernels",
    "diagnose",
    "download",
    "downloaded",
    "hide_memory",
    "is_name",
    "read_labelled_images",
    "remove",
    "served_name",
    "verify",
]
