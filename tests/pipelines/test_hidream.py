"""HiDream-I1 against diffusers' own model: experts, sizes and the text encoder that the folder lacks."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HiDreamImagePipeline, HiDreamImageTransformer2DModel
from family_sample import SIGMA, Sample, engine_with, gradients

from diffsynth_lite.core.gradient import gradient_engine
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.base.folder.hub import HubCommit
from diffsynth_lite.pipelines.hidream import HiDream, RoutedExperts
from diffsynth_lite.training.export.usage import usage_code

FAMILY = "hidream"
EXPERT = "single_stream_blocks.0.block.ff_i.experts.3.w2.weight"
LLAMA = "meta-llama/Meta-Llama-3.1-8B-Instruct"


def inputs_of(sample: Sample, latents: torch.Tensor) -> dict[str, Any]:
    """What diffusers' own model is given of the batch."""
    given = sample.family.model_inputs(sample.conditioning, {})
    return {
        "hidden_states": latents,
        "timesteps": SIGMA * 1000,
        "encoder_hidden_states_t5": given["prompt_embeds_bld"],
        "encoder_hidden_states_llama3": given["llama_embeds_kbld"],
        "pooled_embeds": given["pooled_prompt_embeds_bd"],
        "return_dict": False,
    }


def image_of(tokens_bcsp: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """The image in what diffusers' model returns in training mode: of each token its 2 x 2 places."""
    batch, channels, height, width = latents.shape
    tokens = tokens_bcsp[:, :, : height * width // 4]
    places = tokens.reshape(batch, channels, height // 2, width // 2, 2, 2)
    return places.permute(0, 1, 2, 4, 3, 5).reshape(latents.shape)


@pytest.mark.parametrize("is_square", [False, True])
def test_both_modes_predict_what_diffusers_infers_with_the_gradients_of_its_training_mode(
    sample: Sample, pipeline: HiDreamImagePipeline, is_square: bool
) -> None:
    latents = torch.cat([sample.latents] * 2, dim=2) if is_square else sample.latents
    theirs: HiDreamImageTransformer2DModel = pipeline.transformer.requires_grad_(True)
    inferred = -theirs.eval()(**inputs_of(sample, latents))[0]
    assert gradients(theirs, inferred)[EXPERT] is None  # else the family has no reason to run the experts
    trained = -image_of(theirs.train()(**inputs_of(sample, latents))[0], latents)
    torch.testing.assert_close(trained, inferred, rtol=1e-6, atol=1e-6)
    expected = gradients(theirs, trained)
    ours = sample.family.load_transformer(torch.float32).requires_grad_(True)
    for is_training in (False, True):
        with gradient_engine(engine_with((is_training, False))):
            predicted = sample.family.predict(ours.train(is_training), latents, SIGMA, sample.conditioning)
        assert torch.equal(predicted, inferred)
        found = gradients(ours, predicted)
        assert found.keys() == expected.keys()
        # Of some experts the few tokens of a tiny batch choose none.
        assert any(found[name].any() for name in found if ".experts." in name)
        for name, gradient in found.items():
            assert gradient is not None, name
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_an_expert_that_no_token_chose_gets_a_gradient_of_zeros(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sample.family.load_transformer(torch.float32).requires_grad_(True)
    experts = model.get_submodule("single_stream_blocks.0.block.ff_i")
    assert type(experts) is RoutedExperts
    choose = experts.gate.forward

    def choose_the_first_two(tokens: torch.Tensor) -> Any:
        chosen, weights, loss = choose(tokens)
        assert loss is None
        return torch.tensor([0, 1]).expand_as(chosen), weights, loss

    monkeypatch.setattr(experts.gate, "forward", choose_the_first_two)
    predicted = sample.family.predict(model.train(), sample.latents, SIGMA, sample.conditioning)
    found = gradients(model, predicted)
    assert found[EXPERT] is not None
    assert not found[EXPERT].any()
    assert found[EXPERT.replace("experts.3", "experts.1")].any()


def test_only_the_layers_of_llama_that_the_model_reads_are_kept(sample: Sample, tmp_path: Path) -> None:
    kept = sample.first["llama_embeds"]
    assert len(kept) == 3 == len({*sample.family.folder.component_config("transformer")["llama_layers"]})
    given = sample.family.model_inputs([sample.first], {})["llama_embeds_kbld"]
    assert torch.equal(given[[0, 2, 3], 0], kept)
    assert not given[1].any()
    folder = shutil.copytree(sample.family.folder.path, tmp_path / "model")
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"llama_layers": [0, 1, 3, 3]}))
    other = HiDream(PipelineFolder(path=folder))
    assert other.prompt_encoder_id(torch.float32) != sample.family.prompt_encoder_id(torch.float32)


def test_images_that_are_not_square_are_filled_up_and_have_at_most_as_many_tokens(family: HiDream) -> None:
    family.check_size(128, 128, keys="size")
    family.check_size(64, 48, keys="size")
    with pytest.raises(
        UserError, match=r"size: 128x64; of images that are not square .* at most 4096 pixels"
    ):
        family.check_size(128, 64, keys="size")
    tokens = [family.num_tokens(shape) + family.num_given_tokens(shape) for shape in ((16, 8, 6), (16, 4, 4))]
    assert tokens == [16, 4]


def test_previews_are_of_the_size_that_was_asked_for_whatever_its_root_is(sample: Sample) -> None:
    request = sample.request(num_inference_steps=1, guidance_scale=1.0, seed=0)
    sizes = [(48, 32), (16, 96), (64, 64)]
    requests = [replace(request, width=width, height=height) for width, height in sizes]
    generated = sample.family.sample(sample.model, torch.float32, requests)
    assert [frames[0].size for frames in generated] == sizes


def test_llama_is_read_from_its_own_repository_where_the_folder_has_none(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(sample.family.folder.path, tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "text_encoder_4")
    family = HiDream(PipelineFolder(path=tmp_path / "model"))
    with pytest.raises(UserError, match=f"text_encoder_4 is read from {LLAMA} on the hub: ") as caught:
        family.check_folder()
    assert str(caught.value).endswith(f"; or put its files into {tmp_path / 'model' / 'text_encoder_4'}")
    on_hub = replace(family.folder, hub=HubCommit(repository="owner/model", path=family.folder.path))
    with pytest.raises(UserError, match="into text_encoder_4 of a local copy of the pipeline"):
        on_hub.place("text_encoder_4")
    shown = {"lora": "lora", "dtype": "bfloat16", "prompt": "a ring", "negative_prompt": "", "fps": None}
    request = sample.request(num_inference_steps=2, guidance_scale=1.0, seed=0)
    loaded = f"text_encoder_4 = LlamaForCausalLM.from_pretrained('{LLAMA}', dtype=torch.bfloat16)\n"
    for one, base, is_shown in (
        (family, "model", True),
        (sample.family, "model", False),
        (sample.family, "HiDream-ai/HiDream-I1-Full", True),
    ):
        code = usage_code(one, request, base=base, **shown)
        assert code is not None
        assert (loaded in code) == is_shown
        assert ("text_encoder_4=text_encoder_4" in code) == is_shown
