"""This file puts a pipeline of diffusers together from some of its parts, for encoders and for previews."""

import inspect
from typing import Any


def assemble(pipeline_class: Any, **parts: Any) -> Any:
    """A pipeline with these components and settings, and None for what else it asks for.

    What it does with the parts that it has, such as ``encode_prompt`` with a text encoder, works.
    """
    parameters = inspect.signature(pipeline_class).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    return pipeline_class(**dict.fromkeys(required) | parts)
