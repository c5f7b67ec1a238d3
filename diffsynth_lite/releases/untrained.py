"""This file lists pipelines that no family here trains, with the nearest family and what it lacks."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Untrained:
    """Pipelines of diffusers that no family trains.

    Attributes:
        differs: what they have that the nearest has not.
    """

    models: str
    nearest: str
    differs: str


UNTRAINED: Mapping[str, Untrained] = MappingProxyType(
    {
        "CogVideoXFun": Untrained("CogVideoX-Fun", "cogvideox", "a control clip in the model's input"),
        "CogVideoXImageToVideo": Untrained(
            "CogVideoX from images", "cogvideox", "the first frame in the model's input"
        ),
        "Flux2KleinKV": Untrained("FLUX.2 klein KV", "flux2", "a cache of the images to start from"),
        "FluxControl": Untrained(
            "FLUX.1 Depth and Canny", "flux", "an image of depth or edges in the model's input"
        ),
        "FluxControlNet": Untrained(
            "ControlNets of FLUX.1", "flux", "a second model next to the transformer"
        ),
        "FluxPriorRedux": Untrained("FLUX.1 Redux", "flux", "an image as the prompt"),
        "HunyuanSkyreelsImageToVideo": Untrained(
            "SkyReels V1 from images", "hunyuan_video", "the first frame in the model's input"
        ),
        "HunyuanVideoFramepack": Untrained(
            "FramePack", "hunyuan_video", "another transformer, which is shown the frames before"
        ),
        "LTX2DFR": Untrained("LTX-2's refinement", "ltx2", "a second pass over a clip that is generated"),
        "LTX2HDR": Untrained("LTX-2 for HDR", "ltx2", "a clip to make brighter, next to the noisy one"),
        "LTX2LatentUpsample": Untrained(
            "Upscalers of LTX-2", "ltx2", "a model that enlarges latents and removes no noise"
        ),
        "LTXLatentUpsample": Untrained(
            "Upscalers of LTX-Video", "ltx_video", "a model that enlarges latents and removes no noise"
        ),
        "SanaImageToVideo": Untrained("Sana-Video from images", "sana", "clips, and another transformer"),
        "SanaSprint": Untrained("Sana Sprint", "sana", "a distilled model that takes a guidance scale"),
        "SanaVideo": Untrained("Sana-Video", "sana", "clips, and another transformer"),
        "SkyReelsV2": Untrained("SkyReels-V2", "wan", "a model of its own, made from Wan 2.1"),
        "SkyReelsV2ImageToVideo": Untrained(
            "SkyReels-V2 from images", "wan_i2v", "a model of its own, made from Wan 2.1"
        ),
        "SkyReelsV2DiffusionForcing": Untrained(
            "SkyReels-V2 DF",
            "wan",
            "a model of its own, with a noise level for each frame",
        ),
        "StableDiffusion3ControlNet": Untrained(
            "ControlNets of Stable Diffusion 3", "sd3", "a second model next to the transformer"
        ),
        "StableDiffusionXLImg2Img": Untrained(
            "The SDXL refiner", "sdxl", "one text encoder, and an aesthetic score as an input of the UNet"
        ),
        "StableDiffusionXLInpaint": Untrained(
            "SDXL for inpainting", "sdxl", "a mask and a masked image in the model's input"
        ),
        "ZImageControlNet": Untrained(
            "ControlNets of Z-Image", "z_image", "a second model next to the transformer"
        ),
        "ZImageOmni": Untrained("Z-Image-Omni", "z_image", "images next to the prompt, read by SigLIP"),
    }
)
"""By the beginning of the names of their pipelines' classes; the longest that fits holds."""
