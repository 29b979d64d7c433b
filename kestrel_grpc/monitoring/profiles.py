"""Profiles: the operator's folder of them, and the one that is being taken. Owns names, bounds and the waiting task."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from kestrel_engine import InferenceEngine, Profile, ProfileError, ProfileRequest

from ..settings.debug import DebugConfig

logger = logging.getLogger(__name__)

_LAST_S = 10.0
SUFFIX = ".trace.json.gz"
DEFAULT_SECONDS, MAX_SECONDS, MIN_SECONDS = 10.0, 60.0, 0.1
DEFAULT_STEPS, MAX_STEPS = 500, 10_000


class Profiles:
    """One at a time; on the event loop."""

    def __init__(self, config: DebugConfig) -> None:
        self._folder = None if config.profile_dir is None else Path(config.profile_dir)
        self._max_bytes = config.profile_max_bytes
        self._taking: asyncio.Task[Profile] | None = None
        self._stop = asyncio.Event()

    async def start(
        self, engine: InferenceEngine | None, *, seconds: float, steps: int, python_functions: bool
    ) -> str:
        """The name of the file to come, once it records. Raises ProfileError."""
        if self._folder is None:
            raise ProfileError("the server was started without --profile-dir")
        if engine is None:
            raise ProfileError("no model is ready")
        if self._taking is not None and not self._taking.done():
            raise ProfileError("a profile is being taken")
        room = self._max_bytes - sum(_size(p) for p in self._folder.glob(f"*{SUFFIX}"))
        if room <= 0:
            raise ProfileError("the folder of profiles is full (--profile-max-bytes)")
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        name = f"kestrel-{now}-{secrets.token_hex(3)}{SUFFIX}"
        request = ProfileRequest(
            path=str(self._folder / name),
            seconds=seconds,
            steps=steps,
            max_bytes=room,
            python_functions=python_functions,
        )
        begun, self._stop = asyncio.Event(), asyncio.Event()
        self._taking = asyncio.create_task(engine.profile(request, begun=begun, stop=self._stop))
        self._taking.add_done_callback(_tell)
        waiting = asyncio.ensure_future(begun.wait())
        await asyncio.wait((self._taking, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not begun.is_set():
            await self._taking  # It failed; raises why.
        return name

    async def stop(self) -> Profile:
        """Ends the one that is being taken; else the last one. Raises ProfileError."""
        if self._taking is None:
            raise ProfileError("no profile was started")
        self._stop.set()
        return await asyncio.shield(self._taking)

    async def close(self) -> None:
        """Ends the one that is being taken, before the engine does."""
        if self._taking is not None:
            with suppress(ProfileError, TimeoutError):  # Nobody waits longer for a hung device.
                await asyncio.wait_for(self.stop(), _LAST_S)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # Deleted meanwhile.
        return 0


def _tell(taken: asyncio.Task[Profile]) -> None:
    if taken.cancelled():
        return
    error = taken.exception()
    if error is not None:
        logger.error("no profile: %s", error)
        return
    profile = taken.result()
    logger.info(
        "profile %s: %d bytes, %d steps in %.2f s",
        Path(profile.path).name,
        profile.file_bytes,
        profile.steps,
        profile.seconds,
    )
