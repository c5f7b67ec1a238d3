"""The base of every section of the config: frozen settings that check themselves when they are made."""

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields

from diffsynth_lite.config.field_type import field_types
from diffsynth_lite.errors import UserError


@dataclass(frozen=True)
class Problem:
    """Something wrong with settings that are each of the right type.

    Args:
        keys: the settings concerned, the one to blame first.
        message: what is wrong and what would do.
    """

    keys: tuple[str, ...]
    message: str


class InvalidSettingsError(UserError):
    """Settings that do not fit, all of them, one line each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(f"{problem.keys[0]}: {problem.message}" for problem in problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One section of the config.

    Raises:
        InvalidSettingsError: values outside their ranges, or values that contradict each other.
    """

    def __post_init__(self) -> None:
        problems = list(self._objections()) or list(self.conflicts())
        if problems:
            raise InvalidSettingsError(problems)

    def conflicts(self) -> Iterator[Problem]:
        """What is wrong between settings of this section whose values are each within their ranges."""
        yield from ()

    def is_default(self, key: str) -> bool:
        """Whether an optional setting has the value it has when nobody sets it."""
        (field,) = (field for field in fields(self) if field.name == key)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        return bool(default == getattr(self, key))

    def _objections(self) -> Iterator[Problem]:
        for key, field_type in field_types(type(self)).items():
            value = getattr(self, key)
            objection = field_type.objection(value)
            if objection:
                yield Problem((key,), f"got {value!r}; {objection}")
