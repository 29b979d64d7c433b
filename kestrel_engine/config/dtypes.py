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
_PARTS = ("dtype", "fp8_gemms", "kv_cache_dtype", "weights")
PRECISIONS = {
    "auto": ("auto", "off", "auto", "stored"),
    "float32": ("float32", "off", "model", "stored"),
    "bfloat16": ("bfloat16", "off", "model", "stored"),
    "float16": ("float16", "off", "model", "stored"),
    "fp8": ("bfloat16", "all", "fp8", "stored"),
    "fp8-gemms": ("bfloat16", "all", "auto", "stored"),
    "fp8-prefill": ("bfloat16", "prefill", "auto", "stored"),
    "fp8-vision": ("bfloat16", "vision", "auto", "stored"),
    "fp8-kv": ("bfloat16", "off", "fp8", "stored"),
    "int8": ("auto", "off", "auto", "int8"),
    "int4": ("auto", "off", "auto", "int4"),
}
"""The values of `_PARTS` with each precision."""


def parts_of(precision: str) -> dict[str, str]:
    """Returns the values of `_PARTS` where these fields are auto."""
    return dict(zip(_PARTS, PRECISIONS[precision], strict=True))


def dtype_name(dtype: object) -> str:
    """Returns the canonical name of a dtype, given as a torch.dtype or a string. Raises ConfigError."""
    name = _DTYPE_ALIASES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise ConfigError(
            "dtype", dtype, f"must be auto, {', '.join(DTYPES)} or the torch.dtype of that name"
        )
    return name
