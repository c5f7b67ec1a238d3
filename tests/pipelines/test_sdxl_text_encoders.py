"""SDXL with a LoRA on its text encoders too: several components in one model, run in one forward.

The tests of all families that are imported run on it, too.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from diffusers import StableDiffusionXLPipeline
from diffusers_pipelines import bytes_of, generated_by
from family_sample import (
    CPU,
    PROMPTS,
    SIGMA,
    Sample,
    adapted_transformer,
    assert_does_as,
    encode_texts,
    engine_with,
    pairs_on,
    sample_fixture,
    velocity_and_gradients,
)
from processes import on_ranks
from release_layouts import request_of_sdxl
from test_family_gradients import (  # noqa: F401
    test_every_declared_block_runs_through_the_engine_and_the_flags_change_nothing_also_with_dropout,
)
from test_family_interface import (  # noqa: F401
    test_an_example_of_the_conditioning_is_what_the_encoders_give_of_a_prompt_as_long_as_may_be,
    test_default_targets_match_the_structure_without_weights,
)
from test_family_lora import test_every_adapter_of_the_largest_set_learns  # noqa: F401
from test_family_memory import (  # noqa: F401
    test_a_step_holds_what_is_counted_of_blocks_that_are_kept_and_of_those_that_are_recomputed,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import (
    adapter_settings,
    adapter_tensors,
    add_adapter,
    find_target_layers,
    without_adapter,
)
from diffsynth_lite.lora.updates import pairs_of
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.base.composite import Composite, join_adapter, split_adapter
from diffsynth_lite.pipelines.sdxl import SDXL
from diffsynth_lite.training.lora_file import read_initial_lora

ALL = ("unet", "text_encoder", "text_encoder_2")


only_unet = sample_fixture("sdxl")


@pytest.fixture(scope="module")
def sample(only_unet: Sample) -> Sample:
    """The same batch with tokens in place of embeddings."""
    family = SDXL(only_unet.family.folder, trained=ALL)
    conditioning = [
        tokens | {"time_ids": other["time_ids"]}
        for tokens, other in zip(encode_texts(family, *PROMPTS), only_unet.conditioning, strict=True)
    ]
    return replace(only_unet, family=family, conditioning=conditioning)


def gradients_of_a_step(
    sample: Sample, model: torch.nn.Module, flags: tuple[bool, bool] = (False, False)
) -> dict[str, Tensor | None]:
    return velocity_and_gradients(sample, model, engine_with(flags))[1]


def test_prompts_are_only_made_into_tokens(sample: Sample, tmp_path: Path) -> None:
    family = sample.family
    for row in sample.conditioning:
        assert {name: tensor.shape for name, tensor in row.items()} == {
            "input_ids": (77,),
            "input_ids_2": (77,),
            "is_zero": (),
            "time_ids": (6,),
        }
    # No weights are looked at, and the cache of embeddings is another one.
    without_weights = PipelineFolder(path=tmp_path)
    for name in ("tokenizer", "tokenizer_2", "model_index.json"):
        (tmp_path / name).symlink_to(family.folder.path / name)
    bare = SDXL(without_weights, trained=ALL)
    assert (
        encode_texts(bare, PROMPTS[0])[0]["input_ids"].tolist()
        == sample.conditioning[0]["input_ids"].tolist()
    )
    assert bare.prompt_encoder_id(torch.float32) == family.prompt_encoder_id(torch.bfloat16)
    assert family.prompt_encoder_id(torch.float32) != SDXL(family.folder).prompt_encoder_id(torch.float32)


def test_untrained_encoders_make_of_tokens_what_the_pipeline_makes_of_the_text(
    sample: Sample, only_unet: Sample
) -> None:
    model = sample.family.load_transformer(torch.float32)
    assert isinstance(model, Composite)
    unet = only_unet.family.load_transformer(torch.float32)
    with torch.no_grad():
        ours = sample.family.predict(model, sample.latents, SIGMA, sample.conditioning)
        theirs = only_unet.family.predict(unet, sample.latents, SIGMA, only_unet.conditioning)
    assert torch.equal(ours, theirs)


def test_without_their_adapters_encoders_and_unet_are_those_that_were_not_trained(sample: Sample) -> None:
    plain = sample.family.load_transformer(torch.float32)
    model = adapted_transformer(sample.family)
    with torch.no_grad(), without_adapter(model):
        ours = sample.family.predict(model, sample.latents, SIGMA, sample.conditioning)
    with torch.no_grad():
        theirs = sample.family.predict(plain, sample.latents, SIGMA, sample.conditioning)
        trained = sample.family.predict(model, sample.latents, SIGMA, sample.conditioning)
    assert torch.equal(ours, theirs)
    assert not torch.equal(trained, theirs)


def test_an_empty_prompt_to_steer_away_from_is_zeros_that_leave_the_encoders_a_gradient(
    sample: Sample,
) -> None:
    encode = sample.family.load_prompt_encoder(torch.float32, CPU)
    dropped = encode([Prompt(text="", is_negative=True)])
    model = sample.family.load_transformer(torch.float32).requires_grad_(True)
    for conditioning, is_zero in ((dropped, True), (encode([Prompt(text="")]), False)):
        embeds, pooled = sample.family._prompt_embeds(model, conditioning)
        assert bool(embeds.any()) == bool(pooled.any()) == (not is_zero)
    mixed = replace(sample, conditioning=[row | dropped[0] for row in sample.conditioning])
    assert gradients_of_a_step(mixed, model)["text_encoder.encoder.layers.0.mlp.fc1.weight"] is not None


def test_both_encoders_get_a_lora_but_on_the_layer_that_the_unet_does_not_see(sample: Sample) -> None:
    family, model = sample.family, sample.family.empty_transformer()
    targets = family.target_sets["all"]
    found = find_target_layers(model, targets, unused_modules=family.unused_modules(model))
    attention = [f"self_attn.{name}" for name in ("k_proj", "v_proj", "q_proj", "out_proj")]
    expected = {
        f"{encoder}.{layer}.{name}"
        for encoder, layers in (
            ("text_encoder.encoder.layers", [0]),
            ("text_encoder_2.text_model.encoder.layers", [0, 1]),
        )
        for layer in layers
        for name in (*attention, "mlp.fc1", "mlp.fc2")
    }
    assert {name for name in found if not name.startswith("unet.")} == expected
    # Two attentions and a feed-forward part a block, and what is around the blocks.
    assert sum(name.startswith("unet.") for name in found) == (4 * 2 + 2) * (2 + 2 + 2 * 2) + 2 * 4


def test_the_layer_left_out_would_get_no_gradient(sample: Sample) -> None:
    model = sample.family.load_transformer(torch.float32).requires_grad_(True)
    unused = tuple(f"{name}." for name in sample.family.unused_modules(model))
    without = {name for name, gradient in gradients_of_a_step(sample, model).items() if gradient is None}
    assert {name for name in without if not name.startswith("text_encoder.final_layer_norm")} == {
        name for name, _ in model.named_parameters() if name.startswith(unused)
    }


def test_a_saved_lora_is_one_file_that_the_pipeline_loads_into_all_three(
    sample: Sample, tmp_path: Path
) -> None:
    family = sample.family
    model = adapted_transformer(sample.family, targets=family.target_sets["all"]).eval()
    tensors, settings = adapter_tensors(model), adapter_settings(model)
    (file,) = family.lora_files.save(tmp_path, tensors, settings)
    assert_does_as(pairs_of(*family.lora_files.read(tmp_path)), model)
    assert_does_as(family.lora_files.loaded(tmp_path), model)
    # As transformers before 5 and other programs call the layers, too.
    names = {name.split("_encoder_")[0] for name in safetensors.torch.load_file(file)}
    assert {name for name in names if "lora_te" in name} == {"lora_te1_text_model", "lora_te2_text_model"}

    pipeline = sample.fresh_pipeline()
    fresh = Composite({name: getattr(pipeline, name) for name in ALL})
    with torch.no_grad():
        base = family.predict(fresh, sample.latents, SIGMA, sample.conditioning)
        base_embeds, _, base_pooled, _ = pipeline.encode_prompt(PROMPTS[0], device=CPU)
        pipeline.load_lora_weights(tmp_path)
        assert_does_as(pairs_on(fresh), model)
        embeds, _, pooled, _ = pipeline.encode_prompt(PROMPTS[0], device=CPU)
        reloaded = family.predict(fresh, sample.latents, SIGMA, sample.conditioning)
        trained = family.predict(model, sample.latents, SIGMA, sample.conditioning)
        trained_embeds, trained_pooled = family._prompt_embeds(model, sample.conditioning[:1])
    assert torch.equal(reloaded, trained)
    assert torch.equal(embeds, trained_embeds)
    assert torch.equal(pooled, trained_pooled)
    for before, after in ((base, trained), (base_embeds, embeds), (base_pooled, pooled)):
        assert not torch.allclose(before, after, atol=1e-3)


def test_a_run_of_the_only_unet_does_not_start_from_a_part_of_such_a_lora(
    sample: Sample, tmp_path: Path
) -> None:
    model = adapted_transformer(sample.family)
    tensors, settings = adapter_tensors(model), adapter_settings(model)
    sample.family.lora_files.save(tmp_path, tensors, settings)
    unet = "unet."
    layers = {name.removeprefix(unet) for name in settings["target_modules"] if name.startswith(unet)}
    with pytest.raises(UserError, match=r"it also has text_encoder.*; set lora.target_modules and lora.comp"):
        read_initial_lora(SDXL(sample.family.folder), str(tmp_path), layers=layers, rank=4, alpha=8)


def test_previews_are_drawn_from_prompts_as_the_trained_encoders_see_them(
    sample: Sample, tmp_path: Path
) -> None:
    family = sample.family
    model = adapted_transformer(sample.family).eval()
    family.lora_files.save(tmp_path, adapter_tensors(model), adapter_settings(model))
    pipeline = StableDiffusionXLPipeline.from_pretrained(family.folder.path, add_watermarker=False)
    pipeline.load_lora_weights(tmp_path)
    for negative in ("blurred", " "):
        request = request_of_sdxl(family, negative, guidance_scale=5.0)
        (generated,) = family.sample(model, torch.float32, [request])
        given = {"prompt": PROMPTS[0], "negative_prompt": negative.strip() or None}
        assert bytes_of(generated) == generated_by(pipeline, request, **given)


def train_on_a_rank(rank: int, folder: Path, sample: Sample) -> None:
    """Save the gradients of DDP, and the mean over the ranks of those without it."""
    own = replace(sample, latents=sample.latents * (rank + 1))
    mean = gradients_of_a_step(own, adapted_transformer(sample.family))
    for gradient in mean.values():
        dist.all_reduce(gradient)
        gradient /= 2
    model = DistributedDataParallel(adapted_transformer(sample.family))
    # Twice: DDP finds a missing gradient at the beginning of the next step.
    synchronised = [gradients_of_a_step(own, model, flags) for flags in ((False, False), (True, True))]
    torch.save({"mean": mean, "synchronised": synchronised}, folder / f"rank{rank}.pt")


def test_two_processes_synchronise_the_gradients_of_all_three(sample: Sample, tmp_path: Path) -> None:
    on_ranks(train_on_a_rank, tmp_path, replace(sample))  # without models
    for rank in range(2):
        saved = torch.load(tmp_path / f"rank{rank}.pt")
        for gradients in saved["synchronised"]:
            assert len(gradients) == len(saved["mean"])
            for name, gradient in gradients.items():
                expected = saved["mean"][name.removeprefix("module.")]
                torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


LAYERS = ("first.0", "second.0", "second.2")


def composite() -> Composite:
    def component() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4))

    return Composite({"first": component(), "second": component()})


def test_one_forward_runs_what_it_is_given_on_the_components() -> None:
    model, values = composite(), torch.ones(1, 4)
    result = model(lambda parts: parts.second(parts.first(values)))
    assert torch.equal(result, model.second(model.first(values)))


def test_an_adapter_is_split_by_component_and_joined_again() -> None:
    model = composite()
    add_adapter(model, LAYERS, rank=2, alpha=4, dropout=0.0, seed=0)
    tensors, settings = adapter_tensors(model), adapter_settings(model)
    parts = split_adapter(tensors, settings, ("first", "second"))
    assert {name: part[1]["target_modules"] for name, part in parts.items()} == {
        "first": ["0"],
        "second": ["0", "2"],
    }
    assert set(parts["first"][0]) == {"0.lora_A.weight", "0.lora_B.weight"}
    assert all(part[1]["lora_alpha"] == 4 for part in parts.values())
    joined, joined_settings = join_adapter(parts)
    assert joined_settings == settings
    assert joined.keys() == tensors.keys()
    assert all(joined[name] is tensors[name] for name in tensors)


def test_a_single_component_has_no_prefix_in_either_direction() -> None:
    tensors, settings = {"0.lora_A.weight": torch.ones(2)}, {"r": 2, "target_modules": ["0"]}
    parts = split_adapter(tensors, settings, ("transformer",))
    assert parts == {"transformer": (tensors, settings)}
    assert join_adapter(parts) == (tensors, settings)
