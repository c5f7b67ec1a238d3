"""What is refused before any weights are loaded, though it would only matter later or never be noticed."""

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from PIL import Image
from prepared_run import PROCESS, load_config_of
from release_layouts import two_experts

from diffsynth_lite.data.video import write_video
from diffsynth_lite.doctor.model import model_table
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import flux2, ltx_video, qwen_image, qwen_image_edit, sdxl, wan_animate, wan_i2v
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training.builder import build_transformer
from diffsynth_lite.training.checks import bind_family, check_run
from diffsynth_lite.training.distilled import distillation_warning

# For families that take multiples of 32 pixels.
OF_32 = {"validation.width": "64", "validation.height": "32"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (64, 32), "red").save(tmp_path / "data" / f"{name}.png")
        (tmp_path / "data" / f"{name}.txt").write_text("a red square")
    (tmp_path / "run.yaml").write_text(
        f"model: {{family: qwen_image, path: {tmp_path}/model}}\n"
        f"data: {{path: {tmp_path}/data, cache_dir: {tmp_path}/cache}}\noutput: {{dir: {tmp_path}/run}}\n"
    )
    return tmp_path


def refusal(root: Path, **changes: str) -> str:
    with pytest.raises(UserError) as caught:
        check_run(load_config_of(root, changes), PROCESS)
    return str(caught.value)


def edit_pairs(root: Path) -> dict[str, str]:
    """Make the data edit pairs; the settings for them."""
    qwen_image_edit.tiny().save_pretrained(root / "model")
    shutil.copytree(root / "data", root / "before")
    return {"model.family": "qwen_image_edit", "data.input_dirs": f"[{root}/before]"}


def test_a_kernel_of_attention_is_refused_for_a_model_that_would_not_take_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    flash = {"model.attention": "_native_flash"}
    message = "model.attention: _native_flash is not for model.family qwen_image: diffusers 0."
    assert "set train.micro_batch_size: 1" in refusal(root, **flash, **{"train.micro_batch_size": "2"})
    for owner, name, value, reason in (
        (QwenImage, "masks_attention", "always", "gives its attention masks"),
        (QwenImage, "dispatches_attention", False, "lets nobody choose"),
        (QwenDoubleStreamAttnProcessor2_0, "_attention_backend", None, "lets nobody choose"),
    ):
        with monkeypatch.context() as patch:
            if value is None:
                patch.delattr(owner, name)
            else:
                patch.setattr(owner, name, value)
            found = refusal(root, **flash)
            assert message in found
            assert reason in found


def test_held_out_items_that_are_also_trained_on_are_refused(root: Path) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    inside = shutil.copytree(root / "data", root / "data" / "held_out")
    message = "validation.data: 2 of its 2 items are also trained on, such as a.png"
    assert message in refusal(root, **{"validation.data": str(inside)})
    linked = root / "linked"
    linked.symlink_to(inside)
    assert message in refusal(root, **{"validation.data": str(linked)})
    elsewhere = shutil.move(inside, root / "held_out")
    checked = check_run(load_config_of(root, {"validation.data": str(elsewhere)}), PROCESS)
    assert len(checked.held_out.records) == len(checked.training.records) == 2


def test_held_out_edits_never_start_from_the_inputs_of_training_items_of_their_names(root: Path) -> None:
    changes = edit_pairs(root) | {"validation.prompts": "[]"}
    assert len(check_run(load_config_of(root, changes), PROCESS).training.records) == 2
    held_out = shutil.copytree(root / "data", root / "held_out")
    assert "validation.data: " in refusal(root, **changes, **{"validation.data": str(held_out)})


def test_the_results_of_edits_are_not_cropped_at_random(root: Path) -> None:
    """Their inputs are not cropped, so that the two would not fit."""
    changes = edit_pairs(root) | {"validation.prompts": "[]"}
    assert "data.crop: " in refusal(root, **changes, **{"data.crop": "random"})


