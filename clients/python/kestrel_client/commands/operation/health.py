"""``health``: reports whether a server is ready, for users, probes and scripts that wait. If it is not, says why."""

from __future__ import annotations

import argparse

from kestrel_client import (
    DeadlineExceededError,
    KestrelClient,
    KestrelError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from ..connection import add_server_flags, open_client, sdk_errors, token_variable
from ..flag_table import add_flags
from ..parser import CommandError
from ..values import seconds

_ANSWER_S = 5.0
"""Limit on the time of a call that finds out why a server is not ready."""
_STATES = {
    "loading": "its model is being loaded; wait for it with --wait SECONDS",
    "draining": "it drains, so it takes no new requests; only a restart ends that",
    "failed": "its engine has failed; its log says why; restart it",
    "ready": "it has nearly as many connections or open files as it may have; its log says which",
}


_FLAGS = """
    --wait SECONDS  how long to wait until the server is ready [=2]
    --service NAME  name of a service, like kestrel.v1.VisionService, or of the model [the whole server]
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Prints SERVING and exits with 0 if the server accepts requests, and this caller's token if it has one. "
        "Otherwise exits with 1 and says why."
    )
    add_server_flags(parser)
    add_flags(parser, _FLAGS, SECONDS=seconds())


def run(args: argparse.Namespace) -> int:
    with sdk_errors(args), open_client(args, None) as client:
        try:
            client.wait_ready(args.wait, service=args.service or "")
        except DeadlineExceededError:
            why = _why_not_ready(client, args)
            print("NOT_SERVING")
            raise CommandError(f"server {args.server} answers, but {why}") from None
        except NotFoundError:
            raise CommandError(f"server {args.server} has no service {args.service!r}") from None
        if token_variable() is not None:
            _check_token(client)
    print("SERVING")
    return 0


def _why_not_ready(client: KestrelClient, args: argparse.Namespace) -> str:
    """Why the server that this client reaches is not ready. Raises the SDK's error if it does not reach one."""
    try:
        models = client.list_models(timeout=_ANSWER_S)
    except (UnauthenticatedError, PermissionDeniedError):
        return "it starts, drains or has failed; its log says which"
    except DeadlineExceededError:
        raise CommandError(
            f"server {args.server}: no answer within {_ANSWER_S:g} s; does the server hang, or does a firewall "
            "drop the connection?"
        ) from None
    state = next((m.state for m in models if m.name == args.service), models[0].state)
    return _STATES.get(state, f"its model is {state}")


def _check_token(client: KestrelClient) -> None:
    """Raises UnauthenticatedError if the server refuses the token. Health alone answers every caller."""
    try:
        client.server_info(timeout=_ANSWER_S)
    except UnauthenticatedError:
        raise
    except KestrelError:  # The token is known, and has another scope.
        pass
