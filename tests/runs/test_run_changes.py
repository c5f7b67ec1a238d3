"""A run that resumes on other data or with other settings: refused, allowed by name, in its lineage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import TinyRun, checkpoint_tensors, differing, tiny_image

from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.checkpoint.resume import ResumePolicy
from diffsynth_lite.training.checkpoint.store import CheckpointStore


def lineage(run: TinyRun) -> list[dict]:
    return json.loads((run.folder / "lineage.json").read_text())


def test_a_schedule_may_change_when_its_name_is_given_and_the_lineage_says_so(
    begun_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    assert begun_run.train("train.learning_rate=0.02") == 2
    assert "set 'resume.allow=[train.learning_rate]'" in caplog.text
    assert begun_run.train("train.learning_rate=0.02", "resume.allow=[train.learning_rate]") == 0
    assert "train.learning_rate was 0.01, is 0.02 from step 2 on" in caplog.text
    rates = {row["step"]: row["learning_rate"] for row in begun_run.metrics() if "learning_rate" in row}
    assert (rates[2], rates[3]) == (0.01, 0.02)
    first, second = lineage(begun_run)
    assert (first["step"], first["continues"], first["changed"]) == (0, None, {})
    assert (second["step"], second["continues"]) == (2, "step-00000002")
    assert second["changed"] == {"train.learning_rate": {"from": 0.01, "to": 0.02}}
    # From here on the new value is the run's.
    assert begun_run.train("train.steps=7", "train.learning_rate=0.02") == 0
    assert [entry["step"] for entry in lineage(begun_run)] == [0, 2, 6]


def test_other_data_may_be_trained_on_when_that_is_allowed(
    begun_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    (begun_run.root / "data" / "0.txt").write_text("a blue square")
    assert begun_run.train() == 2
    assert "set 'resume.allow=[data]'" in caplog.text
    assert begun_run.train("resume.allow=[data]") == 0
    assert list(lineage(begun_run)[1]["changed"]) == ["data.items"]


def test_another_base_model_is_refused_whatever_is_allowed(
    begun_run: TinyRun, tiny_model, caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(tiny_model, begun_run.root / "model")
    (weights,) = (copy / "vae").glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert begun_run.train(f"model.path={copy}", "resume.allow=[data]") == 2
    assert "model.weights was" in caplog.text
    assert "(model.weights is the content of model.path's files, or of" in caplog.text
    assert "set resume.allow" not in caplog.text


def test_a_run_of_a_version_that_kept_no_shifts_is_held_against_what_the_family_gave_then(
    begun_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Before its first checkpoint, where only the folder knows.
    shutil.rmtree(begun_run.folder / "checkpoints")
    file = begun_run.folder / "contract.json"
    contract = json.loads(file.read_text())
    assert contract.pop("objective.shift at 64x32") == pytest.approx(1.62824, abs=1e-5)
    file.write_text(json.dumps(contract))
    monkeypatch.setattr(QwenImage, "earlier_shift", lambda _self, _shape: 3.0)
    assert begun_run.train() == 2
    assert "objective.shift at 64x32 was 3.0, is 1.62824" in caplog.text
    monkeypatch.undo()
    assert begun_run.train() == 0


def test_starts_that_saved_nothing_stay_in_the_lineage(
    begun_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(begun_run.folder)
    store = CheckpointStore(folder.checkpoints_folder, keep=2)
    policy = ResumePolicy(source="auto", allow=(), folder=folder, store=store, earlier_shifts={})
    (saved,) = lineage(begun_run)
    killed = saved | {"step": 2, "continues": "step-00000002"}
    folder.lineage_file.write_text(json.dumps([saved, killed]))
    assert policy.earlier_starts(store.latest()) == [saved, killed]
    assert policy.earlier_starts(None) == [saved, killed]
    folder.lineage_file.write_text(json.dumps([killed]))  # another run's, or that of an earlier version
    assert policy.earlier_starts(store.latest()) == [saved]
    assert not caplog.messages
    folder.lineage_file.write_text("[[]]")
    assert policy.earlier_starts(store.latest()) == [saved]
    assert "is damaged" in caplog.text
    folder.lineage_file.unlink()
    assert policy.earlier_starts(store.latest()) == [saved]
    assert policy.earlier_starts(None) == []


def other_image(data: Path) -> None:
    tiny_image(80, 48, 77).save(data / "0.png")


def other_order(data: Path) -> None:
    (data / "0.png").rename(data / "9.png")
    (data / "0.txt").rename(data / "9.txt")


@pytest.mark.parametrize("change", [other_image, other_order])
def test_changed_data_are_another_run(
    begun_run: TinyRun, caplog: pytest.LogCaptureFixture, change: Callable[[Path], None]
) -> None:
    change(begun_run.root / "data")
    settings = (begun_run.folder / "resolved.yaml").read_bytes()
    assert begun_run.train("logging.every_steps=2") == 2
    assert (begun_run.folder / "resolved.yaml").read_bytes() == settings
    (refused,) = [record.message for record in caplog.records if "different run" in record.message]
    assert "data.items was '5 items, " in refused
    assert "data.decoder" not in refused
    assert "resume.allow=[data]" in refused


def test_names_may_change_where_the_order_stays(begun_run: TinyRun, whole_run: TinyRun) -> None:
    data = begun_run.root / "data"
    for path in data.iterdir():
        path.rename(data / f"moved-{path.name}")
    moved = data.rename(begun_run.root / "elsewhere")
    assert begun_run.train(f"data.path={moved}") == 0
    tensors = checkpoint_tensors(whole_run.folder, 6)
    assert differing(tensors, checkpoint_tensors(begun_run.folder, 6)) == []
    for name in ("pytorch_lora_weights.safetensors", "README.md"):
        whole, resumed = (run.folder / "lora" / name for run in (whole_run, begun_run))
        assert whole.read_bytes() == resumed.read_bytes()


def test_another_schema_of_the_cache_encodes_again_and_the_run_goes_on_bit_for_bit(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tiny_run.root / "whole"
    settings = ("data.caption_dropout=0.3", "data.crop=random", "data.crops_per_item=2")
    assert tiny_run.train(*settings, f"output.dir={whole}") == 0
    assert tiny_run.train(*settings, "train.steps=3") == 0
    before = json.loads((tiny_run.folder / "contract.json").read_text())
    monkeypatch.setattr("diffsynth_lite.data.cache._SCHEMA", 2)
    caplog.clear()
    assert tiny_run.train(*settings) == 0
    assert "encoding 10 items that the cache does not hold" in caplog.text
    assert json.loads((tiny_run.folder / "contract.json").read_text()) == before
    assert differing(checkpoint_tensors(whole, 6), checkpoint_tensors(tiny_run.folder, 6)) == []


@pytest.mark.parametrize("constant", ["IMAGE_DECODER_ID", "_TRANSFORM_ID"])
def test_another_decoder_is_refused_by_its_name(
    begun_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, constant: str
) -> None:
    monkeypatch.setattr(f"diffsynth_lite.data.items.{constant}", "v9 other")
    assert begun_run.train() == 2
    assert "data.decoder was 'v1 " in caplog.text
    assert "data.items" not in caplog.text
    assert begun_run.train("resume.allow=[data]") == 0
