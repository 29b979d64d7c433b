"""Conversation: converts a list of messages to a question with history, as Query accepts it. Owns the valid lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kestrel_engine import InvalidRequest


@dataclass(frozen=True, slots=True)
class Message:
    """``name``: the path of the message in the request, for errors."""

    role: str
    text: str
    image: bytes | None
    name: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """``history``: earlier questions with their answers, oldest first. The image belongs to the first question."""

    question: str
    history: list[tuple[str, str]]
    image: bytes | None


def conversation(messages: Iterable[Message]) -> Conversation:
    """Converts messages. System texts precede the first question, and consecutive user messages are joined, with a
    blank line between them. Raises InvalidRequest."""
    system: list[str] = []
    turns: list[tuple[str, str]] = []
    asked: str | None = None
    image: bytes | None = None
    for message in messages:
        name, has_begun = message.name, bool(turns) or asked is not None
        if message.image is not None:
            _check_image(message, image, has_begun)
            image = message.image
        if message.role in ("system", "developer"):
            if has_begun:
                raise InvalidRequest(f"{name}.role", "system messages must come first")
            system.append(message.text)
        elif message.role == "user":
            asked = message.text if asked is None else f"{asked}\n\n{message.text}"
        elif message.role == "assistant":
            if asked is None:
                raise InvalidRequest(f"{name}.role", "an answer must follow a user message")
            turns.append((asked, message.text))
            asked = None
        else:
            raise InvalidRequest(
                f"{name}.role", f"must be system, user or assistant, got {message.role!r}"
            )
    if asked is None:
        raise InvalidRequest("messages", "must end with a user message")
    before = "".join(f"{text}\n\n" for text in system)
    if turns:
        turns[0] = (before + turns[0][0], turns[0][1])
    else:
        asked = before + asked
    return Conversation(asked, turns, image)


def _check_image(message: Message, earlier: bytes | None, has_begun: bool) -> None:
    where = f"{message.name}.content"
    if message.role != "user":
        raise InvalidRequest(where, "only user messages may hold images")
    if earlier is not None:
        raise InvalidRequest(where, "the model takes one image a conversation")
    if has_begun:
        raise InvalidRequest(where, "the image must be in the first user message")
