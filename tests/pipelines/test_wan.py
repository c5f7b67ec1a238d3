"""Wan against diffusers' own transformer, autoencoder and pipeline."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from family_sample import (
    CPU,
    PROMPTS,
    UNCLEAN,
    Sample,
    assert_equal_under_all_flags,
    build_media,
    build_sample,
)
from wan_pipelines import ti2v

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.wan import Wan, model_fn_wan, tiny, tiny_wan_transformer


def saved(pipeline: WanPipeline, folder: Path) -> Wan:
    pipeline.save_pretrained(folder)
    return Wan(PipelineFolder(path=folder))


@pytest.fixture(scope="module")
def pipeline() -> WanPipeline:
    return tiny()


@pytest.fixture(scope="module")
def family(pipeline: WanPipeline, tmp_path_factory: pytest.TempPathFactory) -> Wan:
    return saved(pipeline, tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def ti2v_family(tmp_path_factory: pytest.TempPathFactory) -> Wan:
    return saved(ti2v(), tmp_path_factory.mktemp("ti2v"))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("sees_image", [False, True])
def test_model_fn_equals_the_transformers_own_forward(per_token: bool, sees_image: bool) -> None:
    added = {"image_dim": 8, "added_kv_proj_dim": 24} if sees_image else {}
    transformer = tiny_wan_transformer(32, **added)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 16, 3, 4, 8, generator=generator)
    embeds = torch.randn(2, 512, 32, generator=generator)
    image_embeds = torch.randn(2, 5, 8, generator=generator) if sees_image else None
    timestep = torch.tensor([200.0, 700.0])
    if per_token:
        timestep = timestep[:, None] * torch.rand(2, 3 * 2 * 4, generator=generator)

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
        model_fn_wan,
        latents,
        timestep,
        embeds,
        image_embeds,
    )
    assert expected["blocks.0.attn1.to_q.weight"] is not None


def test_prompts_are_encoded_as_by_the_pipeline(pipeline: WanPipeline, family: Wan) -> None:
    texts = [*PROMPTS, "", *UNCLEAN]
    encoded = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(
            texts, do_classifier_free_guidance=False, max_sequence_length=512, device=CPU
        )
    assert torch.equal(family._prompt_embeds(encoded), expected)
    lengths = expected.any(-1).sum(1).tolist()  # what is not zero
    assert [len(row["prompt_embeds"]) for row in encoded] == family.prompt_lengths(texts) == lengths


def test_without_the_package_that_cleans_prompts_nothing_is_encoded(
    family: Wan, monkeypatch: pytest.MonkeyPatch
) -> None:
    family.check_folder()
    monkeypatch.setattr("diffsynth_lite.pipelines.wan.family.is_ftfy_available", lambda: False)
    with pytest.raises(UserError, match="prompts of Wan are cleaned with the package ftfy"):
        family.check_folder()


def test_a_prompt_beyond_the_limit_is_cut_as_by_the_pipeline(pipeline: WanPipeline, family: Wan) -> None:
    long = "circle " * 200
    (encoded,) = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=long)])
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(
            long, do_classifier_free_guidance=False, max_sequence_length=512, device=CPU
        )
    assert family.prompt_lengths([long])[0] > 512
    assert torch.equal(encoded["prompt_embeds"], expected[0])


def test_a_picture_is_a_clip_of_one_frame(family: Wan) -> None:
    item = Media(frames=build_media(family)[0].frames[:1])
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([item])
    assert encoded["latents"].shape == family.latents_shape(64, 32, 1) == (16, 1, 4, 8)


@pytest.mark.parametrize(
    ("scheduler", "shift"),
    [
        (UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=5.0), 5),
        (FlowMatchEulerDiscreteScheduler(shift=8.0), 8),
    ],
)
def test_the_shift_is_the_one_of_the_folders_sampler(
    scheduler: UniPCMultistepScheduler | FlowMatchEulerDiscreteScheduler, shift: float, tmp_path: Path
) -> None:
    family = saved(WanPipeline(**tiny().components | {"scheduler": scheduler}), tmp_path)
    assert family.family_shift((16, 3, 4, 8)) == shift
    assert type(family.load_scheduler()) is type(scheduler)


def test_in_bf16_the_input_follows_the_first_layer_and_not_what_stays_in_fp32(sample_of_wan: Sample) -> None:
    transformer = sample_of_wan.family.load_transformer(torch.bfloat16)
    assert next(transformer.parameters()).dtype == torch.float32  # a table comes first
    with torch.no_grad():
        velocity = sample_of_wan.family.predict(
            transformer, sample_of_wan.latents, torch.tensor([0.1, 0.5, 0.9]), sample_of_wan.conditioning
        )
    assert velocity.dtype == torch.bfloat16


@pytest.fixture
def sample_of_wan(tmp_path: Path) -> Sample:
    return build_sample("wan", tmp_path)


def test_the_facts_of_ti2v_come_from_its_folder(family: Wan, ti2v_family: Wan) -> None:
    facts = [
        (one.size_divisor, one.default_num_frames, one.default_fps, one.num_tokens((48, 3, 4, 8)))
        for one in (family, ti2v_family)
    ]
    assert facts == [(16, 81, 16, 24), (32, 121, 24, 24)]
    with pytest.raises(UserError, match="48x32 is not divisible by 32"):
        ti2v_family.check_size(48, 32, keys="data.width, data.height")


def test_ti2v_draws_a_clip_and_is_trained_with_one_noise_level_a_sample(ti2v_family: Wan) -> None:
    transformer = ti2v_family.load_transformer(torch.float32)
    (conditioning,) = ti2v_family.load_prompt_encoder(torch.float32, CPU)([Prompt(text="a ring")])
    latents = torch.randn(1, 48, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = ti2v_family.predict(transformer, latents, torch.tensor([0.5]), [conditioning])
        theirs = transformer(
            hidden_states=latents,
            timestep=torch.full((1, 2 * 2 * 4), 500.0),
            encoder_hidden_states=ti2v_family._prompt_embeds([conditioning]),
            return_dict=False,
        )[0]
    # The pipeline repeats the level for each token: the same product, in matrices of another shape.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_scheduler_that_diffusers_does_not_have_is_refused(tmp_path: Path) -> None:
    family = saved(tiny(), tmp_path)
    file = tmp_path / "scheduler" / "scheduler_config.json"
    for name in ("NoSuchScheduler", "WanPipeline", None):
        file.write_text(json.dumps({"_class_name": name}))
        with pytest.raises(UserError, match=f"names no scheduler class: {name}"):
            Wan(family.folder).check_folder()
