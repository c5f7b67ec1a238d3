"""Qwen-Image-Layered against diffusers' own transformer, autoencoder and pipeline."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageLayeredPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_layered as layered
from family_sample import CPU, assert_equal_under_all_flags, layers_of, picture, transformer_calls
from PIL import Image

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.base.vae_tiles import tiles_of
from diffsynth_lite.pipelines.qwen_image_layered import QwenImageLayered, model_fn_qwen_image_layered, tiny
from diffsynth_lite.testing.autoencoders import tiny_qwen_vae

SIGMA = torch.tensor([0.2, 0.7])
MEDIA = Media(frames=(picture(64, 32, 10),), layers=layers_of(64, 32, 20))
REQUEST = {"width": 64, "height": 32, "num_inference_steps": 2, "guidance_scale": 1.0, "seed": 0}


@pytest.fixture(scope="module")
def pipeline() -> QwenImageLayeredPipeline:
    pipeline = tiny()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def family(pipeline: QwenImageLayeredPipeline, tmp_path_factory: pytest.TempPathFactory) -> QwenImageLayered:
    folder = tmp_path_factory.mktemp("qwen_image_layered")
    pipeline.save_pretrained(folder)
    return QwenImageLayered(PipelineFolder(path=folder))


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("is_rgb", [0, 1])
def test_model_fn_equals_the_transformers_own_forward(
    pipeline: QwenImageLayeredPipeline, num_layers: int, is_rgb: int
) -> None:
    """With every optional input: a mask, what is told beside the noise level, another size of the picture."""
    transformer, pack = pipeline.transformer, pipeline._pack_latents
    generator = torch.Generator().manual_seed(0)
    noisy = torch.randn(2, 16, num_layers + 1, 4, 8, generator=generator)
    given = torch.randn(2, 16, 1, 6, 6, generator=generator)
    embeds = torch.randn(2, 7, 16, generator=generator)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    told = torch.tensor([is_rgb, 0])
    in_order = (one.permute(0, 2, 1, 3, 4) for one in (noisy, given))
    sizes = ((4, 8, num_layers + 1), (6, 6, 1))
    tokens = [pack(one.contiguous(), 2, 16, *size) for one, size in zip(in_order, sizes, strict=True)]
    output = transformer(
        hidden_states=torch.cat(tokens, dim=1),
        timestep=SIGMA,
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=mask,
        img_shapes=[[*[(1, 2, 4)] * (num_layers + 1), (1, 3, 3)]] * 2,
        additional_t_cond=told,
        return_dict=False,
    )[0]
    reference = pipeline._unpack_latents(
        output[:, : 8 * (num_layers + 1)], 4 * 8, 8 * 8, num_layers, pipeline.vae_scale_factor
    )
    assert_equal_under_all_flags(
        transformer,
        reference,
        model_fn_qwen_image_layered,
        noisy,
        SIGMA,
        embeds,
        mask,
        input_latents_bcfhw=[given],
        additional_t_cond=told,
    )


def test_each_picture_is_encoded_as_the_pipeline_encodes_its_own(
    family: QwenImageLayered, pipeline: QwenImageLayeredPipeline
) -> None:
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([MEDIA])
    pictures = (MEDIA.frames[0].convert("RGBA"), *MEDIA.layers)
    with torch.no_grad():
        expected = [
            pipeline._encode_vae_image(
                pipeline.image_processor.preprocess(one, 32, 64).unsqueeze(2), generator=None
            )
            for one in pictures
        ]
    torch.testing.assert_close(encoded["latents"][None], torch.cat(expected, dim=2), rtol=1e-5, atol=1e-6)
    assert torch.equal(encoded["picture_latents"], encoded["latents"][:, :1])
    assert family.latents_shape(64, 32, 3) == encoded["latents"].shape
    assert family.num_condition_values(encoded["latents"].shape) == encoded["picture_latents"].numel()
    # Transparency is seen, and so is which layer is on top.
    behind, above = MEDIA.layers
    for layers in ((behind, above.convert("RGB").convert("RGBA")), (above, behind)):
        (other,) = family.load_media_encoder(torch.float32, CPU)([Media(frames=MEDIA.frames, layers=layers)])
        assert not torch.equal(other["latents"], encoded["latents"])


def drawn(
    family: QwenImageLayered, transformer: torch.nn.Module, num_layers: int, **changes: Any
) -> list[Image.Image]:
    conditioning = {"prompt_embeds": torch.ones(5, 16)}
    request = {"conditioning": conditioning, "negative": conditioning, "inputs": (picture(96, 96, 10),)}
    settings = request | REQUEST | {"num_layers": num_layers} | changes
    [layers] = family.sample(transformer, torch.float32, [PreviewRequest(**settings)])
    return layers


def test_a_preview_has_a_transparent_picture_for_each_layer_in_any_size(family: QwenImageLayered) -> None:
    transformer, own = family.load_transformer(torch.float32), layered.calculate_dimensions
    for num_layers, size in ((1, (64, 32)), (3, (48, 48))):
        layers = drawn(family, transformer, num_layers, width=size[0], height=size[1])
        assert [(layer.mode, layer.size) for layer in layers] == [("RGBA", size)] * num_layers
        assert len({layer.getchannel("A").tobytes() for layer in layers}) == num_layers
    with pytest.raises(UserError, match=r"validation\.inputs: 0 pictures for a prompt"):
        drawn(family, transformer, 1, inputs=())
    # What pictures are brought to is the pipeline's own matter again.
    assert layered.calculate_dimensions is own


def test_the_shift_of_the_sampler_is_the_pipelines_and_that_of_training_is_qwen_images(
    family: QwenImageLayered, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    retrieve = layered.retrieve_timesteps
    monkeypatch.setattr(
        layered,
        "retrieve_timesteps",
        lambda *given, mu, **others: told.append(mu) or retrieve(*given, mu=mu, **others),
    )
    transformer = family.load_transformer(torch.float32)
    (call, *_) = transformer_calls(transformer, lambda: drawn(family, transformer, 3))
    shape = family.latents_shape(64, 32, 4)
    assert family.num_tokens(shape) == call["hidden_states"].shape[1]
    assert family.resolution_shift(shape) == pytest.approx(math.exp(told[0]))
    # By the area alone, whatever the number of layers.
    sizes = {edge: [family.latents_shape(edge, edge, count) for count in (2, 5)] for edge in (640, 1024)}
    assert [round(family.resolution_shift(shape), 1) for shape in sizes[640]] == [12.2, 12.2]
    assert [round(family.resolution_shift(shape), 1) for shape in sizes[1024]] == [54.6, 54.6]
    assert [round(family.family_shift(shape), 2) for shape in sizes[640]] == [1.76, 1.76]
    family.scheduler_config["time_shift_type"] = "linear"
    assert family.resolution_shift(sizes[1024][0]) == 4


def test_an_autoencoder_without_transparency_is_refused(
    pipeline: QwenImageLayeredPipeline, tmp_path: Path
) -> None:
    opaque = QwenImageLayeredPipeline(**pipeline.components | {"vae": tiny_qwen_vae()})
    opaque.save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"vae.*takes pictures of 3 channels, and that of Qwen-Image-Layered takes 4"
    ):
        QwenImageLayered(PipelineFolder(path=tmp_path)).check_folder()


def test_layers_are_encoded_in_tiles_like_other_pictures() -> None:
    vae = tiny_qwen_vae(input_channels=4)
    tiles = tiles_of(type(vae), vae.config)
    assert tiles is not None
    width = tiles.largest_whole + 64
    assert tiles.split(width, 32)
    tiles.apply_to(vae)
    seen: list[torch.Size] = []
    vae.encoder.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].shape))
    with torch.no_grad():
        assert vae.encode(torch.zeros(1, 4, 1, 32, width)).latent_dist.mode().shape[-1] == width // 8
    assert len(seen) > 1
    assert {shape[1] for shape in seen} == {4}
