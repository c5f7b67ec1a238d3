"""Finds and reads the files of a config: the one that is named, those that it extends, and presets."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import yaml

from diffsynth_lite.config.document import YamlError, is_nothing, line_of, read_yaml, shown
from diffsynth_lite.config.peers import THEIR_SECTIONS, answer_to
from diffsynth_lite.config.schema import section_types
from diffsynth_lite.config.settings import ConfigError, ConfigProblem, require_possible_path
from diffsynth_lite.errors import UserError

EXTENDS = "extends"
"""The key that names the file that one extends."""

PRESETS = "presets"
"""The folder of the presets, among the recipes."""
_LAUNCHES = "accelerate"
"""The folder of files for ``accelerate launch``, which are not configs of a run."""
_FAMILIES = "families"
"""The key of a preset that lists the model families that it is for."""

# Many times the size of a config; a file of weights named by mistake is not read into memory.
_LARGEST_FILE = 1 << 20
_MANY_OF_OTHERS = 3
"""As many names of another trainer's settings, and no section of ours, show that a file is a config of it."""
_FIRST_KEY = re.compile(r"""^[ \t{"']*(\w+)["']?[ \t]*:""", re.MULTILINE)
_OF_CARD = re.compile(r"_(\d+)gb\.yaml$")
"""In the name of a recipe for a card of so many GB."""
_FITS = re.compile(r"fits a card of (\d+) GB")
"""In the head of any other recipe; scripts/benchmarks/recipes.py checks it."""
_EXTENDED = re.compile(rf"^{EXTENDS}: (\S+)$", re.MULTILINE)
# Less alike, as my_lora.yaml and anima_lora.yaml, is another name and not a mistyped one.
_SIMILAR = 0.85
_INIT = "`diffsynth-lite init FOLDER` writes a config for the images or clips in a folder"


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A yaml file, read.

    Args:
        sections: its top-level keys, ``extends`` left out, and what was written for them.
    """

    path: Path
    text: str
    sections: list[tuple[yaml.ScalarNode, yaml.Node]]


@dataclass(frozen=True, kw_only=True)
class Preset(ConfigFile):
    """A few settings for one goal, for any recipe.

    Args:
        families: the model families that it is for; none where it is for all.
    """

    name: str
    families: tuple[str, ...]

    def require_fit(self, family: str) -> None:
        """Check that it is for a model family; nothing is known of somebody else's, the path of a module."""
        if self.families and family not in self.families and "." not in family:
            raise UserError(
                f"--preset {self.name}: is for {', '.join(self.families)}, and model.family is {family}; "
                "leave it out"
            )


def read_preset(name: str) -> Preset:
    """The preset of that name."""
    found = {path.stem: path for path in (_recipe_folder() / PRESETS).glob("*.yaml")}
    if name not in found:
        raise UserError(f"--preset {name}: {did_you_mean(name, found)}There are {', '.join(sorted(found))}")
    text = _read_text(found[name])
    entries = _top_level(found[name], text)
    families = [node for key, node in entries if key.value == _FAMILIES]
    return Preset(
        path=found[name],
        text=text,
        sections=[(key, node) for key, node in entries if key.value != _FAMILIES],
        name=name,
        families=tuple(entry.value for node in families for entry in node.value),
    )


def read_config_files(path: Path, text: str | None = None) -> list[ConfigFile]:
    """A file and those that it extends: the one that extends none comes first.

    Args:
        text: of the file, in place of what it has.
    """
    files: list[ConfigFile] = []
    seen: list[Path] = []
    next_path: Path | None = path
    while next_path is not None:
        seen.append(next_path.resolve())
        text = _read_text(next_path) if files or text is None else text
        # Before anything that is in a file that a config names is part of a message.
        if files and not any(key == EXTENDS or key in section_types() for key in _FIRST_KEY.findall(text)):
            message = "is not a config: no line of it begins a section, such as 'train:'"
            raise _refusal(next_path, 1, message)
        entries = _top_level(next_path, text)
        sections = [(key, node) for key, node in entries if key.value != EXTENDS]
        files.insert(0, ConfigFile(path=next_path, text=text, sections=sections))
        next_path = _extended(next_path, [entry for entry in entries if entry[0].value == EXTENDS], seen)
    return files


def find_config_file(name: str | Path) -> Path:
    """The file of that name: as given, or in the recipes that come with this package for a bare file name.

    Raises:
        UserError: there is no such file; the message says where it was looked for and what is there.
    """
    given = Path(name)
    try:
        require_possible_path(str(name))
        exists = given.exists()
    except ValueError as error:
        raise UserError(f"--config {name}: {error}") from None
    except OSError as error:
        raise UserError(f"--config {name}: cannot be read: {error.strerror}") from None
    if given.is_dir():
        raise UserError(f"--config {name}: is a folder; name a yaml file")
    if exists:
        return given
    if given.name != str(name):
        raise UserError(
            f"--config {name}: there is no such file; check the path (working folder: {Path.cwd()}), or "
            f"begin with one: {_INIT}"
        )
    return _find_recipe(given.name, Path.cwd(), lambda message: UserError(f"--config {name}: {message}"))


def recipes_by_card(path: Path) -> list[tuple[int, Path]]:
    """The recipes that extend what a recipe extends, or are that: GB of the card of each, and its file.

    Args:
        path: of a config; one that does not come with this package has none.
    """
    folder = _recipe_folder()
    if folder not in path.resolve().parents:
        return []
    # Read as yaml they would take a tenth of a second for every family that is asked for.
    texts = {file: file.read_text(encoding="utf-8") for file in folder.rglob("*.yaml")}
    extended = {file.name: found[1] for file, text in texts.items() if (found := _EXTENDED.search(text))}

    def root(name: str) -> str:
        return root(extended[name]) if name in extended else name

    cards = {file: _OF_CARD.search(file.name) or _FITS.search(text) for file, text in texts.items()}
    like = root(path.resolve().name)
    return [(int(card[1]), file) for file, card in cards.items() if card and root(file.name) == like]


