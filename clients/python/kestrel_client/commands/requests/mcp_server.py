"""``mcp``: the six skills as tools of the Model Context Protocol, for agents. Asks a running server.

An image is named by a path within ``--root``, a data URL, or the id of a stored image. Tools that find places also
return the image with the places drawn on it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kestrel_client import AsyncKestrelClient, ImageHandle, KestrelError

from ...images.base64_images import decoded_image, is_data_url
from ..connection import add_connection_flags, failure_text, open_async_client, sdk_errors
from ..flag_table import add_flags
from ..parser import CommandError
from ..values import whole

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

_MAX_BYTES = 32 * 1024 * 1024
_ID_PREFIX = "img_"
_INSTRUCTIONS = (
    "Looks at images with a Moondream model. Coordinates are fractions of the image's width and height, measured from "
    "the upper left corner. Name objects in a few words, like 'red car'."
)


_FLAGS = """
    --root FOLDER  let tools read images below this folder [no files]
    --http PORT    serve streamable HTTP at http://127.0.0.1:PORT/mcp in place of standard input and output
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = "Needs the extra mcp."
    add_flags(parser, _FLAGS, PORT=whole(1, 65535))
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    root = None if args.root is None else Path(args.root).resolve()
    if root is not None and not root.is_dir():
        raise CommandError(f"--root {args.root}: there is no such folder")
    try:
        import anyio

        server = _server(args, root)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"the package {error.name} is missing; install it with pip install './clients/python[cli,mcp]'"
        ) from None
    with sdk_errors(args):
        if args.http is None:
            anyio.run(server.run_stdio_async)
        else:
            anyio.run(lambda: server.run_streamable_http_async(host="127.0.0.1", port=args.http))
    return 0


class _Answers:
    """What the tools return. The first use of one opens the client's connection."""

    def __init__(self, args: argparse.Namespace, root: Path | None) -> None:
        self._args, self._root = args, root

    @cached_property
    def _client(self) -> AsyncKestrelClient:
        return open_async_client(self._args)

    async def ask(
        self, skill: str, image: str, *arguments: Any, draws: bool = False, **options: Any
    ) -> list[Any]:
        """The result as JSON and, if ``draws``, as a drawing. Raises ToolError."""
        from mcp.server.mcpserver import Image
        from mcp.server.mcpserver.exceptions import ToolError

        try:
            method = getattr(self._client, skill)
            result = await method(_source(image, self._root), *arguments, **options)
        except KestrelError as error:
            raise ToolError(failure_text(error, self._args.server, self._args.timeout)) from None
        except CommandError as error:
            raise ToolError(str(error)) from None
        texts = [json.dumps(result.to_dict(), ensure_ascii=False)]
        if not draws:
            return texts
        file = io.BytesIO()
        try:
            result.draw().save(file, "PNG")
        except (ImportError, KestrelError):
            return texts  # No Pillow, or the image is only known by its id.
        return [*texts, Image(data=file.getvalue(), format="png")]


def _server(args: argparse.Namespace, root: Path | None) -> MCPServer[Any]:
    """The tools."""
    from mcp.server.mcpserver import MCPServer

    server: MCPServer[Any] = MCPServer("kestrel", instructions=_INSTRUCTIONS, log_level="WARNING")
    ask = _Answers(args, root).ask

    @server.tool(structured_output=False)
    async def query(
        image: str,
        question: str,
        reasoning: bool = False,
        stop: list[str] | None = None,
        presupposes: list[str] | None = None,
    ) -> list[Any]:
        """Answers a question about an image. `image`: a path, a data URL or an image id. `stop`: texts that end the
        answer. `presupposes`: objects that the question is about; if the image does not show one of them, `abstained`
        is true and there is no answer."""
        options: dict[str, Any] = {
            "reasoning": reasoning,
            "stop": stop or (),
            "presupposes": presupposes or (),
        }
        return await ask("query", image, question, **options)

    @server.tool(structured_output=False)
    async def caption(
        image: str, length: Literal["short", "normal", "long"] = "normal"
    ) -> list[Any]:
        """Describes an image. `image`: a path, a data URL or an image id."""
        return await ask("caption", image, length)

    @server.tool(structured_output=False)
    async def detect(image: str, objects: list[str]) -> list[Any]:
        """Finds the bounding box of every object of each kind, and draws the boxes on the image. `objects`: the kinds,
        like ["red circle"]."""
        return await ask("detect", image, objects, draws=True)

    @server.tool(structured_output=False)
    async def point(image: str, objects: list[str]) -> list[Any]:
        """Finds the centre of every object of each kind, and draws the points on the image. `objects`: as for
        detect."""
        return await ask("point", image, objects, draws=True)

    @server.tool(structured_output=False)
    async def segment(image: str, object: str) -> list[Any]:
        """Outlines one object, as an SVG path relative to its box, and draws the outline on the image."""
        return await ask("segment", image, object, draws=True)

    @server.tool(structured_output=False)
    async def gaze(
        image: str, eye: tuple[float, float] | None = None, accurate: bool = False
    ) -> list[Any]:
        """Finds what people look at, and draws it on the image. `eye`: x and y of the eye of one person; by default,
        all faces are looked for. A target of null is outside the image. `accurate`: look 20 times for each face; not
        with `eye`."""
        eyes = () if eye is None else (eye,)
        return await ask("gaze", image, eyes, draws=True, accurate=accurate)

    return server


def _source(image: str, root: Path | None) -> bytes | ImageHandle:
    """The image for the client. Raises CommandError."""
    if image.startswith(_ID_PREFIX):
        return ImageHandle(image)
    if is_data_url(image):
        try:
            return decoded_image(image)
        except ValueError as error:
            raise CommandError(f"the data URL {error}") from None
    if image[:8].lower().startswith(("http://", "https://")):
        raise CommandError("an address is not fetched; give a path, a data URL or an image id")
    if root is None:
        raise CommandError("files can't be read: start mcp with --root FOLDER")
    path = (root / image).resolve()
    if not path.is_relative_to(root):
        raise CommandError(f"{image}: is not below {root}")
    try:
        size = os.stat(path).st_size
        if not path.is_file():
            raise CommandError(f"{image}: is not a file")
        if size > _MAX_BYTES:
            raise CommandError(f"{image}: has {size} bytes, the limit is {_MAX_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise CommandError(f"{image}: {(error.strerror or str(error)).lower()}") from None
