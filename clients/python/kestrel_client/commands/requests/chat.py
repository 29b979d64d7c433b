"""``chat``: asks questions about one image, with each answer streamed. The image is sent once.

Each question is sent with the earlier turns. The server reuses the computation of the image and of these turns.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress

from kestrel_client import (
    ImageHandle,
    KestrelClient,
    KestrelError,
    QueryResult,
    RpcError,
    UnavailableError,
)

from ..connection import add_connection_flags, connected, failure_text
from ..flag_table import add_flags
from ..terminal import styled
from .flags import (
    add_question_flags,
    add_request_flags,
    add_sampling_flags,
    question_options,
    request_options,
    sampling,
)
from .inputs import IMAGE_HELP, open_input
from .output import print_event, print_nothing

_MAX_TURNS = 64
"""Limit of QueryRequest.history."""
_TOO_LONG = "CONTEXT_LENGTH_EXCEEDED"

ESSENTIAL = (
    *("--reasoning", "--system", "--temperature", "--max-tokens", "--model"),
    *("--server",),
)


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = "An empty line, 'exit' or Ctrl-D ends the chat."
    parser.add_argument("image", metavar="IMAGE", help=IMAGE_HELP)
    add_question_flags(parser)
    add_flags(parser, "--independent  send each question without the earlier questions and answers")
    add_sampling_flags(parser, text=True)
    add_request_flags(parser)
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    source = open_input(args.image).source
    with suppress(ImportError):  # Gives input() line editing and history, if Python has it.
        import readline  # noqa: F401
    with connected(args) as client:
        image = source if isinstance(source, ImageHandle) else client.put_image(source)
        history: list[QueryResult] = []
        try:
            while question := _next_question():
                result = _answer(client, args, image, question, history)
                if result is not None and not args.independent:
                    history.append(result)
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
    client: KestrelClient,
    args: argparse.Namespace,
    image: ImageHandle,
    question: str,
    history: list[QueryResult],
) -> QueryResult | None:
    """Asks a question and prints the answer. Drops the oldest turns of ``history`` if they do not fit any more.

    Raises an error only if the server is unavailable; prints other errors and returns None.
    """
    options = {**sampling(args), **request_options(args), **question_options(args)}
    del history[:-_MAX_TURNS]
    while True:
        try:
            with client.stream_query(image, question, history=history, **options) as stream:
                for event in stream:
                    print_event(event)
                result = stream.result()
        except UnavailableError:
            raise
        except KestrelError as error:
            if history and isinstance(error, RpcError) and error.reason == _TOO_LONG:
                print(f"left out, to fit the context: {history[0].question}", file=sys.stderr)
                del history[0]
                continue
            print(failure_text(error, args.server, args.timeout, args), file=sys.stderr, flush=True)
            return None
        print()
        print_nothing(result)
        return result
