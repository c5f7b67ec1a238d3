"""This file tracks non-finite losses and gradients: skipped steps, and the newest good checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from diffsynth_lite.errors import RunDivergedError
from diffsynth_lite.training.checkpoint.manifest import folder_name

_MAX_SKIPPED_IN_A_ROW = 5


@dataclass(kw_only=True)
class Divergence:
    """Skipped steps and the newest good checkpoint of a run, over all of its starts; checkpoints keep it.

    Weights that a step has just changed may be ruined although its loss was finite. So a checkpoint is good
    only once its weights have given a finite loss: in a step after it, or in an evaluation of them.

    Attributes:
        num_skipped: steps that were skipped, as their loss or gradients were not finite.
        num_skipped_in_a_row: skipped steps since the last step that was taken.
        is_loss_finite: whether the last loss on fixed noise was; True where none was measured since the last
            step that was not skipped.
        saved_step: step of the newest checkpoint; None before the first.
        sound_step: step of the newest good checkpoint; None where there is none.
        rate_setting: setting, or a value of one, that makes the steps of the run smaller.
    """

    num_skipped: int = 0
    num_skipped_in_a_row: int = 0
    is_loss_finite: bool = True
    saved_step: int | None = None
    sound_step: int | None = None
    rate_setting: str = "train.learning_rate"
    _measured_step: int | None = None
    _skipped_on: str = ""

    @classmethod
    def of_checkpoint(cls, state: Mapping[str, Any]) -> Self:
        """From a checkpoint's state; one of an earlier version has no entry, and counts as good."""
        return cls(
            **{"sound_step": state["step"], **state.get("divergence", {}), "saved_step": state["step"]}
        )

    def document(self) -> dict[str, Any]:
        """The entry of a checkpoint."""
        return {
            "num_skipped": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
            "is_loss_finite": self.is_loss_finite,
            "sound_step": self.sound_step,
        }

    def note_taken(self) -> None:
        """A step had a finite loss and gradients: the weights that it started from are good."""
        self.num_skipped_in_a_row = 0
        self.is_loss_finite = True
        self.sound_step = self.saved_step

    def note_skipped(self, where: str) -> None:
        """A step was skipped."""
        self.num_skipped += 1
        self.num_skipped_in_a_row += 1
        self._skipped_on = where

    def require_few_in_a_row(self, step: int) -> None:
        """Check, after a step, that not too many up to it were skipped."""
        if self.num_skipped_in_a_row >= _MAX_SKIPPED_IN_A_ROW:
            raise RunDivergedError(
                f"step {step}: loss and gradients were not finite in {self.num_skipped_in_a_row} steps in a "
                f"row; last on {self._skipped_on}. Look at these items, and {self._way_out()}"
            )

    def note_loss(self, step: int, *, is_finite: bool, is_of_average: bool) -> None:
        """The loss on fixed noise was measured after a step, with its weights or with their average."""
        self.is_loss_finite = is_finite
        if is_finite and not is_of_average:
            self._measured_step = step

    def note_save(self, step: int) -> None:
        """A checkpoint is about to be written."""
        self.saved_step = step
        if self._measured_step == step:
            self.sound_step = step

    def require_none(self, step: int, total_steps: int) -> None:
        """Check, where the run has taken its last step, that this and the last loss were finite."""
        if step < total_steps:
            return
        if self.num_skipped_in_a_row:
            raise RunDivergedError(
                f"step {step}, the last one, was skipped: its loss or gradients were not finite, as in "
                f"{self.num_skipped} of {step} steps; {self._way_out()}"
            )
        if not self.is_loss_finite:
            raise RunDivergedError(
                f"after step {step}, the last one, the loss on fixed noise is not finite; {self._way_out()}"
            )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Scope of a save, in which an error about weights also names the checkpoint to resume from."""
        try:
            yield
        except RunDivergedError as error:
            raise RunDivergedError(f"{error}; {self._way_out()}") from error

    def _way_out(self) -> str:
        if self.sound_step is None:
            return (
                f"start a new run (another output.dir) with a lower {self.rate_setting} or "
                "train.mixed_precision=no: no checkpoint of this one has given a finite loss"
            )
        return (
            f"resume from checkpoints/{folder_name(self.sound_step)}, the newest one whose weights gave a "
            f"finite loss, with --resume and its path, a lower {self.rate_setting} and "
            f"resume.allow: [{self.rate_setting.rpartition(' of ')[2]}]"
        )
