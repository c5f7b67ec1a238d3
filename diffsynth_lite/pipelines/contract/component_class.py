"""This file checks that a component's folder holds what a family loads it as."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.contract.folder import PipelineFolder


def require_class(folder: PipelineFolder, component: str, wanted: Any) -> None:
    """Check the class that a component's ``config.json`` names; one that names none passes.

    Of a model of transformers it is the ``model_type``: ``architectures`` may name another head of the same
    model, whose weights do as well.

    Args:
        folder: of the pipeline.
        component: name of its folder.
        wanted: the class, of diffusers or transformers.

    Raises:
        UserError: the component is of another class.
    """
    config = folder.component_config(component)
    if issubclass(wanted, PreTrainedModel):
        key, name = "model_type", wanted.config_class.model_type
        # That of a CLIP with both halves holds the settings of each.
        found = list(_model_types(config))
    else:
        key, name = "_class_name", wanted.__name__
        found = [config[key]] if key in config else []
    if found and name not in found:
        raise UserError(
            f"model.path: {folder.path / component / 'config.json'} is that of a {found[0]}, but this family "
            f"loads {component} as a {wanted.__name__} ({key}: {name}); get the folder again, or check "
            "model.path and model.family"
        )


def _model_types(config: Mapping[str, Any]) -> Iterator[Any]:
    if "model_type" in config:
        yield config["model_type"]
    for part in config.values():
        if isinstance(part, dict):
            yield from _model_types(part)
