"""The names of dtypes, and what each precision makes of settings that are auto."""

from __future__ import annotations

from ..errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_ALIASES = {
    "float32": "float32",
    "float": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "fp16": "float16",
    "auto": "auto",
}
PRECISIONS = {
    "auto": {"fp8_gemms": "off"},
    "float32": {"dtype": "float32", "fp8_gemms": "off", "kv_cache_dtype": "model"},
    "bfloat16": {"dtype": "bfloat16", "fp8_gemms": "off", "kv_cache_dtype": "model"},
    "fp8": {"dtype": "bfloat16", "fp8_gemms": "all", "kv_cache_dtype": "fp8"},
}
"""What each precision makes of settings that are auto."""


def dtype_name(dtype: object) -> str:
    """Returns the canonical name of a dtype, given as a torch.dtype or a string. Raises ConfigError."""
    name = _DTYPE_ALIASES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise ConfigError(
            "dtype", dtype, f"must be auto, {', '.join(DTYPES)} or the torch.dtype of that name"
        )
    return name
