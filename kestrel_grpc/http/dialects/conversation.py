"""Conversation: converts a list of messages to a question with history, as Query accepts it. Owns the valid lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import InvalidRequest


@dataclass(frozen=True, slots=True)
class Message:
    """``name``: the path of the message in the request, for errors."""

    role: str
    text: str
    images: Sequence[bytes]
    name: str


@dataclass(slots=True)
class Asked:
    """What the user asked. ``images``: those that the question shows, in order."""

    question: str
    images: list[bytes]


@dataclass(frozen=True, slots=True)
class Conversation:
    """``last``: the question to answer. ``history``: earlier questions with their answers, oldest first. ``system``:
    all system texts."""

    last: Asked
    history: list[tuple[Asked, str]]
    system: str

    @property
    def images(self) -> list[bytes]:
        """All images, in order."""
        turns = [*(asked for asked, _ in self.history), self.last]
        return [image for asked in turns for image in asked.images]

    def request(self, *, reasoning: bool) -> pb.QueryRequest:
        """The request that asks the question. Its ``image`` is that of the first turn, if this has one image."""
        request = pb.QueryRequest(
            question=self.last.question, reasoning=reasoning, system=self.system
        )
        fields = [
            (asked.images, request.history.add(question=asked.question, answer=answer).images)
            for asked, answer in self.history
        ]
        fields.append((self.last.images, request.images))
        for turn, (images, field) in enumerate(fields):
            if turn == 0 and len(images) == 1:
                request.image.encoded = images[0]
                continue
            for image in images:
                field.add(encoded=image)
        return request


def conversation(messages: Iterable[Message]) -> Conversation:
    """Converts messages. System texts are joined, and so are consecutive user messages, with a blank line between them.
    Raises InvalidRequest."""
    system: list[str] = []
    turns: list[tuple[Asked, str]] = []
    asked: Asked | None = None
    texts: list[str] = []
    """Those of ``asked``. They are joined once: a body may hold many thousands."""
    for message in messages:
        name, has_begun = message.name, bool(turns) or asked is not None
        if message.images and message.role != "user":
            raise InvalidRequest(f"{name}.content", "only user messages may hold images")
        if message.role in ("system", "developer"):
            if has_begun:
                raise InvalidRequest(f"{name}.role", "system messages must come first")
            system.append(message.text)
        elif message.role == "user":
            if asked is None:
                asked, texts = Asked("", []), []
            texts.append(message.text)
            asked.images += message.images
        elif message.role == "assistant":
            if asked is None:
                raise InvalidRequest(f"{name}.role", "an answer must follow a user message")
            asked.question = "\n\n".join(texts)
            turns.append((asked, message.text))
            asked = None
        else:
            raise InvalidRequest(
                f"{name}.role", f"must be system, user or assistant, got {message.role!r}"
            )
    if asked is None:
        raise InvalidRequest("messages", "must end with a user message")
    asked.question = "\n\n".join(texts)
    before, first = "\n\n".join(system), turns[0][0] if turns else asked
    if not first.question.strip():  # A question needs text.
        before, first.question = "", before
    if not asked.question.strip():
        raise InvalidRequest("messages", "must end with a user message that has text")
    return Conversation(asked, turns, before)
