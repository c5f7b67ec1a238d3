"""The two experts of Wan 2.2 I2V-A14B, with the pictures that their clips start from."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanImageToVideoPipeline
from family_sample import CPU, PROMPTS, build_media, picture
from PIL.Image import Image
from wan_pipelines import from_pictures

from diffsynth_lite.lora import adapter_settings, adapter_tensors, add_adapter, find_target_layers
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import Conditioning, PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.base.composite import Composite
from diffsynth_lite.pipelines.wan_i2v import WanI2V

SIGMA = torch.tensor([0.1, 0.95, 0.9])
PLACES = {"transformer": [1, 2], "transformer_2": [0]}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> WanI2V:
    folder = tmp_path_factory.mktemp("a14b")
    from_pictures("a14b").save_pretrained(folder)
    return WanI2V(PipelineFolder(path=folder))


@pytest.fixture(scope="module")
def batch(family: WanI2V) -> tuple[torch.Tensor, list[Conditioning]]:
    """Latents and conditioning of three clips, of which the second leads to a last frame."""
    media = build_media(family)
    media[1] = dataclasses.replace(media[1], last_frame=picture(64, 32, 60))
    encoded = family.load_media_encoder(torch.float32, CPU)(media)
    prompts = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in PROMPTS])
    latents = torch.stack([tensors.pop("latents") for tensors in encoded])
    return latents, [prompt | tensors for prompt, tensors in zip(prompts, encoded, strict=True)]


def adapted(family: WanI2V) -> torch.nn.Module:
    model = family.load_transformer(torch.float32)
    layers = find_target_layers(model, family.default_target_modules, unused_modules=())
    add_adapter(model, layers, rank=4, alpha=8, dropout=0.0, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return model.eval()


def test_each_clip_goes_with_its_pictures_to_the_expert_of_its_noise_level(
    family: WanI2V, batch: tuple[torch.Tensor, list[Conditioning]]
) -> None:
    assert family.noise_ranges == ((0.9, 1.0), (0.0, 0.9))
    latents, conditioning = batch
    model = family.load_transformer(torch.float32)
    with torch.no_grad():
        mixed = family.predict(model, latents, SIGMA, conditioning)
        for name, places in PLACES.items():
            alone = WanI2V(family.folder, trained=[name])
            expert = alone.load_transformer(torch.float32)
            chosen = [conditioning[place] for place in places]
            expected = alone.predict(expert, latents[places], SIGMA[places], chosen)
            assert torch.equal(mixed[places], expected)
            strangers = [conditioning[place - 1] for place in places]
            other = alone.predict(expert, latents[places], SIGMA[places], strangers)
            assert not torch.allclose(other, expected, atol=1e-4)


@pytest.mark.parametrize("trained", [None, ["transformer_2"]])
def test_each_saved_lora_draws_the_same_in_its_place_in_the_pipeline(
    trained: list[str] | None,
    family: WanI2V,
    batch: tuple[torch.Tensor, list[Conditioning]],
    tmp_path: Path,
) -> None:
    latents, conditioning = batch
    training = WanI2V(family.folder, trained=trained)
    model = adapted(training)
    training.save_lora(tmp_path, adapter_tensors(model), adapter_settings(model))
    pipeline = WanImageToVideoPipeline.from_pretrained(family.folder.path)
    for name in training.trained:
        pipeline.load_lora_weights(
            tmp_path,
            weight_name=training.lora_file_name(name),
            adapter_name=name,
            load_into_transformer_2=name == "transformer_2",
        )
    reloaded = Composite({name: pipeline.components[name] for name in family.trainable})
    with torch.no_grad():
        found = family.predict(reloaded, latents, SIGMA, conditioning)
        base = family.predict(family.load_transformer(torch.float32), latents, SIGMA, conditioning)
        for name, places in PLACES.items():
            if name not in training.trained:
                assert torch.equal(found[places], base[places])
                continue
            chosen = [conditioning[place] for place in places]
            expected = training.predict(model, latents[places], SIGMA[places], chosen)
            assert torch.equal(found[places], expected)
            assert not torch.allclose(base[places], expected, atol=1e-3)


@pytest.mark.parametrize("trained", [None, ["transformer"]])
def test_a_preview_goes_on_from_its_picture_through_both_experts(
    trained: list[str] | None, family: WanI2V, batch: tuple[torch.Tensor, list[Conditioning]]
) -> None:
    family = WanI2V(family.folder, trained=trained)
    model = adapted(family)
    item = build_media(family)[0]
    prompt = {"prompt_embeds": batch[1][0]["prompt_embeds"]}
    request = PreviewRequest(
        conditioning=prompt,
        negative=prompt,
        inputs=(item.frames[0],),
        width=64,
        height=32,
        num_frames=len(item.frames),
        num_inference_steps=8,
        guidance_scale=1.0,
        seed=0,
    )
    (drawn,) = family.sample(model, torch.float32, [request])

    pipeline = from_pictures("a14b")
    pipeline.register_modules(**family.parts_of(model))
    pipeline.set_progress_bar_config(disable=True)
    calls: list[dict[str, Any]] = []
    for expert in (pipeline.transformer, pipeline.transformer_2):
        expert.register_forward_pre_hook(
            lambda module, _args, kwargs: calls.append({"expert": module, **kwargs}), with_kwargs=True
        )
    expected = pipeline(
        image=item.frames[0],
        prompt_embeds=family._prompt_embeds([prompt]),
        guidance_scale=1.0,
        width=64,
        height=32,
        num_frames=len(item.frames),
        num_inference_steps=8,
        generator=torch.Generator().manual_seed(0),
        output_type="pil",
    ).frames[0]
    assert [frame.tobytes() for frame in drawn] == [frame.tobytes() for frame in expected]
    assert len({call["expert"] for call in calls}) == 2
    for call in calls:
        assert torch.equal(call["hidden_states"][0, 16:], batch[1][0]["condition_latents"])


@pytest.mark.parametrize("pictures", [[picture(64, 32, 40)], [picture(64, 32, 40), picture(64, 32, 50)]])
def test_a_preview_leads_to_a_last_frame_where_it_is_given_one(
    pictures: list[Image], family: WanI2V, batch: tuple[torch.Tensor, list[Conditioning]]
) -> None:
    prompt = {"prompt_embeds": batch[1][0]["prompt_embeds"]}
    request = PreviewRequest(
        conditioning=prompt,
        negative=prompt,
        inputs=tuple(pictures),
        width=64,
        height=32,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=1.0,
        seed=0,
    )
    model, given = family.load_transformer(torch.float32), []
    for expert in family.parts_of(model).values():
        expert.register_forward_pre_hook(
            lambda _module, _args, kwargs: given.append(kwargs["hidden_states"][0, 16:]), with_kwargs=True
        )
    family.sample(model, torch.float32, [request])
    last = pictures[1] if len(pictures) > 1 else None
    item = dataclasses.replace(build_media(family)[0], first_frame=pictures[0], last_frame=last)
    [encoded] = family.load_media_encoder(torch.float32, CPU)([item])
    assert len(given) == 2
    assert all(torch.equal(condition, encoded["condition_latents"]) for condition in given)
