"""This file reads the settings in a model folder, which anybody may have written, and reports what is wrong.

The classes that are built from a file define what it may hold: diffusers' signatures give the kind of each
setting, transformers checks its own. Sizes that no model has are refused before anything is built.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import UserError

_MAX_BYTES = 256 << 20
"""Of a file of settings or a vocabulary, which is read in whole."""
_MAX_SHOWN = 200
_MAX_TABLES = 4 << 30
"""Bytes of what a model computes when it is made, such as of positions; Wan's take 1 MiB."""
_MAX_INT = (1 << 31) - 1
_LARGEST = {"layers": 10_000, "blocks": 10_000, "depth": 10_000, "order": 100, "timesteps": 1_000_000}
"""By a word in a setting's name: what is built or computed once for each."""
_NUMBER: frozenset[type] = frozenset([float])
_ANYTHING: frozenset[type] = frozenset([float, str, list, dict, NoneType])
_KINDS: dict[Any, frozenset[type]] = {
    **dict.fromkeys((int, float), _NUMBER),
    bool: _NUMBER | {NoneType},  # a switch that is null is off
    **dict.fromkeys((list, tuple), frozenset([list])),
    **{kind: frozenset([kind]) for kind in (str, dict, NoneType)},
}
"""What json may hold for a parameter of a type; whole numbers and truth values are numbers."""
_NAMES = {float: "a number", str: "a text", list: "a list", dict: "an object", NoneType: "null"}


class ModelSettings(dict[str, Any]):
    """What a file of settings holds."""

    def __init__(self, settings: Mapping[str, Any], file: Path) -> None:
        super().__init__(settings)
        self.file = file

    def __missing__(self, name: str) -> NoReturn:
        raise UserError(f"model.path: {self.file} lacks {name}; get the folder again")


def require_readable(path: Path) -> None:
    """Check that a path is a file, and no larger than those of settings are; one that is not there passes."""
    if path.is_file():
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(
                f"model.path: {path} has {path.stat().st_size} bytes; that is too many for a file of settings"
            )
    elif path.exists() or path.is_symlink():
        raise UserError(f"model.path: {path} is not a file that can be read; get the folder again")


def read_settings(path: Path) -> ModelSettings:
    """The settings in a json file of a model folder.

    Raises:
        UserError: it holds no object that can be read.
        FileNotFoundError: it is missing.
    """
    require_readable(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_constant)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"model.path: {path} cannot be read: {shortened(error)}") from None
    if not isinstance(document, dict):
        raise UserError(f"model.path: {path} does not hold a JSON object")
    return ModelSettings(document, path)


def _constant(name: str) -> float:
    # Infinities are not json either, but some schedulers of diffusers have them.
    if name == "NaN":
        raise ValueError("it holds NaN, which is not a number")
    return float(name)


def require_sizes(settings: ModelSettings) -> None:
    """Check that whole numbers are such as models have, before anything of their size is made."""
    for name, value in _whole_numbers(settings):
        words = re.split(r"[._]", name)
        largest = min((_LARGEST[word] for word in words if word in _LARGEST), default=_MAX_INT)
        # Without layers a model is made, and leaves the files' unread; of others, -1 may be the last layer.
        smallest = 0 if largest < _MAX_INT and "num" in words else -_MAX_INT
        if not smallest <= value <= largest:
            raise UserError(
                f"model.path: {settings.file}: {name} is {value}, and in no model below {smallest} or above "
                f"{largest}; get the folder again"
            )


