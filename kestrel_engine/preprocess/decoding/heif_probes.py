"""Two tiny images that show which HEIF codecs this build of libvips can decode.

libvips reads the container in every build, so asking for the loader proves nothing: builds without the HEVC patent
licence open HEIC files and fail at the first pixel. Both images are 64x64 of about (200, 30, 30), made for this.
"""

from __future__ import annotations

import base64

HEIF_PROBES = {
    "AVIF": base64.b64decode(
        "AAAAHGZ0eXBhdmlmAAAAAG1pZjFhdmlmbWlhZgAAANZtZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAAAAAAAAAA"
        "ACJpbG9jAAAAAERAAAEAAQAAAAAA+gABAAAAAAAAAC0AAAAjaWluZgAAAAAAAQAAABVpbmZlAgAAAAABAABhdjAxAAAAAA5waXRt"
        "AAAAAAABAAAAVmlwcnAAAAA4aXBjbwAAAAxhdjFDgQAMAAAAABRpc3BlAAAAAAAAAEAAAABAAAAAEHBpeGkAAAAAAwgICAAAABZp"
        "cG1hAAAAAAAAAAEAAQOBAgMAAAA1bWRhdBIACgkYFX/9ogIaDQgyHh2Hh4Wd3HHHAsrAgM/KKvcZejf6wxvOY1500ia4WA=="
    ),
    "HEIC": base64.b64decode(
        "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAUJtZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAAAAAAAAAA"
        "ACJpbG9jAAAAAERAAAEAAQAAAAABZgABAAAAAAAAABgAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAAAAABAABodmMxAAAAAA5waXRt"
        "AAAAAAABAAAAwmlwcnAAAACkaXBjbwAAAHhodmNDAQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEAGEABDAH//wNwAAADAJAAAAMA"
        "AAMAHroCQGEAAQArQgEBA3AAAAMAkAAAAwAAAwAeoCCBBZbqSSmubgIaDAgAAAMAyAAAAwAIQGIAAQAHRAHBcrAiQAAAABRpc3Bl"
        "AAAAAAAAAEAAAABAAAAAEHBpeGkAAAAAAwgICAAAABZpcG1hAAAAAAAAAAEAAQOBAgMAAAAgbWRhdAAAABQoAa8EGPx5OOv/+ZCP"
        "z8BcKsR0OA=="
    ),
}
"""Format to encoded image."""
