"""TaskImages: the image of a task, from where the operator allows.

The address of an image comes from users who may import tasks, so it can name what only this machine reaches.
``ImageFetcher`` says how fetching is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from kestrel_client.images.base64_images import decoded_image, is_data_url
from kestrel_engine import RequestError

from ...http.fetching import ImageFetcher, Place, TrustedOrigin, is_address, origin_of
from .labelling import RequestRefused

MAX_BYTES = 32 * 1024 * 1024
_OWN_PATHS = ("/data/", "/storage-data/", "/tasks/")
"""Where Label Studio keeps images. Other paths, such as those of its interface, are not for its token."""


def origin(url: str) -> str:
    """The origin of Label Studio's address. Raises ValueError."""
    parts = urlsplit(url.strip().lower())
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError("must be an address like http://localhost:8080")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError("must have no path")
    return origin_of(parts)


class TaskImages:
    """``hosts``: from which addresses are fetched. ``label_studio``: the origin of Label Studio, for images that were
    uploaded to it; None for none. ``token``: Label Studio's, which only it gets. ``allow_data``: whether data URLs are
    taken."""

    def __init__(
        self, hosts: Sequence[str], label_studio: str | None, token: str | None, allow_data: bool
    ) -> None:
        remedy = "the bridge's operator may allow the host (--fetch-allow)"
        self._web = ImageFetcher(hosts, MAX_BYTES, remedy=remedy)
        self._origin, self._allow_data = label_studio, allow_data
        self._own: ImageFetcher | None = None
        if label_studio is not None:
            headers = (("authorization", f"Token {token}"),) if token else ()
            trusted = TrustedOrigin(label_studio, headers)
            self._own = ImageFetcher(hosts, MAX_BYTES, trusted=trusted, remedy=remedy)

    async def read(self, value: object, name: str) -> bytes:
        """Returns the image's bytes. ``name``: of its field, for errors. Raises RequestRefused."""
        if not isinstance(value, str) or not value:
            raise RequestRefused(f"{name}: must be the address of an image")
        if is_data_url(value):
            return self._decoded(value, name)
        if self._origin is not None and value.startswith(self._origin + "/"):
            value = value.removeprefix(self._origin)
        if value.startswith("/"):
            return await self._from_label_studio(value, name)
        if not is_address(value):
            raise RequestRefused(
                f"{name}: {value[:80]!r} is neither an address (https://…) nor a path of Label Studio (/data/…); "
                "let the storage give addresses (pre-signed URLs)"
            )
        return await _fetched(self._web, value, name)

    async def _from_label_studio(self, path: str, name: str) -> bytes:
        if self._own is None or self._origin is None:
            raise RequestRefused(
                f"{name}: {path[:80]!r} is a path of Label Studio; start the bridge with --label-studio URL"
            )
        # Only the path counts: without what follows it, and before a server decodes a second ? into it.
        plain = unquote(unquote(re.split("[?#]", path, maxsplit=1)[0]))
        if not plain.startswith(_OWN_PATHS) or "\\" in plain or ".." in plain.split("/"):
            raise RequestRefused(
                f"{name}: {path[:80]!r} is no image of Label Studio; its paths begin with {', '.join(_OWN_PATHS)}"
            )
        return await _fetched(self._own, self._origin + path, name)

    def _decoded(self, url: str, name: str) -> bytes:
        if not self._allow_data:
            raise RequestRefused(
                f"{name}: is a data URL; start the bridge with --allow-data-urls to take them"
            )
        try:
            return decoded_image(url)
        except ValueError as error:
            raise RequestRefused(f"{name}: {error}") from None


async def _fetched(fetcher: ImageFetcher, url: str, name: str) -> bytes:
    held = {"image": url}
    try:
        await fetcher.fill([Place(held, "image", (name,))])
    except RequestError as error:
        raise RequestRefused(str(error)) from None
    image: bytes = held["image"].image  # type: ignore[attr-defined]  # a FetchedImage now
    return image
