"""Options, and Parts: what GpuRuntime consists of, built in one order, in which the device's memory is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...models.kv_format import Scales
from ...models.moondream import Moondream
from ...models.refiner import Refiner
from ...types.model_config import ModelConfig
from ...types.step import RuntimeLimits
from ..kv_cache import KvCache, kv_dtype
from ..refinement import Refinement
from .adapters.layout import SlabLayout
from .adapters.pass_slabs import PassSlabs, new_anchor
from .attention.decode import FlashInferRows
from .attention.prefill import choose_attention
from .decode import Decode
from .device import capabilities
from .footprint import FP8_DECODE, FP8_PREFILL, FP8_VISION
from .lanes import Lanes
from .prefill.graphs import PrefillGraphs
from .prefill.prefill import Prefill
from .room import can_leave_room
from .sampling.prompts import PromptSampler
from .sampling.rows import RowSampler
from .state.sequence_state import SequenceState
from .state.staging import Uploader
from .step_results import StepResults
from .text.decoder import FusedText
from .text.options import TextOptions
from .vision.encoded_images import EncodedImages
from .vision.graphs import VisionGraphs
from .vision.tower import MAX_CROPS, FusedVision
from .weights import pack_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``attention``, ``fp8_gemms`` and ``decode_beside``: as in RuntimeConfig."""

    num_pages: int
    page_size: int
    max_batch_size: int
    max_seq_length: int
    attention: str = "auto"
    fp8_gemms: str = "off"
    cuda_graphs: bool = True
    max_crops: int = MAX_CROPS
    kv_scales: Sequence[Scales] | None = None
    """The scales of each layer for an FP8 KV cache; None for a KV cache in the model's dtype."""
    decode_beside: bool = True
    refiner: Refiner | None = None
    adapters: SlabLayout | None = None
    """The layout of adapters' slabs; None if rows have no adapters, which needs fewer graphs."""
    adapt_vision: bool = True
    """Adapters may change the vision tower and the projector, which needs more graphs."""


