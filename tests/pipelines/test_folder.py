"""Pipelines on disk and on the hub: what is found, and what is refused."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import save_file

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import write_json
from diffsynth_lite.pipelines import PipelineFolder, require_family, resolve_folder
from diffsynth_lite.pipelines.base.folder import ComponentFile
from diffsynth_lite.pipelines.base.folder import hub as hub_module
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.testing.tokenizers import qwen2_tokenizer

SCHEDULER = "scheduler/scheduler_config.json"


@pytest.fixture
def pipeline_folder(tmp_path: Path) -> Path:
    write_json(tmp_path / "model_index.json", {"_class_name": "QwenImagePipeline"})
    for component in ("transformer", "text_encoder", "vae"):
        (tmp_path / component).mkdir()
        (tmp_path / component / "config.json").write_text("{}")
        save_file({"weight": torch.arange(200_000.0)}, tmp_path / component / "model.safetensors")
    (tmp_path / "scheduler").mkdir()
    write_json(tmp_path / SCHEDULER, {"_class_name": "FlowMatchEulerDiscreteScheduler"})
    qwen2_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def check(folder: PipelineFolder) -> None:
    require_family(QwenImage, folder)
    QwenImage(folder).check_folder()


def holds_a(pipeline_class: str) -> Callable[[Path], object]:
    return lambda folder: write_json(folder / "model_index.json", {"_class_name": pipeline_class})


def lack_a_shard(folder: Path) -> None:
    shards = [f"diffusion-0000{place}-of-00002.safetensors" for place in (1, 2)]
    (folder / "vae" / "model.safetensors").rename(folder / "vae" / shards[0])
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    write_json(folder / "vae" / "diffusion.safetensors.index.json", index)


def add_shards_of_bf16(folder: Path) -> None:
    for component in ("transformer", "text_encoder", "vae"):
        for place in (1, 2):
            file = folder / component / f"model.bf16-0000{place}-of-00002.safetensors"
            save_file({"weight": torch.zeros(2)}, file)


def rename_weights(folder: Path) -> None:
    (folder / "vae" / "model.safetensors").rename(folder / "vae" / "model.bin")


@pytest.mark.parametrize(
    ("change", "variant", "words"),
    [
        (lambda folder: (folder / SCHEDULER).unlink(), None, "scheduler is missing or empty"),
        (lack_a_shard, None, "vae lacks diffusion-00002-of-00002.safetensors"),
        (
            lambda folder: (folder / "model_index.json").unlink(),
            None,
            r"not a diffusers pipeline: model_index\.json is missing",
        ),
        (
            holds_a("WanPipeline"),
            None,
            r"holds a WanPipeline, but .* QwenImagePipeline; set model.family: wan,",
        ),
        (holds_a("DDPMPipeline"), None, r"holds a DDPMPipeline, .*no built-in family trains that"),
        (lambda _: None, "fp16", r"transformer holds no safetensors weights of variant 'fp16'"),
        (rename_weights, None, r"vae holds no safetensors weights"),
        (add_shards_of_bf16, "fp16", r"'fp16' .*; remove model\.variant or set model\.variant: bf16$"),
    ],
)
def test_a_folder_that_cannot_be_trained_is_refused_with_what_it_lacks(
    pipeline_folder: Path, change: Callable[[Path], object], variant: str | None, words: str
) -> None:
    change(pipeline_folder)
    with pytest.raises(UserError, match=words):
        check(PipelineFolder(path=pipeline_folder, variant=variant))


def test_a_local_folder_is_used_as_it_is(pipeline_folder: Path) -> None:
    folder = resolve_folder(str(pipeline_folder))
    assert folder == PipelineFolder(path=pipeline_folder)
    check(folder)


@pytest.mark.parametrize(
    ("location", "words"),
    [
        *(
            (place, "which has the form owner/name$")
            for place in ("./missing", "~/no-such-folder", "missing")
        ),
        (
            "models/a/Name/",
            "set model.path=owner/name, .* hf download owner/name --local-dir models/a/Name/$",
        ),
        ("https://hub/owner/name", "set model.path=owner/name, which is downloaded once$"),
    ],
)
def test_a_missing_folder_is_not_looked_for_on_the_hub(location: str, words: str) -> None:
    known = ["an/other", "owner/name"] if "name" in location.lower() else []
    with pytest.raises(UserError, match=f"there is no folder {location}; .*{words}"):
        resolve_folder(location, known=known)


def test_a_misspelt_folder_next_to_existing_ones_is_not_taken_for_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no folder models/qwen"):
        resolve_folder("models/qwen")


def test_a_file_is_not_a_pipeline(pipeline_folder: Path) -> None:
    with pytest.raises(UserError, match=r"is a file; .*model\.transformer_file"):
        resolve_folder(str(pipeline_folder / "model_index.json"))


def test_a_folder_that_is_nearly_right_is_an_error_with_what_is(
    pipeline_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    inside = resolve_folder(str(pipeline_folder / "transformer"))
    parent = re.escape(str(pipeline_folder.resolve()))
    with pytest.raises(UserError, match=rf"is missing; its parent is one: model\.path={parent}$"):
        inside.parts()
    comfyui = tmp_path_factory.mktemp("comfyui")
    (comfyui / "diffusion_models").mkdir()
    with pytest.raises(UserError, match=r"model_index\.json is missing$"):
        resolve_folder(str(comfyui)).parts()
    (comfyui / "diffusion_models" / "flux.safetensors").touch()
    with pytest.raises(UserError, match=r"; diffusion_models/flux\.safetensors, .* model\.transformer_file"):
        resolve_folder(str(comfyui)).parts()


def test_a_revision_of_a_local_folder_is_refused(pipeline_folder: Path) -> None:
    with pytest.raises(UserError, match=r"model\.revision"):
        resolve_folder(str(pipeline_folder), revision="main")


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", "\xff"])
def test_a_damaged_index_is_one_clear_line(pipeline_folder: Path, text: str) -> None:
    (pipeline_folder / "model_index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"model_index\.json") as caught:
        check(PipelineFolder(path=pipeline_folder))
    assert "\n" not in str(caught.value)


def test_components_of_different_variants_are_all_named(pipeline_folder: Path) -> None:
    half = pipeline_folder / "transformer" / "model.fp16.safetensors"
    (pipeline_folder / "transformer" / "model.safetensors").rename(half)
    there = r"none is there for all of them \(transformer: fp16; text_encoder: plain; vae: plain\)"
    for variant, lacking in ((None, "transformer"), ("fp16", "text_encoder")):
        with pytest.raises(UserError, match=f"{lacking} holds no safetensors weights .*{there}"):
            check(PipelineFolder(path=pipeline_folder, variant=variant))


def test_a_variant_is_not_taken_for_the_plain_files(pipeline_folder: Path) -> None:
    for component in ("transformer", "text_encoder", "vae"):
        save_file({"weight": torch.zeros(2)}, pipeline_folder / component / "model.fp16.safetensors")
    plain, half = PipelineFolder(path=pipeline_folder), PipelineFolder(path=pipeline_folder, variant="fp16")
    check(half)
    assert plain.fingerprint("vae") != half.fingerprint("vae")


def test_the_fingerprint_changes_with_the_config_and_with_the_weights(pipeline_folder: Path) -> None:
    folder = PipelineFolder(path=pipeline_folder)
    before = folder.fingerprint("vae")
    assert folder.fingerprint("vae") == before
    weights = pipeline_folder / "vae" / "model.safetensors"
    for offset in (0, 1000, weights.stat().st_size - 1):
        content = bytearray(weights.read_bytes())
        content[offset] ^= 1
        weights.write_bytes(content)
        changed = folder.fingerprint("vae")
        assert changed != before, offset
        content[offset] ^= 1
        weights.write_bytes(content)
    assert folder.fingerprint("vae") == before
    (pipeline_folder / "vae" / "config.json").write_text("{} ")
    assert folder.fingerprint("vae") != before


def test_the_fingerprint_of_a_component_in_a_file_is_that_of_its_content_and_config(
    pipeline_folder: Path, tmp_path: Path
) -> None:
    weights = pipeline_folder / "vae" / "model.safetensors"
    file = shutil.copyfile(weights, tmp_path / "one.safetensors")
    renamed = shutil.copyfile(file, tmp_path / "other.safetensors")
    other = tmp_path / "another.safetensors"
    save_file({"weight": torch.ones(200_000)}, other)

    def fingerprint(path: Path) -> str:
        files = {"vae": ComponentFile(path=path, key="model.transformer_file")}
        return PipelineFolder(path=pipeline_folder, files=files).fingerprint("vae")

    before = fingerprint(file)
    weights.unlink()
    (pipeline_folder / "vae" / "lists what was there.json").touch()
    assert fingerprint(renamed) == fingerprint(file) == before != fingerprint(other)
    (pipeline_folder / "vae" / "config.json").write_text("{} ")
    assert fingerprint(file) != before


RESPONSE = SimpleNamespace(headers={}, request=None, status_code=404, text="", url="")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError("gated", response=RESPONSE), "is gated: accept its terms"),
        (RepositoryNotFoundError("none", response=RESPONSE), "the hub has no repository owner/name"),
        (
            RevisionNotFoundError("none", response=RESPONSE),
            r"model\.revision: owner/name has no revision 'v9'",
        ),
        (LocalEntryNotFoundError("offline"), "the hub cannot be reached"),
        (
            HfHubHTTPError("503", response=RESPONSE),
            r"failed \(HfHubHTTPError: 503\)\. The same command",
        ),
        (OSError(28, "No space left on device"), "No space left .*free some space, or set HF_HOME"),
    ],
)
def test_each_way_a_hub_id_can_fail_has_its_own_message(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_args: object, **_kwargs: object) -> str:
        raise error

    monkeypatch.setattr(hub_module, "snapshot_download", fail)
    with pytest.raises(UserError, match=message):
        resolve_folder("owner/name", revision="v9")


def test_without_a_network_a_hub_id_is_refused_with_that() -> None:
    with pytest.raises(UserError, match="the hub cannot be reached and owner/name is not in the local cache"):
        resolve_folder("owner/name")
