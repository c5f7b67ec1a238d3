"""Finds the config that a person named."""

from difflib import get_close_matches
from pathlib import Path

from diffsynth_lite.errors import UserError


def find_config_file(name: str | Path) -> Path:
    """The file of that name: as given, or in the recipes that come with this package for a bare file name.

    Raises:
        UserError: there is no such file; the message says where it was looked for and what is there.
    """
    given = Path(name)
    try:
        exists = given.exists()
    except OSError as error:
        raise UserError(f"--config {name}: cannot be read: {error.strerror}") from None
    if given.is_dir():
        raise UserError(f"--config {name}: is a folder; name a yaml file")
    if exists:
        return given
    if given.name != str(name):
        raise UserError(
            f"--config {name}: there is no such file; check the path (working folder: {Path.cwd()})"
        )
    recipes = recipe_folder()
    if (recipes / given).is_file():
        return recipes / given
    known = sorted(path.name for path in recipes.glob("*.yaml"))
    close = get_close_matches(given.name, known, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise UserError(
        f"--config {name}: not found in {Path.cwd()} nor in {recipes}; "
        f"{hint}There: {', '.join(known) or 'no yaml file'}"
    )


def recipe_folder() -> Path:
    """The folder ``configs`` of an installed wheel, or of the repository around a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"
