"""SVG paths, which the SDK reads from a server that it may not trust."""

from math import isfinite

from kestrel_client.drawing.svg_path import polygons


def take(data: bytes) -> None:
    path = data.decode(errors="replace")
    for polygon in polygons(path):
        assert len(polygon) > 2
        assert all(isfinite(x) and isfinite(y) for x, y in polygon), path
