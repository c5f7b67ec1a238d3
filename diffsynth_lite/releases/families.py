"""This file knows the names of the built-in model families; to list them imports none, nor torch."""

import difflib
import pkgutil
from pathlib import Path

from diffsynth_lite.errors import UserError

_FOLDER = Path(__file__).parents[1] / "pipelines"


def family_names() -> list[str]:
    """Names of the built-in families: the files and folders in ``pipelines``, sorted."""
    return sorted({module.name for module in pkgutil.iter_modules([str(_FOLDER)])} - {"base"})


def require_family_name(name: str) -> None:
    """Check that a name is that of a built-in family, or the dotted path of a module, which may not be there.

    Raises:
        UserError: it is neither; the message names the families there are.
    """
    if not all(part.isidentifier() for part in name.split(".")) or (
        "." not in name and name not in family_names()
    ):
        raise unknown_family(name)


def unknown_family(name: str) -> UserError:
    """The error about a name that no family has."""
    known = family_names()
    if "." in name:
        place = "Python finds no such module: install its package or name its folder in PYTHONPATH"
        return UserError(
            f"model.family: unknown family {name!r}; {place}; built-in families: {', '.join(known)}"
        )
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return UserError(
        f"model.family: unknown family {name!r}; {hint}built-in families: {', '.join(known)}; "
        "a family kept elsewhere is given by the dotted path of its module"
    )
