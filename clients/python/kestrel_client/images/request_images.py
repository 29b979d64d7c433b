"""The images of a request, wherever its fields hold them."""

from __future__ import annotations

from typing import Any


def request_images(request: Any) -> list[Any]:
    """The Image messages that are set in a request, in the order of the prompt."""
    names = request.DESCRIPTOR.fields_by_name
    if "frame" in names:
        request, names = request.frame, request.frame.DESCRIPTOR.fields_by_name
    if "images" in names:
        return list(request.images)
    return [request.image] if "image" in names and request.HasField("image") else []
