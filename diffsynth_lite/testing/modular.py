"""Small modular pipelines that tests save and change as they do any other pipeline of diffusers."""

from pathlib import Path
from typing import Any

from diffusers import ModularPipeline


def handled_as_others(pipeline_class: type[ModularPipeline]) -> Any:
    """A modular pipeline's class, of the same name, that is saved and given components as others are.

    The ``save_pretrained`` of diffusers 0.42.1 takes a text only, and warns unless the index is set to name
    the folder, which is the default from 0.43 on.
    """

    def save_pretrained(self: Any, save_directory: str | Path, **settings: Any) -> None:
        pipeline_class.save_pretrained(self, str(save_directory), overwrite_modular_index=True, **settings)

    methods = {"save_pretrained": save_pretrained, "register_modules": pipeline_class.update_components}
    return type(pipeline_class.__name__, (pipeline_class,), methods)
