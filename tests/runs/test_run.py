"""Whole runs through the training command, on a tiny pipeline of the real classes."""

import base64
import errno
import hashlib
import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from huggingface_hub import ModelCard as HubCard
from PIL import Image
from tiny_run import UNWATCHED, TinyRun, checkpoint_tensors, differing, lora_metadata_of, make_run

from diffsynth_lite.cli.arguments import command
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.run_folder.model_card import is_as_written
from diffsynth_lite.run_folder.progress import StepResult
from diffsynth_lite.training import trainer
from diffsynth_lite.training.builder import TrainingObjects

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def test_a_run_folder_holds_what_the_readme_says(watched_run: TinyRun) -> None:
    assert watched_run.train() == 0
    names = {path.name for path in watched_run.folder.iterdir() if not path.name.startswith(".")}
    assert names == {
        *("config.yaml", "resolved.yaml", "command.json", "contract.json", "lineage.json", "status.json"),
        *("metrics.jsonl", "items.jsonl", "item_losses.jsonl", "sample_losses.jsonl", "layers.jsonl"),
        *("checkpoints", "previews", "lora"),
        "report.html",
    }
    assert "6 <small>of 6</small>" in (watched_run.folder / "report.html").read_text()
    assert sorted(path.name for path in (watched_run.folder / "checkpoints").iterdir()) == [
        *("lora-00000002", "lora-00000004", "lora-00000006"),
        "step-00000004",
        "step-00000006",
    ]
    assert (watched_run.folder / "config.yaml").read_text() == watched_run.config.read_text()
    status = watched_run.status()
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, 6)
    with Image.open(watched_run.folder / "previews" / "grid.png") as grid:
        assert grid.width > 2 * 64
    measured = {
        name: [row["step"] for row in watched_run.metrics(name=f"{name}.jsonl")]
        for name in ("item_losses", "sample_losses", "layers")
    }
    assert measured == {
        "item_losses": [0, 6],
        "layers": [0, 2, 4, 6],
        "sample_losses": [1, 2, 3, 4, 5, 6],
    }
    drawn = sorted(path.name[:23] for path in (watched_run.folder / "previews").glob("step-*.png"))
    assert drawn == [f"step-{step:08d}-prompt-{place:02d}" for step in (0, 6) for place in (0, 1)]
    metadata = lora_metadata_of(watched_run.folder / "lora")
    assert_told(metadata)
    contract = json.loads((watched_run.folder / "contract.json").read_text())
    digest = hashlib.sha256(json.dumps(contract, sort_keys=True).encode()).hexdigest()
    assert metadata["diffsynth_lite.contract"] == digest
    assert str(watched_run.root) not in str(metadata)
    assert_card(watched_run)


def assert_card(run: TinyRun) -> None:
    """The card of a LoRA for a model that is not a release, with what the run drew and measured."""
    text = (run.folder / "lora" / "README.md").read_text()
    assert is_as_written(text)
    header = HubCard(text).data.to_dict()
    assert "base_model" not in header
    assert header["pipeline_tag"] == "text-to-image"
    widget = [("a red circle", "00"), ("a blue square on a white background", "01")]
    assert header["widget"] == [
        {"text": prompt, "output": {"url": f"pictures/prompt-{place}.png"}} for prompt, place in widget
    ]
    for place, preview in enumerate(sorted(run.folder.glob("previews/step-00000006-*.png"))):
        image = run.folder / "lora" / "pictures" / f"prompt-{place:02d}.png"
        assert image.read_bytes() == preview.read_bytes()
    losses = [row["train_fixed_noise_loss"] for row in run.metrics() if "train_fixed_noise_loss" in row]
    for step, loss in zip((0, 6), losses, strict=True):
        assert f"training items, step {step} | {loss:.4f} |" in text
    assert str(run.root) not in text


