"""The encoding of a run: with the cache and without, what is bad, and what is shared."""

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from PIL import Image
from prepared_run import CPU, PROCESS, Prepared, load_config_of, prepare
from pretended_processes import PretendedProcesses

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.data.batches import Batch
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.records import Part
from diffsynth_lite.data.sources import FoundRecords
from diffsynth_lite.errors import Problems, RunStoppedError, UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines.base.vae_tiles import VaeTiles
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training.checks import check_run
from diffsynth_lite.training.distributed.agreement import FolderGroup
from diffsynth_lite.training.encoding.dataset import read_records
from diffsynth_lite.training.encoding.hold_out import write_held_out
from diffsynth_lite.training.encoding.job import EncodingJob
from diffsynth_lite.training.encoding.run_encoding import TrainingData, encode_run
from diffsynth_lite.training.encoding.seals import _require_same_settings, seal_settings

CHANGES = {
    "data.width": "null",
    "data.height": "null",
    "data.resolutions": "[32, 48]",
    "data.crop": "random",
    "data.crops_per_item": "2",
    "data.caption_dropout": "0.3",
    "data.tag_shuffles": "2",
    "train.global_batch_size": "4",
    "validation.width": "64",
    "validation.height": "32",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    prepared = prepare(tmp_path_factory.mktemp("caching"))
    data = prepared.root / "data"
    for place, size in enumerate([(96, 48), (48, 96), (64, 64)]):
        image = Image.effect_mandelbrot(size, (-2, -1, 1, 1), 20 + place).convert("RGB")
        image.save(data / f"more {place}.png")
        (data / f"more {place}.txt").write_text(f"number {place}, a square, blue, large")
        mask = Image.new("L", size, 0)
        mask.paste(255, (0, 0, size[0] // 2 + 5, size[1]))
        (prepared.root / "masks").mkdir(exist_ok=True)
        mask.save(prepared.root / "masks" / f"more {place}.png")
    return prepared


def encode(prepared: Prepared, process: Any = PROCESS, **changes: str) -> TrainingData:
    config = load_config_of(prepared.root, CHANGES | changes)
    checked = check_run(config, PROCESS)
    return encode_run(config, checked, process)


def listed_as_bad(prepared: Prepared) -> list[str]:
    """Items in the list of the run's folder."""
    rows = (prepared.root / "run" / "quarantine.jsonl").read_text().splitlines()
    return [json.loads(row)["item"] for row in rows]


def first_batches(prepared: Prepared, encoded: TrainingData, **changes: str) -> list[Batch]:
    steps = prepared.build(CHANGES | changes, encoded=encoded).batches
    return [batch for batches in itertools.islice(steps, 6) for batch in batches]


def test_a_run_without_cache_has_the_same_batches_bit_for_bit_and_stores_nothing(
    prepared: Prepared, caplog: pytest.LogCaptureFixture
) -> None:
    cached = encode(prepared)
    live_folder = prepared.root / "live"
    changes = {"data.cache": "false", "data.cache_dir": str(live_folder), "data.num_workers": "2"}
    # Nor does it matter where the text encoder's weights wait.
    changes |= {"memory.stream_text_encoder": "true", "memory.stream_slots": "1"}
    caplog.set_level("INFO")
    live = encode(prepared, **changes)
    assert caplog.text.count("text encoder, first caption: streamed 4 blocks, ") == 1
    assert live.is_live
    assert not cached.is_live
    assert not list(live_folder.rglob("*.safetensors"))
    assert live.identity == cached.identity
    batches = list(
        zip(first_batches(prepared, live, **changes), first_batches(prepared, cached), strict=True)
    )
    assert len({cached_batch.bucket for _, cached_batch in batches}) > 2
    for ours, theirs in batches:
        assert (ours.bucket, ours.names, ours.positions) == (theirs.bucket, theirs.names, theirs.positions)
        assert torch.equal(ours.latents, theirs.latents)
        assert torch.equal(ours.noise, theirs.noise)
        for one, other in zip(ours.conditioning, theirs.conditioning, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
    for one_item, other_item in zip(live.validation_items, cached.validation_items, strict=True):
        assert torch.equal(one_item.latents, other_item.latents)
    assert [item.position for item in live.tracked_items] == [0, 16, 31]
    for one_tracked, other_tracked in zip(live.tracked_items, cached.tracked_items, strict=True):
        assert torch.equal(one_tracked.read().latents, other_tracked.read().latents)
        assert one_tracked.read() is one_tracked.read()  # encoded once
    for one_prompt, other_prompt in zip(live.previews, cached.previews, strict=True):
        assert torch.equal(
            one_prompt.conditioning["prompt_embeds"], other_prompt.conditioning["prompt_embeds"]
        )


def test_each_item_has_a_row_for_each_resolution_and_crop_and_all_orders_of_its_tags(
    prepared: Prepared,
) -> None:
    items = encode(prepared).items
    assert len(items) == 8 * 2 * 2
    captions = {
        items.row(place).name.partition("#")[0]: items.row(place).caption_keys for place in range(len(items))
    }
    assert len(captions["0.png"]) == 1
    assert len(captions["more 0.png"]) == 3


def test_what_guidance_steers_away_from_is_encoded_as_negative(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = type(prepared.checked.family)
    load = family.load_prompt_encoder
    encoded: list[Prompt] = []

    def recording(*arguments: Any) -> Any:
        encode = load(*arguments)
        return lambda prompts: encoded.extend(prompts) or encode(prompts)

    monkeypatch.setattr(family, "load_prompt_encoder", recording)
    encode(prepared, **{"data.cache_dir": str(tmp_path), "validation.negative_prompt": "blurred"})
    assert {prompt.text for prompt in encoded if prompt.is_negative} == {"", "blurred"}
    assert len(encoded) > 2


def test_the_second_start_loads_no_encoder_and_reads_no_media(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = encode(prepared)
    family = type(prepared.checked.family)

    def refuse(*_: object) -> None:
        raise AssertionError("loaded or read")

    monkeypatch.setattr(family, "load_prompt_encoder", refuse)
    monkeypatch.setattr(family, "load_media_encoder", refuse)
    monkeypatch.setattr("diffsynth_lite.data.media_index.check_image", refuse)
    monkeypatch.setattr("diffsynth_lite.data.media_index.file_fingerprint", refuse)
    assert encode(prepared).identity == first.identity


def test_captions_of_a_quantised_text_encoder_are_other_entries_and_those_of_a_streamed_one_are_not(
    prepared: Prepared,
) -> None:
    family = prepared.checked.family

    def identities(**changes: str) -> list[str]:
        job = EncodingJob(load_config_of(prepared.root, changes), family, CPU, FolderGroup())
        return [encoder.identity for _, encoder in job.passes]

    media, captions = identities()
    assert captions == family.prompt_encoder_id(torch.float32)  # as ever: the key of entries that are there
    assert identities(**{"memory.stream_text_encoder": "true"}) == [media, captions]
    assert identities(**{"model.text_encoder_quantize": "int8"}) == [media, f"{captions} int8"]


def test_sizes_that_the_data_come_to_are_refused_before_anything_is_encoded(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = QwenImage.check_size

    def check_that_it_is_not_wide(family: QwenImage, width: int, height: int, *, keys: str) -> None:
        check(family, width, height, keys=keys)
        if keys == "data.resolutions and data.max_aspect_ratio" and width > height:
            raise UserError(f"{keys}: {width}x{height} is too wide")

    monkeypatch.setattr(QwenImage, "check_size", check_that_it_is_not_wide)
    monkeypatch.setattr(QwenImage, "load_component", None)
    with pytest.raises(UserError, match=r"data\.max_aspect_ratio: \d+x\d+ is too wide"):
        encode(prepared)


def test_masks_become_loss_masks_at_the_size_of_the_latents(prepared: Prepared) -> None:
    data = prepared.root / "masked"
    data.mkdir()
    for path in (prepared.root / "data").glob("more *"):
        (data / path.name).write_bytes(path.read_bytes())
    changes = {"data.path": str(data), "data.mask_dir": str(prepared.root / "masks"), "data.crop": "center"}
    changes["data.crops_per_item"] = "1"
    for batch in first_batches(prepared, encode(prepared, **changes), **changes):
        assert batch.loss_mask is not None
        assert batch.loss_mask.shape == (len(batch.names), 1, 1, *batch.latents.shape[-2:])
        assert 0.5 < batch.loss_mask.mean() < 1


def test_bad_items_are_all_named_or_skipped_as_a_whole(prepared: Prepared, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for path in (prepared.root / "data").iterdir():
        (data / path.name).write_bytes(path.read_bytes())
    for name in ("1.png", "more 2.png"):
        (data / name).write_bytes((data / name).read_bytes()[:-60])
    (data / "3.png").write_text("<html>")
    changes = {"data.path": str(data)}
    with pytest.raises(UserError, match=r"1 of 8 items cannot be used: 3\.png"):
        encode(prepared, **changes)  # found by its header
    assert listed_as_bad(prepared) == ["3.png"]
    (data / "3.png").write_bytes((data / "1.png").read_bytes())
    with pytest.raises(UserError, match=r"3 of 8 items cannot be used: 1\.png.*; 3\.png.*; more 2\.png"):
        encode(prepared, **changes)
    with pytest.raises(UserError, match=r"3 of 8 .*max_bad_ratio is 0\.1"):
        encode(prepared, **changes, **{"data.on_bad_item": "skip"})
    assert listed_as_bad(prepared) == ["1.png", "3.png", "more 2.png"]
    for use_cache in ("true", "false"):
        skip = {"data.on_bad_item": "skip", "data.max_bad_ratio": "0.5", "data.cache": use_cache}
        (prepared.root / "run" / "quarantine.jsonl").unlink()
        assert len(encode(prepared, **changes, **skip).items) == 5 * 2 * 2
        assert listed_as_bad(prepared) == ["1.png", "3.png", "more 2.png"]
    encode(prepared)
    assert not (prepared.root / "run" / "quarantine.jsonl").exists()


def test_more_bad_items_than_are_named_are_all_in_the_file_that_the_error_names(
    prepared: Prepared, tmp_path: Path
) -> None:
    trained, held_out = tmp_path / "data", tmp_path / "held out"
    for folder, count in ((trained, 24), (held_out, 2)):
        folder.mkdir()
        for place in range(count):
            image = Image.effect_noise((32, 32), 9 + place)
            image.save(folder / f"{folder.name} {place:02}.png")
            (folder / f"{folder.name} {place:02}.txt").write_text("noise")
    bad = sorted([*trained.iterdir(), *held_out.iterdir()])
    bad = [path for path in bad if path.suffix == ".png"]
    changes = {"data.path": str(trained), "validation.data": str(held_out)}
    changes["output.dir"] = str(tmp_path / "run")
    file = tmp_path / "run" / "quarantine.jsonl"
    for spoil in (lambda path: path.read_bytes()[:-60], lambda _: b"<html>"):  # when decoded; by the header
        file.unlink(missing_ok=True)
        for path in bad:
            path.write_bytes(spoil(path))
        with pytest.raises(UserError, match=r"24 of 24 items .*; and 4 more") as caught:
            encode(prepared, **changes)
        assert "2 of 2 items cannot be used" in str(caught.value)
        assert f"All of them are listed in {file}" in str(caught.value)
        rows = [json.loads(row) for row in file.read_text().splitlines()]
        assert [row["item"] for row in rows] == [path.name for path in bad]
        assert all(str(path) in row["reason"] for path, row in zip(bad, rows, strict=True))


@pytest.mark.parametrize("shared", [True, False])
def test_each_item_is_encoded_once_a_cache_by_the_processes_that_share_it(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shared: bool
) -> None:
    """Each machine has data of its own, too."""
    monkeypatch.setattr("diffsynth_lite.training.distributed.agreement._WAIT_S", 0.0)
    write, written = TensorCache.write, []

    def noted(cache: TensorCache, key: str, tensors: Any) -> None:
        written.append((cache.folder, key))
        write(cache, key, tensors)

    monkeypatch.setattr(TensorCache, "write", noted)
    for machine in range(2):
        data = shutil.copytree(prepared.root / "data", tmp_path / f"data {machine}")
        (data / "1.png").write_bytes((data / "1.png").read_bytes()[:-200])

    def encoded(accelerator: Any, machine: int) -> TrainingData:
        own = {
            "data.path": str(tmp_path / f"data {machine}"),
            "data.cache_dir": str(tmp_path / f"cache {0 if shared else machine}"),
            "output.dir": str(tmp_path / "run"),
            "train.micro_batch_size": "1",
            "data.crops_per_item": "1",
            "data.tag_shuffles": "0",
        }
        skip = {"data.on_bad_item": "skip", "data.max_bad_ratio": "0.5", "data.crops_per_item": "1"}
        config = load_config_of(prepared.root, CHANGES | own | skip)
        checked = check_run(config, accelerator)
        return encode_run(config, checked, accelerator)

    first, *others = PretendedProcesses(monkeypatch, num_machines=2, num_local=2).run(encoded)
    assert isinstance(first, TrainingData), first
    rows = list(first.items)
    assert "1.png" not in {row.name.split("#")[0] for row in rows}
    for data in others:
        assert data.identity == first.identity
        assert list(data.items) == rows
        for key in {key for row in rows for key in row.keys}:
            ours, theirs = first.tensors.read(key), data.tensors.read(key)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len(written) == len(set(written))
    keys = [{key for folder, key in written if folder.name == f"cache {place}"} for place in range(2)]
    assert not keys[1] if shared else keys[1] <= keys[0]
    assert {key for row in rows for key in row.keys} <= keys[0]


def test_what_is_larger_than_a_tile_is_encoded_in_tiles_under_keys_of_their_own(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    few = {"data.crops_per_item": "1", "data.tag_shuffles": "0", "data.caption_dropout": "0"}
    tiled = few | {"model.vae_tiling": "true"}
    encode(prepared, **tiled)
    assert "model.vae_tiling: each of 16 items fits into one of the tiles of 256 pixels" in caplog.text
    small = {AutoencoderKLQwenImage: VaeTiles(side=32, stride=16)}
    monkeypatch.setattr("diffsynth_lite.pipelines.base.vae_tiles._BY_CLASS", small)
    caplog.set_level("INFO")
    whole, parts = encode(prepared, **few), encode(prepared, **tiled)
    assert "8 of 16 items are encoded in tiles of 32 pixels, 16 apart" in caplog.text
    assert whole.identity.items == parts.identity.items
    assert whole.identity.media_encoder != parts.identity.media_encoder
    equal = set()
    for one, other in zip(whole.items, parts.items, strict=True):
        assert one.media_key != other.media_key
        assert one.caption_keys == other.caption_keys
        latents = [
            data.tensors.read(row.media_key)["latents"] for data, row in ((whole, one), (parts, other))
        ]
        assert latents[0].shape == latents[1].shape
        equal.add((max(one.bucket.width, one.bucket.height) <= 32, torch.equal(*latents)))
    assert equal == {(True, True), (False, False)}

    monkeypatch.setattr("diffsynth_lite.pipelines.base.vae_tiles._BY_CLASS", {})
    with pytest.raises(UserError, match=r"model\.vae_tiling: true, but no tiles are known"):
        encode(prepared, **tiled)


def config_of(folder: Path) -> Config:
    """Data and held-out data of which no folder is there."""
    file = folder / "run.yaml"
    file.write_text(
        f"model: {{family: qwen_image, path: {folder}/model}}\n"
        f"data: {{path: {folder}/pictures, cache_dir: {folder}/cache}}\n"
        f"validation: {{data: {folder}/held out}}\noutput: {{dir: {folder}/run}}\n"
    )
    return load_config(file, ()).config


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> PretendedProcesses:
    """One on each of two machines."""
    return PretendedProcesses(monkeypatch, num_machines=2, num_local=1)


def test_all_that_is_wrong_with_the_data_of_any_process_is_a_problem_of_each(
    tmp_path: Path, processes: PretendedProcesses
) -> None:
    def read(accelerator: Any, _: int) -> str:
        problems = Problems([] if accelerator.is_main_process else ["data.path: 3.png has no caption"])
        assert read_records(config_of(tmp_path), accelerator, problems) == (FoundRecords(), FoundRecords())
        return "\n".join(problems)

    for text in processes.run(read):
        assert "machine 1: data.path: 3.png has no caption" in text
        assert f"{tmp_path}/pictures" in text
        assert f"{tmp_path}/held out" in text
        assert text.count("machine 1: ") == 1


def test_bad_data_do_not_let_a_process_go_on_where_another_has_ended(
    tmp_path: Path, processes: PretendedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next exchange would wait for that one."""

    other = tmp_path / "other"
    other.mkdir()

    def fail_there(config: Config) -> None:
        if config.validation.data == f"{other}/held out":
            raise OSError("Input/output error")

    monkeypatch.setattr("diffsynth_lite.training.encoding.dataset.find_held_out_records", fail_there)

    def read(accelerator: Any, _: int) -> Any:
        folder = tmp_path if accelerator.is_main_process else other
        return read_records(config_of(folder), accelerator, Problems())

    first, second = processes.run(read)
    assert isinstance(first, RunStoppedError)
    assert str(first) == f"machine 1: {second}" == "machine 1: Input/output error"


def of_sources(*sources: str, held_out: str = "held_out") -> dict[str, Any]:
    given = ", ".join(f"{{path: {source}}}" for source in sources)
    overrides = ("data.path=null", f"data.sources=[{given}]", f"validation.data={held_out}")
    return seal_settings(load_config("quickstart.yaml", overrides).config)


def test_what_is_preserved_counts_only_where_held_out_items_are_then_read_as_another_source() -> None:
    both = of_sources("a, trigger: x", "b")
    assert of_sources("a, trigger: x", "b, preserve: true, loss_weight: 2") == both
    other = of_sources("a, trigger: x, preserve: true", "b")
    assert other == both | {"the source of validation.data": "data.sources[1]"}
    alone = of_sources("a, trigger: x", "b", held_out="null")
    assert of_sources("a, trigger: x, preserve: true", "b", held_out="null") == alone


def test_a_seal_from_before_there_was_a_setting_was_made_with_its_default() -> None:
    settings = of_sources("a", "b")
    added = ("data.audio", "data.sources[1].mask_column")
    older: Any = SimpleNamespace(settings={key: settings[key] for key in settings if key not in added})
    seal: Any = SimpleNamespace(folder="sealed", document=older)
    _require_same_settings(seal, settings)
    for key, value in zip(added, (True, "mask"), strict=True):
        with pytest.raises(UserError, match="was sealed with other settings"):
            _require_same_settings(seal, settings | {key: value})


def test_held_out_items_are_measured_and_in_no_batch_of_an_epoch_and_no_part_has_them(
    prepared: Prepared, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    changes = {"data.hold_out": "0.25", "output.dir": str(prepared.root / "held out")}
    config = load_config_of(prepared.root, CHANGES | changes)
    checked = check_run(config, PROCESS)
    held_out = checked.held_out.names
    assert len(held_out) == 2
    assert f"data.hold_out: 2 of 8 items: {'; '.join(held_out)}" in caplog.text
    encoded = encode_run(config, checked, PROCESS)
    whole = encode(prepared).items
    trained = [row.name for row in encoded.items]
    assert trained == [row.name for row in whole if row.name.partition("#")[0] not in held_out]
    # Two resolutions of each, from the middle, with the written caption.
    assert [item.bucket.num_frames for item in encoded.validation_items] == [1] * 4
    assert len(encoded.items) == 6 * 2 * 2
    built = prepared.build(CHANGES | changes, encoded=encoded)
    assert built.validation_loss.name == "validation_loss"
    steps = built.batches
    names = [
        name for batches in itertools.islice(steps, 24 * 3 // 4) for batch in batches for name in batch.names
    ]
    assert sorted(set(names)) == sorted(trained)
    parts = [check_run(config, PROCESS, Part(index, 3)) for index in range(3)]
    assert sorted(name for part in parts for name in part.training.names) == sorted(checked.training.names)
    assert all(part.held_out.names == held_out for part in parts)


def test_the_list_of_held_out_items_goes_where_nothing_is_held_out_any_more(prepared: Prepared) -> None:
    config = load_config_of(
        prepared.root, {"data.hold_out": "0.2", "output.dir": str(prepared.root / "listed")}
    )
    file = prepared.root / "listed" / "held_out.jsonl"
    file.parent.mkdir()
    write_held_out(config, FoundRecords(records=check_run(config, PROCESS).held_out.records))
    rows = [json.loads(row) for row in file.read_text().splitlines()]
    assert [row["item"] for row in rows] == check_run(config, PROCESS).held_out.names
    write_held_out(config, FoundRecords())  # of a sealed cache
    assert file.exists()
    write_held_out(
        load_config_of(prepared.root, {"output.dir": str(prepared.root / "listed")}), FoundRecords()
    )
    assert not file.exists()
