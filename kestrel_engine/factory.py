"""build(config): from a configuration to a runtime. The only place that picks a device, a dtype and a pool size.

Imports torch when called, not before. Everything that can be wrong with the configuration is found before any weight is
read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import RuntimeConfig
from .errors import ConfigError, InsufficientMemoryError
from .info import EngineInfo
from .model_config import ModelConfig
from .runtime.protocol import Runtime
from .skills.base import TextCodec

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, what)."""

LARGEST_DEFAULT_PAGE = 16
"""Positions. Attention speed doesn't depend on the page size; small pages waste little and share well."""
POOL_SHARE = 0.5
"""The KV pool's default takes at most this share of the memory left beside the weights."""


@dataclass(frozen=True, slots=True)
class Built:
    """All that an engine is made of; ``info.skills`` is what the model can do."""

    runtime: Runtime
    model: ModelConfig
    codec: TextCodec
    info: EngineInfo


def build(config: RuntimeConfig, progress: Progress | None = None) -> Built:
    """Resolves, checks, downloads if need be, loads. Blocks; raises ConfigError or ModelLoadError."""
    import torch

    from .checkpoint.memory import device_available
    from .checkpoint.open import load_weights, open_model
    from .models.moondream import Moondream
    from .preprocess.prompt import Tokenizer
    from .runtime.kv_cache import bytes_per_page
    from .runtime.torch_runtime import TorchRuntime

    device, dtype = _device(config), _dtype(config)
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    opened = open_model(config, progress=progress)
    model = opened.config
    page_size = _page_size(config, model)
    _check_pool(config, model, page_size)
    codec = Tokenizer.from_file(opened.tokenizer_path, vocab_size=model.text.vocab_size)
    loaded = load_weights(opened, dtype=dtype, device=device, progress=progress)
    page_bytes = bytes_per_page(model.text, page_size, dtype)
    num_pages, max_seq_length = _pool(
        config, model, page_size, page_bytes, device_available(device)
    )
    runtime = TorchRuntime(
        Moondream(model, loaded.tensors),
        model,
        num_pages=num_pages,
        page_size=page_size,
        max_batch_size=config.max_batch_size,
        max_seq_length=max_seq_length,
        device=device,
        dtype=dtype,
    )
    info = EngineInfo(
        model=opened.name,
        family=model.family,
        skills=model.skills,
        max_context=max_seq_length,
        image_positions=model.image_positions,
        vocab_size=model.text.vocab_size,
        num_parameters=sum(t.numel() for t in loaded.tensors.values()),
        weights_bytes=sum(t.numel() * t.element_size() for t in loaded.tensors.values()),
        weights_fingerprint=loaded.fingerprint,
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        dtype=str(dtype).removeprefix("torch."),
        max_batch_size=config.max_batch_size,
        num_pages=num_pages,
        page_size=page_size,
        max_queue=config.max_queue,
        torch_version=torch.__version__,
    )
    return Built(runtime, model, codec, info)


def _device(config: RuntimeConfig) -> torch.device:
    import torch

    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = int(config.device.partition(":")[2] or 0)
        if index >= count:
            raise ConfigError("device", config.device, f"torch sees {count} CUDA devices here")
    return torch.device(config.device)


def _dtype(config: RuntimeConfig) -> torch.dtype:
    import torch

    if config.dtype == "auto":
        return torch.float32 if _device(config).type == "cpu" else torch.bfloat16
    dtype = getattr(torch, str(config.dtype))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _page_size(config: RuntimeConfig, model: ModelConfig) -> int:
    """A divisor of the image prefix, so that a prefix fills whole pages and none is shared half full."""
    prefix = model.image_prefix
    if config.page_size is None:
        return max(n for n in range(1, LARGEST_DEFAULT_PAGE + 1) if prefix % n == 0)
    if prefix % config.page_size:
        divisors = [n for n in range(1, 129) if prefix % n == 0]
        raise ConfigError(
            "page_size",
            config.page_size,
            f"must divide the image prefix {prefix}: one of {divisors}",
        )
    return config.page_size


def _check_pool(config: RuntimeConfig, model: ModelConfig, page_size: int) -> None:
    """Raises ConfigError for sizes that can't hold what the warm-up takes: a picture, a caption's prompt, 2 tokens."""
    least = model.image_prefix + max(map(len, model.templates.caption.values())) + 2
    if config.max_seq_length is not None and config.max_seq_length < least:
        raise ConfigError(
            "max_seq_length",
            config.max_seq_length,
            f"must be at least {least}, a picture with a short prompt and answer",
        )
    pages = config.kv_cache_pages
    if pages is not None and pages * page_size < least:
        raise ConfigError(
            "kv_cache_pages",
            pages,
            f"of {page_size} positions can't hold {least}, a picture with a short prompt and answer",
        )


def _pool(
    config: RuntimeConfig,
    model: ModelConfig,
    page_size: int,
    page_bytes: int,
    available: int | None,
) -> tuple[int, int]:
    """(pages, longest sequence). By default every batch place can hold a full sequence, as far as memory allows."""
    longest = config.max_seq_length or model.text.max_context
    per_sequence = -(-longest // page_size)
    pages = config.kv_cache_pages
    if pages is None:
        pages = per_sequence * config.max_batch_size
        if available is not None:
            pages = min(pages, int(available * POOL_SHARE) // page_bytes)
        if pages * page_size <= model.image_prefix:
            raise InsufficientMemoryError(
                f"{available} bytes are left beside the weights; half of them hold {pages} pages of the KV cache, and "
                f"a picture takes {model.image_prefix // page_size} pages of {page_bytes} bytes"
            )
    return pages, min(longest, pages * page_size)