def _whole_numbers(document: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """All of them, with the name of their setting after those that it is part of."""
    # Not by recursion: what json could read may be nested deeper than what may be called.
    found: list[tuple[str, Any]] = list(document.items())
    while found:
        name, value = found.pop()
        if isinstance(value, dict):
            found += [(f"{name}.{inner}", one) for inner, one in value.items()]
        elif isinstance(value, list):
            found += [(name, one) for one in value]
        elif isinstance(value, int):
            yield name, value


def require_class(wanted: Any, settings: ModelSettings) -> None:
    """Check the class that the settings of a component name; those that name none pass.

    Of a model of transformers it is the ``model_type``: ``architectures`` may name another head of the same
    model, whose weights do as well.
    """
    if issubclass(wanted, PreTrainedModel):
        key, name = "model_type", wanted.config_class.model_type
        # That of a CLIP with both halves holds the settings of each.
        found = list(_model_types(settings))
    else:
        key, name = "_class_name", wanted.__name__
        found = [settings[key]] if key in settings else []
    if found and name not in found:
        raise UserError(
            f"model.path: {settings.file} is that of a {shortened(found[0])}, but this family loads "
            f"{settings.file.parent.name} as a {wanted.__name__} ({key}: {name}); get the folder again, or "
            "check model.path and model.family"
        )


def _model_types(config: Mapping[str, Any]) -> Iterator[Any]:
    if "model_type" in config:
        yield config["model_type"]
    for part in config.values():
        if isinstance(part, dict):
            yield from _model_types(part)


def require_kinds(built: Any, settings: ModelSettings) -> None:
    """Check that settings are of the kinds that a class of diffusers takes; those it does not know pass.

    Those of transformers are left to its own checks, when a model is built.
    """
    if issubclass(built, PreTrainedModel):
        return
    hints = get_type_hints(built.__init__)
    for name, parameter in inspect.signature(built.__init__).parameters.items():
        if name not in settings or name not in hints:
            continue
        taken = _kinds_of(hints[name])
        if parameter.default is not parameter.empty:
            taken |= _kinds_of(type(parameter.default))
        value, place = settings[name], f"model.path: {settings.file}:"
        _require_kind(value, taken, f"{place} {name}", built)
        for entry in value if isinstance(value, list) else ():
            _require_kind(entry, _kinds_in(hints[name]) or _ANYTHING, f"{place} an entry of {name}", built)


def _require_kind(value: Any, taken: frozenset[type], place: str, built: Any) -> None:
    if (float if isinstance(value, int | float) else type(value)) in taken:
        return
    wanted = " or ".join(_NAMES[one] for one in _NAMES if one in taken)
    raise UserError(
        f"{place} is {shortened(json.dumps(value))}, and {built.__name__} takes {wanted}; "
        "get the folder again"
    )


def _kinds_in(annotation: Any) -> frozenset[type]:
    """What json may hold in a list for a parameter; empty where that is not known."""
    entries = [entry for entry in get_args(annotation) if entry is not Ellipsis]
    if get_origin(annotation) in (Union, UnionType):
        return frozenset[type]().union(*map(_kinds_in, entries))
    if get_origin(annotation) in (list, tuple):
        return frozenset[type]().union(*map(_kinds_of, entries))
    return frozenset()


def _kinds_of(annotation: Any) -> frozenset[type]:
    """What json may hold for a parameter; anything where that is not known."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return frozenset[type]().union(*map(_kinds_of, get_args(annotation)))
    if origin is Literal:
        return frozenset[type]().union(*(_kinds_of(type(value)) for value in get_args(annotation)))
    return _KINDS.get(origin or annotation, _ANYTHING)


@contextmanager
def building(built: Any, place: Path) -> Iterator[None]:
    """Scope in which a class of a library is built from files: what it raises then is their mistake.

    Args:
        place: the file of its settings, or the folder with all it reads.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError | OSError | SafetensorError | MemoryError):
            raise
        raise UserError(
            f"model.path: {place} makes no {built.__name__} ({type(error).__name__}: {shortened(error)}); "
            "get the folder again"
        ) from error


def require_possible(model: nn.Module) -> None:
    """Check that a model on the meta device is one that can be: no weight is empty, no table is huge.

    Raises:
        ValueError: naming what is not.
    """
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            raise ValueError(f"its {name} would have the shape {list(parameter.shape)}")
    tables = sum(buffer.nbytes for buffer in model.buffers())
    if tables > _MAX_TABLES:
        raise ValueError(f"what it computes when it is made would take {format_bytes(tables)}")


def shortened(text: object) -> str:
    """A message about a file in one line, cut where it is too long: values in files may have any length."""
    line = " ".join(str(text).split())
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}..."
