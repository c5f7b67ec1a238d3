"""This file writes a release out as a folder without weights, and identifies the model in a folder.

A family bound to such a folder answers what it answers of a downloaded one, but for what needs weights or a
tokenizer: shapes, tokens, noise levels, and the model that is trained, on the meta device.
"""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import ModularPipeline
from diffusers.models.modeling_utils import no_init_weights
from transformers import PreTrainedModel

from diffsynth_lite.pipelines.base.folder import PipelineFolder
from diffsynth_lite.pipelines.base.model_settings import require_possible
from diffsynth_lite.releases import BaseModel, Release, ReleaseComponent

Differences = dict[str, tuple[Any, Any]]
"""What is found and what was expected, by component and setting."""

_NOT_TELLING = ("scheduler.", "text_encoder")
"""Parts that do not identify a release: schedulers are changed, and text encoders are shared by many."""

_OFF = (None, False)

_CACHED = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})")
"""The end of a folder in the hub's cache: owner and name of the repository, and the commit."""


def write_release(release: Release, path: Path) -> PipelineFolder:
    """Write the index and the settings of all components; no weights, no vocabularies."""
    index: dict[str, Any] = {"_class_name": release.pipeline_class, **release.settings}
    for name, component in {**release.components, "scheduler": release.scheduler}.items():
        component_class = class_of(component)
        package, _, class_name = component.class_name.rpartition(".")
        index[name] = [package or component_class.__module__.partition(".")[0], class_name]
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        _write_json(path / name / file, full_config(component))
    for name, tokenizer in release.tokenizers.items():
        library = _class_named(tokenizer.class_name).__module__.partition(".")[0]
        index[name] = [library, tokenizer.class_name]
        if library == "diffusers":
            file = f"{name.rpartition('_')[-1]}_config.json"
            _write_json(path / name / file, {"_class_name": tokenizer.class_name})
            continue
        _write_json(path / name / "tokenizer_config.json", {"tokenizer_class": tokenizer.class_name})
        if tokenizer.class_name.endswith("Processor"):
            _write_json(path / name / "preprocessor_config.json", tokenizer.images)
    pipeline_class = _class_named(release.pipeline_class)
    if issubclass(pipeline_class, ModularPipeline):
        for name in (*release.components, "scheduler", *release.tokenizers):
            index[name] = [*index[name], {"subfolder": name, "type_hint": index[name]}]
    _write_json(path / pipeline_class.config_name, index)
    return PipelineFolder(path=path)


def class_of(component: ReleaseComponent) -> Any:
    """The class that a component names, of diffusers or transformers."""
    return _class_named(component.class_name)


def _class_named(name: str) -> Any:
    package, _, class_name = name.rpartition(".")
    if package:
        return getattr(getattr(diffusers.pipelines, package), class_name)
    return getattr(diffusers if hasattr(diffusers, name) else transformers, name)


def full_config(component: ReleaseComponent) -> dict[str, Any]:
    """The settings of a component as its file holds them: also those that are the defaults of its class."""
    return _full_config(component.class_name, component.config)


