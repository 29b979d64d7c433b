"""Encoded images, as Pillow writes them."""

import io
from typing import Any

import numpy as np
from PIL import Image


def encoded(image: Image.Image | np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(file, format, **options)
    return file.getvalue()
