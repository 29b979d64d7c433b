"""``point`` and ``detect`` with ``--object``: finds several objects with one request per image."""

from __future__ import annotations

import argparse

from ...settings.flags import SettingsError
from .analyze import run_several
from .flags import object_options, request_options, sampling


def run_objects(args: argparse.Namespace) -> int:
    """Runs the command for the objects of ``--object``. Raises SettingsError."""
    if not args.words:
        raise SettingsError(f"no image is given: kestrel-grpc {args.command} IMAGE --object NAME")
    names = args.objects
    options = {**sampling(args), **request_options(args), **object_options(args)}
    titles = {name: name for name in names}
    if args.command == "point":
        return run_several(
            args,
            titles,
            lambda client, image: client.point(image, objects=names, **options),
            lambda client, image: client.stream_point(image, objects=names, **options),
        )
    return run_several(
        args,
        titles,
        lambda client, image: client.detect(image, objects=names, **options),
        lambda client, image: client.stream_detect(image, objects=names, **options),
    )
