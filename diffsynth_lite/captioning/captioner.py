"""This file defines what a captioner is asked and answers, whether it is a model or a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL.Image import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One item to describe.

    Attributes:
        images: RGB, at least one: an image; the frames of a clip in their order; or of an edit its inputs
            and then its result.
        instruction: what to write about them.
    """

    images: Sequence[Image]
    instruction: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What was answered about one item.

    Attributes:
        text: as it was answered, before anything is cleaned; empty where there is none.
        num_tokens: tokens of the answer; None where a server does not report them.
        is_unfinished: whether the limit of tokens ended it.
        problem: why there is no answer; empty where there is one.
        is_last: whether no further question can be answered, such as by a server that is gone. Else the
            problem does not concern other items.
    """

    text: str = ""
    num_tokens: int | None = None
    is_unfinished: bool = False
    problem: str = ""
    is_last: bool = False


class Captioner(Protocol):
    """Answers questions; a context manager, which frees the memory of the model at its end.

    Attributes:
        name: of the model, as it is reported.
        batch_size: questions to ask at once.
    """

    name: str
    batch_size: int

    def answer(self, questions: Sequence[Question], *, max_tokens: int) -> list[Answer]:
        """An answer to each question, in their order.

        The same questions get the same answers, each by itself as in a batch.

        Args:
            questions: at most ``batch_size``.
            max_tokens: of an answer.

        Raises:
            UserError: nothing was answered, and no further question can be.
        """
        ...

    def __enter__(self) -> "Captioner": ...

    def __exit__(self, *error: object) -> None: ...
