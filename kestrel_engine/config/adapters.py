"""AdapterSources: where adapters come from besides the operator's folder, and where downloaded ones are kept."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import ConfigError
from .groups import MODEL
from .setting import check_settings, checked

_ALLOWED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/(?:[A-Za-z0-9][A-Za-z0-9._-]{0,95}\*?|\*)")
TUNING_API = "https://api.moondream.ai"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSources:
    """By default, no caller can make the server download anything. Raises ConfigError."""

    hub: tuple[str, ...] = MODEL.setting(
        (),
        "repository of the hub, or a pattern, from which requests may name adapters: ORG/REPO, ORG/PREFIX* or ORG/*; a "
        "request names ORG/REPO or ORG/REPO@REVISION",
        flag="--adapter-hub",
        metavar="REPOSITORY",
        shown="none",
    )
    api: str | None = MODEL.setting(
        None,
        "address of the tuning API, such as https://api.moondream.ai, from which requests may name fine-tunes as "
        "ID@STEP; needs a key in MOONDREAM_API_KEY or --adapter-api-key-file",
        flag="--adapter-api",
        metavar="URL",
        shown="off",
    )
    api_key_file: str | Path | None = MODEL.setting(
        None,
        "file that holds the key of --adapter-api; read again for each download",
        flag="--adapter-api-key-file",
        metavar="FILE",
        shown="MOONDREAM_API_KEY",
    )
    api_key: str | None = field(default=None, repr=False)
    """The key of the tuning API. A secret has no flag."""
    disk_bytes: int = MODEL.setting(
        10 * 1024 * 1024 * 1024,
        "limit on the bytes of downloaded adapters in --cache-dir; the least recently used adapters are deleted",
        flag="--adapter-disk-bytes",
        low=1,
    )
    host_bytes: int = checked(1024 * 1024 * 1024, low=0)
    """On CUDA, limit on the memory of the host for adapters that are ready to be copied to the GPU; 0 keeps none."""

    def __post_init__(self) -> None:
        check_settings(self, "adapter_sources.")
        for each in self.hub:
            if not _ALLOWED.fullmatch(each):
                raise ConfigError(
                    "adapter_sources.hub", each, "must be ORG/REPO, ORG/PREFIX* or ORG/*"
                )
        if self.api is not None:
            self._check_api(self.api)

    @property
    def downloads(self) -> bool:
        """Whether requests may name adapters that are not in the operator's folder."""
        return bool(self.hub) or self.api is not None

    def with_key(self, key: str) -> AdapterSources:
        """Returns these sources with the tuning API's key, and with the released API if none is named."""
        return replace(self, api_key=key, api=self.api or TUNING_API)

    def allows(self, repository: str) -> bool:
        """Whether requests may name adapters of this repository of the hub."""
        return any(
            repository.startswith(each[:-1]) if each.endswith("*") else repository == each
            for each in self.hub
        )

    def _check_api(self, api: str) -> None:
        try:
            parts = urlsplit(api)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise ConfigError("adapter_sources.api", api, "is not an address") from None
        if parts.username is not None or parts.query or parts.fragment or not host:
            raise ConfigError(
                "adapter_sources.api", "...", "must be like https://HOST or https://HOST/PATH"
            )
        if parts.scheme != "https" and not (parts.scheme == "http" and host in _LOOPBACK):
            raise ConfigError(
                "adapter_sources.api", api, "must begin with https://, because a key is sent there"
            )
