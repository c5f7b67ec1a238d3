"""This file makes of a control what LTX-2 follows in context (IC-LoRA): a clip next to the noisy one.

Layouts: c latent channels, f latent frames, h and w latent height and width.
Sources: diffusers ``pipeline_ltx2_ic_lora.py``; ``training_strategies/flexible.py`` of the ``ltx-trainer`` of
Lightricks' LTX-2; ``iclora.py`` of ComfyUI-LTXVideo.
"""

from collections.abc import Sequence
from typing import Any

from diffusers.pipelines.ltx2 import LTX2ReferenceCondition, LTX2VideoCondition

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import EncodedMedia, PreviewRequest
from diffsynth_lite.pipelines.base.first_frame import preview_start, start_code
from diffsynth_lite.pipelines.base.preview_request import LANCZOS, Code

CONTROL = "control_latents"
"""Name of the latents of an item's control."""
METADATA = "reference_downscale_factor"
"""What Lightricks' trainer calls the ratio of sizes in a LoRA file, where its pipelines and nodes read it."""


def control_shape(latents_shape: Sequence[int], downscale: int) -> tuple[int, ...]:
    """Shape of a control's latents, by that of the latents of its item, (C, F, H, W)."""
    *others, height, width = latents_shape
    return (*others, height // downscale, width // downscale)


def encode_control(family: DiffusersFamily, pipeline: Any, item: Media) -> EncodedMedia:
    """Latents of an item's control, (C, F, h, w), resized as by the pipeline; of a run with controls only."""
    if not family.with_controls:
        return {}
    if not item.control:
        raise UserError(
            "data: an item has no control, and others have one: this model attends to one in all items of a "
            "run or in none; name the controls of all sources (control_dir, control_column)"
        )
    width, height = (side // family.control_downscale for side in item.frames[0].size)
    pixels_bcfhw = pipeline.video_processor.preprocess_video(
        list(item.control), height, width, resize_mode="crop"
    )
    (latents_cfhw,) = family.encode_pixels(pipeline.vae, pixels_bcfhw)
    return {CONTROL: latents_cfhw}


def control_arguments(request: PreviewRequest, downscale: int, crf: int) -> dict[str, Any]:
    """The control of a preview, and the image that it starts from, as arguments of the pipeline.

    Args:
        crf: how strongly H.264 compresses that image.
    """
    start = [LTX2VideoCondition(frames=image, crf=crf) for image in preview_start(request).values()]
    return {
        "reference_conditions": LTX2ReferenceCondition(frames=list(request.control)),
        "reference_downscale_factor": downscale,
        **({"conditions": start} if start else {}),
    }


def control_code(request: PreviewRequest, downscale: int) -> dict[str, Any]:
    """What :func:`control_arguments` gives, as code that reads it from files."""
    is_image = request.num_frames == 1
    read = '[load_image("control.png")]' if is_image else 'load_video("control.mp4")'
    frames = f"[{request.fitted('frame', LANCZOS)} for frame in {read}[:{request.num_frames}]]"
    start = [Code(f"LTX2VideoCondition({image})") for image in start_code(request).values()]
    return {
        "reference_conditions": Code(f"LTX2ReferenceCondition({frames})"),
        "reference_downscale_factor": downscale,
        **({"conditions": start} if start else {}),
    }
