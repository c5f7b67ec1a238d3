"""Pipelines on disk and on the hub: what is found, what is refused, and what families read in settings."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from family_sample import Sample
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import save_file

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder, require_family, resolve_folder
from diffsynth_lite.pipelines.base import hub as hub_module
from diffsynth_lite.pipelines.base.folder import ComponentFile
from diffsynth_lite.pipelines.base.samplers import matches_flows
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.testing.tokenizers import qwen2_tokenizer


@pytest.fixture
def pipeline_folder(tmp_path: Path) -> Path:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "QwenImagePipeline"}))
    for component in ("transformer", "text_encoder", "vae"):
        (tmp_path / component).mkdir()
        (tmp_path / component / "config.json").write_text("{}")
        save_file({"weight": torch.arange(200_000.0)}, tmp_path / component / "model.safetensors")
    (tmp_path / "scheduler").mkdir()
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    qwen2_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def check(folder: PipelineFolder) -> None:
    require_family(QwenImage, folder)
    QwenImage(folder).check_folder()


def test_a_missing_component_without_weights_is_named(pipeline_folder: Path) -> None:
    (pipeline_folder / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(UserError, match="scheduler is missing or empty"):
        check(PipelineFolder(path=pipeline_folder))


def test_a_missing_shard_is_named(pipeline_folder: Path) -> None:
    shards = [f"diffusion-0000{place}-of-00002.safetensors" for place in (1, 2)]
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    (pipeline_folder / "vae" / "model.safetensors").rename(pipeline_folder / "vae" / shards[0])
    (pipeline_folder / "vae" / "diffusion.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"vae lacks {shards[1]}"):
        check(PipelineFolder(path=pipeline_folder))


def test_a_local_folder_is_used_as_it_is(pipeline_folder: Path) -> None:
    folder = resolve_folder(str(pipeline_folder))
    assert folder == PipelineFolder(path=pipeline_folder)
    check(folder)


@pytest.mark.parametrize("location", ["/no/such/folder", "./missing", "~/no-such-folder", "a/b/c", "missing"])
def test_a_missing_folder_is_not_looked_for_on_the_hub(location: str) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        resolve_folder(location)


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


def test_a_folder_without_an_index_is_not_a_diffusers_pipeline(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a diffusers pipeline: model_index\.json is missing"):
        check(PipelineFolder(path=tmp_path))


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", "\xff"])
def test_a_damaged_index_is_one_clear_line(pipeline_folder: Path, text: str) -> None:
    (pipeline_folder / "model_index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"model_index\.json") as caught:
        check(PipelineFolder(path=pipeline_folder))
    assert "\n" not in str(caught.value)


def test_another_pipeline_class_is_refused(pipeline_folder: Path) -> None:
    (pipeline_folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    with pytest.raises(
        UserError, match=r"holds a WanPipeline, but .* QwenImagePipeline; set model.family: wan,"
    ):
        check(PipelineFolder(path=pipeline_folder))


def test_a_pipeline_that_nobody_trains_is_refused_as_such(pipeline_folder: Path) -> None:
    (pipeline_folder / "model_index.json").write_text(json.dumps({"_class_name": "DDPMPipeline"}))
    with pytest.raises(UserError, match=r"holds a DDPMPipeline, .*no built-in family trains that"):
        check(PipelineFolder(path=pipeline_folder))


def test_missing_weights_name_the_component_and_the_variant(pipeline_folder: Path) -> None:
    with pytest.raises(UserError, match=r"transformer holds no safetensors weights of variant 'fp16'"):
        check(PipelineFolder(path=pipeline_folder, variant="fp16"))
    (pipeline_folder / "vae" / "model.safetensors").rename(pipeline_folder / "vae" / "model.bin")
    with pytest.raises(UserError, match=r"vae holds no safetensors weights"):
        check(PipelineFolder(path=pipeline_folder))


def test_components_of_different_variants_are_all_named(pipeline_folder: Path) -> None:
    half = pipeline_folder / "transformer" / "model.fp16.safetensors"
    (pipeline_folder / "transformer" / "model.safetensors").rename(half)
    there = r"none is there for all of them \(transformer: fp16; text_encoder: plain; vae: plain\)"
    for variant, lacking in ((None, "transformer"), ("fp16", "text_encoder")):
        with pytest.raises(UserError, match=f"{lacking} holds no safetensors weights .*{there}"):
            check(PipelineFolder(path=pipeline_folder, variant=variant))


def test_a_variant_that_is_not_there_is_refused_with_those_that_are(pipeline_folder: Path) -> None:
    for component in ("transformer", "text_encoder", "vae"):
        shards = ["model.bf16-00001-of-00002.safetensors", "model.bf16-00002-of-00002.safetensors"]
        for shard in shards:
            save_file({"weight": torch.zeros(2)}, pipeline_folder / component / shard)
    with pytest.raises(UserError, match=r"'fp16' .*; remove model\.variant or set model\.variant: bf16$"):
        check(PipelineFolder(path=pipeline_folder, variant="fp16"))


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


SCHEDULER = "scheduler/scheduler_config.json"
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "anima",
        "text_conditioner/config.json",
        {"min_sequence_length": 256},
        "pads prompts of up to 512 tokens to 256 ",
    ),
    (
        "hunyuan_video_15",
        "transformer/config.json",
        {"use_meanflow": True},
        "transformer has use_meanflow: a step-distilled model",
    ),
    (
        "ltx2",
        "transformer/config.json",
        {"use_keyframes_abs_pos_embedding": True},
        r"transformer has use_keyframes_abs_pos_embedding: an LTX-2\.5",
    ),
    (
        "qwen_image_layered",
        "vae/config.json",
        {"input_channels": 3},
        r"vae.*takes \w+ of 3 channels, and that of Qwen-Image-Layered takes 4",
    ),
    (
        "sdxl",
        SCHEDULER,
        {"_class_name": "EDMEulerScheduler"},
        "EDMEulerScheduler.* sampler of denoising diffusion",
    ),
    ("wan", SCHEDULER, {"_class_name": "NoSuchScheduler"}, "names no scheduler class: NoSuchScheduler"),
    ("wan", SCHEDULER, {"_class_name": "WanPipeline"}, "names no scheduler class: WanPipeline"),
    ("wan", SCHEDULER, {"_class_name": None}, "names no scheduler class: None"),
    (
        "wan_i2v",
        "model_index.json",
        {"expand_timesteps": True},
        "TI2V-5B .* model.family: wan trains, .* _class_name: WanPipeline",
    ),
    (
        "z_image",
        "transformer/config.json",
        {"siglip_feat_dim": 8},
        "holds a Z-Image Omni.*siglip_feat_dim.*use Z-Image or Z-Image-Turbo",
    ),
]
"""Families, a file with changed settings, and the words of the error."""


def family_with(sample: Sample, folder: Path, changed: str, settings: dict[str, Any]) -> ModelFamily:
    """The family on a copy of its folder without weights."""
    for file in sample.family.folder.path.rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            copy = folder / file.relative_to(sample.family.folder.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    # Of another class nothing is left of the settings of the first.
    given = {} if "_class_name" in settings else json.loads((folder / changed).read_text())
    (folder / changed).write_text(json.dumps(given | settings))
    return type(sample.family)(PipelineFolder(path=folder))


@pytest.mark.parametrize(("name", "file", "settings", "words"), REFUSED)
def test_settings_of_models_that_are_not_trained_are_refused(
    sample_of: Callable[[str], Sample],
    name: str,
    file: str,
    settings: dict[str, Any],
    words: str,
    tmp_path: Path,
) -> None:
    sample_of(name).family.check_folder()
    with pytest.raises(UserError, match=words):
        family_with(sample_of(name), tmp_path, file, settings).check_folder(with_weights=False)


FIXED = {"use_dynamic_shifting": False}
UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "use_flow_sigmas": True,
    "prediction_type": "flow_prediction",
}
DPM = UNIPC | {"_class_name": "DPMSolverMultistepScheduler"}
FLOW_MATCH = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
SHIFTS: list[tuple[str, dict[str, Any], float]] = [
    ("chroma", FLOW_MATCH | {"shift": 3.0}, 3.0),
    ("flux schnell", {}, 1.0),
    # Of HunyuanVideo 1.5 that of its own trainer, but not above that of the folder.
    ("hunyuan_video_15", {"shift": 9.0}, 3.0),
    ("hunyuan_video_15", {"shift": 2.0}, 2.0),
    ("ltx2", FIXED | {"shift": 3.0}, 3.0),
    ("ltx_video", FIXED | {"shift": 3.0}, 3.0),
    ("ltx_video of conditions", {}, 1.0),
    ("sana", DPM | {"flow_shift": 6.0}, 6.0),
    ("sana", FLOW_MATCH | {"shift": 3.0}, 3.0),
    ("wan", UNIPC | {"flow_shift": 5.0}, 5.0),
    ("wan", FLOW_MATCH | {"shift": 8.0}, 8.0),
    ("wan_i2v", {"flow_shift": 16.0}, 16.0),
    ("wan_i2v a14b", {"flow_shift": 12.0}, 12.0),
    # At most 5 where a clip leads to a last frame.
    ("wan_i2v flf2v", {"flow_shift": 16.0}, 5.0),
    ("wan_i2v flf2v", {"flow_shift": 3.0}, 3.0),
    ("z_image", {"shift": 6.0}, 6.0),
    ("z_image", {"shift": 3.0}, 3.0),
]


@pytest.mark.parametrize(("name", "settings", "shift"), SHIFTS)
def test_the_shift_of_training_is_that_of_the_folders_sampler_at_any_size(
    sample_of: Callable[[str], Sample], name: str, settings: dict[str, Any], shift: float, tmp_path: Path
) -> None:
    family = family_with(sample_of(name), tmp_path, SCHEDULER, settings)
    for width, height in ((512, 512), (1280, 768)):
        shape = family.latents_shape(width, height, family.default_num_frames)
        assert family.family_shift(shape) == shift
    assert type(family.load_scheduler()).__name__ == settings.get(
        "_class_name", type(sample_of(name).family.load_scheduler()).__name__
    )
    if "flow_shift" in settings and name.startswith("wan_i2v"):
        assert family.earlier_shift(shape) == settings["flow_shift"]


FLOWS = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


@pytest.mark.parametrize(
    ("scheduler_class", "settings", "expected"),
    [
        (FlowMatchEulerDiscreteScheduler, {}, True),
        (UniPCMultistepScheduler, FLOWS, True),
        (DPMSolverMultistepScheduler, FLOWS, True),
        (UniPCMultistepScheduler, {}, False),
        (EulerDiscreteScheduler, {}, False),
        (EulerDiscreteScheduler, {"prediction_type": "v_prediction"}, False),
    ],
)
def test_a_sampler_matches_flows_where_its_class_does_or_is_set_to(
    scheduler_class: Any, settings: dict[str, Any], expected: bool
) -> None:
    assert matches_flows(scheduler_class.from_config(settings)) is expected


def test_a_setting_that_the_class_does_not_take_has_no_effect() -> None:
    left_from_another = EulerDiscreteScheduler().config | {"prediction_type": "epsilon"}
    assert matches_flows(FlowMatchEulerDiscreteScheduler.from_config(left_from_another))
