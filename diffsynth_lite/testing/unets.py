"""Small random UNets of the real classes."""

from diffusers import UNet2DConditionModel

from diffsynth_lite.testing.seeding import seeded


def tiny_sdxl_unet(*, text_dim: int, pooled_dim: int, seed: int = 0) -> UNet2DConditionModel:
    """A random UNet of SDXL with two levels, of which the second has transformer blocks, as has the middle.

    Args:
        text_dim: width of the prompt embeddings.
        pooled_dim: of the pooled ones.
        seed: of the weights; the global random state is left as it was.
    """
    time_dim = 8
    with seeded(seed):
        return UNet2DConditionModel(
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            transformer_layers_per_block=(1, 2),
            attention_head_dim=(1, 2),
            cross_attention_dim=text_dim,
            use_linear_projection=True,
            norm_num_groups=4,
            addition_embed_type="text_time",
            addition_time_embed_dim=time_dim,
            projection_class_embeddings_input_dim=6 * time_dim + pooled_dim,
        ).eval()
