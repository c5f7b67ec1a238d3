"""The checkpoint store: what it writes, keeps, sets aside and refuses."""

import errno
import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffsynth_lite.errors import CheckpointError, RunDivergedError, RunStoppedError, UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import choose, chosen_copy, lora_copies
from diffsynth_lite.training.checkpoint.manifest import Checkpoint, read_checkpoint, read_manifest
from diffsynth_lite.training.checkpoint.store import CheckpointStore

Tensors = dict[str, dict[str, Tensor]]


def contents(step: int) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and documents that differ from those of any other step."""
    generator = torch.Generator().manual_seed(step)
    adapter = {
        "blocks.0.lora_A.weight": torch.randn(4, 8, generator=generator),
        "blocks.0.lora_B.weight": torch.randn(8, 4, generator=generator).bfloat16(),
    }
    optimizer = {"blocks.0.lora_A.weight::step": torch.tensor(float(step)), "count": torch.tensor([step])}
    documents = {"state": {"step": step, "skipped": []}, "config": f"seed: {step}\n# ünïcode\n"}
    return {"adapter": adapter, "optimizer": optimizer}, documents


def save(store: CheckpointStore, step: int) -> Path:
    return store.save(step, *contents(step))


def assert_holds(checkpoint: Checkpoint | None, step: int) -> None:
    assert checkpoint is not None
    tensors, documents = contents(step)
    assert checkpoint.step == step
    assert checkpoint.documents == documents
    for name, expected in tensors.items():
        found = checkpoint.tensors(name)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[key].dtype == tensor.dtype
            assert torch.equal(found[key], tensor)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_saved_checkpoint_is_read_back_exactly_also_where_it_was_moved_to(
    store: CheckpointStore, tmp_path: Path
) -> None:
    path = save(store, 200)
    assert path == store.folder / "step-00000200"
    files = ["COMPLETE", "adapter.safetensors", "config.json", "optimizer.safetensors", "state.json"]
    assert names(path) == files
    assert_holds(store.latest(), 200)
    assert_holds(read_checkpoint(path), 200)
    assert_holds(read_checkpoint(path.rename(tmp_path / "my best one")), 200)


def test_tensors_that_require_grad_or_share_memory_are_saved_by_value(store: CheckpointStore) -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    memory = torch.arange(6.0)  # as the 8-bit state of bitsandbytes does, whose tables are one for all layers
    shared = {"a.table": memory, "b.table": memory, "b.part": memory[2:4], "transposed": weight.t()}
    checkpoint = read_checkpoint(store.save(1, {"adapter": shared, "optimizer": {}}, {}))
    saved = checkpoint.tensors("adapter")
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {
        name: tensor.tolist() for name, tensor in shared.items()
    }
    assert checkpoint.tensors("optimizer") == {}


def test_a_fresh_folder_has_no_latest_checkpoint(store: CheckpointStore) -> None:
    assert store.latest() is None
    assert store.steps() == []
    store.clean()
    assert not store.folder.exists()


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(store: CheckpointStore) -> None:
    for step in (9, 10, 123_456_789):
        save(store, step)
    assert store.steps() == [10, 123_456_789]
    assert_holds(store.latest(), 123_456_789)


@pytest.mark.parametrize("keep", [1, 3])
def test_only_the_newest_complete_checkpoints_are_kept(tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path, keep=keep)
    for step in range(1, 6):
        save(store, step)
    assert names(tmp_path) == [f"step-0000000{step}" for step in range(6 - keep, 6)]
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)


@pytest.mark.parametrize("name", ["COMPLETE", "adapter.safetensors"])
def test_a_torn_folder_neither_counts_as_kept_nor_is_removed(store: CheckpointStore, name: str) -> None:
    for step in (1, 2):
        save(store, step)
    os.truncate(store.folder / "step-00000002" / name, 20)
    save(store, 3)
    assert store.steps() == [1, 2, 3]
    save(store, 4)
    assert store.steps() == [2, 3, 4]


def test_saving_a_complete_step_again_leaves_it_alone_and_drops_old_ones(store: CheckpointStore) -> None:
    save(store, 4)
    path = save(store, 5)
    store.keep = 1
    inode = path.stat().st_ino
    other_tensors, other_documents = contents(6)
    assert store.save(5, other_tensors, other_documents) == path
    assert path.stat().st_ino == inode
    assert store.steps() == [5]
    assert_holds(store.latest(), 5)


def test_saving_over_a_damaged_step_sets_it_aside(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    flip_last_bit(save(store, 5) / "adapter.safetensors")
    assert_holds(read_checkpoint(save(store, 5)), 5)
    assert names(store.folder) == [".bad-step-00000005-1", "step-00000005"]
    assert "adapter.safetensors is damaged" in caplog.text


def test_a_damaged_newest_checkpoint_is_set_aside_loudly_and_the_previous_one_used(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 1)
    for attempt in (1, 2):
        flip_last_bit(save(store, 2) / "optimizer.safetensors")
        caplog.clear()
        assert_holds(store.latest(), 1)
        aside = f".bad-step-00000002-{attempt}"
        assert aside in names(store.folder)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "optimizer.safetensors is damaged" in caplog.text
        assert aside in caplog.text


def test_damaged_checkpoints_only_are_an_error_however_often_one_asks(store: CheckpointStore) -> None:
    for step in (1, 2):
        flip_last_bit(save(store, step) / "state.json")
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"damaged checkpoints only .*\.bad-step-00000001-1"
        ) as caught:
            store.latest()
        assert isinstance(caught.value, UserError)
        assert "\n" not in str(caught.value)


def test_a_folder_renamed_to_another_step_is_not_taken_for_it(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2).rename(store.folder / "step-00000900")
    with pytest.raises(CheckpointError, match="holds step 2"):
        read_checkpoint(store.folder / "step-00000900")
    assert_holds(store.latest(), 1)


def test_files_and_folders_of_others_are_left_alone(store: CheckpointStore, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(save(store, 1), elsewhere)
    foreign = ["step-abc", "step-00000001 copy", "step-1", "step-000000001", "step-0000000७"]
    foreign += ["notes", ".tmp-mine"]
    for name in foreign:
        (store.folder / name).mkdir()
    (store.folder / "step-00000009").write_text("a file")
    (store.folder / "step-00000008").symlink_to(elsewhere)
    for step in (2, 3, 4):
        save(store, step)
    store.clean()
    assert_holds(store.latest(), 4)
    assert store.steps() == [3, 4]
    kept = [*foreign, "step-00000009", "step-00000008", "step-00000003", "step-00000004"]
    assert names(store.folder) == sorted(kept)


def test_leftovers_of_killed_writers_are_cleaned_on_request_only(store: CheckpointStore) -> None:
    save(store, 1)
    for name in (".tmp-step-00000002-0123abcd", ".tmp-step-00000000-4567cdef"):
        shutil.copytree(store.folder / "step-00000001", store.folder / name)
    assert_holds(store.latest(), 1)
    assert len(names(store.folder)) == 3
    store.clean()
    assert names(store.folder) == ["step-00000001"]


def test_going_on_from_an_earlier_step_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20):
        save(store, step)
    store.cut_back_to(10)
    assert_holds(store.latest(), 10)
    save(store, 15)
    assert names(tmp_path) == [".left-step-00000020-1", "step-00000010", "step-00000015"]
    assert_holds(store.latest(), 15)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_that_is_not_finite_is_refused_by_name(store: CheckpointStore, value: float) -> None:
    tensors, documents = contents(1)
    tensors["adapter"]["blocks.0.lora_B.weight"][3, 1] = value
    with pytest.raises(RunDivergedError, match=r"step 1: blocks\.0\.lora_B\.weight of adapter"):
        store.save(1, tensors, documents)
    assert not store.folder.exists()


def test_a_document_that_json_cannot_hold_leaves_nothing_behind(store: CheckpointStore) -> None:
    tensors, _ = contents(1)
    with pytest.raises(ValueError, match="JSON compliant"):
        store.save(1, tensors, {"state": {"loss": float("nan")}})
    assert names(store.folder) == []


@pytest.mark.parametrize("name", ["../adapter", "a/b", "", ".", "COMPLETE\n", "ädapter"])
def test_a_file_name_that_readers_would_refuse_is_not_written(store: CheckpointStore, name: str) -> None:
    with pytest.raises(ValueError, match="not a name for a file"):
        store.save(1, {}, {name: 1})
    assert names(store.folder) == []


def test_a_failed_removal_of_an_old_checkpoint_is_only_a_warning(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    for step in (1, 2):
        save(store, step)
    monkeypatch.setattr(shutil, "rmtree", refuse)
    save(store, 3)
    assert store.steps() == [2, 3]
    assert_holds(store.latest(), 3)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert ".tmp-step-00000001" in caplog.text


def test_a_missing_folder_manifest_or_tensors_file_is_named(store: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"ema\.safetensors"):
        read_checkpoint(save(store, 1)).tensors("ema")
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no file COMPLETE"):
        read_checkpoint(tmp_path)


def test_the_files_get_the_permissions_that_the_user_s_mask_gives(store: CheckpointStore) -> None:
    mask = os.umask(0o027)
    try:
        path = save(store, 1)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((path / "adapter.safetensors").stat().st_mode) == 0o640


def test_a_folder_that_cannot_be_made_stops_the_run_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStoppedError, match="Not a directory"):
        save(CheckpointStore(tmp_path / "file" / "checkpoints", keep=1), 1)


@pytest.mark.parametrize(("keep_loras", "steps"), [(None, [1, 2, 3, 4, 5]), (2, [2, 3, 4, 5]), (0, [4, 5])])
def test_copies_of_the_lora_stay_for_each_checkpoint_and_so_many_more(
    tmp_path: Path, keep_loras: int | None, steps: list[int]
) -> None:
    export = tmp_path / "lora"
    (export / "pictures").mkdir(parents=True)
    files = [export / "pytorch_lora_weights.safetensors", export / "pictures" / "prompt-00.png"]
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, keep_loras=keep_loras)
    for step in range(1, 6):
        for file in files:
            file.write_text(f"{file.name} of step {step}")
        save(store, step)
        store.keep_lora(step, export, files)
    copies = lora_copies(store.folder)
    assert [copy.step for copy in copies] == steps
    for copy in copies:
        assert names(copy.path) == ["COMPLETE", "pictures", "pytorch_lora_weights.safetensors"]
        assert read_manifest(copy.path).files.keys() == {
            "pytorch_lora_weights.safetensors",
            "pictures/prompt-00.png",
        }
        for file in files:
            assert (copy.path / file.relative_to(export)).read_text() == f"{file.name} of step {copy.step}"
    assert store.steps() == [4, 5]
    assert_holds(store.latest(), 5)
    store.cut_back_to(4)
    assert [copy.step for copy in lora_copies(store.folder)] == steps[:-1]


def test_the_copy_that_was_chosen_stays_and_where_the_choice_is_damaged_all_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunFolder(tmp_path)
    store = CheckpointStore(run.checkpoints_folder, keep=1, keep_loras=0, chosen=lambda: chosen_copy(run))
    run.lora_folder.mkdir()
    file = run.lora_folder / "pytorch_lora_weights.safetensors"
    file.write_text("a LoRA")
    kept = []
    for step in range(1, 8):
        save(store, step)
        store.keep_lora(step, run.lora_folder, [file])
        kept.append([copy.step for copy in lora_copies(store.folder)])
        if step == 2:
            choose(run, lora_copies(store.folder)[0])
        elif step == 4:
            run.chosen_file.write_text("torn")
        elif step == 5:
            choose(run, None)
            store.pinned = 4  # as the recommended step, whose checkpoint may be gone
    assert kept == [[1], [2], [2, 3], [2, 4], [2, 4, 5], [4, 6], [4, 7]]
    assert caplog.messages == [f"{run.chosen_file}: names no LoRA of the run; remove it, or choose one again"]


@pytest.mark.parametrize("reason", ["pinned", "known_good"])
def test_a_pinned_step_and_those_of_every_so_many_stay_besides_the_newest(
    tmp_path: Path, reason: str
) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_every=4)
    for step in range(1, 8):
        setattr(store, reason, 5 if step >= 5 else 2)
        save(store, step)
    assert names(tmp_path) == [f"step-0000000{step}" for step in (4, 5, 7)]