def test_images_of_a_family_that_can_edit_too_are_cropped_at_random(root: Path) -> None:
    flux2.tiny().save_pretrained(root / "model")
    changes = {"model.family": "flux2", "data.crop": "random"}
    check_run(load_config_of(root, changes), PROCESS)
    inputs = f"[{{path: {root}/data}}, {{path: {root}/data, input_dirs: [{root}/data]}}]"
    sources = {"data.path": "null", "data.repeats": "1", "data.sources": inputs}
    assert "data.crop: " in refusal(root, **changes, **sources)


def test_a_preview_input_that_the_family_cannot_encode_is_named(root: Path) -> None:
    flux2.tiny().save_pretrained(root / "model")
    image = root / "thin.png"
    Image.new("RGB", (700, 70)).save(image)
    changes = {"model.family": "flux2", "validation.prompts": "[a circle]"}
    message = f"validation.inputs: {image}: 700x70 pixels: an input image of this family has"
    assert message in refusal(root, **changes, **{"validation.inputs": f"[{image}]"})


def test_a_preview_input_that_is_cut_off_or_not_there_is_named(root: Path) -> None:
    changes = edit_pairs(root) | {"validation.prompts": "[make it blue]"}
    image = root / "street.jpg"
    Image.effect_noise((64, 64), 50).save(image)
    changes["validation.inputs"] = f"[{image}]"
    check_run(load_config_of(root, changes), PROCESS)
    image.write_bytes(image.read_bytes()[:-400])
    assert str(image) in refusal(root, **changes)
    image.unlink()
    assert f"validation.inputs: there is no file {image}" in refusal(root, **changes)


