"""Z-Image against diffusers' own transformer, autoencoder and pipeline."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline
from diffusers.pipelines.z_image.pipeline_z_image import calculate_shift, get_default_z_image_sigmas
from family_sample import CPU, PROMPTS, assert_equal_under_all_flags
from transformers import DynamicCache, Qwen3ForCausalLM

from diffsynth_lite.core.gradient import blocks_of
from diffsynth_lite.core.noise import shift_sigma
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder, require_family
from diffsynth_lite.pipelines.z_image import ZImage, model_fn_z_image, tiny

FLAGS = [(False, False), (True, False), (False, True), (True, True)]
# The transformer fills prompts up to multiples of 32: three lengths, two of which it makes one.
NUM_TOKENS = (5, 40, 64)
DYNAMIC = {"use_dynamic_shifting": True, "base_shift": 0.4, "max_shift": 0.9, "max_image_seq_len": 8192}


def saved(pipeline: ZImagePipeline, folder: Path) -> ZImage:
    pipeline.save_pretrained(folder)
    return ZImage(PipelineFolder(path=folder))


@pytest.fixture(scope="module")
def pipeline() -> ZImagePipeline:
    return tiny()


@pytest.fixture(scope="module")
def family(pipeline: ZImagePipeline, tmp_path_factory: pytest.TempPathFactory) -> ZImage:
    return saved(pipeline, tmp_path_factory.mktemp("z_image"))


def encoded_prompts(family: ZImage, *texts: str) -> list[dict[str, torch.Tensor]]:
    return family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])


def batch_of_three() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Latents, timesteps, and prompts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(3, 16, 8, 4, generator=generator)
    prompts = [torch.randn(length, 16, generator=generator) for length in NUM_TOKENS]
    return latents, torch.tensor([0.2, 0.7, 0.5]), prompts


def gradients(transformer: torch.nn.Module, predicted: torch.Tensor) -> dict[str, torch.Tensor | None]:
    transformer.zero_grad()
    predicted.square().sum().backward()
    return {name: parameter.grad for name, parameter in transformer.named_parameters()}


def test_model_fn_equals_the_transformers_own_forward() -> None:
    """Its other optional inputs are those of Omni, of a ControlNet and of a LoRA's scale."""
    transformer = tiny().transformer
    latents, timestep, prompts = batch_of_three()
    reference = torch.cat(
        transformer([picture[:, None] for picture in latents], timestep, prompts, return_dict=False)[0], dim=1
    )
    expected = assert_equal_under_all_flags(
        transformer,
        reference.transpose(0, 1),
        model_fn_z_image,
        latents,
        timestep,
        prompts,
    )
    # No layer of the last block is unused.
    assert all(gradient is not None for gradient in expected.values())


@pytest.mark.parametrize("flags", [(False, False), (True, True)])
def test_prompts_of_different_lengths_in_a_batch_give_what_each_gives_alone(flags: tuple[bool, bool]) -> None:
    transformer = tiny().transformer
    latents, timestep, prompts = batch_of_three()

    def run(samples: slice) -> torch.Tensor:
        return model_fn_z_image(
            transformer,
            latents[samples],
            timestep[samples],
            prompts[samples],
            use_gradient_checkpointing=flags[0],
            use_gradient_checkpointing_offload=flags[1],
        )

    together = run(slice(3))
    found = gradients(transformer, together)
    alone = torch.cat([run(slice(place, place + 1)) for place in range(3)])
    expected = gradients(transformer, alone)
    # A longer row sums the same numbers in another order.
    torch.testing.assert_close(together, alone, rtol=0, atol=5e-6)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=2e-4, msg=name)


def test_the_blocks_run_in_the_order_in_which_they_are_declared(family: ZImage) -> None:
    transformer = family.load_transformer(torch.float32)
    run: list[torch.nn.Module] = []
    for block in transformer.modules():
        if type(block).__name__ in transformer._repeated_blocks:
            block.register_forward_pre_hook(lambda module, _args: run.append(module))
    latents, timestep, prompts = batch_of_three()
    with torch.no_grad():
        model_fn_z_image(transformer, latents, timestep, prompts)
    declared = blocks_of(transformer, family.block_lists)
    assert len(run) == 6
    assert all(block is other for block, other in zip(run, declared, strict=True))


