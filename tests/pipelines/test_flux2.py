"""FLUX.2, from text and from pictures, against diffusers' own transformer, autoencoder and pipelines."""

import inspect
import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinKVPipeline, Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from family_sample import (
    CPU,
    PROMPTS,
    assert_equal_under_all_flags,
    picture,
    transformer_calls,
)
from flux2_layouts import (
    LAYOUTS,
    PROMPT,
    draw,
    encoded_prompts,
    klein,
    reference,
    request_of,
    saved,
    small_transformer,
)
from PIL import Image

from diffsynth_lite.core.gradient import blocks_of
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import adapter_settings, adapter_tensors, add_adapter, find_target_layers
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import PipelineFolder, require_family
from diffsynth_lite.pipelines.flux2 import Flux2, model_fn_flux2, tiny
from diffsynth_lite.testing import seeded

WIDE, TALL = picture(110, 70, 20), picture(64, 100, 30)


@pytest.fixture(scope="module", params=LAYOUTS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Flux2:
    family = saved(LAYOUTS[request.param](), tmp_path_factory.mktemp(request.param))
    family.check_folder()
    return family


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Flux2:
    return saved(tiny(), tmp_path_factory.mktemp("dev"))


def tokens_and_positions(latents: torch.Tensor, time: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places in reading order and their (time, row, column, text), written out without diffusers."""
    _, _, height, width = latents.shape
    positions = [[time, row, column, 0] for row in range(height) for column in range(width)]
    return latents.flatten(2).transpose(1, 2), torch.tensor(positions)


@pytest.mark.parametrize("is_guided", [False, True])
@pytest.mark.parametrize("input_sizes", [[], [(3, 5)], [(3, 5), (2, 2)]])
def test_model_fn_equals_the_transformers_own_forward(
    is_guided: bool, input_sizes: list[tuple[int, int]]
) -> None:
    transformer = small_transformer(is_guided=is_guided)
    generator = torch.Generator().manual_seed(0)
    noisy, *inputs = (torch.randn(2, 128, *size, generator=generator) for size in [(4, 2), *input_sizes])
    embeds = torch.randn(2, 7, 48, generator=generator)
    sigma = torch.tensor([0.2, 0.7])
    guidance = torch.tensor([1.0, 3.5]) if is_guided else None

    pictures = zip([noisy, *inputs], (0, 10, 20), strict=False)
    tokens, positions = zip(*(tokens_and_positions(*picture) for picture in pictures), strict=True)
    reference = transformer(
        hidden_states=torch.cat(tokens, dim=1),
        timestep=sigma,
        guidance=guidance,
        encoder_hidden_states=embeds,
        txt_ids=torch.tensor([[0, 0, 0, place] for place in range(7)]),
        img_ids=torch.cat(positions),
        return_dict=False,
    )[0]
    reference = reference[:, : 4 * 2].transpose(1, 2).unflatten(2, (4, 2))
    expected = assert_equal_under_all_flags(
        transformer,
        reference,
        model_fn_flux2,
        noisy,
        sigma,
        embeds,
        guidance,
        input_latents_bchw=inputs,
    )
    # No layer of the last block is unused.
    assert all(gradient is not None for gradient in expected.values())


def test_the_blocks_run_in_the_order_in_which_they_are_declared(dev: Flux2) -> None:
    transformer = dev.load_transformer(torch.float32)
    run: list[torch.nn.Module] = []
    declared = blocks_of(transformer, dev.block_lists)
    for block in transformer.modules():
        if type(block).__name__ in transformer._repeated_blocks:
            block.register_forward_pre_hook(lambda module, _args: run.append(module))
    with torch.no_grad():
        dev.predict(transformer, torch.zeros(1, 128, 2, 4), torch.ones(1), encoded_prompts(dev, PROMPT))
    assert [type(block).__name__ for block in run] == [
        *["Flux2TransformerBlock"] * 2,
        *["Flux2SingleTransformerBlock"] * 2,
    ]
    assert all(block is other for block, other in zip(run, declared, strict=True))


def test_the_default_targets_are_all_linear_layers_of_the_blocks_and_none_beside(dev: Flux2) -> None:
    transformer = dev.empty_transformer()
    found = find_target_layers(transformer, dev.default_target_modules, unused_modules=())
    linear = [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    assert found == [name for name in linear if name.startswith(dev.block_lists)]
    assert "single_transformer_blocks.1.attn.to_out" in found


def test_prompts_are_encoded_as_by_the_pipeline(family: Flux2) -> None:
    texts = [*PROMPTS, "", "circle [IMG] " * 80]
    encoded = encoded_prompts(family, *texts)
    with torch.no_grad():
        embeds, _ = reference(family).encode_prompt(texts, device=CPU)
    assert torch.equal(torch.stack([row["prompt_embeds"] for row in encoded]), embeds)
    assert embeds.shape == (5, 512, 48)
    assert all(not torch.equal(embeds[0], other) for other in embeds[1:])


def test_the_length_of_a_prompt_is_what_the_pipeline_does_not_fill_up(family: Flux2) -> None:
    seen: list[torch.Tensor] = []
    texts = [*PROMPTS, ""]
    pipeline = reference(family)
    pipeline.text_encoder.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with torch.no_grad():
        pipeline.encode_prompt(texts, device=CPU)
    (mask,) = seen
    assert family.prompt_lengths(texts) == mask.sum(1).tolist()
    assert family.prompt_lengths(["circle " * 512])[0] > family.max_prompt_tokens
    # Filled up on the left in dev, on the right in klein.
    assert mask[:, 0].tolist() == [0 if family.pipeline is Flux2Pipeline else 1] * 4


def test_the_tokenizer_alone_reads_prompts_as_the_processor_of_the_released_models() -> None:
    pytest.importorskip("torchvision", reason="PixtralProcessor cannot be imported without torchvision")
    from diffusers.pipelines.flux2.pipeline_flux2 import format_input
    from transformers import PixtralImageProcessorPil, PixtralProcessor

    tokenizer = tiny().tokenizer
    processor = PixtralProcessor(
        image_processor=PixtralImageProcessorPil(), tokenizer=tokenizer, chat_template=tokenizer.chat_template
    )
    call = {"return_tensors": "pt", "padding": "max_length", "truncation": True, "max_length": 512}
    chats = format_input([*PROMPTS, "", "circle " * 200])
    ours, theirs = (
        reader.apply_chat_template(chats, tokenize=True, return_dict=True, **call)
        for reader in (tokenizer, processor)
    )
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(ours[name], theirs[name]), name


def test_the_shift_by_resolution_is_the_one_that_the_pipeline_gives_its_sampler(
    family: Flux2, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = inspect.signature(family.pipeline.__call__).parameters["num_inference_steps"].default
    transformer = family.load_transformer(torch.float32)
    scheduler = family.load_scheduler()
    monkeypatch.setattr(family, "load_scheduler", lambda: scheduler)
    # The noise levels are set before the first of 50 steps.
    monkeypatch.setattr(scheduler, "step", Mock(side_effect=InterruptedError))
    request = request_of(family, num_inference_steps=default, guidance_scale=1.0)
    with pytest.raises(InterruptedError):
        family.sample(transformer, torch.float32, [request])
    shift = family.resolution_shift(family.latents_shape(64, 32, 1))
    sigmas = torch.linspace(1, 1 / default, default)
    torch.testing.assert_close(
        scheduler.sigmas[:-1], shift * sigmas / (1 + (shift - 1) * sigmas), rtol=1e-5, atol=0
    )


def test_the_shift_by_resolution_falls_once_where_the_pipelines_formula_does(dev: Flux2) -> None:
    for width, height in ((256, 256), (1024, 1024), (1344, 768), (2048, 2048)):
        shape = dev.latents_shape(width, height, 1)
        assert dev.num_tokens(shape) == width * height // 16**2
        assert dev.resolution_shift(shape) == math.exp(compute_empirical_mu(width * height // 16**2, 50))
    assert round(dev.resolution_shift((128, 43, 100)), 1) == 7.7
    assert round(dev.resolution_shift((128, 1, 4301)), 1) == 3.3


def test_training_has_one_shift_at_any_size_and_had_the_samplers_before(family: Flux2) -> None:
    for width, height in ((512, 512), (1024, 1024), (2048, 2048)):
        shape = family.latents_shape(width, height, 1)
        assert family.family_shift(shape) == math.exp(0.8)
        assert family.earlier_shift(shape) == family.resolution_shift(shape)


def test_a_preview_of_a_distilled_klein_knows_no_guidance_as_in_the_pipeline(tmp_path: Path) -> None:
    distilled = saved(klein(is_distilled=True), tmp_path)
    transformer, drawn = distilled.load_transformer(torch.float32), []
    request = request_of(distilled, guidance_scale=3.5)
    calls = transformer_calls(
        transformer, lambda: drawn.extend(distilled.sample(transformer, torch.float32, [request]))
    )
    assert len(calls) == 2
    assert drawn[0][0].tobytes() == draw(reference(distilled), guidance_scale=3.5).tobytes()


def test_a_distilled_klein_is_known_by_its_index(dev: Flux2, tmp_path: Path) -> None:
    distilled = saved(klein(is_distilled=True), tmp_path / "distilled").distilled
    assert distilled == "is_distilled in its model_index.json; better train its base, whose LoRA it takes"
    assert dev.distilled is saved(klein(), tmp_path / "base").distilled is None


def test_a_lora_of_klein_is_loaded_by_its_pipeline_with_its_alpha(tmp_path: Path) -> None:
    family = saved(klein(), tmp_path / "klein")
    transformer = family.load_transformer(torch.float32)
    layers = find_target_layers(transformer, family.default_target_modules, unused_modules=())
    add_adapter(transformer, layers, rank=2, alpha=8, dropout=0.0, seed=1)
    for name, parameter in transformer.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    family.save_lora(tmp_path, adapter_tensors(transformer), adapter_settings(transformer))
    pipeline = reference(family)
    batch = torch.ones(1, 128, 2, 4), torch.tensor([0.5]), encoded_prompts(family, PROMPT)
    with torch.no_grad():
        base = family.predict(pipeline.transformer, *batch)
        pipeline.load_lora_weights(tmp_path)
        reloaded, trained = (family.predict(model, *batch) for model in (pipeline.transformer, transformer))
    assert torch.equal(reloaded, trained)
    assert not torch.allclose(base, trained, atol=1e-3)


def test_a_klein_with_a_cache_of_its_inputs_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    Flux2KleinKVPipeline(**klein().components).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"holds a Flux2KleinKVPipeline, but .* Flux2Pipeline"):
        require_family(Flux2, PipelineFolder(path=tmp_path))


def test_dev_and_klein_have_prompt_encodings_of_their_own(dev: Flux2, tmp_path: Path) -> None:
    other = saved(klein(), tmp_path)
    assert other.prompt_encoder_id(torch.float32) != dev.prompt_encoder_id(torch.float32)
    # The autoencoder is the same one.
    assert other.media_encoder_id(torch.float32) == dev.media_encoder_id(torch.float32)


def encoded_inputs(family: Flux2, *inputs: Image.Image) -> dict[str, torch.Tensor]:
    media = Media(frames=(picture(64, 32, 10),), inputs=inputs)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([media])
    return {name: tensor for name, tensor in encoded.items() if name != "latents"}


def encoded(family: Flux2, *inputs: Image.Image) -> dict[str, torch.Tensor]:
    """What the transformer gets of an item with the prompt, beside its latents."""
    return encoded_prompts(family, PROMPT)[0] | encoded_inputs(family, *inputs)


@pytest.mark.parametrize("inputs", [(WIDE,), (WIDE, TALL), (TALL, WIDE, WIDE)])
def test_all_that_the_model_gets_is_what_the_pipeline_gives_it(
    family: Flux2, inputs: tuple[Image.Image, ...]
) -> None:
    pipeline = reference(family)
    (theirs, *_) = transformer_calls(pipeline.transformer, lambda: draw(pipeline, image=list(inputs)))
    transformer = family.load_transformer(torch.float32)
    batch = torch.zeros(2, 128, 2, 4), torch.ones(2), [encoded(family, *inputs)] * 2
    (ours,) = transformer_calls(transformer, lambda: family.predict(transformer, *batch))
    num_noisy = 2 * 4
    num_tokens = num_noisy + sum(6 * 4 for _ in inputs)
    assert ours["hidden_states"].shape == (2, num_tokens, 128)
    for row in ours["hidden_states"]:
        assert torch.equal(row[num_noisy:], theirs["hidden_states"][0, num_noisy:])
    for name in ("txt_ids", "img_ids"):
        assert torch.equal(ours[name], theirs[name]), name
    assert ours["img_ids"][..., 0].unique().tolist() == [10 * place for place in range(1 + len(inputs))]
    assert torch.equal(ours["encoder_hidden_states"][:1], theirs["encoder_hidden_states"])


def test_the_velocity_is_that_of_the_noisy_picture_and_follows_the_others(family: Flux2) -> None:
    transformer = family.load_transformer(torch.float32)
    batch = torch.zeros(1, 128, 2, 4), torch.ones(1)
    with torch.no_grad():
        velocities = [
            family.predict(transformer, *batch, [encoded(family, *inputs)])
            for inputs in ((), (WIDE,), (WIDE.rotate(180),), (WIDE, TALL), (TALL, WIDE))
        ]
    for place, velocity in enumerate(velocities):
        assert velocity.shape == (1, 128, 2, 4)
        assert not any(torch.allclose(velocity, other, atol=1e-5) for other in velocities[:place])


@pytest.mark.parametrize("inputs", [(WIDE,), (WIDE, TALL)])
def test_a_preview_is_what_the_pipeline_draws_from_the_text_and_the_pictures(
    family: Flux2, inputs: tuple[Image.Image, ...]
) -> None:
    transformer = family.load_transformer(torch.float32)
    request = request_of(family, inputs=inputs, guidance_scale=1.0)
    ((drawn,),) = family.sample(transformer, torch.float32, [request])
    expected = draw(reference(family), image=list(inputs), guidance_scale=1.0)
    assert drawn.tobytes() == expected.tobytes()


def test_a_bf16_autoencoder_reads_the_pictures_of_a_preview_of_a_fp32_model(dev: Flux2) -> None:
    request = request_of(dev, inputs=(WIDE,))
    ((drawn,),) = dev.sample(dev.load_transformer(torch.float32), torch.bfloat16, [request])
    assert drawn.size == (64, 32)


def test_the_size_of_an_input_is_known_before_it_is_encoded(family: Flux2) -> None:
    assert family.max_inputs is None
    assert not family.needs_inputs
    for given in (WIDE, TALL, picture(64, 64, 20), picture(512, 64, 20)):
        width, height = family.input_size(*given.size)
        assert encoded_inputs(family, given)["input_latents_0"].shape == family.latents_shape(
            width, height, 1
        )
    # Cut to whole tokens, never enlarged; brought to a megapixel where they are above one.
    assert family.input_size(*WIDE.size) == (96, 64)
    assert family.input_size(1024, 1024) == (1024, 1024)
    assert family.input_size(4000, 3000) == (1168, 880)


def test_an_input_above_a_megapixel_is_encoded_as_by_the_pipeline(tmp_path: Path) -> None:
    with seeded(0):  # without attention, which would take long at this size
        vae = AutoencoderKLFlux2(
            block_out_channels=(2, 2, 2, 2),
            norm_num_groups=1,
            layers_per_block=1,
            mid_block_add_attention=False,
        )
    family = saved(Flux2Pipeline(**tiny().components | {"vae": vae.eval()}), tmp_path)
    given = picture(1300, 900, 20)
    pipeline = reference(family)
    pixels: list[torch.Tensor] = []
    pipeline.prepare_image_latents = lambda images, **_settings: pixels.extend(images) or (None, None)
    draw(pipeline, image=given)
    with torch.no_grad():
        expected = pipeline._encode_vae_image(pixels[0], generator=None)[0]
    (latents,) = encoded_inputs(family, given).values()
    assert torch.equal(latents, expected)
    assert latents.shape == family.latents_shape(*family.input_size(1300, 900), 1) == (128, 53, 76)


@pytest.mark.parametrize("size", [(63, 200), (200, 63), (700, 70), (513, 64), (64, 513)])
def test_an_input_that_the_pipeline_refuses_is_refused(dev: Flux2, size: tuple[int, int]) -> None:
    processor = reference(dev).image_processor
    with pytest.raises(ValueError, match=r"too small|too extreme"):
        processor.check_image_input(Image.new("RGB", size))
    message = f"{size[0]}x{size[1]} pixels: .* at least 64 on each side, and at most 8 times"
    with pytest.raises(UserError, match=message):
        dev.input_size(*size)


@pytest.mark.parametrize("size", [(64, 512), (512, 64), (64, 64), (71, 568)])
def test_an_input_that_the_pipeline_takes_is_taken(dev: Flux2, size: tuple[int, int]) -> None:
    reference(dev).image_processor.check_image_input(Image.new("RGB", size))
    assert min(dev.input_size(*size)) >= 64