def test_a_distilled_model_is_warned_of_once(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    check_run(load_config_of(root, {}), PROCESS)
    assert caplog.messages == []
    monkeypatch.setattr(qwen_image.QwenImage, "distilled", "its files say so; better train the base")
    check_run(load_config_of(root, {}), PROCESS)
    assert caplog.messages == [
        f"model.path: {root}/model is distilled to few steps: its files say so; better train the base. "
        "Training knows nothing of the distillation and undoes it: with the LoRA, few steps give blurred "
        "images. To keep them, set objective.guidance_target, or model.training_adapter where there is one "
        "for it; or train what it was made from, with previews on this one (validation.model_path)."
    ]
    caplog.clear()
    # What all who train it must know is logged all the same.
    monkeypatch.setattr(qwen_image.QwenImage, "notice", "its licence excludes somebody")
    check_run(load_config_of(root, {"objective.guidance_target": "3"}), PROCESS)
    assert caplog.messages == ["its licence excludes somebody"]


@pytest.mark.parametrize(
    ("location", "is_distilled"),
    [
        ("someone/SDXL-Lightning", True),
        ("/models/sdxl_turbo_v1", True),
        ("Hyper-SDXL-8steps", True),
        ("LTX-Video-0.9.8-13B-distilled", True),
        ("lightx2v/Wan2.1-T2V-14B-StepDistill-CfgDistill-Diffusers", True),
        ("SDXL-DMD2", True),
        ("SDXLTurbo", True),
        ("turbo/Qwen-Image", False),
        ("someone/flux-dev-de-distilled", False),
        ("someone/Flux-DeDistilled", False),
        ("Undistilled-XL", False),
        ("Turbocharger", False),
    ],
)
def test_a_name_shows_a_distilled_model_where_no_file_does(
    root: Path, location: str, is_distilled: bool
) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    family = bind_family(load_config_of(root, {}))
    warning = distillation_warning(family, location)
    assert (warning is not None) == is_distilled
    assert warning is None or "by its name, not by its files" in warning
    of_file = distillation_warning(family, "someone/Turbo", location)
    assert of_file == (warning and warning.replace("model.path: ", "model.transformer_file: "))


def test_a_named_set_of_layers_is_the_familys_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    family = qwen_image.QwenImage
    sets = {name: ", ".join(family.target_sets[name]) for name in ("attention", "all")}
    for named, listed in (
        ("attention", f"[{sets['attention']}]"),
        ("all", f"[{sets['all']}]"),
        ("[img_mod.1, attention]", f"[img_mod.1, {sets['attention']}]"),
    ):
        found, same = (
            check_run(load_config_of(root, {"lora.target_modules": value}), PROCESS).target_layers
            for value in (named, listed)
        )
        assert found == same
    monkeypatch.setattr(family, "target_sets", {})
    message = "lora.target_modules: all is not a set of layers of qwen_image; list them instead"
    for chosen in ("all", "[img_mod.1, all]"):
        assert message in refusal(root, **{"lora.target_modules": chosen})


def test_a_problem_with_the_layers_is_not_one_of_the_optimizer_and_both_are_named(root: Path) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    (one,) = refusal(root, **{"lora.groups": "[{match: nothing, rank: 3}]"}).splitlines()
    assert one.startswith("lora.groups[0].match: nothing is in the name of no layer")
    both = {"lora.target_modules": "[nothing]", "train.optimizer": "nowhere.Adam"}
    assert "train.optimizer: nowhere.Adam needs nowhere" in refusal(root, **both)
    slow = {
        "lora.groups": "[{match: to_q, learning_rate: 1.0e-8}]",
        "train.lr_scheduler": "polynomial",
    }
    assert "lora.groups: the learning rate of to_q, 1e-08 with train.lr_scheduler" in refusal(root, **slow)


def test_an_optimizer_that_averages_as_it_goes_trains_one_expert_only(root: Path) -> None:
    two_experts().save_pretrained(root / "model")
    changes = {"model.family": "wan", "data.width": "32", "data.height": "32"}
    changes |= {"train.optimizer": "schedule_free", "train.lr_scheduler": "constant"}
    message = "schedule_free counts every step into its average, and a step trains one of transformer and "
    assert message in refusal(root, **changes)
    check_run(load_config_of(root, changes | {"lora.components": "[transformer]"}), PROCESS)
    check_run(load_config_of(root, changes | {"train.optimizer": "adamw"}), PROCESS)


def test_an_autoencoder_that_float16_is_too_narrow_for_is_refused(root: Path) -> None:
    sdxl.tiny().save_pretrained(root / "model")
    changes = {
        "model.family": "sdxl",
        "model.vae_dtype": "float16",
        "objective.loss_weighting": "none",
    } | OF_32
    assert "model.vae_dtype: float16 is too narrow" in refusal(root, **changes)
    checked = check_run(load_config_of(root, {**changes, "model.vae_dtype": "bfloat16"}), PROCESS)
    assert checked.num_blocks > 0


@pytest.mark.parametrize("family", [wan_i2v, ltx_video])
def test_clips_that_end_with_an_image_are_refused_where_the_model_leads_to_none(
    root: Path, family: ModuleType
) -> None:
    family.tiny().save_pretrained(root / "model")
    shutil.move(root / "data", root / "starts")
    (root / "data").mkdir()
    for name in ("a", "b"):
        frames = [Image.new("RGB", (64, 64), (place * 20, 0, 0)) for place in range(9)]
        write_video(root / "data" / f"{name}.mp4", frames, fps=16)
        (root / "data" / f"{name}.txt").write_text("a red square")
    changes = {
        "model.family": family.__name__.rpartition(".")[2],
        "data.frame_counts": "[9]",
        "data.first_frame_dir": f"{root}/starts",
        "validation.prompts": "[]",
        **OF_32,
    }
    checked = check_run(load_config_of(root, changes), PROCESS)
    assert [record.kind for record in checked.training.records] == ["image_to_video"] * 2
    message = "data: 2 clips, such as a.mp4, end with an image, and this model only starts them from one"
    assert message in refusal(root, **changes, **{"data.last_frame_dir": f"{root}/starts"})


def test_faces_and_controls_belong_to_the_families_that_take_them(root: Path) -> None:
    wan_animate.tiny().save_pretrained(root / "model")
    (root / "clips").mkdir()
    frames = [Image.new("RGB", (64, 64), (place * 20, 0, 0)) for place in range(9)]
    write_video(root / "clips" / "a.mp4", frames, fps=30)
    (root / "clips" / "a.txt").write_text("a red square")
    clip = f"[{root}/clips/a.mp4]"
    for name in ("poses", "faces"):
        shutil.copytree(root / "clips", root / name)
    data = {"data.path": f"{root}/clips", "data.frame_counts": "[9]", "model.family": "wan_animate"}
    faces = {"data.face_dir": f"{root}/faces"}
    changes = data | faces | {"data.control_dir": f"{root}/poses", "validation.prompts": "[]"}
    checked = check_run(load_config_of(root, changes), PROCESS)
    assert [record.kinds for record in checked.training.records] == [("control",)]
    (root / "starts").mkdir()
    shutil.copy(root / "data" / "a.png", root / "starts" / "a.png")
    started = changes | {"data.first_frame_dir": f"{root}/starts"}
    for missing in ("data.face_dir", "data.control_dir"):
        kept = {key: value for key, value in started.items() if key != missing}
        assert "data: 1 items, such as a.mp4, have no face or no control" in refusal(root, **kept)
    previews = {"validation.prompts": "[a circle]", "validation.inputs": f"[{root}/data/a.png]"}
    given = changes | previews | {"validation.control": clip}
    assert "validation.faces: is empty" in refusal(root, **given)
    assert "validation.control: is empty" in refusal(root, **(changes | previews))
    image = {"validation.faces": f"[{root}/data/a.png]"}
    assert "validation.faces: there is no clip" in refusal(root, **(given | image))
    wan_i2v.tiny().save_pretrained(root / "model")
    other = data | faces | {"model.family": "wan_i2v", "validation.prompts": "[]"}
    assert "data: 1 clips, such as a.mp4, have a face" in refusal(root, **other)


def test_last_frames_of_previews_are_refused_where_the_model_leads_to_none(root: Path) -> None:
    flux2.tiny().save_pretrained(root / "model")
    image = f"[{root}/data/a.png]"
    changes = {"model.family": "flux2", "validation.prompts": "[a circle]"}
    changes |= {"validation.inputs": image, "validation.last_frames": image}
    assert "validation.last_frames: has no effect" in refusal(root, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora.components": "[transformer, vae]"},
            "lora.components: vae cannot be trained; this pipeline has tr",
        ),
        (
            {"validation.prompts": "[a circle]", "validation.inputs": "[{root}/data/a.png]"},
            "validation.inputs: has no effect",
        ),
        # With one step, diffusers would divide by zero, and draw black images.
        ({"validation.num_inference_steps": "1"}, "validation.num_inference_steps: 1, "),
        # Outside of the blocks nothing is quantised, so that to leave it out would do nothing.
        (
            {"model.quantize": "int8", "model.quantize_skip": "[to_q, proj_out]"},
            "model.quantize_skip: proj_out match no linear layer of the blocks of QwenImageTransformer2DMo",
        ),
        (
            {"model.quantize": "int8", "model.quantize_skip": "['*']"},
            "model.quantize_skip: * leave out all 28 layers",
        ),
        (
            {"memory.stream_text_encoder": "true"},
            "the text encoder has no more layers than memory.stream_slots, 2, so that all would stay",
        ),
        (
            {"memory.stream_text_encoder": "true", "memory.stream_slots": "1", "memory.min_bytes": "99999"},
            "memory.stream_text_encoder: there is nothing to stream in 2 blocks",
        ),
    ],
)
def test_a_setting_that_is_wrong_or_without_effect_is_refused(
    root: Path, changes: dict[str, str], message: str
) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    assert message in refusal(root, **{key: value.format(root=root) for key, value in changes.items()})