def assert_told(metadata: dict[str, str]) -> None:
    """What a file says of six steps on five images, on a model that is not a release."""
    expected = {
        "modelspec.architecture": "Qwen-Image/lora",
        "modelspec.title": "qwen_image LoRA",
        "modelspec.resolution": "64x32",
        "diffsynth_lite.step": "6",
        "diffsynth_lite.dtype": "float32",
        "ss_network_dim": "4",
        "ss_network_alpha": "8",
        "ss_network_dropout": "0.1",
        "ss_num_train_images": "5",
        "ss_total_batch_size": "4",
        "ss_learning_rate": "0.01",
        "ss_optimizer": "torch.optim.adamw.AdamW(weight_decay=0.01,betas=(0.9, 0.999),eps=1e-08)",
    }
    assert {name: metadata.get(name) for name in expected} == expected
    tags = {"a red circle": 3, "a red circle on a white background": 2}
    assert json.loads(metadata["ss_tag_frequency"]) == {"data": tags}
    assert json.loads(metadata["ss_bucket_info"])["buckets"] == {"0": {"resolution": [64, 32], "count": 5}}
    assert metadata.keys().isdisjoint(("ss_output_name", "ss_sd_model_name", "modelspec.license"))
    thumbnail = base64.b64decode(metadata["modelspec.thumbnail"].removeprefix("data:image/jpeg;base64,"))
    with Image.open(io.BytesIO(thumbnail)) as image:
        assert image.size == (64, 32)


def test_the_loss_on_fixed_noise_falls(tiny_run: TinyRun) -> None:
    settings = ("train.steps=20", "output.checkpoint_every_steps=20", "lora.dropout=0")
    assert tiny_run.train(*settings, "validation.loss_items=3") == 0
    losses = [row["train_fixed_noise_loss"] for row in tiny_run.metrics() if "train_fixed_noise_loss" in row]
    assert len(losses) == 2
    assert losses[1] < 0.9 * losses[0]


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> TinyRun:
    """A run that was done as a whole, and again up to its fourth step."""
    settings = ("train.warmup_steps=3", "validation.every_steps=3")
    run = replace(make_run(tmp_path_factory.mktemp("halved"), tiny_model), settings=settings)
    for arguments in (
        (f"output.dir={run.root / 'whole'}",),
        (f"output.dir={run.root / 'half'}", "train.steps=4"),
    ):
        assert run.train(*arguments) == 0
        AcceleratorState._reset_state(reset_partial_state=True)
    return run


@pytest.mark.parametrize(
    "second_half",
    [
        (),
        ("--use_gradient_checkpointing_offload",),
        ("--no-use_gradient_checkpointing",),
        (
            "memory.policy=every_n",
            "memory.policy_n=2",
            "memory.save_attention=park",
            "memory.skip_dead_ops=off",
        ),
    ],
)
def test_a_resumed_run_is_the_same_run_bit_for_bit(
    halved: TinyRun, second_half: tuple[str, ...], tmp_path: Path
) -> None:
    whole, parts = halved.root / "whole", tmp_path / "parts"
    shutil.copytree(halved.root / "half", parts)
    assert halved.train(f"output.dir={parts}", *UNWATCHED, *second_half) == 0
    assert differing(checkpoint_tensors(whole, 6), checkpoint_tensors(parts, 6)) == []
    rows = {row["step"]: row for row in halved.metrics(parts) if "loss" in row}
    assert rows == {row["step"]: row for row in halved.metrics(whole) if "loss" in row}


def test_a_run_takes_repeatable_kernels_when_asked_to(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORKSPACE, "")
    monkeypatch.delenv(WORKSPACE)
    repeatable = []
    train_step = trainer.train_step

    def observed(built: TrainingObjects, step: int) -> StepResult:
        repeatable.append((torch.are_deterministic_algorithms_enabled(), os.environ.get(WORKSPACE)))
        return train_step(built, step)

    monkeypatch.setattr(trainer, "train_step", observed)
    assert tiny_run.train("train.steps=4") == 0
    assert tiny_run.train("train.deterministic=true") == 0
    assert repeatable == [(False, None)] * 4 + [(True, ":4096:8")] * 2


