"""What is refused before any weights are loaded, though it would only matter later or never be noticed."""

import shutil
from pathlib import Path

import pytest
from PIL import Image
from prepared_run import PROCESS, load_config_of

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import flux2, qwen_image, qwen_image_edit
from diffsynth_lite.training.preflight import check_run


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


def test_held_out_items_that_are_also_trained_on_are_refused(root: Path) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    inside = shutil.copytree(root / "data", root / "data" / "held_out")
    message = "validation.data: 2 of its 2 items are also trained on, such as a.png"
    assert message in refusal(root, **{"validation.data": str(inside)})
    linked = root / "linked"
    linked.symlink_to(inside)
    assert message in refusal(root, **{"validation.data": str(linked)})
    apart = shutil.move(inside, root / "held_out")
    checked = check_run(load_config_of(root, {"validation.data": str(apart)}), PROCESS)
    assert len(checked.validation_records) == len(checked.records) == 2


def test_held_out_edits_never_start_from_the_inputs_of_training_items_of_their_names(root: Path) -> None:
    changes = edit_pairs(root) | {"validation.prompts": "[]"}
    assert len(check_run(load_config_of(root, changes), PROCESS).records) == 2
    held_out = shutil.copytree(root / "data", root / "held_out")
    assert "validation.data: " in refusal(root, **changes, **{"validation.data": str(held_out)})


def test_the_results_of_edits_are_not_cropped_at_random(root: Path) -> None:
    """Their inputs are not cropped, so that the two would not fit."""
    changes = edit_pairs(root) | {"validation.prompts": "[]"}
    assert "data.crop: " in refusal(root, **changes, **{"data.crop": "random"})
    qwen_image.tiny().save_pretrained(root / "model")
    check_run(load_config_of(root, {"data.crop": "random"}), PROCESS)


def test_pictures_of_a_family_that_can_edit_too_are_cropped_at_random(root: Path) -> None:
    flux2.tiny().save_pretrained(root / "model")
    changes = {"model.family": "flux2", "data.crop": "random"}
    check_run(load_config_of(root, changes), PROCESS)
    inputs = f"[{{path: {root}/data}}, {{path: {root}/data, input_dirs: [{root}/data]}}]"
    sources = {"data.path": "null", "data.repeats": "1", "data.sources": inputs}
    assert "data.crop: " in refusal(root, **changes, **sources)


def test_a_preview_input_that_the_family_cannot_encode_is_named(root: Path) -> None:
    flux2.tiny().save_pretrained(root / "model")
    picture = root / "thin.png"
    Image.new("RGB", (700, 70)).save(picture)
    changes = {"model.family": "flux2", "validation.prompts": "[a circle]"}
    message = f"validation.inputs: {picture}: 700x70 pixels: an input picture of this family has"
    assert message in refusal(root, **changes, **{"validation.inputs": f"[{picture}]"})


def test_a_preview_input_that_is_cut_off_is_named(root: Path) -> None:
    changes = edit_pairs(root) | {"validation.prompts": "[make it blue]"}
    picture = root / "street.jpg"
    Image.effect_noise((64, 64), 50).save(picture)
    changes["validation.inputs"] = f"[{picture}]"
    check_run(load_config_of(root, changes), PROCESS)
    picture.write_bytes(picture.read_bytes()[:-400])
    assert str(picture) in refusal(root, **changes)


def test_preview_inputs_that_the_family_does_not_look_at_are_refused(root: Path) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    changes = {"validation.prompts": "[a circle]", "validation.inputs": f"[{root}/data/a.png]"}
    assert "validation.inputs: has no effect" in refusal(root, **changes)


def test_a_component_that_the_pipeline_cannot_train_is_named(root: Path) -> None:
    qwen_image.tiny().save_pretrained(root / "model")
    message = "lora.components: vae cannot be trained; this pipeline has transformer"
    assert message in refusal(root, **{"lora.components": "[transformer, vae]"})
    checked = check_run(load_config_of(root, {"lora.components": "[transformer]"}), PROCESS)
    assert checked.family.trained == ("transformer",)
