"""Conversation: converts a list of messages to a question with history, as Query accepts it. Owns the valid lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import FieldPath, InvalidRequest

from ..fields import Fields
from ..known_fields import KnownFields

IMAGE_ALONE = "Describe this image."
"""The question that an image without text asks. The model needs one."""
FIELDS = frozenset({"image", "images", "question", "system", "answer_start", "history"})
"""The fields of a Query that messages fill."""
MESSAGE = "an object with role and content"
_ROLES = frozenset({"system", "developer", "user", "assistant"})


class MessageImage(NamedTuple):
    """An encoded image, its place in the request, and its budget (Image.max_crops), if it has one."""

    encoded: bytes
    path: FieldPath
    max_crops: int | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """``path``: of the message in the request, for errors."""

    role: str
    text: str
    images: Sequence[MessageImage]
    path: FieldPath


def read_message(
    fields: Fields,
    known: KnownFields,
    content: Callable[[Fields], tuple[str, Sequence[MessageImage]]],
) -> Message:
    """``content``: reads text and images. Raises InvalidRequest, UnsupportedImageError."""
    known.check(fields)
    text, images = content(fields)
    return Message(str(fields.values.get("role")), text, images, fields.path)


@dataclass(slots=True)
class Question:
    """``text``: what the user wrote. ``images``: those that the question shows, in order."""

    text: str
    images: list[MessageImage]


@dataclass(frozen=True, slots=True)
class Conversation:
    """``last``: the question to answer. ``history``: earlier questions with their answers, oldest first. ``system``:
    all texts before the first question. ``begun``: the beginning of the answer, which the model continues."""

    last: Question
    history: list[tuple[Question, str]]
    system: str
    begun: str = ""

    @property
    def images(self) -> list[MessageImage]:
        """All images, in order."""
        questions = [*(question for question, _ in self.history), self.last]
        return [image for question in questions for image in question.images]

    def image_path(self, path: FieldPath) -> FieldPath | None:
        """Where the caller wrote the image that ``path`` of a request is about; None for other paths."""
        inner = path[1:] if path[0] == "images" else (0, *path[1:])
        if path[0] not in ("image", "images") or not inner or inner[-1] == "max_crops":
            return None
        return self.images[int(inner[0])].path

    def request(self, *, reasoning: bool, max_crops: int | None) -> pb.QueryRequest:
        """The request that asks the question. ``max_crops``: the budget of images without one."""
        request = pb.QueryRequest()
        for image in self.images:
            request.images.add(encoded=image.encoded, max_crops=image.max_crops or max_crops)
        task = request.query
        task.question, task.reasoning, task.system = self.last.text, reasoning, self.system
        if self.begun:
            task.answer_start = self.begun
        for question, answer in self.history:
            num_images = len(question.images)
            task.history.add(question=question.text, answer=answer, num_images=num_images)
        return request


def conversation(messages: Iterable[Message]) -> Conversation:
    """Converts messages. Raises InvalidRequest.

    Texts in a row are joined with a blank line between them: system texts, user texts, answers. What comes before the
    first question precedes it, as system text does, and a later system text belongs to the question at its place. User
    messages without text and images are left out. An answer at the end is the beginning of the answer.
    """
    before: list[str] = []
    turns: list[_Turn] = []
    has_system = has_greeting = ends_empty = False
    for message in messages:
        _check(message)
        ends_empty = False
        if message.role == "assistant":
            if turns:
                turns[-1].answers.append(message.text)
            else:
                has_greeting = True
                before.append(message.text)
        elif message.role != "user" and not turns:
            has_system = True
            before.append(message.text)
        elif message.text.strip() or message.images:
            if not turns or turns[-1].answers:
                turns.append(_Turn())
            turns[-1].texts.append(message.text)
            turns[-1].images += message.images
        else:
            ends_empty = True
    if not turns and has_system:
        turns.append(_Turn())
    if not turns or (ends_empty and turns[-1].answers):
        raise InvalidRequest("messages", "must hold a user message that has text or an image")
    system, questions = "\n\n".join(before), [turn.question() for turn in turns]
    if has_system and not has_greeting and not questions[0].text.strip():
        # Instructions for the image are the question about it.
        system, questions[0].text = "", system
    for each in questions:
        if not each.text.strip():
            if not each.images:
                raise InvalidRequest("messages", "must hold text or an image")
            each.text = IMAGE_ALONE
    answers = ["\n\n".join(turn.answers) for turn in turns]
    history = list(zip(questions[:-1], answers[:-1], strict=True))
    return Conversation(questions[-1], history, system, answers[-1])


@dataclass(slots=True)
class _Turn:
    """What a user asked, and what was answered. The texts are joined once: a body may hold many thousands."""

    texts: list[str] = field(default_factory=list)
    images: list[MessageImage] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def question(self) -> Question:
        return Question("\n\n".join(self.texts), self.images)


def _check(message: Message) -> None:
    if message.role not in _ROLES:
        raise InvalidRequest(
            (*message.path, "role"), f"must be system, user or assistant, got {message.role[:50]!r}"
        )
    if message.images and message.role != "user":
        raise InvalidRequest((*message.path, "content"), "only user messages may hold images")
