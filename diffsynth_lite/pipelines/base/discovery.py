"""How a model family is found: by its name here, or by a dotted path for one kept elsewhere.

A dotted path is code of somebody else, so whatever a setting names is imported here.
"""

import importlib
import inspect
import logging
import sys
from collections.abc import Iterable
from types import ModuleType

from diffsynth_lite import pipelines
from diffsynth_lite.config.schema import EXPECTED_PACKAGES
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.reading import LoraContents, likeliest, unknown_layers
from diffsynth_lite.pipelines.base.family import ModelFamily
from diffsynth_lite.pipelines.base.folder import PipelineFolder
from diffsynth_lite.releases import UNTRAINED, Release
from diffsynth_lite.releases.families import family_names, require_family_name, unknown_family

logger = logging.getLogger(__name__)


def load_family(name: str) -> type[ModelFamily]:
    """The family class that a file or a folder offers.

    Args:
        name: of a file or a folder under ``pipelines/``, or the dotted path of a module elsewhere.

    Raises:
        UserError: no such module, or it does not define exactly one family.
    """
    path = name if "." in name else f"{pipelines.__name__}.{name}"
    require_family_name(name)
    try:
        module = import_named(path, setting="model.family")
    except ModuleNotFoundError as error:
        # A missing import inside the family's file is that file's bug and keeps its traceback.
        if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
            raise
        raise unknown_family(name) from None
    return _family_in(module)


def import_named(path: str, *, setting: str) -> ModuleType:
    """Import the module that a setting names; before code of somebody else runs for the first time, warn.

    Raises:
        ModuleNotFoundError: there is none.
    """
    if path.partition(".")[0] not in EXPECTED_PACKAGES and path not in sys.modules:
        logger.warning(
            "%s: imports the Python module %s, which comes with neither diffsynth_lite nor torch; its code "
            "now runs, and may do all that you may.",
            setting,
            path,
        )
    return importlib.import_module(path)


def releases_of(name: str) -> tuple[Release, ...]:
    """The released models that are known of a family; a family may have none."""
    return load_family(name).releases


def families_of(contents: LoraContents) -> list[str]:
    """The built-in families that a LoRA is likely of, by its layers; takes the seconds to import them all."""
    layers = {name: load_family(name).lora_layers for name in family_names()}
    return likeliest(
        contents, {name: of for name, of in layers.items() if of and not unknown_layers(contents, of)}
    )


def require_family(family: type[ModelFamily], folder: PipelineFolder) -> None:
    """Check that a folder holds a pipeline of a family; else name those that train it, or the nearest."""
    found = folder.pipeline_class_name()
    if found in family.pipeline_classes:
        return
    raise UserError(
        f"model.path: {folder.path} holds a {found}, but this family trains a "
        f"{' or '.join(family.pipeline_classes)}; {_advice(found)}, or check model.path"
    )


def _advice(pipeline_class: str) -> str:
    """Which family trains folders of a pipeline, or is nearest to it, and how another one is added."""
    # Imports every family, which takes seconds: only for the message.
    classes = {name: load_family(name).pipeline_classes for name in family_names()}
    if families := [name for name, trained in classes.items() if pipeline_class in trained]:
        return f"set model.family: {' or '.join(families)}"
    untrained = UNTRAINED.get(_longest_beginning(pipeline_class, UNTRAINED))
    stems = {found.removesuffix("Pipeline"): name for name, trained in classes.items() for found in trained}
    nearest = untrained.nearest if untrained else stems.get(_longest_beginning(pipeline_class, stems))
    refusal = "no built-in family trains that"
    if untrained:
        refusal += f" ({untrained.models}: {untrained.differs})"
    if nearest:
        summary = inspect.cleandoc(load_family(nearest).__doc__ or "").partition("\n")[0]
        refusal += f"; the nearest is {nearest} ({summary.rstrip('.')})"
    return f"{refusal}; docs/add-a-model.md says how one is added"


def _longest_beginning(text: str, beginnings: Iterable[str]) -> str:
    """The longest of them that ``text`` begins with; empty where there is none."""
    return max((one for one in beginnings if text.startswith(one)), key=len, default="")


def _family_in(module: ModuleType) -> type[ModelFamily]:
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, ModelFamily)
        and (value.__module__ == module.__name__ or value.__module__.startswith(f"{module.__name__}."))
        and not inspect.isabstract(value)
    ]
    if len(found) != 1:
        raise UserError(
            f"model.family: {module.__name__} defines {len(found)} concrete subclasses of ModelFamily; "
            "a family's file or folder offers exactly one"
        )
    return found[0]
