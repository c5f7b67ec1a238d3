"""This file writes the captions of a folder: it asks about its items in batches, and reports each answer."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from diffsynth_lite.captioning.captioner import Answer, Captioner, Question
from diffsynth_lite.captioning.choice import (
    CaptionJob,
    Choice,
    caption_path,
    choose,
    first_start,
    inputs_of,
    is_as_seen,
    source_of,
)
from diffsynth_lite.captioning.cleaning import clean, refusal_in
from diffsynth_lite.captioning.contents import Item, read_contents
from diffsynth_lite.captioning.instructions import max_tokens, plainer
from diffsynth_lite.captioning.limit import fitted
from diffsynth_lite.captioning.page import MAX_SHOWN, thumbnails, write_page
from diffsynth_lite.captioning.report import (
    CaptioningState,
    CaptioningStatus,
    CaptionReport,
    CaptionRow,
    Made,
    Outcome,
    caption_hash,
)
from diffsynth_lite.data.captions import clean_caption, has_trigger, with_trigger
from diffsynth_lite.data.images import load_image
from diffsynth_lite.data.records import is_video
from diffsynth_lite.data.video import check_video, read_frames
from diffsynth_lite.errors import RunInterrupted, RunStoppedError, UserError
from diffsynth_lite.files import DISK_FULL, is_unfinished, parse_json, write_text
from diffsynth_lite.progress_log import Phase, ProgressLog, current_watch, watched
from diffsynth_lite.run_folder.lock import open_lock
from diffsynth_lite.run_folder.process import Process

MAX_SIDE = 1024
"""Pixels of the longer side of an image, as a captioner gets it."""
MAX_FRAME_SIDE = 512
"""Of each frame of a clip."""
_BACKGROUND = "white"
_STATUS_EVERY_S = 1.0


def write_captions(
    job: CaptionJob, open_captioner: Callable[[], Captioner], *, logs_progress: bool = True
) -> Outcome:
    """Write the captions of a folder, each as soon as it is answered.

    What stops it loses at most the answers of one batch; the same job then goes on.

    Args:
        open_captioner: called once it is known that there is something to write.
        logs_progress: whether lines of the log show it, too, and not only what watches the progress.

    Raises:
        UserError: there is nothing to write for, or no further question can be answered.
        RunStoppedError: the disk is full.
    """
    report = CaptionReport(job.folder)
    contents = read_contents(source_of(job))
    choice = choose(job, contents, report)
    with _locked(report):
        run = _Run(job, report, choice, logs_progress=logs_progress)
        run.finish(open_captioner)
        return run.outcome


@contextmanager
def _locked(report: CaptionReport) -> Iterator[None]:
    """Scope in which no other command writes captions in the folder.

    Raises:
        UserError: one does, nothing can be written there, or what is there leads elsewhere.
    """
    for path in (report.folder, report.lock_file, report.rows_file):
        if path.is_symlink():
            raise UserError(f"{path} is a link, through which nothing is written; move it aside")
    try:
        report.folder.mkdir(exist_ok=True)
        lock = open_lock(report.lock_file, place=str(report.folder.parent))
    except OSError as error:
        raise UserError(f"{report.folder} cannot be written to: {error.strerror}") from error
    with lock.file:
        for left in report.folder.iterdir():
            if is_unfinished(left.name) and left.is_file():
                left.unlink(missing_ok=True)
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    """An item with its images, or the reason why they cannot be read."""

    item: Item
    question: Question | None = None
    thumbnails: Sequence[str] = ()
    problem: str = ""


class _Run:
    """One start of a job, under the lock of its folder."""

    def __init__(
        self, job: CaptionJob, report: CaptionReport, choice: Choice, *, logs_progress: bool
    ) -> None:
        self.outcome = Outcome(refused=dict(choice.unusable), kept=len(choice.kept), locked=choice.locked)
        self._job = job
        self._report = report
        self._items = choice.items
        self._logs_progress = logs_progress
        self._outer_watch = current_watch()
        self._written_at = 0.0
        self._status = CaptioningStatus(
            state="running",
            process=Process.current().as_text(),
            arguments=job.arguments,
            started_at=first_start(job, report),
            total=len(choice.items),
        )

    def finish(self, open_captioner: Callable[[], Captioner]) -> None:
        """Do what is left of the job."""
        with self._recorded(), watched(self._show_phase):
            if self._items:
                self._show_phase("loading", 0, 0)
                with open_captioner() as captioner:
                    self._ask_all(captioner)
            if not self._job.num_shown:
                write_page(self._job, self._report, self.outcome)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Scope after which ``status.json`` has how the job ended.

        Raises:
            RunStoppedError: the disk is full.
            UserError: the report cannot be written.
        """
        try:
            self._write_status()
            yield
            self._write_status(state="finished", message=self.outcome.summary)
        except BaseException as error:
            was_stopped = isinstance(error, RunInterrupted | KeyboardInterrupt)
            state: CaptioningState = "stopped" if was_stopped else "failed"
            with suppress(OSError):
                self._write_status(state=state, message=str(error) or type(error).__name__)
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise RunStoppedError(
                    f"no space left on the disk ({error}); captions already written are intact, and the same "
                    "command goes on"
                ) from error
            if isinstance(error, OSError) and str(error.filename).startswith(str(self._report.folder)):
                raise UserError(f"{error.filename}: cannot be written: {error.strerror}") from error
            raise

    def _show_phase(self, phase: Phase, done: int, total: int) -> None:
        """Show how far the model's loading is, now and then."""
        self._outer_watch(phase, done, total)
        if phase == "captioning":
            return  # the status is written after each batch
        is_new = phase != self._status.phase
        if is_new or time.monotonic() - self._written_at > _STATUS_EVERY_S:
            message = f"{phase}{f', {100 * done // total} %' if total else ''}"
            self._write_status(phase=phase, message=message)

    def _ask_all(self, captioner: Captioner) -> None:
        """Ask about all items, in batches; the images of the next one are read meanwhile."""
        size, items, job = captioner.batch_size, self._items, self._job
        self.outcome.model = captioner.name
        self._write_status(phase="captioning", message="", model=captioner.name)
        text = "captions: %d of %d" if self._logs_progress else None
        progress = ProgressLog(text, len(items), phase="captioning")
        began_at = time.perf_counter()
        batches = [items[start : start + size] for start in range(0, len(items), size)]
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self._load, batches[0])
            for place, batch in enumerate(batches, start=1):
                loaded = coming.result()
                if place < len(batches):
                    coming = pool.submit(self._load, batches[place])
                self._caption(captioner, loaded)
                done = self._status.done + len(batch)
                self.outcome.seconds = time.perf_counter() - began_at
                preview = {name: made.caption for name, made in self.outcome.made.items()}
                self._write_status(
                    done=done,
                    seconds_per_item=self.outcome.seconds / done,
                    refused=dict(self.outcome.refused),
                    preview=preview if job.num_shown else {},
                )
                progress.reach(done)

    def _load(self, items: Sequence[Item]) -> list[_Loaded]:
        return [self._loaded(item) for item in items]

    def _loaded(self, item: Item) -> _Loaded:
        try:
            images = _images_of(item, self._job.num_frames)
        except (UserError, OSError) as error:
            problem = str(error).removeprefix(f"{item.path}: ")
            return _Loaded(item=item, problem=problem)
        question = Question(images=images, instruction=self._job.instruction_of(item))
        is_shown = not self._job.num_shown and len(self.outcome.thumbnails) < MAX_SHOWN
        small = thumbnails(images) if is_shown else []
        return _Loaded(item=item, question=question, thumbnails=small)

    def _caption(self, captioner: Captioner, batch: Sequence[_Loaded]) -> None:
        """Ask about a batch, and write what is answered."""
        questions = []
        for loaded in batch:
            if loaded.question is None:
                self.outcome.refused[loaded.item.file] = loaded.problem
            else:
                questions.append(loaded.question)
        if not questions:
            return
        began_at = time.perf_counter()
        answered = _answered(captioner, questions, max_tokens(self._job.request))
        seconds = (time.perf_counter() - began_at) / len(questions)
        usable = (loaded for loaded in batch if loaded.question is not None)
        for loaded, (question, answer) in zip(usable, answered, strict=True):
            file = loaded.item.file
            if loaded.thumbnails:
                self.outcome.thumbnails[file] = loaded.thumbnails
            made = self._made(answer)
            if made.problem:
                self.outcome.refused[file] = made.problem
                continue
            row = CaptionRow(
                file=file,
                hash=caption_hash(made.caption),
                model=captioner.name,
                instruction=question.instruction,
                seconds=round(seconds, 3),
                num_tokens=answer.num_tokens,
                removed=made.removed,
                cut=made.cut,
                written_at=time.time(),
            )
            self._write(loaded.item, made, row)

    def _made(self, answer: Answer) -> Made:
        """The caption of an answer, or why it is none."""
        if answer.problem:
            return Made(problem=answer.problem)
        if phrase := refusal_in(answer.text):
            return Made(problem=f"the model refused: {phrase}")
        job = self._job
        cleaned = clean(
            answer.text,
            format=job.request.format,
            kept=job.kept_rules,
            is_unfinished=answer.is_unfinished,
        )
        if cleaned.problem or not cleaned.text:
            return Made(problem=cleaned.problem or "empty answer")
        caption = cleaned.text
        if job.request.trigger:
            add = _with_trigger_in_json if job.request.format == "json" else with_trigger
            caption = add(caption, job.request.trigger)
        caption, cut = fitted(caption, job.limit)
        if cut and not caption:
            return Made(problem="nothing of the answer fits what the text encoder reads")
        try:
            return Made(caption=clean_caption(caption), removed=cleaned.removed, cut=cut)
        except UserError as error:
            return Made(problem=f"the answer is not a caption: {error}")

    def _write(self, item: Item, made: Made, row: CaptionRow) -> None:
        """Write a caption, unless somebody else has written one in the meantime."""
        if self._job.num_shown:
            self.outcome.made[item.file] = made
            return
        # First the row: after a kill between the two, the caption is still missing and asked for again.
        self._report.add(row)
        if not is_as_seen(self._job.folder, item):
            self.outcome.appeared.append(item.file)
            return
        try:
            write_text(caption_path(self._job.folder, item), made.caption + "\n")
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            self.outcome.refused[item.file] = f"its caption cannot be written: {error.strerror}"
            return
        self.outcome.made[item.file] = made

    def _write_status(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)
        self._report.write_status(self._status)
        self._written_at = time.monotonic()


