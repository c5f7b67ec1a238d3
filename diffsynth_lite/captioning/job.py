"""This file writes the captions of a folder: it asks about its items in batches, and reports each answer."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from PIL import Image

from diffsynth_lite.captioning.captioner import Answer, Captioner, Question
from diffsynth_lite.captioning.choice import CaptionJob, Outcome, choose, is_as_seen
from diffsynth_lite.captioning.cleaning import Cleaned, clean, refusal_in, with_exact_trigger
from diffsynth_lite.captioning.contents import Item, read_contents
from diffsynth_lite.captioning.instructions import instruction_for, max_tokens, plainer
from diffsynth_lite.captioning.limit import Fits, fitted
from diffsynth_lite.captioning.page import write_page
from diffsynth_lite.captioning.report import CaptioningStatus, CaptionReport, CaptionRow, caption_hash
from diffsynth_lite.data.images import load_image
from diffsynth_lite.data.records import is_video
from diffsynth_lite.data.video import check_video, read_frames
from diffsynth_lite.errors import RunInterrupted, RunStoppedError, UserError, join_names
from diffsynth_lite.files import DISK_FULL, is_unfinished, is_young, write_text
from diffsynth_lite.progress_log import Phase, ProgressLog, current_watch, watched
from diffsynth_lite.run_folder.lock import open_lock
from diffsynth_lite.run_folder.process import Process

logger = logging.getLogger(__name__)

MAX_SIDE = 1024
"""Pixels of the longer side of an image, as a captioner gets it."""
MAX_SIDE_OF_MANY = 512
"""Of more than three images or frames, which share the room for tokens."""
_FEW_IMAGES = 3
_STATUS_EVERY_S = 1.0


def write_captions(
    job: CaptionJob, open_captioner: Callable[[], Captioner], *, logs_progress: bool = True
) -> Outcome:
    """Write the captions of a folder, each as soon as it is answered.

    What stops it loses at most the answers of one batch; the same job then goes on.

    Args:
        open_captioner: called once it is known that there is something to write, and before that; what is
            wrong with the model is an error of it.
        logs_progress: whether lines of the log show it, too, and not only what watches the progress.

    Raises:
        UserError: there is nothing to write for, or no further question can be answered.
        RunStoppedError: the disk is full.
    """
    report = CaptionReport(job.folder, job.part)
    outcome = choose(job, read_contents(job.source, logs_skipped=True), report)
    if outcome.sharing:
        text = "These share the caption file of another item; rename them to have their own: %s"
        logger.warning(text, join_names(outcome.sharing))
    fits = job.limit() if job.limit else lambda _: True
    captioner = open_captioner() if outcome.items else None
    with _locked(report, is_needed=not job.num_shown):
        _Run(job, report, outcome, fits, logs_progress=logs_progress).finish(captioner)
    return outcome


def finish_parts(job: CaptionJob, outcome: Outcome) -> None:
    """Join the reports of the parts of a job, and write the page of all items."""
    report = CaptionReport(job.folder)
    with _locked(report, is_needed=True):
        write_page(job, report, outcome)
        status = CaptioningStatus(
            state="finished",
            process=Process.current().as_text(),
            arguments=job.arguments,
            total=len(outcome.made) + len(outcome.failed),
            model=outcome.model,
            failed=dict(outcome.failed),
            message=outcome.summary,
        )
        report.write_status(status)


@contextmanager
def _locked(report: CaptionReport, *, is_needed: bool) -> Iterator[None]:
    """Scope in which no other command writes captions in the folder; what a killed one left is removed.

    Args:
        is_needed: whether the folder has to be one that can be written to.
    """
    for path in (report.folder, report.lock_file, report.rows_file):
        if path.is_symlink():
            raise UserError(f"{path} is a link, through which nothing is written; move it aside")
    try:
        report.folder.mkdir(exist_ok=True)
        lock = open_lock(report.lock_file, place=str(report.folder.parent))
    except OSError as error:
        if is_needed:
            raise UserError(f"{report.folder} cannot be written to: {error.strerror}") from error
        yield
        return
    with lock.file:
        report.take_parts()
        for left in report.folder.parent.rglob(".tmp-*") if report.part.is_whole else ():
            is_old = left.parent == report.folder or not is_young(left)  # the screen writes captions, too
            if is_old and is_unfinished(left.name) and left.is_file():
                left.unlink(missing_ok=True)
        yield


_Asked = tuple[Item, Question]


class _Run:
    """One start of a job, under the lock of its folder."""

    def __init__(
        self, job: CaptionJob, report: CaptionReport, outcome: Outcome, fits: Fits, *, logs_progress: bool
    ) -> None:
        self._job, self._report, self._outcome, self._fits = job, report, outcome, fits
        self._logs_progress = logs_progress
        self._outer_watch = current_watch()
        self._written_at = 0.0
        self._status = CaptioningStatus(
            state="running",
            process=Process.current().as_text(),
            arguments=job.arguments,
            started_at=outcome.started_at,
            total=len(outcome.items),
        )

    def finish(self, captioner: Captioner | None) -> None:
        """Do what is left of the job; None where nothing is."""
        try:
            self._write_status()
            try:
                if captioner is not None:
                    self._show_phase("loading", 0, 0)
                    self._caption_all(captioner)
            finally:
                if not self._job.num_shown and self._job.part.is_whole:
                    write_page(self._job, self._report, self._outcome)
            self._write_status(state="finished", message=self._outcome.summary)
        except BaseException as error:
            was_stopped = isinstance(error, RunInterrupted | KeyboardInterrupt)
            with suppress(OSError):
                message = str(error) or type(error).__name__
                self._write_status(state="stopped" if was_stopped else "failed", message=message)
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

    def _caption_all(self, captioner: Captioner) -> None:
        """Ask about all items, in batches; the images of the next one are read meanwhile."""
        items, outcome, size = self._outcome.items, self._outcome, captioner.batch_size
        batches = [items[start : start + size] for start in range(0, len(items), size)]
        with watched(self._show_phase), captioner as loaded, ThreadPoolExecutor(1) as pool:
            outcome.model = loaded.name
            self._write_status(phase="captioning", message="", model=loaded.name)
            text = "captions: %d of %d" if self._logs_progress else None
            progress = ProgressLog(text, len(items), phase="captioning")
            began_at = time.perf_counter()
            coming = pool.submit(self._loaded, batches[0])
            for place, batch in enumerate(batches, start=1):
                asked = coming.result()
                if place < len(batches):
                    coming = pool.submit(self._loaded, batches[place])
                refused = self._ask(loaded, asked)
                again = [(item, replace(one, instruction=plainer(one.instruction))) for item, one in refused]
                self._ask(loaded, again)
                done = self._status.done + len(batch)
                outcome.seconds = time.perf_counter() - began_at
                preview = {name: made.text for name, made in outcome.made.items()}
                self._write_status(
                    done=done,
                    seconds_per_item=outcome.seconds / done,
                    failed=dict(outcome.failed),
                    preview=preview if self._job.num_shown else {},
                )
                progress.reach(done)

    def _loaded(self, items: Sequence[Item]) -> list[_Asked]:
        """The items with the questions about them, but for those whose images cannot be read."""
        asked = []
        for item in items:
            try:
                images = _images_of(item, self._job.num_frames)
            except (UserError, OSError) as error:
                of_system = error.strerror if isinstance(error, OSError) else ""
                reason = f"cannot be read: {of_system}" if of_system else str(error)
                self._outcome.failed[item.file] = reason.removeprefix(f"{item.path}: ")
                continue
            instruction = instruction_for(
                self._job.request, is_clip=is_video(item.file), num_inputs=len(item.inputs)
            )
            asked.append((item, Question(images=images, instruction=instruction)))
        return asked

    def _ask(self, captioner: Captioner, asked: Sequence[_Asked]) -> list[_Asked]:
        """Ask, and write what is answered.

        Returns:
            What the model refuses.
        """
        if not asked:
            return []
        began_at = time.perf_counter()
        answers = captioner.answer(
            [question for _, question in asked], max_tokens=max_tokens(self._job.request)
        )
        seconds = (time.perf_counter() - began_at) / len(asked)
        for (item, question), answer in zip(asked, answers, strict=True):
            cleaned = self._cleaned(answer)
            if cleaned.problem:
                self._outcome.failed[item.file] = cleaned.problem
                continue
            self._outcome.failed.pop(item.file, None)
            row = CaptionRow(
                file=item.file,
                hash=caption_hash(cleaned.text),
                model=captioner.name,
                instruction=question.instruction,
                seconds=round(seconds, 3),
                num_tokens=answer.num_tokens,
                removed=cleaned.removed,
                cut=cleaned.cut,
                written_at=time.time(),
            )
            self._write(item, cleaned, row)
        if ends := [answer.problem for answer in answers if answer.is_last]:
            raise UserError(ends[0])
        return [one for one, answer in zip(asked, answers, strict=True) if refusal_in(answer.text)]

    def _cleaned(self, answer: Answer) -> Cleaned:
        """The caption of an answer, or why it is none."""
        phrase = refusal_in(answer.text)
        if problem := answer.problem or (phrase and f"the model refused: {phrase}"):
            return Cleaned(problem=problem)
        request, kept = self._job.request, self._job.kept_rules
        cleaned = clean(answer.text, format=request.format, kept=kept, is_unfinished=answer.is_unfinished)
        if cleaned.problem:
            return cleaned
        whole = with_exact_trigger(cleaned.text, request.trigger) if request.trigger else cleaned.text
        caption, cut = fitted(whole, self._fits)
        if not caption:
            return Cleaned(problem="nothing of the answer fits what the text encoder reads")
        return replace(cleaned, text=caption, cut=cut)

    def _write(self, item: Item, made: Cleaned, row: CaptionRow) -> None:
        """Write a caption, unless somebody else has written one in the meantime."""
        if self._job.num_shown:
            self._outcome.made[item.file] = made
            return
        # First the row: after a kill between the two, the caption is still missing and asked for again.
        self._report.add(row)
        if not is_as_seen(self._job.folder, item):
            self._outcome.appeared.append(item.file)
            return
        try:
            write_text(self._job.folder / item.caption_file, made.text + "\n")
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            self._outcome.failed[item.file] = f"its caption cannot be written: {error.strerror}"
            return
        self._outcome.made[item.file] = made

    def _write_status(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)
        with suppress(*([OSError] if self._job.num_shown else [])):  # a dry run may have no place for it
            self._report.write_status(self._status)
        self._written_at = time.monotonic()


def _images_of(item: Item, num_frames: int) -> list[Image.Image]:
    """What a captioner sees: an image, after the inputs of an edit; or frames of a clip, evenly spread."""
    assert item.path is not None
    paths = [*item.inputs, item.path]
    facts = check_video(item.path) if is_video(item.file) else None
    count = len(paths) if facts is None else min(num_frames, facts.num_frames)
    side = MAX_SIDE if count <= _FEW_IMAGES else MAX_SIDE_OF_MANY

    def scaled(image: Image.Image) -> Image.Image:
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        return image

    if facts is None:
        return [scaled(load_image(path, background="white")) for path in paths]
    return read_frames(item.path, facts.spread_times(count), each=scaled)
