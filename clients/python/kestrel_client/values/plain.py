"""Values as plain values for JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from ..drawing.marks import Mask
from ..errors import RpcError
from ..geometry import ImageSize


class Plain:
    """A dataclass that has a form for JSON."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``."""
        return plain_fields(self)


def plain_fields(value: Any, *but: str) -> dict[str, Any]:
    """The fields of a dataclass, except those in ``but``."""
    names = (name for name in value.__dataclass_fields__ if name not in but)
    return {name: plain_value(getattr(value, name)) for name in names}


def plain_value(value: Any) -> Any:
    """Converts ``value`` to types of JSON."""
    match value:
        case Plain():
            return value.to_dict()
        case ImageSize():
            return value._asdict()
        case Mask():
            png = base64.b64encode(value.png).decode("ascii")
            data = plain_value(png if value.format == "png" else getattr(value, value.format))
            size = {"width": value.width, "height": value.height}
            return {"format": value.format, **size, value.format: data}
        case RpcError():
            return {"code": value.code.name, "message": value.message, "reason": value.reason}
        case tuple() | list() | bytes():
            return [plain_value(item) for item in value]
        case Mapping():
            return {key: plain_value(item) for key, item in value.items()}
    return plain_fields(value) if hasattr(value, "__dataclass_fields__") else value
