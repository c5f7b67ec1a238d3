"""The base class of the config's sections, and the types that they share."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Annotated, Any, Self, TypeAlias, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from diffsynth_lite.errors import UserError, join_lines

_Entry = TypeVar("_Entry")


def _require_distinct(entries: list[_Entry]) -> list[_Entry]:
    if len(set(entries)) < len(entries):
        raise ValueError("has an entry twice; give each once")
    return entries


def require_possible_path(path: str) -> str:
    """The path; a ``ValueError`` says why there can be none like it here."""
    if os.name != "nt" and (windows := PureWindowsPath(path)).drive.endswith(":") and windows.root:
        place = "/".join(("/mnt", windows.drive[0].lower(), *windows.parts[1:]))
        raise ValueError(f"is a path of Windows, and this is not Windows: in WSL it is {place}")
    try:
        parts = Path(path).expanduser().parts
    except RuntimeError:
        raise ValueError("~ is a home folder, and there is no user of that name; name a folder") from None
    if max(len(os.fsencode(part)) for part in (*parts, "")) > _LONGEST_NAME:
        raise ValueError(f"the name of a file or folder has at most {_LONGEST_NAME} bytes")
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ValueError(f"a path has at most {_LONGEST_PATH} bytes here")
    return path


_LARGEST_COUNT = 1_000_000_000
# On Linux; a path has up to 4095 bytes there, some of which are left for names inside a folder.
_LONGEST_NAME, _LONGEST_PATH = 255, 3_000
MOST_COPIES = 1_000
MOST_PIXELS = 16_384

NonEmptyStr: TypeAlias = Annotated[str, Field(pattern=r"\S")]
"""Text with something in it that is not white space."""
FilePath: TypeAlias = Annotated[
    NonEmptyStr,
    AfterValidator(require_possible_path),
    BeforeValidator(lambda path: str(path) if isinstance(path, Path) else path),
]
"""A path; ``~`` is a home folder. In Python a ``Path`` is accepted, too."""
Count: TypeAlias = Annotated[int, Field(ge=1, le=_LARGEST_COUNT)]
"""How many of something, such as steps."""
CountOrNone: TypeAlias = Annotated[int, Field(ge=0, le=_LARGEST_COUNT)]
"""How many of something, or none."""
Samples: TypeAlias = Annotated[int, Field(ge=1, le=65_536)]
"""How many samples a step takes."""
Copies: TypeAlias = Annotated[int, Field(ge=1, le=MOST_COPIES)]
"""How many items are made of one: each is planned, encoded and kept."""
Seed: TypeAlias = Annotated[int, Field(ge=0, le=10**18 - 1)]
"""Seed of random numbers, with as many digits as a whole number may have in a file."""
Pixels: TypeAlias = Annotated[int, Field(ge=1, le=MOST_PIXELS)]
"""Edge of an image."""
Frames: TypeAlias = Annotated[int, Field(ge=1, le=100_000)]
"""Length of a clip."""
Layers: TypeAlias = Annotated[int, Field(ge=1, le=1000)]
Blocks: TypeAlias = Annotated[int, Field(ge=0, le=10_000)]
"""How many blocks of a model, or the place of one."""
BlocksAtLeastOne: TypeAlias = Annotated[int, Field(ge=1, le=10_000)]
"""How many blocks of a model, at least one."""
Gib: TypeAlias = Annotated[float, Field(gt=0, le=2**20)]
"""Size of a memory in GiB, up to one PiB."""
Minutes: TypeAlias = Annotated[float, Field(gt=0, le=525_600)]
"""A time of at most a year."""
Distinct: TypeAlias = Annotated[
    list[_Entry], AfterValidator(_require_distinct), Field(json_schema_extra={"uniqueItems": True})
]
"""A list without duplicates."""


OptionName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Name of an argument in Python."""
OptionValue: TypeAlias = bool | int | float | OptionName | list[int | float] | None
"""What an argument in Python may be given; a word needs no quotes, as none looks like a number."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with settings that are each of the right type.

    Args:
        keys: the settings concerned, the one to blame first.
        message: the problem and its remedy.
        blames_last: whether the one that was given last is to blame, as each may make the problem.
    """

    keys: tuple[str, ...]
    message: str
    blames_last: bool = False


class ConflictError(ValueError):
    """Settings that contradict each other: all the contradictions of one section."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(f"{problem.keys[0]}: {problem.message}" for problem in problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, kw_only=True)
class ConfigProblem:
    """Something wrong in a config, where somebody can put it right.

    Attributes:
        key: of the setting, such as ``data.sources[0].path``, or of the section; empty for a whole file.
        file: that has it, or that lacks it; None on the command line.
        line: of the file, counted from 1; 0 on the command line.
        text: the problem and its remedy.
        place: as a message names it.
    """

    key: str
    file: Path | None
    line: int
    text: str
    place: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"

    @classmethod
    def in_file(cls, path: Path, line: int, text: str, *, key: str = "") -> Self:
        """One that a line of a file has."""
        place = f"{path}:{line} {key}".rstrip()
        return cls(key=key, file=path, line=line, text=text, place=place)


class ConfigError(UserError):
    """All that is wrong with a config, one line each."""

    def __init__(self, *problems: ConfigProblem) -> None:
        super().__init__(join_lines(list(map(str, problems))))
        self.problems = problems


def _is_path(annotation: Any) -> bool:
    """Whether a type is :data:`FilePath`, or holds it."""
    return annotation == AfterValidator(require_possible_path) or any(map(_is_path, get_args(annotation)))


class Settings(BaseModel):
    """One section of the config: frozen, and checked when it is made. The text under a setting documents it.

    Raises:
        pydantic.ValidationError: values of a wrong type or outside their range, unknown settings, or settings
            that contradict each other.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default values of the optional settings."""
        return {key: cls.default(key) for key, field in cls.model_fields.items() if not field.is_required()}

    @classmethod
    def default(cls, key: str) -> Any:
        """The default value of a setting."""
        return cls.model_fields[key].get_default()

    def conflicts(self) -> Iterator[Problem]:
        """Conflicts between settings of this section whose values are each valid."""
        yield from ()

    def is_default(self, key: str) -> bool:
        """Whether an optional setting has its default value."""
        return bool(getattr(self, key) == self.default(key))

    def paths(self) -> Iterator[tuple[str, str]]:
        """Key and value of each setting that is a path, also of the sections within this one."""
        for key, field in type(self).model_fields.items():
            value = getattr(self, key)
            is_several, is_path = isinstance(value, list), _is_path(field.rebuild_annotation())
            for place, one in enumerate(value if is_several else [value]):
                name = f"{key}[{place}]" if is_several else key
                if isinstance(one, Settings):
                    yield from ((f"{name}.{inner}", path) for inner, path in one.paths())
                elif is_path and one is not None:
                    yield name, one

    @field_validator("*", mode="before")
    @classmethod
    def _require_storable(cls, value: Any) -> Any:
        """Text must survive being written to a file as yaml, used in a path, and read again."""
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (text == "???" or re.search(r"\$\{|[\0\ud800-\udfff]", text)):
                raise ValueError("must not contain '${', a zero byte or half a character, nor be '???'")
        return value

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        if problems := list(self.conflicts()):
            raise ConflictError(problems)
        return self
