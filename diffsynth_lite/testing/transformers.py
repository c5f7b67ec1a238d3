"""Small random transformers of the real classes, for families whose releases differ in the layout."""

from diffusers import WanTransformer3DModel

from diffsynth_lite.testing.seeding import seeded


def tiny_wan_transformer(text_dim: int, *, seed: int = 0, **layout: int) -> WanTransformer3DModel:
    """A random Wan transformer in eval mode: two blocks of 24 channels.

    Args:
        text_dim: channels of the text encoder.
        seed: of the weights; the global random state is left as it was.
        **layout: what a release has of its own, such as ``in_channels`` or ``image_dim``.
    """
    with seeded(seed):
        return WanTransformer3DModel(
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=12,
            ffn_dim=32,
            text_dim=text_dim,
            rope_max_seq_len=32,
            **layout,
        ).eval()
