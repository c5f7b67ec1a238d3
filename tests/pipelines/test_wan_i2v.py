"""Wan image to video against diffusers' own transformer and pipeline: I2V, FLF2V and A14B."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from family_sample import CPU, PROMPTS, UNCLEAN, assert_equal_under_all_flags, build_media, picture
from PIL import ImageOps
from wan_pipelines import FROM_PICTURES, families_from_pictures, from_pictures, transformer_from_pictures

from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PreviewRequest
from diffsynth_lite.pipelines.wan_i2v import WanI2V, model_fn_wan_i2v

SIGMA = torch.tensor([0.1, 0.5, 0.9])


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WanI2V]:
    return families_from_pictures(tmp_path_factory.mktemp("wan_i2v"))


@pytest.fixture(scope="module")
def prompts(families: dict[str, WanI2V]) -> list[dict[str, torch.Tensor]]:
    encode = families["i2v"].load_prompt_encoder(torch.float32, CPU)
    return encode([Prompt(text=text) for text in PROMPTS])


@pytest.mark.parametrize("release", FROM_PICTURES)
def test_model_fn_equals_the_transformers_own_forward(release: str) -> None:
    transformer = transformer_from_pictures(release)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 36, 3, 4, 8, generator=generator)
    embeds = torch.randn(2, 512, 32, generator=generator)
    num_pictures = {"i2v": 2, "flf2v": 4, "a14b": 0}[release]
    image_embeds = torch.randn(num_pictures, 5, 16, generator=generator) if num_pictures else None
    timestep = torch.tensor([200.0, 700.0])
    reference = transformer(
        hidden_states=latents,
        timestep=timestep,
        encoder_hidden_states=embeds,
        encoder_hidden_states_image=image_embeds,
        return_dict=False,
    )[0]
    expected = assert_equal_under_all_flags(
        transformer,
        reference,
        model_fn_wan_i2v,
        latents,
        timestep,
        embeds,
        image_embeds,
    )
    assert reference.shape == (2, 16, 3, 4, 8)
    picture_layers = [name for name in expected if "add_k_proj" in name or "image_embedder" in name]
    assert bool(picture_layers) == (release != "a14b")
    assert all(expected[name] is not None for name in picture_layers)


def calls_in(transformers: Sequence[torch.nn.Module | None], run: Callable[[], object]) -> list[Any]:
    """Keyword arguments of each forward of the transformers in ``run``."""
    calls: list[Any] = []
    hooks = [
        part.register_forward_pre_hook(lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True)
        for part in transformers
        if part is not None
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize(
    ("release", "has_last"), [("i2v", False), ("flf2v", True), ("a14b", False), ("a14b", True)]
)
def test_the_model_is_given_the_pictures_as_by_the_pipeline(
    release: str, has_last: bool, families: dict[str, WanI2V], prompts: list[dict[str, torch.Tensor]]
) -> None:
    family, pipeline = families[release], from_pictures(release)
    first, last = picture(64, 32, 40), picture(64, 32, 50) if has_last else None
    item = dataclasses.replace(build_media(family)[0], first_frame=first, last_frame=last)
    random_state = torch.random.get_rng_state()
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([item])
    assert torch.equal(torch.random.get_rng_state(), random_state)
    pipeline.set_progress_bar_config(disable=True)
    calls = calls_in(
        [pipeline.transformer, pipeline.transformer_2],
        lambda: pipeline(
            image=first,
            last_image=last,
            prompt_embeds=family._prompt_embeds(prompts[:1]),
            width=64,
            height=32,
            num_frames=len(item.frames),
            num_inference_steps=2,
            guidance_scale=1.0,
            output_type="latent",
        ),
    )
    model = family.load_transformer(torch.float32)
    assert len(calls) == 2
    for theirs in calls:
        noisy, sigma = theirs["hidden_states"][:, :16], theirs["timestep"].float() / 1000
        (ours,) = calls_in(
            list(family.parts_of(model).values()),
            lambda noisy=noisy, sigma=sigma: family.predict(model, noisy, sigma, [prompts[0] | encoded]),
        )
        # Bit for bit: the pipeline's own methods encode the pictures.
        assert torch.equal(ours["hidden_states"], theirs["hidden_states"])
        assert torch.equal(ours["encoder_hidden_states"], theirs["encoder_hidden_states"])
        torch.testing.assert_close(ours["timestep"], theirs["timestep"].float(), rtol=1e-6, atol=0)
        pair = ours["encoder_hidden_states_image"], theirs["encoder_hidden_states_image"]
        assert pair == (None, None) if release == "a14b" else torch.equal(*pair)


def test_what_is_kept_of_the_pictures_is_counted_before_anything_is_encoded(
    families: dict[str, WanI2V],
) -> None:
    for family in families.values():
        (encoded,) = family.load_media_encoder(torch.float32, CPU)(build_media(family)[:1])
        latents = encoded.pop("latents")
        num_values = sum(tensor.numel() for tensor in encoded.values())
        assert num_values == family.num_condition_values(latents.shape)


@pytest.mark.parametrize("has_last", [False, True])
def test_the_mask_marks_the_frames_that_are_given_and_the_latents_are_those_of_grey_between_them(
    has_last: bool, families: dict[str, WanI2V]
) -> None:
    family = families["a14b"]
    item = build_media(family)[0]
    item = dataclasses.replace(item, last_frame=item.frames[-1] if has_last else None)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([item])
    mask, latents = encoded["condition_latents"].split([4, 16])
    given = [[1.0] * 4, [0.0] * 4, [0.0] * 3 + [float(has_last)]]  # of 1 + 4 + 4 frames, the first four times
    assert mask.shape == (4, 3, 4, 8)
    assert mask.mean((2, 3)).T.tolist() == given
    vae = from_pictures("a14b").vae
    pixels = torch.zeros(1, 3, 9, 32, 64)
    for place in [0, -1] if has_last else [0]:
        channels = torch.frombuffer(bytearray(item.frames[place].tobytes()), dtype=torch.uint8)
        pixels[0, :, place] = channels.view(32, 64, 3).permute(2, 0, 1) / 127.5 - 1
    mean, std = (
        torch.tensor(values).view(-1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    with torch.no_grad():
        expected = (vae.encode(pixels).latent_dist.mode()[0] - mean) / std
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-5)


def test_a_clip_starts_from_its_own_first_frame_unless_the_data_names_one(
    families: dict[str, WanI2V],
) -> None:
    item = build_media(families["i2v"])[0]
    first, last = item.frames[0], item.frames[-1]
    for release, named in (
        ("i2v", {"first_frame": first}),
        ("flf2v", {"first_frame": first, "last_frame": last}),
        ("flf2v", {"last_frame": last}),
        ("a14b", {"first_frame": first}),
    ):
        encode = families[release].load_media_encoder(torch.float32, CPU)
        changes: list[dict[str, Any]] = [{}, named, {"first_frame": picture(64, 32, 90)}]
        own, same, other = encode([dataclasses.replace(item, **change) for change in changes])
        assert own.keys() == same.keys()
        assert all(torch.equal(own[name], same[name]) for name in own), release
        assert torch.equal(own["latents"], other["latents"])
        assert not torch.equal(own["condition_latents"], other["condition_latents"])


def test_clips_are_encoded_alike_alone_and_together(families: dict[str, WanI2V]) -> None:
    encode = families["flf2v"].load_media_encoder(torch.float32, CPU)
    media = build_media(families["flf2v"])
    for item, together in zip(media, encode(media), strict=True):
        (alone,) = encode([item])
        for name, tensor in alone.items():
            torch.testing.assert_close(together[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("release", ["i2v", "flf2v"])
def test_each_sample_of_a_batch_sees_its_own_pictures(
    release: str, families: dict[str, WanI2V], prompts: list[dict[str, torch.Tensor]]
) -> None:
    family = families[release]
    transformer = family.load_transformer(torch.float32)
    encoded = family.load_media_encoder(torch.float32, CPU)(build_media(family))
    noisy = torch.stack([tensors.pop("latents") for tensors in encoded])
    conditioning = [prompt | tensors for prompt, tensors in zip(prompts, encoded, strict=True)]
    with torch.no_grad():
        together = family.predict(transformer, noisy, SIGMA, conditioning)
        for place, sample in enumerate(conditioning):
            here = slice(place, place + 1)
            alone = family.predict(transformer, noisy[here], SIGMA[here], [sample])
            torch.testing.assert_close(together[here], alone, rtol=1e-4, atol=1e-5)
            stranger = conditioning[place - 1]["image_embeds"].flip(0)
            other = family.predict(
                transformer, noisy[here], SIGMA[here], [sample | {"image_embeds": stranger}]
            )
            assert not torch.allclose(alone, other, atol=1e-4)


def test_prompts_are_encoded_as_by_the_pipeline(families: dict[str, WanI2V]) -> None:
    family, texts = families["i2v"], [*PROMPTS, "", *UNCLEAN, "circle " * 200]
    encoded = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])
    with torch.no_grad():
        expected, _ = from_pictures("i2v").encode_prompt(
            texts, do_classifier_free_guidance=False, max_sequence_length=512, device=CPU
        )
    assert torch.equal(family._prompt_embeds(encoded), expected)


def preview(prompt: dict[str, torch.Tensor], *pictures: Any) -> PreviewRequest:
    return PreviewRequest(
        conditioning=prompt,
        negative=prompt,
        inputs=pictures,
        width=64,
        height=32,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=2.0,
        seed=0,
    )


@pytest.mark.parametrize(("release", "num_pictures"), [("i2v", 1), ("flf2v", 1), ("flf2v", 2)])
def test_a_preview_goes_on_from_its_picture_as_in_training(
    release: str, num_pictures: int, families: dict[str, WanI2V], prompts: list[dict[str, torch.Tensor]]
) -> None:
    family = families[release]
    transformer = family.load_transformer(torch.float32)
    pictures = [picture(100, 80, 40), picture(64, 32, 50)][:num_pictures]
    request, drawn = preview(prompts[0], *pictures), []
    calls = calls_in(
        [transformer], lambda: drawn.extend(family.sample(transformer, torch.float32, [request]))
    )
    (frames,) = drawn
    assert [frame.size for frame in frames] == [(64, 32)] * 9
    fitted = [ImageOps.fit(one, (64, 32)) for one in pictures]
    last = fitted[-1] if release == "flf2v" else None
    item = dataclasses.replace(build_media(family)[0], first_frame=fitted[0], last_frame=last)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([item])
    assert len(calls) == 4  # two steps, each with and without the prompt
    for call in calls:
        assert torch.equal(call["hidden_states"][0, 16:], encoded["condition_latents"])
        assert torch.equal(call["encoder_hidden_states_image"], encoded["image_embeds"])
