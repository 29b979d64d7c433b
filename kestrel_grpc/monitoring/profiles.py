"""Profiles: records profiles of the engine into the operator's folder, one at a time, within its limits."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from kestrel_engine import InferenceEngine, Profile, ProfileError, ProfileRequest, clock

from ..settings.debug import DebugConfig

logger = logging.getLogger(__name__)

_LAST_S = 10.0
SUFFIX = ".trace.json.gz"
DEFAULT_MS, MAX_MS, MIN_MS = 10_000, 60_000, 100
DEFAULT_STEPS, MAX_STEPS = 500, 10_000


class Profiles:
    """Records one profile at a time. Runs on the event loop."""

    def __init__(self, config: DebugConfig) -> None:
        self._folder = None if config.profile_dir is None else Path(config.profile_dir)
        self._max_bytes = config.profile_max_bytes
        self._recording: asyncio.Task[Profile] | None = None
        self._stop = asyncio.Event()

    async def start(
        self, engine: InferenceEngine | None, *, seconds: float, steps: int, python_functions: bool
    ) -> str:
        """Starts a profile. Returns the name of its file when the recording has begun. Raises ProfileError."""
        if self._folder is None:
            raise ProfileError("the server was started without --profile-dir")
        if engine is None:
            raise ProfileError("no model is ready")
        if self._recording is not None and not self._recording.done():
            raise ProfileError("a profile is being recorded already")
        room = self._max_bytes - sum(_size(p) for p in self._folder.glob(f"*{SUFFIX}"))
        if room <= 0:
            raise ProfileError("the folder of profiles is full; delete some")
        now = datetime.fromtimestamp(clock.wall(), UTC).strftime("%Y%m%dT%H%M%SZ")
        name = f"kestrel-{now}-{secrets.token_hex(3)}{SUFFIX}"
        request = ProfileRequest(
            path=str(self._folder / name),
            seconds=seconds,
            steps=steps,
            max_bytes=room,
            python_functions=python_functions,
        )
        begun, self._stop = asyncio.Event(), asyncio.Event()
        self._recording = asyncio.create_task(engine.profile(request, begun=begun, stop=self._stop))
        self._recording.add_done_callback(_log_result)
        waiting = asyncio.ensure_future(begun.wait())
        await asyncio.wait((self._recording, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not begun.is_set():
            await self._recording  # Raises the error that prevented the start.
        return name

    async def stop(self) -> Profile:
        """Ends the running profile and returns it. If none runs, returns the last one. Raises ProfileError."""
        if self._recording is None:
            raise ProfileError("no profile was started")
        self._stop.set()
        return await asyncio.shield(self._recording)

    async def close(self) -> None:
        """Ends the running profile. Call this before the engine is closed."""
        if self._recording is not None:
            # A hung device must not delay the server's end further.
            with suppress(ProfileError, TimeoutError):
                await asyncio.wait_for(self.stop(), _LAST_S)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # The file has been deleted.
        return 0


def _log_result(recorded: asyncio.Task[Profile]) -> None:
    if recorded.cancelled():
        return
    error = recorded.exception()
    if error is not None:
        logger.error("the profile failed: %s", error)
        return
    profile = recorded.result()
    logger.info(
        "profile %s: %d bytes, %d steps in %.2f s",
        Path(profile.path).name,
        profile.file_bytes,
        profile.steps,
        profile.seconds,
    )
