"""LoRA and TextLoRAConfig."""

from ..adapters.lora import LoRA, TextLoRAConfig

__all__ = ["LoRA", "TextLoRAConfig"]
