"""A run that is continued with other settings: refused, allowed by name, and kept in its lineage."""

import json
import re
import shutil

import pytest
from tiny_run import TinyRun, checkpoint_tensors, differing

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
    assert "set resume.allow: [train.learning_rate]" in caplog.text
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


def test_what_was_allowed_and_did_not_change_changes_nothing(begun_run: TinyRun, whole_run: TinyRun) -> None:
    assert begun_run.train("resume.allow=[data, train.learning_rate]") == 0
    tensors = checkpoint_tensors(whole_run.folder, 6)
    assert differing(tensors, checkpoint_tensors(begun_run.folder, 6)) == []


def test_other_data_may_be_trained_on_when_that_is_allowed(
    begun_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    (begun_run.root / "data" / "0.txt").write_text("a blue square")
    assert begun_run.train() == 2
    assert "set resume.allow: [data]" in caplog.text
    assert begun_run.train("resume.allow=[data]") == 0
    assert list(lineage(begun_run)[1]["changed"]) == ["data.items"]


@pytest.mark.parametrize("change", ["train.seed=1", "lora.rank=8", "objective.sigma_max=0.9"])
def test_what_makes_it_another_run_can_never_be_allowed(
    begun_run: TinyRun, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    assert begun_run.train(change) == 2
    assert "resume.allow" not in caplog.text
    assert begun_run.train(change, f"resume.allow=[{change.partition('=')[0]}]") == 2
    assert "resume.allow" in caplog.text


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


def test_a_family_that_means_another_shift_than_it_did_is_refused_until_the_config_restores_it(
    begun_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(QwenImage, "family_shift", lambda _self, _shape: 3.0)
    assert begun_run.train() == 2
    assert re.search(r"objective\.shift at 64x32 was 1\.62824\d+, is 3\.0\. Restore these", caplog.text)
    assert begun_run.train("objective.shift=resolution") == 0
    assert lineage(begun_run)[1]["changed"] == {}


def test_a_run_of_a_version_that_kept_no_shifts_is_held_against_what_the_family_gave_then(
    begun_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Before its first checkpoint, where the folder alone tells.
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