class Parts:
    """Holds all that takes the device's memory. ``config``, ``tensors``: as of GpuRuntime."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor], options: Options) -> None:
        """Raises ConfigError for an attention library or an FP8 setting that is not available, and torch's errors."""
        pack_weights(config, tensors)
        self._config, self._options = config, options
        self.model = model = Moondream(config, tensors)
        device, rows = model.device, options.max_batch_size
        self.attention = choose_attention(
            options.attention, device, model.dtype, kv_dtype(model.dtype, options.kv_scales)
        )
        self.limits = self._limits()
        self.refinement = (
            None if options.refiner is None else Refinement(model.vision, options.refiner)
        )
        self.lanes = Lanes(device, two=self.limits.decodes_beside)
        self.stream = self.lanes.stream
        # One page more than the scheduler uses: rows of padding write to it.
        self.cache = KvCache(
            config.text,
            num_pages=options.num_pages + 1,
            page_size=options.page_size,
            dtype=model.dtype,
            device=device,
            scales=options.kv_scales,
        )
        self.upload = Uploader(device)
        self.state = SequenceState(self.limits, device, self.upload)
        planned = self._planned_rows()
        self.text = self._text(tensors, planned)
        layout = options.adapters
        self._anchor = None if layout is None else new_anchor(model.dtype, device)
        slabs = None
        if self._anchor is not None:
            slabs = PassSlabs(self._anchor, rows, rows, device)
        self.vision = self._vision(tensors)
        self.vision_graphs = None
        if self.stream is not None and options.cuda_graphs:
            self.vision_graphs = VisionGraphs(
                self.vision,
                self.stream,
                max_crops=options.max_crops,
                with_room=self.limits.leaves_room,
            )
        self.images = EncodedImages(
            self.vision,
            self.vision_graphs,
            model.text.wte[config.ids.bos_id],
            self.upload,
        )
        self.prompts = Prefill(
            config,
            model,
            self.text,
            self.cache,
            self.images,
            self.attention,
            self.upload,
            self._prefill_graphs(),
            spare_slot=options.num_pages * options.page_size,
            anchor=self._anchor,
        )
        decode_sampler, prompt_sampler = (
            RowSampler(config, model, self.text, self.state, rows, device) for _ in range(2)
        )
        self.prompt_sampler = PromptSampler(
            prompt_sampler, self.state, self.prompts.fixed_hidden, stream=self.stream
        )
        self.decode = Decode(
            model,
            self.text,
            self.cache,
            self.state,
            decode_sampler,
            rows,
            planned=planned,
            slabs=slabs,
            stream=self.lanes.decode_stream,
        )
        self.results = StepResults(config, rows, device)

    def close(self) -> None:
        """Ends the work of all parts, and drops what they hold beside weights and buffers."""
        self.decode.close()
        if self.vision_graphs is not None:
            self.vision_graphs.clear()
        self.prompts.close()
        self.prompt_sampler.close()
        self.images.clear()

    def _limits(self) -> RuntimeLimits:
        options, model = self._options, self.model
        # FlashInfer's prefill and decode share a workspace. Without graphs, the host launches too slowly for two lanes.
        can_decode_beside = (
            model.device.type == "cuda" and options.cuda_graphs and self.attention.decode is None
        )
        decode_beside = options.decode_beside and can_decode_beside
        return RuntimeLimits(
            num_pages=options.num_pages,
            page_size=options.page_size,
            max_batch_size=options.max_batch_size,
            max_seq_length=options.max_seq_length,
            vocab_size=self._config.text.vocab_size,
            decodes_beside=decode_beside,
            leaves_room=decode_beside and can_leave_room(model.device, model.dtype),
            refines=options.refiner is not None,
        )

    def _planned_rows(self) -> FlashInferRows | None:
        if self.attention.decode is None:
            return None
        return FlashInferRows(
            self.attention.decode,
            self._config.text,
            self.limits,
            self.state.max_pages,
            spare_page=self._options.num_pages,
        )

    def _text(self, tensors: dict[str, Tensor], planned: FlashInferRows | None) -> FusedText:
        options, device = self._options, self.model.device
        return FusedText(
            self._config.text,
            tensors,
            TextOptions(
                max_rows=options.max_batch_size,
                page_size=options.page_size,
                pdl=device.type == "cuda" and capabilities(device).compute_capability == (9, 0),
                attention=planned,
                fp8=options.fp8_gemms in FP8_PREFILL,
                fp8_decode=options.fp8_gemms in FP8_DECODE,
                kv_scales=options.kv_scales,
                priority=self.lanes.decode_priority,
                adapters=options.adapters,
            ),
        )

    def _vision(self, tensors: dict[str, Tensor]) -> FusedVision:
        options, anchor = self._options, self._anchor
        changes = None
        if options.adapt_vision and options.adapters is not None and anchor is not None:
            changes = options.adapters, anchor
        fp8 = options.fp8_gemms in FP8_VISION
        # The projector takes as much memory for an image as the tower for a crop.
        return FusedVision(
            self._config.vision, tensors, fp8=fp8, adapters=changes, most_images=options.max_crops
        )

    def _prefill_graphs(self) -> PrefillGraphs | None:
        """Returns the captured passes, if they are used. On a CPU, the same passes run without capture, for tests."""
        captured = self._options.cuda_graphs or self.stream is None
        if not self.attention.captures or not captured:
            return None
        limits = self.limits
        return PrefillGraphs(
            self.text,
            self.cache,
            self.state.page_table,
            block_length=self._config.image_prefix,
            max_rows=limits.max_batch_size,
            spare_slot=limits.num_pages * limits.page_size,
            blocks=self.attention.own_blocks,
            stream=self.stream,
            anchor=self._anchor,
            with_room=limits.leaves_room,
        )
