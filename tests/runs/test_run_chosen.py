"""A LoRA that a person chose while a run goes on, and the copies that a run writes for ComfyUI."""

from pathlib import Path

import pytest
from tiny_run import TinyRun, checkpoint_part, checkpoint_tensors, differing

from diffsynth_lite.cli.main import main
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.run_folder.loras import lora_copies


def test_a_run_that_goes_on_keeps_the_chosen_lora_and_is_otherwise_the_same_and_a_new_one_starts_from_it(
    begun_run: TinyRun, whole_run: TinyRun
) -> None:
    folder, chosen = begun_run.folder, checkpoint_part(begun_run.folder, 2)
    assert main(["choose", f"{folder}@2"]) == 0
    kept = (folder / "checkpoints" / "lora-00000002" / "pytorch_lora_weights.safetensors").read_bytes()
    few = ("output.keep_adapters=0", "output.keep_checkpoints=1")
    assert begun_run.train(*few) == 0
    copies = {copy.step: copy.path for copy in lora_copies(folder / "checkpoints")}
    assert sorted(copies) == [2, 4, 6]
    assert (copies[2] / "pytorch_lora_weights.safetensors").read_bytes() == kept
    assert differing(checkpoint_tensors(folder, 6), checkpoint_tensors(whole_run.folder, 6)) == []
    second = begun_run.root / "second"
    still = ("train.steps=1", "train.learning_rate=1e-30", "train.weight_decay=0")
    assert begun_run.train(f"lora.init_from={folder}@chosen", f"output.dir={second}", *still) == 0
    assert differing(checkpoint_part(second, 1), chosen) == []


def test_each_save_is_copied_as_convert_would_and_a_copy_that_fails_ends_no_run(
    begun_run: TinyRun, whole_run: TinyRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, by_hand = tmp_path / "loras", tmp_path / "by_hand.safetensors"
    theirs.mkdir()
    (theirs / "other.safetensors").write_text("theirs")
    setting = f"output.copy_to={theirs}"
    assert begun_run.stopped_after(2, setting) == 75
    copy = theirs / "run.safetensors"
    assert main(["convert", f"{begun_run.folder}@4", str(by_hand), "--to", "comfyui"]) == 0
    assert copy.read_bytes() == by_hand.read_bytes()
    assert sorted(path.name for path in theirs.iterdir()) == ["other.safetensors", "run.safetensors"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffsynth_lite.lora.conversion.save_file", full)
        assert begun_run.train(setting) == 0
    assert f"output.copy_to: {copy} could not be written ([Errno 28] No space left on device)" in caplog.text
    assert copy.read_bytes() == by_hand.read_bytes()
    assert differing(checkpoint_tensors(begun_run.folder, 6), checkpoint_tensors(whole_run.folder, 6)) == []


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("output.copy_to={root}/nowhere",), "output.copy_to: {root}/nowhere: is not a folder"),
        (("output.copy_to={root}/tiny.yaml",), "tiny.yaml: is not a folder"),
        (("output.copy_to=/proc",), "output.copy_to: /proc cannot be written to"),
        (("output.copy_to={root}",), "run.safetensors is there already, and not of this run; move or remove"),
        (("output.copy_to={root}", "output.dir={root}/first"), "first.safetensors is there already"),
    ],
)
def test_where_no_copy_can_be_is_refused_before_weights_load(
    begun_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(QwenImage, "load_transformer", lambda *_: pytest.fail("weights were loaded"))
    root = begun_run.root
    for name in ("run", "first"):
        (root / f"{name}.safetensors").write_text("theirs")
    assert begun_run.train(*(setting.format(root=root) for setting in settings)) == 2
    assert message.format(root=root) in caplog.messages[-1]
