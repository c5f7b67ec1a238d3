"""Tiny pipelines in the layouts of the releases of HunyuanVideo 1.5."""

from diffusers import HunyuanVideo15ImageToVideoPipeline
from transformers import SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

from diffsynth_lite.pipelines import hunyuan_video_15
from diffsynth_lite.testing import seeded

_PICTURE_SIZE = 32


def from_pictures() -> HunyuanVideo15ImageToVideoPipeline:
    """Image to video: a SigLIP that makes 4 tokens of a picture; its pipeline draws 64 x 32, among others."""
    parts = hunyuan_video_15.tiny().components
    layout = parts["transformer"].config
    widths = ("in_channels", "out_channels", "text_embed_dim", "text_embed_2_dim")
    parts["transformer"] = hunyuan_video_15.tiny_transformer(
        # Pictures of the area of 45 x 45 pixels: the size of the tests of all families is one of them.
        target_size=45,
        **{name: layout[name] for name in widths},
    )
    config = SiglipVisionConfig(
        hidden_size=layout.image_embed_dim,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_PICTURE_SIZE,
        patch_size=_PICTURE_SIZE // 2,
    )
    with seeded(0):
        image_encoder = SiglipVisionModel(config).eval()
    return HunyuanVideo15ImageToVideoPipeline(
        **parts,
        image_encoder=image_encoder,
        feature_extractor=SiglipImageProcessorPil(size={"height": _PICTURE_SIZE, "width": _PICTURE_SIZE}),
    )