def test_settings_that_are_refused_elsewhere_have_an_effect_here(root: Path) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    no_previews = {"validation.num_inference_steps": "1", "validation.prompts": "[]", "data.crop": "random"}
    checked = check_run(load_config_of(root, {"lora.components": "[transformer]", **no_previews}), PROCESS)
    assert checked.family.trained == ("transformer",)


def test_a_transformer_may_come_from_a_file_which_is_checked_with_all_else(root: Path) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    weights = root / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    file = shutil.move(weights, root / "qwen_turbo.safetensors")
    given = {"model.transformer_file": str(file)}
    family = check_run(load_config_of(root, given), PROCESS).family
    assert model_table(load_config_of(root, given), family)["transformer"].endswith(f", trained, from {file}")
    message = f"model.transformer_2_file: {file} has no effect, as this pipeline has one transformer"
    assert message in refusal(root, **given, **{"model.transformer_2_file": str(file)})
    file.write_bytes(file.read_bytes()[:-1])
    problems = refusal(root, **given, **{"output.dir": f"{root}/data/run"}).splitlines()
    assert [problem.partition(":")[0] for problem in problems] == ["output.dir", "model.transformer_file"]


def test_layers_that_are_not_to_be_quantised_are_left_out(root: Path) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    assert check_run(load_config_of(root), PROCESS).family.quantization is None
    every, some = (
        check_run(load_config_of(root, {"model.quantize": "int8", **changes}), PROCESS).family.quantization
        for changes in ({}, {"model.quantize_skip": "[img_mod.1, transformer_blocks.*.attn.to_q]"})
    )
    assert every is not None
    assert some is not None
    left_out = {
        f"transformer_blocks.{block}.{name}" for block in range(2) for name in ("img_mod.1", "attn.to_q")
    }
    assert set(every.layers) - set(some.layers) == left_out


