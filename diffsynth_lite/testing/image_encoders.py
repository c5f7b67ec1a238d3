"""Small random encoders of pictures of the real classes, and the processors in front of them."""

from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from diffsynth_lite.testing.seeding import seeded

_SIZE = 32


def tiny_clip_vision(*, hidden_size: int = 16, seed: int = 0) -> CLIPVisionModel:
    """A random CLIP picture encoder in eval mode with two layers: of the Wan 2.1 image-to-video pipelines.

    It makes 5 tokens of a picture of 32 x 32 pixels; the released one makes 257 of 224 x 224.

    Args:
        hidden_size: width of the embeddings; a multiple of 2, the number of heads.
        seed: of the weights; the global random state is left as it was.
    """
    config = CLIPVisionConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        projection_dim=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_SIZE,
        patch_size=_SIZE // 2,
    )
    with seeded(seed):
        return CLIPVisionModel(config).eval()


def tiny_clip_processor() -> CLIPImageProcessorPil:
    """What brings a picture to the size of :func:`tiny_clip_vision`: shorter side to 32, then cut."""
    size = {"height": _SIZE, "width": _SIZE}
    return CLIPImageProcessorPil(size={"shortest_edge": _SIZE}, crop_size=size)
