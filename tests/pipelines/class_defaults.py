"""Numbers of releases that are defaults of classes or given in their documentation: read by import."""

import ast
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
from diffusers.modular_pipelines.flux3.before_denoise import Flux3PrepareLatentsStep, Flux3SetTimestepsStep
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import resolve_canvas_size
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import VAE_IMAGE_SIZE

from diffsynth_lite.pipelines.base.diffusers_components import assemble

Row = tuple[str | tuple[str, ...], Mapping[str, Any]]
"""Places, as patterns of ``name of a release / folder of a component``, and what is stated there.

Settings of settings are joined by a dot. ``settings`` are those of ``model_index.json``, ``size`` is that of
what the model makes.
"""


def size(width: int, height: int, frames: int = 1) -> dict[str, int]:
    return {"width": width, "height": height, "frames": frames}


def _own_size(pipeline: str) -> dict[str, int]:
    """Of a pipeline with a default number of latents for a side."""
    built = assemble(getattr(diffusers, pipeline))
    side = built.default_sample_size * built.vae_scale_factor
    return size(side, side)


def _called(pipeline: str) -> dict[str, int]:
    """Defaults of a pipeline's call."""
    defaults = inspect.signature(getattr(diffusers, pipeline).__call__).parameters
    frames = [defaults[name].default for name in ("num_frames",) if name in defaults]
    return size(defaults["width"].default, defaults["height"].default, *frames)


def _fallbacks(pipeline: str) -> dict[str, int]:
    """Width and height that a pipeline's call takes where it is given none."""
    found = re.findall(r"(width|height) = \1 or (\d+)", inspect.getsource(getattr(diffusers, pipeline)))
    return size(**{name: int(side) for name, side in found})


def _default(owner: Any, name: str) -> Any:
    return inspect.signature(owner).parameters[name].default


def _documented(pipeline: str) -> dict[str, Any]:
    """Settings of its scheduler that a pipeline's documentation gives, as ``name=value``."""
    found = re.findall(r"`(\w+)=([\d.]+|True|False)`", inspect.getdoc(getattr(diffusers, pipeline)) or "")
    known = inspect.signature(diffusers.FlowMatchEulerDiscreteScheduler).parameters
    return {name: ast.literal_eval(value) for name, value in found if name in known}


_COG = diffusers.CogVideoXTransformer3DModel
_LATENT = 8
"""Pixels to a place of the latents."""
_WAN = _called("WanPipeline")
_KREA2 = assemble(diffusers.Krea2Pipeline).config
_FLUX3 = Flux3SetTimestepsStep()
_H3 = MiniMaxH3PrepareLayoutStep()
_LAYERED = diffusers.QwenImageLayeredPipeline.__call__

IMPORTED: Sequence[Row] = (
    ("Krea 2* / scheduler", _documented("Krea2Pipeline")),
    ("Krea 2* / settings", {name: _KREA2[name] for name in ("patch_size", "text_encoder_select_layers")}),
    ("Krea 2 Raw / settings", {"is_distilled": _KREA2["is_distilled"]}),
    ("Anima* / size", _own_size("AnimaModularPipeline")),
    ("AuraFlow v0.3 / size", _called("AuraFlowPipeline")),
    ("Chroma1* / size", _own_size("ChromaPipeline")),
    ("FLUX.1 * / size", _own_size("FluxPipeline")),
    ("FLUX.2 dev / size", _own_size("Flux2Pipeline")),
    ("FLUX.2 klein* / size", _own_size("Flux2KleinPipeline")),
    (
        "FLUX.3 * / size",
        size(
            _default(Flux3PrepareLatentsStep, "default_width"),
            _default(Flux3PrepareLatentsStep, "default_height"),
        ),
    ),
    (
        "FLUX.3 Image Klein / transformer",
        {
            "flow_map": "`flow_map=True`, the step-distilled"
            in (diffusers.Flux3Transformer2DModel.__doc__ or "")
        },
    ),
    ("FLUX.3 * / scheduler", {"shift": _FLUX3.shift}),
    (
        "MiniMax-H3 / size",
        size(
            *reversed(resolve_canvas_size(16, 9, 32, 768, _H3.expected_configs[1].default)),
            next(one.default for one in _H3.inputs if one.name == "num_frames"),
        ),
    ),
    ("MiniMax-H3 / scheduler", {"shift": _default(diffusers.MiniMaxH3Scheduler, "shift")}),
    ("ERNIE-Image* / size", _called("ErnieImagePipeline")),
    ("HiDream-I1* / size", _own_size("HiDreamImagePipeline")),
    ("HunyuanVideo / size", _called("HunyuanVideoPipeline")),
    ("HunyuanVideo I2V* / size", _called("HunyuanVideoImageToVideoPipeline")),
    (
        "HunyuanVideo 1.5* / size",
        {"frames": _default(diffusers.HunyuanVideo15Pipeline.__call__, "num_frames")},
    ),
    ("Ideogram 4* / size", _called("Ideogram4Pipeline")),
    ("Kandinsky 5.0 T2I * / size", _called("Kandinsky5T2IPipeline")),
    ("Kandinsky 5.0 ?2V * / size", _called("Kandinsky5T2VPipeline")),
    ("Krea 2* / size", _called("Krea2Pipeline")),
    (
        "LTX-2* / size",
        _called("LTX2Pipeline") | {"frames": _default(diffusers.LTX2Pipeline.prepare_latents, "num_frames")},
    ),
    ("LTX-Video* / size", _called("LTXPipeline")),
    ("LongCat-Image* / size", _own_size("LongCatImagePipeline")),
    (("Lumina-Image 2.0 / size", "NetaYume Lumina* / size"), _own_size("Lumina2Pipeline")),
    ("Sana* / size", _called("SanaPipeline")),
    ("Z-Image* / size", _fallbacks("ZImagePipeline")),
    (
        "Wan 2.2 Animate * / size",
        _called("WanAnimatePipeline")
        | {"frames": _default(diffusers.WanAnimatePipeline.__call__, "segment_frame_length")},
    ),
    (("Wan 2.1 T2V* / size", "Wan 2.1 I2V * 480P / size", "Wan 2.1 VACE 1.3B / size"), _WAN),
    (
        ("Wan 2.1 * 720P / size", "Wan 2.1 VACE 14B / size", "Wan 2.2 * A14B / size"),
        {"frames": _WAN["frames"]},
    ),
    (
        ("CogVideoX 2B / size", "CogVideoX 5B / size"),
        size(
            _default(_COG, "sample_width") * _LATENT,
            _default(_COG, "sample_height") * _LATENT,
            _default(_COG, "sample_frames"),
        ),
    ),
    (
        "Stable Diffusion 3* / size",
        size(*[_default(diffusers.SD3Transformer2DModel, "sample_size") * _LATENT] * 2),
    ),
    ("Qwen-Image-Edit* / size", size(*[math.isqrt(VAE_IMAGE_SIZE)] * 2)),
    (
        "Qwen-Image-Layered / size",
        size(*[_default(_LAYERED, "resolution")] * 2, 1 + _default(_LAYERED, "layers")),
    ),
)
