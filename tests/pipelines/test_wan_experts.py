"""The two experts of Wan 2.2 A14B, from text, images and controls: when each is used, and its LoRA file."""

import dataclasses
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from diffusers.training_utils import free_memory
from diffusers_pipelines import bytes_of, generated_by
from family_sample import (
    CPU,
    PROMPTS,
    Sample,
    adapted_transformer,
    assert_does_as,
    build_media,
    encode_texts,
    engine_with,
    hole,
    mandelbrot,
)
from original_layouts import original_layout
from PIL import Image
from processes import group_of_one
from release_layouts import BOUNDARY, two_experts, vace_of_two_experts, wan_of_images
from safetensors.torch import save_file

from diffsynth_lite.core.gradient import gradient_engine
from diffsynth_lite.core.weights.formats import weight_format
from diffsynth_lite.core.weights.frozen_linear import Quantization, QuantizationReport
from diffsynth_lite.core.weights.sharding import BaseShards, is_sharded
from diffsynth_lite.core.weights.stream import WeightStream
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import adapter_settings, adapter_tensors, find_target_layers
from diffsynth_lite.lora.spelling import DIFFUSERS
from diffsynth_lite.lora.updates import pairs_of
from diffsynth_lite.pipelines import Conditioning, PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.base.composite import Composite
from diffsynth_lite.pipelines.base.quantized import quantizable_layers
from diffsynth_lite.pipelines.base.single_file import component_files
from diffsynth_lite.pipelines.wan import Wan, tiny
from diffsynth_lite.pipelines.wan_i2v import WanI2V
from diffsynth_lite.pipelines.wan_vace import WanVACE

BOTH = ("transformer", "transformer_2")
FILES = {"pytorch_lora_weights_high_noise.safetensors", "pytorch_lora_weights_low_noise.safetensors"}


