"""Pipelines as diffusers reads them from a folder, and what they generate."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, ModularPipeline
from diffusers.modular_pipelines.anima.before_denoise import AnimaTextConditioningStep
from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep
from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3TextEncoderStep
from PIL import Image

from diffsynth_lite.pipelines import PreviewRequest
from diffsynth_lite.pipelines.anima import without_torchvision


def bytes_of(frames: Sequence[Image.Image]) -> list[bytes]:
    """A digest of each: pytest takes minutes to show in what frames differ."""
    return [hashlib.sha256(frame.tobytes()).digest() for frame in frames]


def generated_by(pipeline: Any, request: PreviewRequest, **own: Any) -> list[bytes]:
    """The frames or the image that diffusers' pipeline generates of a request and of what else it takes."""
    output = pipeline(
        guidance_scale=request.guidance_scale, output_type="pil", **request.call_arguments(), **own
    )
    return bytes_of(output_frames(output))


def output_frames(output: Any) -> Sequence[Image.Image]:
    """The frames or images in what a pipeline returns, whose name differs."""
    if hasattr(output, "frames"):
        return output.frames[0]  # type: ignore[no-any-return]
    return output.images if hasattr(output, "images") else output.image  # type: ignore[no-any-return]


READING_STEPS = {
    "AnimaModularPipeline": AnimaTextEncoderStep,
    "Flux3ModularPipeline": Flux3TextEncoderStep,
    "MiniMaxH3ModularPipeline": MiniMaxH3TextEncoderStep,
}
"""By a modular pipeline, the block that reads prompts."""
_READ = {name: step.__call__ for name, step in READING_STEPS.items()}


def read_pipeline(folder: Path) -> Any:
    """What diffusers itself reads from a folder."""
    if not (folder / "modular_model_index.json").exists():
        return DiffusionPipeline.from_pretrained(folder)
    pipeline = ModularPipeline.from_pretrained(str(folder))
    pipeline.load_components()
    return called_as_others(pipeline)


def called_as_others(pipeline: Any) -> Any:
    """The pipeline, whose call takes by name what it takes of a state, and the scale of its guider.

    Its ``encode_prompt`` is what its blocks do with a prompt before they remove noise; the call uses the one
    that it is given in its place.
    """
    if not isinstance(pipeline, ModularPipeline):
        return pipeline

    name = type(pipeline).__name__
    reader = READING_STEPS[name]
    pipeline._blocks.sub_blocks.pop("prompt_upsampler", None)  # prompts as they are given

    class Called(type(pipeline)):  # type: ignore[misc]
        def encode_prompt(self, step: Any, state: Any) -> Any:
            read = _READ[name](step, self, state)
            return AnimaTextConditioningStep()(self, state) if reader is AnimaTextEncoderStep else read

        def __call__(
            self,
            prompt: str,
            negative_prompt: str | None = None,
            guidance_scale: float = 4.0,
            *,
            width: int,
            height: int,
            num_inference_steps: int,
            generator: torch.Generator,
            output_type: str = "pil",
            image: Any = None,
        ) -> Any:
            self.guider = self.guider.new(guidance_scale=guidance_scale, enabled=guidance_scale > 1)
            given = {"width": width, "height": height, "generator": generator, "output_type": output_type}
            given |= {"negative_prompt": negative_prompt, "num_inference_steps": num_inference_steps}
            given |= {} if image is None else {"image": image}
            with pytest.MonkeyPatch.context() as patch, without_torchvision():
                if "encode_prompt" in vars(self):
                    call = lambda step, _, state: self.encode_prompt(step, state)  # noqa: E731
                    patch.setattr(reader, "__call__", call)
                return super().__call__(prompt=prompt, **given)

    class CalledForClips(Called):
        min_duration = 0.0  # in place of 5 seconds

        def __call__(  # type: ignore[override]
            self,
            prompt: str,
            *,
            width: int,
            height: int,
            num_inference_steps: int,
            generator: torch.Generator,
            num_frames: int = 22,
            output_type: str = "pil",
        ) -> Any:
            given = {"width": width, "height": height, "generator": generator, "output_type": output_type}
            with pytest.MonkeyPatch.context() as patch:
                if "encode_prompt" in vars(self):
                    call = lambda step, _, state: self.encode_prompt(step, state)  # noqa: E731
                    patch.setattr(reader, "__call__", call)
                state = super(Called, self).__call__(
                    prompt=prompt, num_frames=num_frames, num_inference_steps=num_inference_steps, **given
                )
            return SimpleNamespace(frames=state.get("videos"), audio=state.get("audio"))

    pipeline.__class__ = Called if reader is not MiniMaxH3TextEncoderStep else CalledForClips
    type(pipeline).__name__ = name
    return pipeline
