"""This file has the scores that a run folder keeps, ``scores.json``: of the base and of each scored LoRA."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import read_bytes, write_json

FILE_NAME = "scores.json"
BASE_STEP = 0

_MOST_BYTES = 16 << 20
"""1,000 columns of 100 prompts are 12 MiB."""

_Scores = tuple[float, ...]
_Name = Annotated[str, Field(min_length=1, max_length=500)]
_Prompts = Annotated[tuple[str, ...], Field(max_length=10_000)]


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ScoredColumn(_Stored):
    """The scores of one LoRA, or of the base: a value a prompt.

    Attributes:
        column: names it: the step for one of the run, else the name of the LoRA.
        step: of the run; 0 is the base; None of a LoRA that is not of the run.
        likeness: of the image of each new prompt to the held-out images of that caption, cosines.
        contrast: of each new prompt, that likeness minus the one to images of others: the mean of that to the
            held-out images of other captions, and that to the base's images of plain prompts.
        prompt: similarity of each new prompt to its image.
        kept: of each plain prompt, 1 where the image is that of the base, 0 where it is as far from it as
            the base's image of another prompt.
        memory: likeness of the image of each taught prompt to the training images of that caption.
    """

    column: _Name
    step: int | None = Field(default=None, ge=0)
    likeness: _Scores
    contrast: _Scores
    prompt: _Scores
    kept: _Scores
    memory: _Scores = ()

    @classmethod
    def name(cls, step: int) -> str:
        """The name of the column of a step of the run."""
        return str(step) if step else "base"


class ScoreRecord(_Stored):
    """What ``scores.json`` holds.

    Attributes:
        measure: a digest of all that decides which scores may be compared: prompts, seeds, sizes, sampler,
            base model, feature models, held-out files. Scores of another measure start over.
        is_average: whether those of steps are of averaged weights.
        models: the name of the model for images, and of that for prompts.
        held_out_contrast: contrast of the held-out images among themselves, as ``contrast`` of a column.
        other_seed: of each plain prompt, ``kept`` of the base's image of another seed; empty where there is
            none.
        new_prompts: captions of held-out images.
        plain_prompts: prompts that do not name what was taught.
        taught_prompts: captions of training images.
        columns: the base, then the steps in their order, then LoRAs that are not of the run.
    """

    measure: _Name
    is_average: bool = False
    models: tuple[_Name, ...]
    held_out_contrast: float
    other_seed: _Scores = ()
    new_prompts: _Prompts
    plain_prompts: _Prompts
    taught_prompts: _Prompts = ()
    columns: Annotated[tuple[ScoredColumn, ...], Field(min_length=1, max_length=10_000)]

    @property
    def base(self) -> ScoredColumn:
        """The scores of the base."""
        return self.columns[0]

    def with_column(self, column: ScoredColumn) -> "ScoreRecord":
        """The record with one more column, or with another in place of the one of the same name.

        Raises:
            ValueError: the column does not have a value for each prompt.
        """
        others = [other for other in self.columns if other.column != column.column]
        columns = sorted([*others, column], key=lambda one: (one.step is None, one.step or 0))
        return ScoreRecord(**{**dict(self), "columns": tuple(columns)})

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        names = [column.column for column in self.columns]
        if len(set(names)) < len(names):
            raise ValueError("two columns have the same name")
        if [column.step for column in self.columns].count(BASE_STEP) != 1 or self.base.step != BASE_STEP:
            raise ValueError("the first column, and no other, has to be the base, step 0")
        new, plain, taught = map(len, (self.new_prompts, self.plain_prompts, self.taught_prompts))
        if len(self.other_seed) not in (0, plain):
            raise ValueError("other_seed does not have one value for each plain prompt")
        for column in self.columns:
            by_prompt = (column.likeness, column.contrast, column.prompt, column.kept, column.memory)
            if list(map(len, by_prompt)) != [new, new, new, plain, taught]:
                raise ValueError(f"column {column.column} does not have one value for each prompt")
        return self


def joined(first: ScoreRecord, steps: Iterable[tuple[str, ScoreRecord, int]]) -> ScoreRecord:
    """One record of steps of several runs, ``RUN@STEP``, as if they were LoRAs of others to the first run.

    Args:
        steps: of each the name of its run, the record of that, of the same measure, and the step.
    """
    columns = [
        column.model_copy(update={"column": f"{name}@{step}", "step": None})
        for name, record, step in steps
        for column in record.columns
        if column.step == step
    ]
    return ScoreRecord(**{**dict(first), "columns": (first.base, *columns)})


def read_scores(path: Path) -> ScoreRecord | None:
    """The record in a file, which may be somebody else's; None where there is no file.

    Raises:
        UserError: it is damaged.
        OSError: it cannot be read.
    """
    try:
        return ScoreRecord.model_validate_json(read_bytes(path, most_bytes=_MOST_BYTES))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise UserError(f"{path} is damaged: {where}: {first['msg']}; remove it to score again") from None


def write_scores(path: Path, record: ScoreRecord) -> None:
    """Write the file, or replace it, durably."""
    write_json(path, record.model_dump(mode="json"))