def _with_trigger_in_json(caption: str, trigger: str) -> str:
    """The JSON of a caption with the trigger, in front of its first sentence unless it is anywhere in it."""
    if has_trigger(caption, trigger):
        return caption
    value = parse_json(caption)
    text = f"{trigger}, {value.get('high_level_description', '')}".strip(" ,")
    return json.dumps({**value, "high_level_description": text}, ensure_ascii=False, separators=(",", ":"))


def _answered(
    captioner: Captioner, questions: Sequence[Question], most_tokens: int
) -> list[tuple[Question, Answer]]:
    """Each question as it was asked at last, with its answer: what was refused is asked once more."""
    answered = list(zip(questions, captioner.answer(questions, max_tokens=most_tokens), strict=True))
    places = [place for place, (_, answer) in enumerate(answered) if refusal_in(answer.text)]
    again = [
        Question(images=questions[place].images, instruction=plainer(questions[place].instruction))
        for place in places
    ]
    if again:
        answers = captioner.answer(again, max_tokens=most_tokens)
        for place, question, answer in zip(places, again, answers, strict=True):
            answered[place] = question, answer
    return answered


def _images_of(item: Item, num_frames: int) -> list[Image.Image]:
    """What a captioner sees: an image, after the inputs of an edit; or frames of a clip, evenly spread."""
    assert item.path is not None
    if not is_video(item.file):
        paths = (*inputs_of(item), item.path)
        return [_scaled(load_image(path, background=_BACKGROUND), MAX_SIDE) for path in paths]
    facts = check_video(item.path)
    count = min(num_frames, facts.num_frames)
    times = [(place + 0.5) * facts.duration_s / count for place in range(count)]
    return read_frames(item.path, times, each=lambda frame: _scaled(frame, MAX_FRAME_SIDE))


def _scaled(image: Image.Image, side: int) -> Image.Image:
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image
