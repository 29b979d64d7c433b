"""``--save``: draws answers on images and writes them. The target is checked before the first request."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from kestrel_client import ImageFeatures, ImageHandle, KestrelError
from kestrel_client.drawing.marks import Marks
from kestrel_client.values.results.showing import draw_marks

from ..files import file_errors
from ..parser import CommandError
from .inputs import Input, unique_stems

SAVE_HELP = (
    "write the image with the answer drawn on it: a file, or a folder for several images; "
    "- writes PNG to standard output (needs Pillow)"
)


class Painter:
    """Writes images to ``target``: - for standard output, a folder (it exists, or its name ends with /), or a file."""

    def __init__(
        self, target: str, inputs: list[Input], base: str | None = None, *, report: bool = True
    ) -> None:
        """``base``: the image to draw on if an input is only an id. ``report``: print the name of each file. Raises
        CommandError if an image could not be written."""
        self._target, self._base, self._report = target, base, report
        if importlib.util.find_spec("PIL") is None:
            raise CommandError("--save needs Pillow: pip install './clients/python[images]'")
        if not inputs:
            raise CommandError("--save draws on an image: give one")
        for each in inputs:
            if isinstance(each.source, (ImageFeatures, ImageHandle)) and base is None:
                raise CommandError(
                    f"--save cannot draw on {each.name!r}, which holds no pixels here: "
                    "give its file with --save-on FILE"
                )
        if not target:
            raise CommandError("--save: the name of the file or folder is empty")
        self._folder = target.endswith(os.sep) or Path(target).is_dir()
        if len(inputs) > 1 and not self._folder:
            raise CommandError(
                f"--save={target}: there are {len(inputs)} images; give a folder, like {target}/"
            )
        self._left = list(zip(inputs, unique_stems(inputs), strict=True))
        if target != "-":
            self._check_target()
            self._check_originals()

    @property
    def takes_output(self) -> bool:
        """Whether images are written to standard output, so that the command must not print text there."""
        return self._target == "-"

    def write(self, marks: Marks, item: Input, name: str | None = None) -> None:
        """Draws on an image, writes it, and prints its file on standard error. ``name``: of the file in the folder,
        without its suffix; None for the input's own. Raises CommandError."""
        try:
            image = draw_marks(marks, self._base, item.source)
            if self.takes_output:
                image.save(sys.stdout.buffer, "PNG")
                sys.stdout.buffer.flush()
                return
            if name is None:  # That of the input, which may be named several times.
                at = next(at for at, (each, _) in enumerate(self._left) if each == item)
                _, name = self._left.pop(at)
            file = self._file(name)
            image.save(file)
        except BrokenPipeError:
            raise  # As for a command that prints.
        except (OSError, ValueError, KestrelError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise CommandError(f"cannot write {self._target!r}: {why}") from None
        if self._report:
            print(f"wrote {file}", file=sys.stderr)

    def _file(self, name: str) -> Path:
        return Path(self._target, f"{name}.png") if self._folder else Path(self._target)

    def _check_originals(self) -> None:
        """Raises CommandError if a written file would replace one of the images."""
        for item, name in self._left:
            file = self._file(name)
            # A source may also be an address, bytes or an id.
            is_file = isinstance(item.source, str) and os.path.exists(item.source)
            if is_file and file.exists() and file.samefile(item.name):
                raise CommandError(
                    f"--save={self._target} would replace the image {item.name!r}; name another file or folder"
                )

    def _check_target(self) -> None:
        from PIL import Image

        folder = Path(self._target) if self._folder else Path(self._target).absolute().parent
        if self._folder:
            with file_errors("write", self._target):
                folder.mkdir(exist_ok=True)
        elif Path(self._target).suffix.lower() not in Image.registered_extensions():
            raise CommandError(f"cannot write {self._target!r}: end its name with .png or .jpg")
        if not folder.is_dir():
            raise CommandError(f"cannot write {self._target!r}: there is no folder {str(folder)!r}")
        if not os.access(folder, os.W_OK):
            raise CommandError(f"cannot write {self._target!r}: {str(folder)!r} is read-only")