def _full_config(class_name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(_with_defaults(class_name, json.dumps(dict(config))))
    return settings


@cache
def _with_defaults(class_name: str, config: str) -> str:
    # A run asks three times what its model is, and to make configs of transformers is most of the answer.
    component_class, settings = _class_named(class_name), json.loads(config)
    if issubclass(component_class, PreTrainedModel):
        return json.dumps(component_class.config_class.from_dict(settings).to_dict())
    parameters = inspect.signature(component_class).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    return json.dumps({"_class_name": component_class.__name__, **defaults, **settings})


def empty_model(model_class: Any, config: Mapping[str, Any]) -> torch.nn.Module:
    """A model of diffusers or transformers on the meta device: its structure without its weights.

    Args:
        config: its settings, as its ``config.json`` holds them.
    """
    with torch.device("meta"):
        if issubclass(model_class, PreTrainedModel):
            model: torch.nn.Module = model_class(model_class.config_class.from_dict(dict(config)))
        else:
            with no_init_weights():  # almost half of the time, as torch draws them in Python on meta
                model = model_class.from_config(dict(config))
    return model


def num_parameters(component: ReleaseComponent) -> int:
    """Parameters of a released component, shared ones counted once."""
    return count_parameters(_class_named(component.class_name), json.dumps(full_config(component)))


@cache
def count_parameters(model_class: Any, config: str) -> int:
    """Parameters of a model, shared ones counted once; a run asks each time that it loads a component.

    Args:
        config: the text of its ``config.json``.

    Raises:
        ValueError: no such model can be.
    """
    model = empty_model(model_class, json.loads(config))
    require_possible(model)
    return sum(parameter.numel() for parameter in model.parameters())


def weight_bytes(component: ReleaseComponent, dtype: torch.dtype | None = None) -> int | None:
    """Bytes of a component's weights, computed from its settings: nothing is loaded.

    Args:
        dtype: None is that of the released files.

    Returns:
        None where the released dtype is asked for and not known.
    """
    if dtype is None:
        if component.dtype is None:
            return None
        dtype = getattr(torch, component.dtype)
    return num_parameters(component) * dtype.itemsize


def differences(release: Release, folder: PipelineFolder) -> Differences:
    """The settings in which a folder's files differ from a release.

    Of a model of transformers only the settings that the release gives are compared.
    """
    index = folder.pipeline_config()
    found = {"_class_name": index.get("_class_name")}
    expected: dict[str, Any] = {"_class_name": release.pipeline_class}
    for name, default in _pipeline_settings(release).items():
        found[name], expected[name] = index.get(name, default), release.settings.get(name, default)
    components = {**release.components, "scheduler": release.scheduler}
    named = folder.parts()
    found["components"] = sorted(named.keys() - {*release.tokenizers, *release.optional_components})
    expected["components"] = sorted(components)
    differing = dict(_differing(found, expected, "model_index."))
    for name in components.keys() & named.keys():
        component, (_, class_name) = components[name], named[name]
        if class_name != class_of(component).__name__:  # which has other settings
            differing[f"{name}._class_name"] = class_name, class_of(component).__name__
            continue
        found = _full_config(component.class_name, folder.component_config(name))
        expected = full_config(component)
        if issubclass(class_of(component), PreTrainedModel):
            expected = _given(expected, component.config)
        differing |= dict(_differing(found, expected, f"{name}."))
    return differing


def _pipeline_settings(release: Release) -> dict[str, Any]:
    """The settings of the index that distinguish releases, and their defaults."""
    parameters = inspect.signature(getattr(diffusers, release.pipeline_class)).parameters.values()
    switches = {entry.name: entry.default for entry in parameters if isinstance(entry.default, bool)}
    return dict.fromkeys(release.settings) | switches


def _given(settings: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of these names, also within settings that are mappings; some are kept by other names."""
    return {
        name: _given(settings[name], value) if isinstance(value, Mapping) else settings[name]
        for name, value in names.items()
        if name in settings
    }


def _differing(
    found: Mapping[str, Any], expected: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    # As JSON, which knows no tuples.
    found, expected = (json.loads(json.dumps(settings)) for settings in (found, expected))
    for name, value in expected.items():
        other = found.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _differing(other, value, f"{prefix}{name}.")
        # Some boolean settings of SDXL are null in its file: off, as the class's default False.
        elif value != other and not (value in _OFF and other in _OFF):
            yield f"{prefix}{name}", (other, value)


def find_releases(
    releases: Sequence[Release], location: str, folder: PipelineFolder
) -> list[tuple[Release, Differences]]:
    """The releases that a folder may be, and the differences of its files.

    Returns:
        The release of that hub id. Else those with the folder's models and pipeline, and of these the ones
        with the fewest differences: several, where files do not distinguish them; or none.
    """
    if named := [release for release in releases if release.hub_id.lower() == location.lower()]:
        return [(release, differences(release, folder)) for release in named]
    compared = [(release, differences(release, folder)) for release in releases]
    alike = [pair for pair in compared if all(name.startswith(_NOT_TELLING) for name in pair[1])]
    fewest = min((len(differing) for _, differing in alike), default=0)
    return [(release, differing) for release, differing in alike if len(differing) == fewest]


def find_base_model(releases: Sequence[Release], location: str, folder: PipelineFolder) -> BaseModel:
    """What may be published of the model in a folder, as far as its files and its name show it.

    A local folder is taken for a repository where it is a commit of it in the hub's cache, and for a release
    where it has the settings and the name of the release's repository. Where weights come from files of their
    own, only the architecture is known.
    """
    hub_id, revision = _place_on_hub(folder)
    alike = [release for release, _ in find_releases(releases, hub_id or location, folder)]
    names = {name.lower() for name in (hub_id or location, folder.path.resolve().name)}
    named = [one for one in alike if not names.isdisjoint(_names_of(one))]
    candidates = (named if len(named) == 1 else alike) or releases
    is_as_released = not folder.files
    release = named[0] if len(named) == 1 and is_as_released else None
    return BaseModel(
        hub_id=release.hub_id if release else hub_id if is_as_released else None,
        revision=revision if is_as_released else None,
        release=release,
        architecture=_common(one.architecture for one in candidates),
        version=_common(one.version for one in candidates),
    )


def _place_on_hub(folder: PipelineFolder) -> tuple[str | None, str | None]:
    """Repository and commit; None, None of a folder of the user's."""
    if folder.hub is not None:
        return folder.hub.repository, folder.hub.path.name
    cached = _CACHED.search(folder.path.resolve().as_posix())
    return (f"{cached[1]}/{cached[2]}", cached[3]) if cached else (None, None)


def _names_of(release: Release) -> set[str]:
    """Its repository with and without the owner, in small letters."""
    return {release.hub_id.lower(), release.hub_id.lower().partition("/")[2]}


def _common(names: Iterable[str | None]) -> str | None:
    """The one that all have, or None."""
    different = set(names)
    return different.pop() if len(different) == 1 else None


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2), encoding="utf-8")