def test_what_has_no_repeatable_kernel_is_named_on_the_screen_and_in_the_status(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    monkeypatch.setattr(
        trainer, "train_step", lambda *_: torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    )
    assert tiny_run.train("train.deterministic=true") == 2
    status = tiny_run.status()
    assert (status["state"], status["exit_code"]) == ("failed", 2)
    assert "train.deterministic: true" in status["message"]
    monkeypatch.setenv(WORKSPACE, ":4096:2")
    assert tiny_run.train("train.deterministic=true") == 2
    assert "CUBLAS_WORKSPACE_CONFIG is ':4096:2' in the environment" in caplog.messages[-1]


def test_a_finished_run_says_where_its_results_are_and_changes_nothing(
    finished_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    before = {
        path: path.stat().st_mtime_ns for path in finished_run.folder.rglob("*") if path.name != ".lock"
    }
    assert finished_run.train() == 0
    assert f"LoRA: {finished_run.folder / 'lora'}" in caplog.text
    sample = command("sample", "--lora", str(finished_run.folder))
    assert caplog.messages[-2:] == [
        f'Next: {sample} --prompt "..."',
        f'Which step was best: {sample} --every-checkpoint --prompt "..."',
    ]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_run_folder_that_was_moved_resumes(begun_run: TinyRun) -> None:
    moved = begun_run.root / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(begun_run.folder, moved)
    assert begun_run.train(f"output.dir={moved}") == 0
    assert (moved / "checkpoints" / "step-00000006").is_dir()


def test_a_different_run_in_the_same_folder_is_refused_by_name(
    begun_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    kept = ("status.json", "command.json", "resolved.yaml", "lineage.json")
    before = [(begun_run.folder / name).read_bytes() for name in kept]
    assert begun_run.train("lora.rank=8", "data.width=32") == 2
    assert "lora.rank was 4, is 8" in caplog.text
    assert "data.width was 64, is 32" in caplog.text
    assert "another output.dir" in caplog.text
    assert [(begun_run.folder / name).read_bytes() for name in kept] == before


def test_a_run_whose_set_of_layers_means_others_now_is_refused_by_the_first_of_them(
    begun_run: TinyRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = [layer for layer in QwenImage.default_target_modules if layer != "img_mod.1"]
    monkeypatch.setattr(QwenImage, "default_target_modules", tuple(fewer))
    assert begun_run.train() == 2
    assert "4 tensors differ (first: transformer_blocks.0.img_mod.1.lora_A.weight)" in caplog.text
    assert "with the version that began the run" in caplog.text
    monkeypatch.undo()
    assert begun_run.train() == 0


def test_resume_must_needs_a_checkpoint_and_none_needs_an_empty_folder(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def killed(*_args: object) -> None:
        raise KeyError("as if killed while it encodes")

    def last_word() -> str:
        return json.loads((tiny_run.folder / "command.json").read_text())["arguments"][-1]

    assert tiny_run.train("--resume", "must") == 2
    assert "holds no checkpoint" in caplog.text
    assert last_word() == "must"  # from the lock on
    monkeypatch.setattr("diffsynth_lite.training.run.encode", killed)
    with pytest.raises(SystemExit, match="1"):
        tiny_run.train("--resume", "none", "train.steps=2")
    assert "status.json" not in caplog.text  # nothing is missing
    assert last_word() == "train.steps=2"
    assert tiny_run.train("--resume", "none") == 2
    assert "resume.source: none starts a new run" in caplog.text
    assert last_word() == "train.steps=2"


def test_a_step_that_is_not_finite_is_skipped_and_the_run_goes_on(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    predict = QwenImage.predict
    calls = []

    def predict_nan_once(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return predict(*args, **kwargs) * (float("nan") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(QwenImage, "predict", predict_nan_once)
    assert tiny_run.train() == 0
    assert "Step 2 is skipped: loss nan" in caplog.text
    remark = "skipped steps, as loss or gradients were not finite: 1"
    assert f"Finished after 6 steps; {remark}." in caplog.text
    assert tiny_run.status()["message"] == f"finished; {remark}"
    assert [row.get("skipped_steps") for row in tiny_run.metrics() if "loss" in row] == [None, *[1] * 5]
    assert ".png" in caplog.text
    assert [row["step"] for row in tiny_run.metrics() if row.get("loss", 0) is None] == [2]
    tensors = checkpoint_tensors(tiny_run.folder, 6)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    steps = {float(value) for name, value in tensors.items() if name.endswith("::step")}
    assert steps == {5.0}  # the optimizer did not count the skipped one


def test_too_many_skipped_steps_in_a_row_stop_the_run(
    begun_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = checkpoint_tensors(begun_run.folder, 2)
    predict = QwenImage.predict
    monkeypatch.setattr(QwenImage, "predict", lambda *args, **kwargs: predict(*args, **kwargs) * float("nan"))
    for _ in range(2):  # Also where no step is left to take.
        assert begun_run.train("train.steps=3") == 3
        assert begun_run.status()["state"] == "diverged"
    assert caplog.text.count("step 3, the last one, was skipped: its loss or gradients were not finite") == 2
    # Those of earlier starts count.
    assert begun_run.train("train.steps=20", "output.checkpoint_every_steps=20") == 3
    assert "step 7: loss and gradients were not finite in 5 steps in a row" in caplog.text
    assert begun_run.status()["state"] == "diverged"
    assert differing(before, checkpoint_tensors(begun_run.folder, 2)) == []


def test_a_run_without_a_checkpoint_is_not_written_over_by_another(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def killed(*_args: object) -> None:
        raise KeyError("as if killed before its first checkpoint")

    with monkeypatch.context() as patched:
        patched.setattr("diffsynth_lite.training.saver.Saver.save", killed)
        with pytest.raises(SystemExit, match="1"):
            tiny_run.train()
    metrics = tiny_run.metrics()
    contract = tiny_run.folder / "contract.json"
    intact = contract.read_text()
    contract.write_text("[1")
    assert tiny_run.train() == 2
    assert "contract.json is damaged, and there is no checkpoint" in caplog.text
    contract.write_text(intact)
    lineage = tiny_run.folder / "lineage.json"
    intact = lineage.read_text()
    lineage.write_text("[1]")
    assert tiny_run.train("memory.auto=true") == 2
    assert "lineage.json is damaged, and there is no checkpoint" in caplog.text
    lineage.write_text(intact)
    assert tiny_run.train("lora.rank=8") == 2
    assert "lora.rank was 4, is 8" in caplog.text
    assert tiny_run.metrics() == metrics
    assert tiny_run.train() == 0


def test_a_run_whose_last_export_failed_is_finished_by_the_same_command(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_settings: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("diffsynth_lite.training.saver.export_lora", full)
        assert tiny_run.train("output.checkpoint_every_steps=6") == 3
    assert tiny_run.status()["state"] == "stopped"
    assert tiny_run.train("output.checkpoint_every_steps=6") == 0
    assert (tiny_run.folder / "lora" / "pytorch_lora_weights.safetensors").is_file()
    assert tiny_run.status()["state"] == "finished"


def test_prompts_changed_on_resume_get_images_of_their_own(watched_run: TinyRun) -> None:
    assert watched_run.train("train.steps=2") == 0
    assert watched_run.train("train.steps=4", "validation.prompts=[a green star]") == 0
    with Image.open(watched_run.folder / "previews" / "grid.png") as grid:
        assert grid.width < 2 * 128 + 190  # one column: step 4, for the old images show other prompts
