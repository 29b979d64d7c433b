"""ImagePreparation: the images of requests, prepared in the pool. Owns the pool and what the observer hears of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from .. import clock
from ..building.factory import Built
from ..config.image_limits import ImageLimits
from ..config.runtime import RuntimeConfig
from ..config.sizes import Sizes
from ..errors import RequestError
from ..preprocess.decoding.costs import FIELD
from ..preprocess.features import ImageFeatures, features_of, prepared_features
from ..preprocess.jobs import PreparedLooks
from ..preprocess.looks import Tiled
from ..preprocess.measuring import MeasuredImage
from ..preprocess.pool import PreprocessPool
from ..types.model_config import VisionConfig
from ..types.observer import ImageEvent, Observer
from ..types.requests import PreparedImage, PreparedTiles
from ..types.timings import FrontTimings
from .queue_places import QueuePlace
from .request import Request
from .unsubmitted import Unsubmitted

logger = logging.getLogger(__name__)


class ImagePreparation:
    """``prepare`` for the images of a request, ``prepare_ahead`` for those that later requests are about."""

    def __init__(
        self,
        pool: PreprocessPool,
        limits: ImageLimits,
        vision: VisionConfig,
        unsubmitted: Unsubmitted,
        observer: Observer | None,
    ) -> None:
        self.pool, self._limits, self._vision = pool, limits, vision
        self._unsubmitted = unsubmitted
        self._observer = observer

    async def prepare(
        self, request: Request, accepted_at: float, place: QueuePlace
    ) -> tuple[tuple[PreparedImage | PreparedTiles, ...], FrontTimings]:
        """Raises RequestError, EngineOverloaded, DeadlineExceeded, and Displaced if the request loses its place
        meanwhile."""
        images = request.images
        ready = [image for image in images if isinstance(image, (PreparedImage, PreparedTiles))]
        if len(ready) == len(images):
            return tuple(ready), FrontTimings(accepted_at=accepted_at)
        prepared = await self._unsubmitted.run(
            self._prepare_each(images, request.cache_salt, place),
            place,
            request.deadline_at,
            "in preprocessing",
        )
        # Images of one request are prepared at the same time if decoders are free.
        now = clock.now()
        timings = FrontTimings(
            accepted_at=accepted_at,
            preprocess_s=min(sum(each.seconds for each in prepared), now - accepted_at),
            prepared_at=now,
        )
        found = [
            PreparedTiles(each.looks)
            if isinstance(image, (Tiled, PreparedTiles))
            else each.looks[0]
            for image, each in zip(images, prepared, strict=True)
        ]
        return tuple(found), timings

    async def prepare_ahead(
        self, request: Request, place: QueuePlace
    ) -> PreparedImage | PreparedTiles:
        """The only image of ``request``, which is no more than an image ahead of the requests that will be about it.
        Tells the observer. Raises as ``prepare``."""
        now = clock.now()
        timings = FrontTimings(accepted_at=now)
        looks: tuple[PreparedImage, ...] = ()
        error = ""
        try:
            (found,), timings = await self.prepare(request, now, place)
            looks = found.looks
            return found
        except BaseException as failed:
            error = type(failed).__name__
            raise
        finally:
            self._observe(request.request_id, timings, looks, error)

    async def measure(self, request: Request, place: QueuePlace) -> MeasuredImage:
        """Size and crops of the only image of ``request``. Raises as ``prepare``."""
        (image,) = request.images
        if (features := features_of(image)) is not None:
            checked = await asyncio.to_thread(self._features, features, "")
            return MeasuredImage(checked.image_size, (0,))
        measuring = self.pool.measure(image, principal=place.principal, is_high=place.priority == 0)
        return await self._unsubmitted.run(
            measuring, place, request.deadline_at, "before the image's header was read"
        )

    def _features(self, features: ImageFeatures, namespace: str) -> PreparedImage:
        return prepared_features(features, self._vision, self._limits, namespace)

    def flush(self) -> None:
        """Drops prepared images that no request uses."""
        self.pool.flush()

    def close(self) -> None:
        self.pool.close()

    async def _prepare_each(
        self, images: Sequence[Any], cache_salt: str, place: QueuePlace
    ) -> list[PreparedLooks]:
        """Prepares the images at the same time. The error of an image names its place, if there are several."""
        if len(images) == 1:
            return [await self._prepare_one(images[0], cache_salt, place)]

        async def prepare(image: Any) -> PreparedLooks:
            if isinstance(image, (PreparedImage, PreparedTiles)):
                return PreparedLooks(image.looks, 0.0)
            return await self._prepare_one(image, cache_salt, place)

        tasks = [asyncio.create_task(prepare(image)) for image in images]
        try:
            prepared = []
            for index, task in enumerate(tasks):
                try:
                    prepared.append(await task)
                except RequestError as error:
                    if error.path[:1] != FIELD:
                        raise
                    raise error.at(("images", index, *error.path[1:])) from error
            return prepared
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepare_one(self, image: Any, cache_salt: str, place: QueuePlace) -> PreparedLooks:
        if (features := features_of(image)) is not None:
            began = clock.now()
            checked = await asyncio.to_thread(self._features, features, cache_salt)
            return PreparedLooks((checked,), clock.now() - began)
        return await self.pool.prepare(
            image, cache_salt, principal=place.principal, is_high=place.priority == 0
        )

    def _observe(
        self,
        request_id: str,
        timings: FrontTimings,
        looks: tuple[PreparedImage, ...],
        error: str,
    ) -> None:
        if self._observer is None:
            return
        event = ImageEvent(
            request_id=request_id,
            error=error,
            size=looks[0].image_size if looks else None,
            num_crops=sum(look.num_crops for look in looks),
            seconds=timings.preprocess_s,
            accepted_at=timings.accepted_at,
            ended_at=clock.now(),
        )
        try:
            self._observer.on_image(event)
        except Exception:  # A fault of the observer must not change what it observes.
            logger.exception("the observer failed on an image")


def new_pool(config: RuntimeConfig, sizes: Sizes, built: Built) -> PreprocessPool:
    return PreprocessPool(
        sizes.preprocess_threads,
        config.image_limits,
        built.model.vision,
        decode_bytes=config.decode_bytes,
        timeout_s=config.decode_timeout_s,
        cache_bytes=config.image_cache_bytes,
        max_waiting_pixels=config.max_queued_pixels,
        device_pixels=built.device_pixels,
        with_crop_keys=bool(config.crop_cache_bytes),
        confine=config.confine,
    )
