"""``chat``: asks questions about one image, with each answer streamed. The image is sent once.

Every question is independent, because the models do not remember earlier questions. The server reuses the computation
of the image.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress

from kestrel_client import ImageHandle, KestrelClient, KestrelError, UnavailableError

from ..connection import add_connection_flags, connected, failure_text
from ..terminal import styled
from .inputs import IMAGE_HELP, open_input
from .skills import (
    add_request_flags,
    add_sampling_flags,
    print_event,
    print_nothing,
    request_options,
    sampling,
)


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = "An empty line, 'exit' or Ctrl-D ends the chat. Every question is independent."
    parser.add_argument("image", metavar="IMAGE", help=IMAGE_HELP)
    parser.add_argument("--reasoning", action="store_true", help="let the model reason first")
    add_sampling_flags(parser, text=True)
    add_request_flags(parser)
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    given = open_input(args.image)
    with suppress(ImportError):  # Gives input() line editing and history, if Python has it.
        import readline  # noqa: F401
    with connected(args) as client:
        source = given.source
        image = source if isinstance(source, ImageHandle) else client.put_image(source)
        try:
            while question := _next_question():
                _answer(client, args, image, question)
        finally:
            if image is not source:
                with suppress(KestrelError):
                    client.delete_image(image)
    return 0


def _next_question() -> str:
    """Reads the next question. Returns "" at the end."""
    prompt = styled("? ", "bold", sys.stdout) if sys.stdin.isatty() else ""
    try:
        question = input(prompt).strip()
    except EOFError:
        return ""
    return "" if question in ("exit", "quit") else question


def _answer(
    client: KestrelClient, args: argparse.Namespace, image: ImageHandle, question: str
) -> None:
    """Asks a question and prints the answer. Raises an error only if the server is unavailable; prints other errors."""
    options = {**sampling(args), **request_options(args), "reasoning": args.reasoning or None}
    try:
        with client.stream_query(image, question, **options) as stream:
            for event in stream:
                print_event(event)
            print()
            print_nothing(stream.result())
    except UnavailableError:
        raise
    except KestrelError as error:
        print(failure_text(error, args.server, args.timeout), file=sys.stderr, flush=True)