def test_a_model_whose_blocks_have_nothing_to_quantise_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    monkeypatch.setattr("diffsynth_lite.training.frozen_weights.quantizable_layers", lambda *_: [])
    message = "model.quantize: int8 has no effect, as the blocks of this model have no linear layers"
    assert message in refusal(root, **{"model.quantize": "int8"})


def test_a_format_whose_kernels_are_not_installed_is_refused_with_what_installs_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    found = refusal(root, **{"model.quantize": "nf4", "model.text_encoder_quantize": "nf4"})
    for key in ("model.quantize", "model.text_encoder_quantize"):
        assert f"{key}: nf4 needs bitsandbytes, which is not installed: pip install bitsandbytes" in found


def test_a_family_that_loads_its_model_without_quantising_it_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    config = load_config_of(root, {"model.quantize": "int8"})
    checked = check_run(config, PROCESS)
    plain = qwen_image.tiny().transformer
    monkeypatch.setattr(type(checked.family), "load_transformer", lambda *_: plain)
    with pytest.raises(UserError, match=r"model\.quantize: int8 has no effect, as qwen_image loads"):
        build_transformer(config, checked)


def test_text_encoders_that_are_trained_are_neither_quantised_nor_streamed(root: Path) -> None:
    sdxl.tiny().save_pretrained(root / "model")
    trained = {"model.family": "sdxl", "lora.components": "[unet, text_encoder, text_encoder_2]"}
    for key, value in (("model.text_encoder_quantize", "int8"), ("memory.stream_text_encoder", "true")):
        message = f"{key}: has no effect, as lora.components names the text encoders"
        assert message in refusal(root, **trained, **{key: value})


def test_a_streamed_text_encoder_that_the_host_does_not_hold_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    monkeypatch.setattr("diffsynth_lite.training.frozen_weights.available_host_bytes", lambda: 20 * 1024)
    streamed = {"memory.stream_text_encoder": "true", "memory.stream_slots": "1"}
    message = "memory.stream_text_encoder: the layers take 64.0 KiB of host memory, a copy for"
    assert message in refusal(root, **streamed)


def test_a_text_encoder_of_unknown_layers_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    monkeypatch.setattr(QwenImage, "empty_component", lambda *_: None)
    monkeypatch.setattr(QwenImage, "empty_transformer", lambda _: qwen_image.tiny().transformer)
    message = "model.text_encoder_quantize: has no effect, as the text encoder has no known transformer"
    assert message in refusal(root, **{"model.text_encoder_quantize": "int8"})
