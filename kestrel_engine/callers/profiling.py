"""take_profile: records one profile on the step thread and writes its file. Runs on the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from ..errors import ProfileError
from ..runtime.profile import Profile, StepProfile
from ..steps.loop import EngineLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Records at most ``seconds`` and ``steps``, and writes at most ``max_bytes`` to ``path`` (a new file).
    ``python_functions``: also those of the step thread, which slows the thread down."""

    path: str
    seconds: float
    steps: int
    max_bytes: int
    python_functions: bool = False


async def take_profile(
    loop: EngineLoop,
    request: ProfileRequest,
    *,
    cuda: bool,
    patience_s: float,
    begun: asyncio.Event,
    stop: asyncio.Event,
) -> Profile:
    """Sets ``begun`` when recording has begun; ``stop`` ends it early. ``patience_s``: seconds that the step thread may
    take to begin and to end the profile. Raises ProfileError."""
    profile = await asyncio.to_thread(
        StepProfile, request.steps, cuda=cuda, python_functions=request.python_functions
    )
    ended = asyncio.wrap_future(profile.ended)
    loop.begin_profile(profile)
    try:
        await asyncio.wait_for(asyncio.wrap_future(profile.begun), patience_s)
        begun.set()
        stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        await asyncio.wait(
            (ended, stopped), timeout=request.seconds, return_when=asyncio.FIRST_COMPLETED
        )
        stopped.cancel()
        loop.end_profile()
        await asyncio.wait_for(ended, patience_s)
        return await asyncio.to_thread(profile.write, request.path, request.max_bytes)
    except TimeoutError:
        raise ProfileError("the step thread hangs") from None
    except OSError as error:
        raise ProfileError(f"the profile could not be written: {error}") from None
    except RuntimeError as error:  # Another profiler runs, or the driver forbids profiling.
        raise ProfileError(f"the profiler failed: {error}") from None
    finally:
        loop.end_profile()
