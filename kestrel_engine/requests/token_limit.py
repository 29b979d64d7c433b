"""The number of tokens that a request may sample, from its own limits and those of context and engine."""

from __future__ import annotations

from ..errors import ContextLengthError, InvalidRequest, RequestError
from ..skills.base import SkillRequest


def token_limit(
    request: SkillRequest, positions: int, *, context: int, most: int | None, default: int
) -> int:
    """Returns the most tokens to sample. A limit of the request that exceeds the room is an error; a default shrinks.

    ``positions``: of the prompt. ``context``: positions of a sequence. ``most``: the engine's limit on the tokens of a
    request. ``default``: the default of max_tokens. Raises ContextLengthError, InvalidRequest.
    """
    room = context - positions
    fitting = min(room, most or room) - request.tokens_ahead
    for field, needed, shown in request.token_limits:
        error: RequestError
        if needed > room:
            error = ContextLengthError(
                field,
                f"{shown} exceeds the {room} positions left after a prompt of {positions} in a context of {context}",
                value=needed,
                limit=room,
            )
        elif most is not None and needed > most:
            error = InvalidRequest(
                field, f"{shown} exceeds this engine's limit of {most}", value=needed, limit=most
            )
        else:
            continue
        if request.max_tokens is not None and fitting >= 1:
            error.most_tokens = fitting
        raise error
    return min(request.token_budget or request.max_tokens or default, room, most or room)
