"""Pipelines on the hub: which files are fetched, how much, and how it continues where it broke off."""

import json
import logging
import shutil
from collections import namedtuple
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from family_sample import CPU
from hub_server import REPOSITORY, Hub, serving
from huggingface_hub import constants
from PIL import Image

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.errors import RunInterrupted, UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder, resolve_folder
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.flux import Flux, tiny
from diffsynth_lite.progress_log import watched
from diffsynth_lite.training.checks import bind_family, check_run

COMPONENTS = ("transformer", "text_encoder", "text_encoder_2", "vae")
WEIGHTS = [
    "text_encoder/model.safetensors",
    "text_encoder_2/model.safetensors",
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
]
FOREIGN = {
    "README.md": b"# FLUX",
    "flux1-dev.safetensors": b"of another layout",
    "ae.safetensors": b"of another layout",
    "config.json": b"{}",
    "text_encoders/t5xxl_fp16.safetensors": b"for ComfyUI",
    "text_encoders/config.json": b"{}",
    "onnx/model.onnx": b"onnx",
    "onnx/model.safetensors": b"onnx",
    "vae/diffusion_pytorch_model.bin": b"pickle",
    "vae/diffusion_flax_model.msgpack": b"flax",
    "vae/flux_vae.safetensors": b"for another program",
    "transformer/diffusion_pytorch_model.fp16.safetensors": b"another variant",
    "transformer/diffusion_pytorch_model.safetensors.index.fp16.json": b'{"weight_map": {}}',
    "text_encoder/openvino_model.xml": b"openvino",
    "text_encoder/onnx/config.json": b"{}",
    "text_encoder/onnx/model.safetensors": b"onnx",
    "safety_checker/model.safetensors": b"not in the index",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tiny pipeline as it is saved, by path."""
    folder = tmp_path_factory.mktemp("saved")
    tiny().save_pretrained(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(files | FOREIGN)
    with serving(hub, tmp_path / "cache"):
        yield hub


def config(tmp_path: Path, model: Mapping[str, Any] | None = None, **sections: Any) -> Config:
    path = tmp_path / "config.yaml"
    of_model = {"family": "flux", "path": REPOSITORY, **(model or {})}
    others = {"data": {"path": "x"}, "output": {"dir": str(tmp_path / "run")}, **sections}
    path.write_text(json.dumps({"model": of_model, **others}))
    return load_config(path, []).config


def fetched_family(tmp_path: Path, **model: Any) -> DiffusersFamily:
    """What a run does."""
    family = bind_family(config(tmp_path, model))
    family.folder.download_weights(family.components)
    assert isinstance(family, DiffusersFamily)
    return family


def test_of_a_repository_only_the_pipeline_is_fetched(
    hub: Hub, files: dict[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        family = fetched_family(tmp_path)
    # What is small comes for all variants.
    expected = {*files, "transformer/diffusion_pytorch_model.safetensors.index.fp16.json"}
    assert set(hub.fetched) <= expected
    present = {
        str(path.relative_to(family.folder.path))
        for path in family.folder.path.rglob("*")
        if not path.is_dir()
    }
    assert present == expected
    (message,) = [line for line in caplog.messages if "to download" in line]
    assert message.startswith(f"{REPOSITORY}: ")
    assert "in 4 files" in message
    assert message.endswith("; 0 bytes of its weights are there already.")
    family.load_prompt_encoder(torch.float32, CPU)([Prompt(text="a circle")])
    family.load_transformer(torch.float32)


def test_weights_are_fetched_when_there_is_nothing_wrong_and_each_tokenizer_is_loaded_once(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loaded = Flux.load_tokenizer, []
    monkeypatch.setattr(Flux, "load_tokenizer", lambda self, name: loaded.append(name) or load(self, name))
    (tmp_path / "data").mkdir()
    Image.new("RGB", (64, 32)).save(tmp_path / "data" / "a.png")
    (tmp_path / "data" / "a.txt").write_text("a circle")
    sections = {"data": {"path": str(tmp_path / "data"), "width": 64, "height": 32}}
    for wrong in ({"lora": {"target_modules": ["to_nothing"]}}, {"validation": {"width": 40}}):
        with pytest.raises(UserError, match=r"to_nothing|40x32 is not divisible"):
            check_run(config(tmp_path, **sections, **wrong), Accelerator())
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]
    loaded.clear()
    checked = check_run(config(tmp_path, **sections), Accelerator())
    checked.family.folder.require_weights(COMPONENTS)
    assert loaded == ["tokenizer", "tokenizer_2"]


def test_of_a_transformer_that_is_in_a_file_no_weights_are_fetched(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    file = tmp_path / "flux.safetensors"
    file.write_bytes(files[WEIGHTS[2]])
    family = fetched_family(tmp_path, transformer_file=str(file))
    assert sorted(name for name in hub.fetched if name.endswith(".safetensors")) == [*WEIGHTS[:2], WEIGHTS[3]]
    assert len(family.load_transformer(torch.float32).state_dict()) > 0


def test_what_cannot_be_trained_is_known_before_weights_are_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.files["tokenizer_2/tokenizer.json"] = b"{"
    with pytest.raises(UserError, match=r"the tokenizer in .*tokenizer_2 cannot be loaded"):
        fetched_family(tmp_path)
    with pytest.raises(UserError, match="holds a FluxPipeline"):
        fetched_family(tmp_path, family="wan")
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]


def in_shards(files: dict[str, bytes], variant: str = "") -> dict[str, bytes]:
    """Names of shards of the transformer and the second text encoder next to their one file."""
    added = {}
    for stem in ("transformer/diffusion_pytorch_model", "text_encoder_2/model"):
        shards = [f"{stem}{variant}-0000{place}-of-00002.safetensors" for place in (1, 2)]
        index = {"weight_map": {str(place): Path(shard).name for place, shard in enumerate(shards)}}
        added[f"{stem}.safetensors.index{variant}.json"] = json.dumps(index).encode()
        added |= {shard: shard.encode() for shard in shards}
        added[f"{stem}{variant}-00003-of-00003.safetensors"] = b"left behind by an earlier upload"
    return files | added


def fetched_weights(hub: Hub, folder: PipelineFolder) -> list[str]:
    folder.download_weights(COMPONENTS)
    folder.require_weights(COMPONENTS)
    return sorted(name for name in hub.fetched if name.endswith(".safetensors"))


def test_of_one_file_and_shards_those_are_fetched_that_are_loaded(hub: Hub) -> None:
    hub.files = in_shards(hub.files)
    assert fetched_weights(hub, resolve_folder(REPOSITORY)) == [
        *WEIGHTS[:2],
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
        WEIGHTS[3],
    ]


def test_what_is_fetched_of_one_file_and_shards_is_enough_to_load(hub: Hub, tmp_path: Path) -> None:
    pipeline, folder = tiny(), tmp_path / "shards"
    pipeline.save_pretrained(folder, max_shard_size="16KB")
    hub.files |= {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("*/*")}
    family = fetched_family(tmp_path)
    for component in COMPONENTS:
        loaded, expected = family.load_component(component, torch.float32), getattr(pipeline, component)
        for name, tensor in expected.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor)
    assert len(list((family.folder.path / "transformer").glob("*.safetensors"))) > 1
    assert len(list((family.folder.path / "text_encoder_2").glob("*.safetensors"))) == 1


def test_of_a_variant_only_its_files_are_fetched(hub: Hub, files: dict[str, bytes]) -> None:
    halves = {name.replace(".safetensors", ".fp16.safetensors"): name.encode() for name in WEIGHTS}
    hub.files = in_shards(files | halves, ".fp16")
    assert fetched_weights(hub, resolve_folder(REPOSITORY, variant="fp16")) == [
        "text_encoder/model.fp16.safetensors",
        "text_encoder_2/model.fp16.safetensors",
        "transformer/diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model.fp16-00002-of-00002.safetensors",
        "vae/diffusion_pytorch_model.fp16.safetensors",
    ]


def test_a_variant_that_the_hub_lacks_is_refused_with_those_it_has(hub: Hub) -> None:
    folder = resolve_folder(REPOSITORY, variant="bf16")
    with pytest.raises(
        UserError, match=rf"{REPOSITORY}/transformer holds no .* 'bf16' .*; remove model\.var"
    ):
        folder.download_weights(COMPONENTS)
    del hub.files["vae/diffusion_pytorch_model.safetensors"], hub.files["vae/flux_vae.safetensors"]
    with pytest.raises(UserError, match=rf"{REPOSITORY}/vae holds no safetensors weights .*model\.bin"):
        resolve_folder(REPOSITORY).download_weights(COMPONENTS)
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]


def test_an_interrupted_download_goes_on_with_the_files_that_lack(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.broken = {WEIGHTS[2]}
    with pytest.raises(
        UserError, match=r"downloading owner/name failed \(.*The same command continues with it"
    ):
        fetched_family(tmp_path)
    assert hub.fetched.count(WEIGHTS[0]) == 1
    hub.broken, hub.fetched = set(), []
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fetched_family(tmp_path)
    assert WEIGHTS[2] in hub.fetched
    assert WEIGHTS[0] not in hub.fetched
    assert "0 bytes of its weights are there already" not in caplog.text
    hub.fetched = []
    fetched_family(tmp_path)
    assert hub.fetched == []


def test_a_download_reports_its_bytes_and_ends_where_a_run_is_to_stop(hub: Hub) -> None:
    folder, seen, needed = resolve_folder(REPOSITORY), [], sum(len(hub.files[name]) for name in WEIGHTS)

    def watch(phase: str, done: int, total: int) -> None:
        seen.append((phase, done, total))
        if done:
            raise RunInterrupted("STOP before the first step")

    with pytest.raises(RunInterrupted, match="STOP before the first step"), watched(watch):
        folder.download_weights(COMPONENTS)
    assert seen[0] == ("downloading", 0, needed)
    there = sum((folder.path / name).exists() for name in WEIGHTS)
    assert there < len(WEIGHTS)
    with watched(lambda *progress: seen.append(progress)):
        folder.download_weights(COMPONENTS)
    assert seen[-1][1:] == (seen[-1][2], seen[-1][2])
    folder.require_weights(COMPONENTS)


@pytest.mark.parametrize(
    ("code", "token", "message"),
    [
        ("GatedRepo", None, r"model\.path: owner/name is gated: .* then log in with `hf auth login`$"),
        ("GatedRepo", "hf_x", r"is gated: accept its terms on its hub page, as the account of the token in"),
        ("", "hf_x", r"model\.path: the hub refuses the token in use \(HF_TOKEN, .* for owner/name: log in"),
    ],
)
def test_who_is_not_let_in_gets_an_error_before_a_weight_is_fetched(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, code: str, token: str | None, message: str
) -> None:
    folder, hub.gate = resolve_folder(REPOSITORY), code
    monkeypatch.setattr("diffsynth_lite.pipelines.base.folder.hub.get_token", lambda: token)
    with pytest.raises(UserError, match=message) as refused:
        folder.download_weights(COMPONENTS)
    assert "\n" not in str(refused.value)
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]


def test_a_download_that_somebody_stops_reports_how_it_resumes(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_folder(REPOSITORY)

    def stopped(*_args: object, **_settings: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("diffsynth_lite.pipelines.base.folder.hub.snapshot_download", stopped)
    with pytest.raises(
        RunInterrupted, match=r"owner/name was interrupted\. The same command continues with it"
    ):
        folder.download_weights(COMPONENTS)


def test_a_disk_without_room_is_reported_before_a_weight_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    needed = sum(len(hub.files[name]) for name in WEIGHTS)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2 * needed, needed + 1, needed - 1))
    with pytest.raises(
        UserError, match=rf"KiB of {REPOSITORY} are to be .*{tmp_path / 'cache'} has .* free; .*HF_HOME to a"
    ):
        fetched_family(tmp_path)
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2 * needed, needed, needed))
    fetched_family(tmp_path)


def test_one_process_of_a_machine_downloads_at_a_time(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one would count against the disk what another one has half fetched."""
    folder, begins = resolve_folder(REPOSITORY), Event()
    assert folder.hub
    lock = folder.hub.lock()

    def locked() -> AbstractContextManager[object]:
        begins.set()
        return lock_of_another

    with lock:
        lock_of_another = folder.hub.lock()
        monkeypatch.setattr(type(folder.hub), "lock", lambda _: locked())
        other = Thread(target=folder.download_weights, args=[COMPONENTS])
        hub.requests = []
        other.start()
        assert begins.wait(timeout=60)
        assert hub.requests == []
    other.join(timeout=60)
    assert sorted(set(hub.fetched) & set(WEIGHTS)) == WEIGHTS


def test_all_files_are_of_the_commit_that_the_branch_was_at_first(hub: Hub) -> None:
    folder, before = resolve_folder(REPOSITORY), hub.files
    hub.files = {name: content + b"later" for name, content in before.items()}
    folder.download_weights(COMPONENTS)
    for name in WEIGHTS:
        assert (folder.path / name).read_bytes() == before[name]
    assert hub.commit != folder.path.name


def test_a_revision_is_fetched_by_its_commit(hub: Hub) -> None:
    earlier, before = hub.commit, hub.files
    hub.files = {name: content + b" " for name, content in before.items()}
    folder = resolve_folder(REPOSITORY, revision=earlier)
    assert folder.path.name == earlier
    assert (folder.path / "vae/config.json").read_bytes() == before["vae/config.json"]


@pytest.mark.parametrize("setting", [{"HF_HUB_OFFLINE": True}, {"ENDPOINT": "http://127.0.0.1:9"}])
def test_without_the_hub_a_whole_pipeline_is_taken_from_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]
) -> None:
    online = fetched_family(tmp_path)
    hub.requests = []
    for name, value in setting.items():
        monkeypatch.setattr(constants, name, value)
    offline = fetched_family(tmp_path)
    assert (offline.folder, hub.requests) == (online.folder, [])
    (online.folder.path / WEIGHTS[3]).unlink()
    with pytest.raises(
        UserError, match=r"the hub cannot be reached and owner/name|downloading owner/name fai"
    ):
        fetched_family(tmp_path)


def test_a_repository_of_another_layout_is_refused_before_anything_is_fetched(hub: Hub) -> None:
    del hub.files["model_index.json"]
    with pytest.raises(UserError, match=r"owner/name on the hub holds no model_index\.json"):
        resolve_folder(REPOSITORY)
    assert hub.fetched == []
