"""``embed``: the embeddings of images, as JSON or in a file for numpy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kestrel_client import EmbedResult, KestrelClient

from ..connection import add_connection_flags, ask_each
from ..files import file_errors
from ..flag_table import add_flags
from ..flags import SettingsError
from ..terminal import counted
from .features import SUFFIX, write_features
from .flags import add_request_flags, request_options
from .inputs import IMAGE_HELP, Input, open_inputs
from .output import print_json

ESSENTIAL = ("--crops", "--pooling", "--dtype", "--save", "--model", "--server")


_FLAGS = """
    --crops  embed the crops of each image too, not only the whole
    --pooling {mean,none}  mean: one vector of length 1 for an image or crop; none: one vector for each patch [=mean]
    --dtype {float32,float16}  format of the numbers [=float32]
    --save FILE  write the vectors to this file: .npz, or .npy for the features of one image, by patches, which
        --features of other commands sends in place of the image
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Prints a line of JSON for each image. With --save, writes arrays instead: 'names' and 'vectors',\n"
        "with --crops also 'crops', 'crop_of' (the index of each crop's image) and 'boxes'. numpy.load reads them."
    )
    parser.add_argument("images", metavar="IMAGE", nargs="+", help=IMAGE_HELP)
    add_flags(parser, _FLAGS)
    add_request_flags(parser)
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    as_features = args.save is not None and args.save.endswith(SUFFIX)
    inputs = open_inputs(args.images)
    if args.save is not None and not args.save.endswith((".npz", SUFFIX)):
        raise SettingsError(f"--save: {args.save!r} must end in .npz or .npy")
    if as_features and (len(inputs) > 1 or args.crops):
        raise SettingsError(
            f"--save: {args.save!r} holds one whole image; use .npz for several, or for crops"
        )
    found: dict[str, EmbedResult] = {}

    def embed(client: KestrelClient, image: Input) -> bool:
        # A stream has no limit on the bytes of all embeddings together.
        stream = client.stream_embed(
            image.source,
            crops=args.crops,
            pooling="none" if as_features else args.pooling,
            dtype=args.dtype,
            **request_options(args),
        )
        with stream:
            result = stream.result()
        if args.save is None:
            print_json({"image": image.name, **result.to_dict()})
        else:
            found[image.name] = result
        return True

    status = ask_each(args, inputs, embed)
    if args.save is not None and found:
        if as_features:
            write_features(Path(args.save), next(iter(found.values())).features)
        else:
            _save(Path(args.save), found)
    return status


def _save(path: Path, found: dict[str, EmbedResult]) -> None:
    """Raises CommandError."""
    import numpy as np

    results = list(found.values())
    arrays = {
        "names": np.array(list(found)),
        "vectors": np.stack([np.asarray(result.whole_image) for result in results]),
    }
    crops = [(i, crop) for i, result in enumerate(results) for crop in result.crops]
    if crops:
        boxes = [(c.box.x_min, c.box.y_min, c.box.x_max, c.box.y_max) for _, c in crops]
        arrays["crops"] = np.stack([np.asarray(crop) for _, crop in crops])
        arrays["crop_of"] = np.array([i for i, _ in crops])
        arrays["boxes"] = np.array(boxes, np.float32)
    with file_errors("write", path), path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    print(f"wrote {counted(len(results), 'image')} to {path}", file=sys.stderr)