@dataclass(frozen=True)
class Batch:
    """Samples for both experts of a family, and which are whose.

    Attributes:
        places: of the samples of each expert.
    """

    family: Wan
    latents: torch.Tensor
    sigma: torch.Tensor
    conditioning: list[Conditioning]
    places: dict[str, list[int]]

    def predict(
        self, family: Wan, model: torch.nn.Module, places: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The velocities of some samples, or of all."""
        places = range(len(self.latents)) if places is None else places
        chosen = [self.conditioning[place] for place in places]
        return family.predict(model, self.latents[list(places)], self.sigma[list(places)], chosen)


@pytest.fixture(scope="module")
def folder(sample_of: Callable[[str], Sample]) -> PipelineFolder:
    return sample_of("wan experts").family.folder


@pytest.fixture(scope="module")
def family(folder: PipelineFolder) -> Wan:
    return Wan(folder)


@pytest.fixture(scope="module")
def conditioning(family: Wan) -> list[Conditioning]:
    return encode_texts(family, *PROMPTS, "a star")


@pytest.fixture(scope="module")
def of_texts(family: Wan, conditioning: list[Conditioning]) -> Batch:
    latents = torch.randn(4, 16, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.1, 0.95, 0.875, 0.8749])
    places = {"transformer": [1, 2], "transformer_2": [0, 3]}
    return Batch(family, latents, sigma, conditioning, places)


@pytest.fixture(scope="module")
def of_images(sample_of: Callable[[str], Sample]) -> Batch:
    """Three clips, of which the second leads to a last frame."""
    return batch_of(sample_of("wan_i2v a14b").family, last_frame=mandelbrot(64, 32, 60))


@pytest.fixture(scope="module")
def of_controls(sample_of: Callable[[str], Sample]) -> Batch:
    """Three clips that are guided, of which the second is regenerated in part only."""
    return batch_of(sample_of("wan_vace experts").family, inpaint_mask=(hole(64, 32, 0),) * 9)


def batch_of(family: Any, **of_second: Any) -> Batch:
    media = build_media(family)
    media[1] = dataclasses.replace(media[1], **of_second)
    encoded = family.load_media_encoder(torch.float32, CPU)(media)
    latents = torch.stack([tensors.pop("latents") for tensors in encoded])
    prompts = encode_texts(family, *PROMPTS)
    conditioning = [prompt | tensors for prompt, tensors in zip(prompts, encoded, strict=True)]
    places = {"transformer": [1, 2], "transformer_2": [0]}
    return Batch(family, latents, torch.tensor([0.1, 0.95, 0.9]), conditioning, places)


@pytest.fixture(scope="module", params=["of_texts", "of_images", "of_controls"])
def batch(request: pytest.FixtureRequest) -> Batch:
    return request.getfixturevalue(request.param)


def request(conditioning: Sequence[Conditioning], **settings: Any) -> PreviewRequest:
    fixed = {"width": 64, "height": 32, "num_frames": 5, "num_inference_steps": 8, "guidance_scale": 1.0}
    return PreviewRequest(
        conditioning=conditioning[0], negative=conditioning[1], seed=0, **{**fixed, **settings}
    )


def test_each_sample_is_the_work_of_the_expert_of_its_noise_level(batch: Batch) -> None:
    family = batch.family
    model = family.load_transformer(torch.float32)
    assert isinstance(model, Composite)
    calls: list[tuple[str, int]] = []
    forwards: list[object] = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    for name, expert in family.parts_of(model).items():
        expert.register_forward_pre_hook(
            lambda _module, _args, kwargs, name=name: calls.append((name, len(kwargs["timestep"]))),
            with_kwargs=True,
        )
    with torch.no_grad():
        mixed = batch.predict(family, model)
        assert calls == [(name, len(places)) for name, places in batch.places.items()]
        assert len(forwards) == 1  # a wrapper for distributed training allows no second one
        for name, places in batch.places.items():
            single = type(family)(family.folder, trained=[name])
            expert = single.load_transformer(torch.float32)
            assert torch.equal(mixed[places], batch.predict(single, expert, places))
    assert not torch.allclose(mixed[0], mixed[1])


@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True)])
def test_the_flags_change_nothing_and_only_the_blocks_of_the_expert_that_is_used_run(
    of_controls: Batch, flags: tuple[bool, bool]
) -> None:
    model = adapted_transformer(of_controls.family)

    def run(places: list[int]) -> list[torch.Tensor | None]:
        model.zero_grad()
        velocity = of_controls.predict(of_controls.family, model, places)
        velocity.square().mean().backward()
        return [velocity.detach(), *(value.grad for value in model.parameters() if value.requires_grad)]

    for used, places in of_controls.places.items():
        expected, engine = run(places), engine_with(flags)
        with gradient_engine(engine):
            found = run(places)
        names = [name for name, value in model.named_parameters() if value.requires_grad]
        for name, first, second in zip(names, expected[1:], found[1:], strict=True):
            assert (first is not None) == name.startswith(f"{used}."), name
            assert (first is None and second is None) or torch.equal(first, second), name
        assert torch.equal(expected[0], found[0])
        report = engine.report()
        assert report.blocks_run == report.blocks_recomputed == 3 + 2  # those of one expert
        assert (report.bytes_offloaded > 0) == flags[1]


def test_each_expert_is_trained_on_its_noise_levels(folder: PipelineFolder) -> None:
    for trained, expected in (
        (None, ((BOUNDARY, 1.0), (0.0, BOUNDARY))),
        (["transformer"], ((BOUNDARY, 1.0),)),
        (["transformer_2"], ((0.0, BOUNDARY),)),
        (["transformer_2", "transformer"], ((BOUNDARY, 1.0), (0.0, BOUNDARY))),
    ):
        assert Wan(folder, trained=trained).noise_ranges == expected


@pytest.mark.parametrize("trained", [None, ["transformer"], ["transformer_2"]])
def test_each_saved_lora_does_the_same_in_its_place_in_the_pipeline(
    trained: list[str] | None, batch: Batch, tmp_path: Path
) -> None:
    both = batch.family
    family = type(both)(both.folder, trained=trained)
    model = adapted_transformer(family).eval()
    tensors, settings = adapter_tensors(model), adapter_settings(model)
    files = [file.name for file in family.lora_files.save(tmp_path, tensors, settings)]
    assert files == list(family.lora_files.by_name)
    assert set(files) <= FILES
    assert_does_as(pairs_of(*family.lora_files.read(tmp_path)), model)
    assert_does_as(family.lora_files.loaded(tmp_path), model)

    pipeline = both.pipeline.from_pretrained(both.folder.path)
    for name in family.trained:
        pipeline.load_lora_weights(
            tmp_path,
            weight_name=family.lora_file_names[name],
            adapter_name=name,
            load_into_transformer_2=name == "transformer_2",
        )
    reloaded = Composite({name: pipeline.components[name] for name in BOTH})
    with torch.no_grad():
        found = batch.predict(both, reloaded)
        before = batch.predict(both, both.load_transformer(torch.float32))
        for name, places in batch.places.items():
            if name not in family.trained:
                assert torch.equal(found[places], before[places])
                continue
            expected = batch.predict(family, model, places)
            assert torch.equal(found[places], expected)
            assert not torch.allclose(before[places], expected, atol=1e-3)


def test_layers_that_diffusers_knows_by_its_own_names_only_have_these_in_the_file(
    folder: PipelineFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Wan(folder)
    model = family.empty_transformer()
    layers = find_target_layers(model, ["proj_out"], unused_modules=[])
    family.lora_files.settle(model, layers, rank=2)
    assert family.lora_files.spelling == DIFFUSERS
    assert "diffusers' names, by which ComfyUI does not find the layers" in caplog.text
    expected = {f"{name}.proj_out" for name in family.trained}
    tensors = {
        f"{layer}.lora_{matrix}.weight": torch.ones_like(model.get_parameter(f"{layer}.weight"), device="cpu")
        for layer in expected
        for matrix in "AB"
    }
    tensors = {
        name: tensor[:2] if ".lora_A." in name else tensor[:, :2].clone() for name, tensor in tensors.items()
    }
    family.lora_files.save(tmp_path, tensors, {"r": 2, "lora_alpha": 1, "target_modules": sorted(expected)})
    assert family.lora_files.loaded(tmp_path).keys() == expected

    family = Wan(folder)
    monkeypatch.setattr(family.lora_files, "ask_loader", lambda *_: {})
    with pytest.raises(UserError, match=r"WanPipeline loads no LoRA on transformer.proj_out, transformer_2"):
        family.lora_files.settle(model, layers, rank=2)


def test_one_transformer_keeps_the_usual_file_name(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    family = Wan(PipelineFolder(path=tmp_path))
    assert family.trainable == ("transformer",)
    assert list(family.lora_files.by_name) == ["pytorch_lora_weights.safetensors"]


@pytest.mark.parametrize("trained", [None, ["transformer"], ["transformer_2"]])
def test_previews_draw_with_both_experts_whichever_are_trained(
    trained: list[str] | None, folder: PipelineFolder, conditioning: list[Conditioning]
) -> None:
    family = Wan(folder, trained=trained)
    generated = [
        family.sample(adapted_transformer(family).eval(), torch.float32, [request(conditioning)])[0]
        for _ in range(2)
    ]
    assert bytes_of(generated[0]) == bytes_of(generated[1])

    pipeline = two_experts()
    pipeline.register_modules(**family.parts_of(adapted_transformer(family).eval()))
    calls = dict.fromkeys(family.trainable, 0)
    for name in calls:
        pipeline.components[name].register_forward_pre_hook(
            lambda _module, _args, name=name: calls.update({name: calls[name] + 1})
        )
    embeds = family._prompt_embeds(conditioning[:1])
    expected = generated_by(pipeline, request(conditioning), prompt_embeds=embeds, num_frames=5)
    assert bytes_of(generated[0]) == expected
    assert min(calls.values()) > 0

    with group_of_one() as group:
        family.shards = BaseShards(group, CPU, family.block_lists)
        model = adapted_transformer(family).eval()
        parts = family.preview_models(model).values()
        frozen = [weight for part in parts for weight in part.parameters() if not weight.requires_grad]
        assert all(map(is_sharded, frozen))
        shared = family.sample(model, torch.float32, [request(conditioning)])[0]
    assert bytes_of(shared) == expected


def test_the_expert_that_is_not_trained_is_drawn_with_in_the_format_of_the_other_and_streamed(
    folder: PipelineFolder, conditioning: list[Conditioning]
) -> None:
    family = Wan(folder, trained=["transformer_2"])
    layers = quantizable_layers(family.empty_transformer(), family.block_lists)
    family.quantization = Quantization(format=weight_format("int8"), layers=tuple(layers), device=CPU)
    pipeline, resident = two_experts(), family.load_component("transformer", torch.float32)
    pipeline.register_modules(transformer=resident, transformer_2=adapted_transformer(family).eval())
    embeds = family._prompt_embeds(conditioning[:1])
    expected = generated_by(pipeline, request(conditioning), prompt_embeds=embeds, num_frames=5)

    model = adapted_transformer(family).eval()
    WeightStream([list(model.blocks)], CPU, num_slots=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (generated,) = family.sample(model, torch.float32, [request(conditioning)])
    assert bytes_of(generated) == expected
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    experts = family.preview_models(model)
    assert experts["transformer_2"] is model
    other = experts["transformer"]
    assert QuantizationReport.of(other) == QuantizationReport.of(resident)
    assert QuantizationReport.of(other).num_layers == len(layers)
    assert [name for name, _ in other.named_parameters() if name.startswith("blocks.")] == []


@pytest.mark.parametrize(
    ("told_by", "answer"),
    [("available_host_bytes", lambda: 1000), ("smallest_worth_moving", lambda *_: 2**20)],
)
def test_an_expert_for_which_the_host_has_no_room_or_that_is_too_small_goes_to_the_device(
    told_by: str, answer: Any, folder: PipelineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"diffsynth_lite.pipelines.wan.experts.{told_by}", answer)
    family = Wan(folder, trained=["transformer_2"])
    other = family.preview_models(family.load_transformer(torch.float32))["transformer"]
    assert len(list(other.blocks.parameters())) > 0


def test_an_expert_that_is_not_trained_is_drawn_with_in_the_dtype_of_the_other(
    folder: PipelineFolder, conditioning: list[Conditioning]
) -> None:
    family = Wan(folder, trained=["transformer_2"])
    model = family.load_transformer(torch.bfloat16)
    experts = family.preview_models(model)
    assert experts["transformer_2"] is model
    assert experts["transformer"].dtype == torch.bfloat16
    assert not any(parameter.requires_grad for parameter in experts["transformer"].parameters())
    assert len(family.sample(model, torch.float32, [request(conditioning)])[0]) == 5


def test_an_expert_that_was_read_for_a_preview_is_freed_afterwards(
    folder: PipelineFolder, conditioning: list[Conditioning], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Wan(folder, trained=["transformer"])
    model = family.load_transformer(torch.float32)
    read: dict[str, weakref.ref[torch.nn.Module]] = {}
    load = family.load_component

    def load_watched(name: str, dtype: torch.dtype) -> Any:
        component = load(name, dtype)
        read[name] = weakref.ref(component)
        return component

    monkeypatch.setattr(family, "load_component", load_watched)
    family.sample(model, torch.float32, [request(conditioning, num_inference_steps=2)])
    free_memory()
    assert set(read) == {"vae", "transformer_2"}
    assert [name for name, component in read.items() if component() is not None] == []


def test_the_second_expert_is_needed_and_part_of_the_models_identity(tmp_path: Path) -> None:
    two_experts().save_pretrained(tmp_path)
    family = Wan(PipelineFolder(path=tmp_path), trained=["transformer"])
    family.check_folder()
    identity = family.fingerprint()
    (weights,) = (tmp_path / "transformer_2").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert family.fingerprint() != identity
    index = tmp_path / "model_index.json"
    identity, settings = family.fingerprint(), json.loads(index.read_text())
    index.write_text(json.dumps(settings | {"boundary_ratio": 0.9}))
    assert Wan(family.folder).fingerprint() != identity
    weights.unlink()
    with pytest.raises(UserError, match="transformer_2 holds no safetensors weights"):
        family.check_folder()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boundary_ratio": None}, "names transformer_2, but no boundary_ratio"),
        ({"transformer_2": [None, None]}, r"boundary_ratio 0.875 .* names no transformer_2"),
        ({"transformer": [None, None]}, r"boundary_ratio 0.875 .* names no transformer;"),
    ],
)
def test_half_a_pair_of_experts_is_refused_by_name(
    changes: dict[str, object], message: str, folder: PipelineFolder, tmp_path: Path
) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps(folder.pipeline_config() | changes))
    with pytest.raises(UserError, match=message):
        Wan(PipelineFolder(path=tmp_path))


@pytest.mark.parametrize("trained", [None, ["transformer"]])
def test_a_preview_continues_from_its_image_through_both_experts(
    trained: list[str] | None, of_images: Batch
) -> None:
    family = WanI2V(of_images.family.folder, trained=trained)
    model = adapted_transformer(family).eval()
    item = build_media(family)[0]
    prompt = {"prompt_embeds": of_images.conditioning[0]["prompt_embeds"]}
    size = {"num_frames": len(item.frames)}
    asked = request([prompt, prompt], inputs=item.frames[:1], **size)
    (generated,) = family.sample(model, torch.float32, [asked])

    pipeline = wan_of_images("a14b")
    pipeline.register_modules(**family.parts_of(model))
    calls: list[dict[str, Any]] = []
    for expert in (pipeline.transformer, pipeline.transformer_2):
        expert.register_forward_pre_hook(
            lambda module, _args, kwargs: calls.append({"expert": module, **kwargs}), with_kwargs=True
        )
    given = {"image": item.frames[0], "prompt_embeds": family._prompt_embeds([prompt]), **size}
    assert bytes_of(generated) == generated_by(pipeline, asked, **given)
    assert len({call["expert"] for call in calls}) == 2
    for call in calls:
        assert torch.equal(call["hidden_states"][0, 16:], of_images.conditioning[0]["condition_latents"])


@pytest.mark.parametrize("trained", [None, ["transformer_2"]])
def test_a_preview_follows_its_control_through_both_experts(
    trained: list[str] | None, of_controls: Batch
) -> None:
    family = WanVACE(of_controls.family.folder, trained=trained)
    model, item = adapted_transformer(family).eval(), build_media(family)[0]
    prompt = {"prompt_embeds": of_controls.conditioning[0]["prompt_embeds"]}
    asked = request([prompt, prompt], control=item.control, num_frames=len(item.frames))
    (generated,) = family.sample(model, torch.float32, [asked])

    pipeline = vace_of_two_experts()
    pipeline.register_modules(**family.parts_of(model))
    calls: list[dict[str, Any]] = []
    for expert in (pipeline.transformer, pipeline.transformer_2):
        expert.register_forward_pre_hook(
            lambda module, _args, kwargs: calls.append({"expert": module, **kwargs}), with_kwargs=True
        )
    given = {"prompt_embeds": family._prompt_embeds([prompt]), "num_frames": len(item.frames)}
    assert bytes_of(generated) == generated_by(pipeline, asked, video=list(item.control), **given)
    assert len({call["expert"] for call in calls}) == 2
    trained_on = family.model_inputs(of_controls.conditioning[:1], {"dtype": torch.float32})
    for call in calls:
        assert torch.equal(call["control_hidden_states"], trained_on["control_bcfhw"])


def test_each_expert_is_read_from_its_file_by_the_names_of_the_models_repository(
    of_controls: Batch, tmp_path: Path
) -> None:
    family = WanVACE(of_controls.family.folder)
    high, low = family.parts_of(family.load_transformer(torch.float32)).values()
    expected = of_controls.predict(family, Composite({"transformer": low, "transformer_2": high}))
    files = {}
    for key, expert in {"model.transformer_file": low, "model.transformer_2_file": high}.items():
        files[key] = str(tmp_path / f"{key}.safetensors")  # not those that the folder has
        save_file(original_layout(expert), files[key])
    family.take_files(component_files(files, family.denoisers))
    assert torch.equal(of_controls.predict(family, family.load_transformer(torch.float32)), expected)


@pytest.mark.parametrize(
    "images", [[mandelbrot(64, 32, 40)], [mandelbrot(64, 32, 40), mandelbrot(64, 32, 50)]]
)
def test_a_preview_leads_to_a_last_frame_where_it_is_given_one(
    images: list[Image.Image], of_images: Batch
) -> None:
    family = of_images.family
    prompt = {"prompt_embeds": of_images.conditioning[0]["prompt_embeds"]}
    model, given = family.load_transformer(torch.float32), []
    for expert in family.parts_of(model).values():
        expert.register_forward_pre_hook(
            lambda _module, _args, kwargs: given.append(kwargs["hidden_states"][0, 16:]), with_kwargs=True
        )
    sizes = {"num_frames": 9, "num_inference_steps": 2}
    family.sample(model, torch.float32, [request([prompt, prompt], inputs=tuple(images), **sizes)])
    last = images[1] if len(images) > 1 else None
    item = dataclasses.replace(build_media(family)[0], first_frame=images[0], last_frame=last)
    [encoded] = family.load_media_encoder(torch.float32, CPU)([item])
    assert len(given) == 2
    assert all(torch.equal(condition, encoded["condition_latents"]) for condition in given)
