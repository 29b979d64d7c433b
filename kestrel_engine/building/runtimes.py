"""From a plan and weights to one of the two runtimes, whose memory it claims."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config.runtime import RuntimeConfig
from ..runtime.protocol import Runtime
from ..types.model_config import ModelConfig
from .claims import CLAIMS, claim_of
from .room import Plan, beside_weights, most_crops, plan_of_pool

if TYPE_CHECKING:
    import torch

    from ..models.refiner import Refiner


def runtime_of(
    plan: Plan, tensors: dict[str, torch.Tensor], refiner: Refiner | None, name: str
) -> tuple[Runtime, float]:
    """Builds the runtime of ``plan`` and claims its memory for the model ``name``. Returns it, and the seconds that
    capturing graphs took. Raises InsufficientMemoryError."""
    from ..runtime.torch_runtime import TorchRuntime

    weights = sum(tensor.nbytes for tensor in tensors.values())
    build = _gpu_runtime if plan.kernels else _torch_runtime
    runtime, capture_s = build(plan, tensors, refiner)
    staying, passing = beside_weights(plan, refiner)
    untouched = runtime.untouched() if isinstance(runtime, TorchRuntime) else _nothing
    pool = runtime.limits.num_pages * plan.page_bytes
    holds = weights + staying + pool - untouched()

    def growth() -> int:
        return passing + untouched()

    CLAIMS.add(runtime, claim_of(name, plan.device, holds, growth))
    return runtime, capture_s


def _nothing() -> int:
    return 0


def _torch_runtime(
    plan: Plan, tensors: dict[str, torch.Tensor], refiner: Refiner | None
) -> tuple[Runtime, float]:
    from ..models.compiled import decode_attention, large_pages
    from ..models.moondream import Moondream
    from ..models.weight_only import pack_for_cpu
    from ..runtime.torch_runtime import TorchRuntime

    if plan.device.type == "cpu" and plan.config.dtype != "float32":
        pack_for_cpu(tensors)
    large_pages.move(tensors.values())
    pool = plan_of_pool(plan, refiner)
    model = Moondream(plan.model, tensors)
    model.text.compile_decode(plan.sizes.max_batch_size)
    runtime = TorchRuntime(
        model,
        plan.model,
        num_pages=pool.num_pages,
        page_size=plan.page_size,
        max_batch_size=plan.sizes.max_batch_size,
        max_seq_length=pool.max_seq_length,
        device=plan.device,
        dtype=plan.dtype,
        kv_scales=plan.kv_scales,
        refiner=refiner,
    )
    assert runtime.cache is not None
    decode_attention.compile_for(runtime.cache.keys)
    return runtime, 0.0


def _gpu_runtime(
    plan: Plan, tensors: dict[str, torch.Tensor], refiner: Refiner | None
) -> tuple[Runtime, float]:
    from ..runtime.gpu.parts import Options
    from ..runtime.gpu.runtime import GpuRuntime

    sizes = plan.sizes
    pool = plan_of_pool(plan, refiner)
    options = Options(
        num_pages=pool.num_pages,
        page_size=plan.page_size,
        max_batch_size=sizes.max_batch_size,
        max_seq_length=pool.max_seq_length,
        attention=plan.config.attention,
        fp8_gemms=plan.config.fp8_gemms,
        kv_scales=plan.kv_scales,
        cuda_graphs=plan.config.cuda_graphs,
        decode_beside=decode_beside_of(plan.config, plan.model, cuda=True) == "on",
        max_crops=most_crops(sizes),
        refiner=refiner,
        adapters=plan.slabs,
        adapt_vision=plan.config.has_adapters,
    )
    runtime = GpuRuntime(plan.model, tensors, options, plan.progress)
    return runtime, runtime.capture_s


def decode_beside_of(config: RuntimeConfig, model: ModelConfig, *, cuda: bool) -> str:
    """Returns ``config.decode_beside``, or what auto chooses: on, off or slices."""
    if config.decode_beside != "auto":
        return config.decode_beside
    if not cuda:
        return "off"
    return "on" if model.text.moe is None else "slices"
