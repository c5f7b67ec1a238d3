"""A captioner that answers by the colour of an image, and the jobs that it is asked for."""

from collections.abc import Callable, Sequence
from pathlib import Path

from diffsynth_lite.captioning.captioner import Answer, Question
from diffsynth_lite.captioning.choice import CaptionJob, Outcome
from diffsynth_lite.captioning.instructions import CaptionRequest
from diffsynth_lite.captioning.job import write_captions
from diffsynth_lite.captioning.report import CaptioningStatus, CaptionReport

COLOURS = {"a.png": "red", "b.png": "lime", "c.png": "blue", "d.png": "yellow", "e.png": "magenta"}
REFUSAL = "I'm sorry, but I cannot describe this image."


class Colours:
    """Answers with the colour in the middle of the last image, or as it is given.

    Args:
        answers: by the colour; what is called is called with the question.
    """

    name = "colours"

    def __init__(
        self,
        answers: dict[str, str | Answer | Callable[[Question], str]] | None = None,
        *,
        batch_size: int = 2,
    ) -> None:
        self.batch_size = batch_size
        self.asked: list[Question] = []
        self.is_open = False
        self._answers = answers or {}

    def __enter__(self) -> "Colours":
        self.is_open = True
        return self

    def __exit__(self, *error: object) -> None:
        self.is_open = False

    def answer(self, questions: Sequence[Question], *, max_tokens: int) -> list[Answer]:
        assert self.is_open
        assert 0 < len(questions) <= self.batch_size
        assert max_tokens > 0
        self.asked += questions
        return [self._answer(question) for question in questions]

    def _answer(self, question: Question) -> Answer:
        image = question.images[-1]
        colour = "#{:02x}{:02x}{:02x}".format(*image.getpixel((image.width // 2, image.height // 2)))
        given = self._answers.get(NAMES.get(colour, colour), f"A {NAMES.get(colour, colour)} square.")
        given = given(question) if callable(given) else given
        return given if isinstance(given, Answer) else Answer(text=given, num_tokens=len(given.split()))


NAMES = {"#ff0000": "red", "#00ff00": "lime", "#0000ff": "blue", "#ffff00": "yellow", "#ff00ff": "magenta"}


def job_in(folder: Path, **settings: object) -> CaptionJob:
    request = settings.pop("request", CaptionRequest())
    return CaptionJob(folder=folder, request=request, arguments=("pictures",), **settings)  # type: ignore[arg-type]


def write(folder: Path, captioner: Colours | None = None, **settings: object) -> Outcome:
    captioner = captioner or Colours()
    outcome = write_captions(job_in(folder, **settings), lambda: captioner)
    assert not captioner.is_open
    return outcome


def status_of(folder: Path) -> CaptioningStatus:
    """Of the latest command, which is there."""
    status = CaptionReport(folder).status()
    assert status is not None
    return status


def captions_in(folder: Path) -> dict[str, str]:
    return {
        path.name: path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".txt", ".caption")
    }
