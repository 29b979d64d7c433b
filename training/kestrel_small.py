"""kestrel-small's sizes and files; training/README.md says why they are what they are."""

from __future__ import annotations

from pathlib import Path

from training.learning.model import Sizes
from training.scenes.tiling import Geometry

VIEW = Geometry(patch=20, crop=640, margin=2, max_crops=4)
LAYERS = 8
SIZES = Sizes(
    dim=384, ff_dim=1536, layers=LAYERS, heads=6, vocab=2048, max_context=4096, moe_start=LAYERS,
    vision_dim=320, vision_layers=8, vision_heads=5, vision_ff=1280, proj_inner=1024, view=VIEW,
)  # fmt: skip
TOKENIZER_FILE = Path(__file__).parent / "domains" / "tokenizer.json"