def test_prompts_are_encoded_as_by_the_pipeline(pipeline: ZImagePipeline, family: ZImage) -> None:
    texts = [*PROMPTS, "", "circle " * 200]
    encoded = encoded_prompts(family, *texts)
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(list(texts), device=CPU, do_classifier_free_guidance=False)
    for row, other in zip(encoded, expected, strict=True):
        assert torch.equal(row["prompt_embeds"], other)
    lengths = [len(row["prompt_embeds"]) for row in encoded]
    counted = family.prompt_lengths(texts)
    assert len(set(lengths)) == 5
    assert lengths == [*counted[:4], family.max_prompt_tokens]
    assert counted[4] > family.max_prompt_tokens


def test_a_text_encoder_saved_as_a_whole_language_model_encodes_the_same(
    pipeline: ZImagePipeline, family: ZImage, tmp_path: Path
) -> None:
    whole = saved(pipeline, tmp_path)
    encoder = pipeline.text_encoder
    language_model = Qwen3ForCausalLM(encoder.config)
    language_model.model.load_state_dict(encoder.state_dict())
    language_model.tie_weights()
    language_model.save_pretrained(tmp_path / "text_encoder")
    expected, found = (encoded_prompts(each, *PROMPTS) for each in (family, whole))
    for row, other in zip(found, expected, strict=True):
        assert torch.equal(row["prompt_embeds"], other["prompt_embeds"])


def test_no_keys_and_values_are_kept_of_a_prompt_and_none_are_missed(
    family: ZImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make, load = [], DynamicCache.__init__, family.load_text_encoders

    def load_with_cache(*given: Any) -> dict[str, Any]:
        encoders = load(*given)
        encoders["text_encoder"].config.use_cache = True
        return encoders

    def encoded() -> torch.Tensor:
        (given,) = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=PROMPTS[0])])
        return given["prompt_embeds"]

    monkeypatch.setattr(DynamicCache, "__init__", lambda *a, **k: made.append(1) or make(*a, **k))
    without = encoded()
    assert not made
    monkeypatch.setattr(family, "load_text_encoders", load_with_cache)
    assert torch.equal(encoded(), without)
    assert made


@pytest.mark.parametrize(
    ("settings", "shift"), [({"shift": 6.0}, 6.0), ({"shift": 3.0}, 3.0), (DYNAMIC, None)]
)
def test_the_shift_is_the_one_of_the_folders_sampler(
    settings: dict[str, Any], shift: float | None, pipeline: ZImagePipeline, tmp_path: Path
) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    family = saved(ZImagePipeline(**pipeline.components | {"scheduler": scheduler}), tmp_path)
    shape = family.latents_shape(1024, 768, 1)
    mu = calculate_shift(64 * 48, max_seq_len=8192, base_shift=0.4, max_shift=0.9)
    unshifted = get_default_z_image_sigmas(8)
    scheduler.set_timesteps(sigmas=unshifted, mu=mu)
    ours = shift_sigma(torch.tensor(unshifted), family.family_shift(shape))
    torch.testing.assert_close(ours, scheduler.sigmas[:-1], rtol=1e-6, atol=0)
    assert shift in (None, family.family_shift(shape))


def test_turbo_is_known_by_the_shift_of_its_sampler(family: ZImage, tmp_path: Path) -> None:
    assert family.distilled is None
    turbo = tiny()
    turbo.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    turbo.save_pretrained(tmp_path)
    distilled = ZImage(PipelineFolder(path=tmp_path)).distilled
    assert distilled is not None
    assert "a shift of 3, as Z-Image-Turbo's (the base model's is 6); better train the base" in distilled


def test_a_transformer_that_sees_pictures_is_refused_by_name(
    pipeline: ZImagePipeline, tmp_path: Path
) -> None:
    family = saved(pipeline, tmp_path)
    family.check_folder()
    path = tmp_path / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"siglip_feat_dim": 8}))
    with pytest.raises(
        UserError, match=r"holds a Z-Image Omni.*siglip_feat_dim.*use Z-Image or Z-Image-Turbo"
    ):
        family.check_folder()


@pytest.mark.parametrize("name", ["ZImageOmniPipeline", "ZImageControlNetPipeline"])
def test_a_folder_of_another_z_image_pipeline_is_refused_with_what_it_holds(
    name: str, pipeline: ZImagePipeline, tmp_path: Path
) -> None:
    family = saved(pipeline, tmp_path)
    path = tmp_path / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": name}))
    with pytest.raises(UserError, match=f"holds a {name}, but this family trains a ZImagePipeline"):
        require_family(ZImage, family.folder)