def _find_recipe(name: str, looked_in: Path, refusal: Callable[[str], UserError]) -> Path:
    """A recipe that comes with this package, those for a card among them.

    Args:
        name: of its file.
        looked_in: the folder that does not have it.
        refusal: makes an error of a message, by what named the file.
    """
    recipes = _recipe_folder()
    found = {path.name: path for path in recipes.rglob("*.yaml")}
    if name in found and found[name].parent.name == PRESETS:
        raise refusal(f"is a preset; give --preset {found[name].stem} next to --config and a recipe")
    if name in found and found[name].parent.name == _LAUNCHES:
        raise refusal(
            f"is for the launcher; give accelerate launch --config_file {found[name]}, and a recipe after "
            "train.py"
        )
    if name in found:
        return found[name]
    nearby = {path.name for path in looked_in.glob("*.y*ml")}
    hint = did_you_mean(name, [*nearby, *found], cutoff=_SIMILAR).strip()
    raise refusal(f"not found in {looked_in} nor in {recipes}; {hint or _INIT}")


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A question for a message about an unknown name, with a space after it; empty where none is like it."""
    close = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean '{close[0]}'? " if close else ""


def schema_file() -> Path:
    """The JSON schema that editors complete a config from."""
    return _recipe_folder() / "schema.json"


def schema_line() -> str:
    """The line by which editors find what settings there are."""
    return f"# yaml-language-server: $schema={schema_file().resolve().as_uri()}"


def recipe_table_file() -> Path:
    """What is known of each recipe, such as the memory that it needs; a script writes it."""
    return _recipe_folder() / "recipes.json"


def if_in_clone(page: str, clause: str) -> str:
    """A clause that names a page of the docs; empty where there is no such file, as in a wheel."""
    return clause if (Path(__file__).parents[2] / page).is_file() else ""


def _recipe_folder() -> Path:
    """The folder ``configs`` of an installed wheel, or of the repository around a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def _extended(path: Path, written: list[tuple[yaml.ScalarNode, yaml.Node]], seen: list[Path]) -> Path | None:
    """The file that one extends.

    Args:
        written: its keys ``extends``, with their values.
        seen: the files so far, this one last.
    """
    if not written:
        return None
    (key, node), *again = written
    if again:
        message = f"is there already, on line {line_of(key)}; keep one of them"
        raise _refusal(path, line_of(again[0][0]), message, key=EXTENDS)

    def refusal(message: str) -> ConfigError:
        return _refusal(path, line_of(key), message, key=EXTENDS)

    if not isinstance(node, yaml.ScalarNode) or not node.value:
        raise refusal(f"got {shown(node)}; must be the name of one yaml file, as in qwen_lora.yaml")
    name: str = node.value
    found = path.parent / name
    try:
        is_there = found.is_file()
    except OSError as error:
        raise refusal(f"{shown(node)} cannot be looked for: {error.strerror}") from None
    if not is_there:
        if Path(name).name != name:
            raise refusal(f"there is no file {found}; its path is relative to that of this file")
        found = _find_recipe(name, path.parent, lambda message: refusal(f"{name}: {message}"))
    if found.resolve() in seen:
        circle = " -> ".join(file.name for file in [*seen[seen.index(found.resolve()) :], found])
        raise refusal(f"a file cannot extend itself: {circle}")
    return found


def _top_level(path: Path, text: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """The keys of a file, and the values written for them."""
    try:
        root = read_yaml(text, str(path))
    except YamlError as error:
        if path.suffix.lower() == ".toml":
            raise _refusal(path, 1, f"is toml, and a config is yaml; {_translation(path)}") from None
        raise _refusal(path, error.line, str(error)) from None
    if is_nothing(root):
        raise _refusal(path, 1, "is empty; start from a copy of configs/qwen_lora.yaml")
    if not isinstance(root, yaml.MappingNode):
        example = "such as 'train:' and below it '  steps: 1000'"
        raise _refusal(path, 1, f"must be sections with settings, {example}")
    entries: list[tuple[yaml.ScalarNode, yaml.Node]] = root.value
    _refuse_others_config(path, entries)
    return entries


def _refuse_others_config(path: Path, entries: list[tuple[yaml.ScalarNode, yaml.Node]]) -> None:
    """Refuse a config of another trainer as a whole: a line for each key of it would bury what to do."""
    if any(key.value in section_types() and isinstance(node, yaml.MappingNode) for key, node in entries):
        return
    theirs = [key for key, _ in entries if isinstance(key.value, str) and answer_to(key.value)]
    sections = [key for key in theirs if key.value in THEIR_SECTIONS]
    if sections or len(theirs) >= _MANY_OF_OTHERS:
        key = (sections or theirs)[0]
        message = f"is of another trainer's config; {_translation(path)}"
        raise _refusal(path, line_of(key), message, key=key.value)


def _refusal(path: Path, line: int, message: str, *, key: str = "") -> ConfigError:
    return ConfigError(ConfigProblem.in_file(path, line, message, key=key))


def _translation(path: Path) -> str:
    return f"`diffsynth-lite init --from {path}` translates configs of other trainers"


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise _refusal(path, 1, "too large for a config; name a yaml file")
        return content.decode("utf-8")
    except OSError as error:
        raise _refusal(path, 1, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise _refusal(path, line, "is not UTF-8 text; save it as UTF-8") from None
