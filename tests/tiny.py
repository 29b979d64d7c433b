"""kestrel-tiny, the small model that most tests load. It is served under its folder's name."""

from pathlib import Path

TINY = Path(__file__).parent / "models" / "kestrel-tiny"
SPARE_REFINER = TINY / "spare_refiner.safetensors"
"""Not used unless it is named, because it rounds corners (docs/lab/kestrel-tiny.md)."""
VARIABLES = {"KESTREL_MODEL": str(TINY)}
"""With them, commands of ``kestrel-grpc`` load it if they name no model."""
