"""RuntimeConfig: the settings of an engine. They are checked once, before the engine reads any weight.

This module imports no torch and queries no device. A new setting is one field made with its group's ``setting``, in the
file of its group.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, fields, replace

from ..errors import ConfigError
from .device_settings import DeviceSettings
from .dtypes import dtype_name, parts_of
from .model_settings import ModelPaths, ModelSettings
from .request_settings import RequestSettings
from .scheduler_settings import SchedulerSettings
from .setting import check_settings
from .sizes import Sizes, default_sizes


# The fields of the last base come first, in help texts and tables too.
@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(SchedulerSettings, RequestSettings, DeviceSettings, ModelSettings):
    """``model`` is a name (``kestrel-small``, ``moondream2``, ``moondream3-preview``, ``moondream3.1-9b-a2b``), a hub
    id ``org/repo[@revision][:file]``, ``s3://bucket/prefix``, or a path. ``model_path`` gives weights that replace the
    model's own; ``model_paths`` gives them too, with a tokenizer. Each field's ``help`` describes it. With None, the
    device or the model determines the value. Raises ConfigError, which names field, value and limit.
    """

    model_paths: InitVar[ModelPaths | None] = None

    def __post_init__(self, model_paths: ModelPaths | None) -> None:
        if model_paths is not None:
            self._take(model_paths)
        if not isinstance(self.model, str) or not self.model.strip():
            raise ConfigError("model", self.model, "must be a model name, hub id or path")
        for name in (
            "model_path",
            "cache_dir",
            "tokenizer_path",
            "adapters_dir",
            "kernel_cache_dir",
        ):
            value = getattr(self, name)
            if value is not None and not str(value):
                raise ConfigError(name, value, "must not be empty")
        if not str(self.calibration):
            raise ConfigError("calibration", self.calibration, "must be auto, off or a file")
        self._check_device()
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        check_settings(self)
        for name, value in parts_of(self.precision).items():
            if getattr(self, name) == "auto":
                object.__setattr__(self, name, value)
        if self.kv_cache_dtype == "fp8" and self.attention == "flashinfer":
            raise ConfigError(
                "kv_cache_dtype",
                "fp8",
                "flashinfer can't read an FP8 KV cache; set attention to auto, triton or torch",
            )
        if self.kv_cache_gib is not None and self.kv_cache_pages is not None:
            raise ConfigError(
                "kv_cache_gib",
                self.kv_cache_gib,
                f"kv_cache_pages={self.kv_cache_pages} is set too; set only one of the two",
            )

    @property
    def has_adapters(self) -> bool:
        return self.adapters_dir is not None or self.adapter_sources.downloads

    def sizes(self, *, cuda: bool, rung: int = 0) -> Sizes:
        """Returns the fields that may be None, with the defaults of the device. Read these fields only here. ``rung``:
        of the defaults for devices with less memory (SMALLER_CUDA_SIZES)."""
        values = {f.name: getattr(self, f.name) for f in fields(Sizes)}
        chosen = {name: value for name, value in values.items() if value is not None}
        defaults = default_sizes(cuda=cuda, itl_target_ms=self.itl_target_ms, rung=rung)
        return replace(defaults, **chosen)

    def _take(self, paths: ModelPaths) -> None:
        """Sets ``model_path`` and ``tokenizer_path``. Raises ConfigError if one is given twice."""
        paths_by_name = {"model_path": paths.weights, "tokenizer_path": paths.tokenizer}
        for name, value in paths_by_name.items():
            if value is None:
                continue
            if getattr(self, name) is not None:
                raise ConfigError(
                    "model_paths", paths, f"{name} is set too; set only one of the two"
                )
            object.__setattr__(self, name, value)

    def _check_device(self) -> None:
        kind, _, index = (
            self.device.partition(":") if isinstance(self.device, str) else ("", "", "")
        )
        if kind not in ("auto", "cpu", "cuda") or (
            index and (kind != "cuda" or not index.isdigit())
        ):
            raise ConfigError("device", self.device, 'must be "auto", "cpu", "cuda" or "cuda:N"')
