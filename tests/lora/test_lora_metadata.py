"""The metadata of a LoRA file: the names that readers look for, and equal bytes for equal files."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from diffsynth_lite.lora.metadata import LoraFacts, SourceFacts, add_metadata, lora_metadata
from diffsynth_lite.pipelines import releases_of
from diffsynth_lite.releases import BaseModel

SDXL = releases_of("sdxl")[0]
FACTS = LoraFacts(
    version="0.1.0",
    name="Ohwx dog",
    family="sdxl",
    base=BaseModel(
        hub_id=SDXL.hub_id,
        revision="0a" * 20,
        release=SDXL,
        architecture=SDXL.architecture,
        version=SDXL.version,
    ),
    contract="1b" * 32,
    trigger_words=("ohwx dog", "in ohwx style"),
    rank=16,
    alpha=8.0,
    resolution=(1024, 768),
    items_by_size={(1024, 768): 3, (512, 512): 4},
    sources={
        "data.sources[0]": SourceFacts(num_items=3, passes=2.0, tag_counts={"ohwx dog": 3, "červená": 1}),
        "data.sources[1]": SourceFacts(num_items=4, passes=0.5, tag_counts={}),
    },
    prediction_type="epsilon",
    training={"seed": 7, "learning_rate": 1e-4, "lr_scheduler": "constant"},
)


def test_a_file_has_the_metadata_that_programs_look_for_and_nothing_unknown() -> None:
    metadata = lora_metadata(FACTS, step=250, thumbnail="data:image/jpeg;base64,/9j/")
    frequency = json.loads(metadata.pop("ss_tag_frequency"))
    assert frequency == {"data.sources[0]": {"ohwx dog": 3, "červená": 1}}
    assert json.loads(metadata.pop("ss_dataset_dirs")) == {
        "data.sources[0]": {"n_repeats": 2, "img_count": 3},
        "data.sources[1]": {"n_repeats": 0.5, "img_count": 4},
    }
    assert json.loads(metadata.pop("ss_bucket_info")) == {
        "buckets": {
            "0": {"resolution": [512, 512], "count": 4},
            "1": {"resolution": [1024, 768], "count": 3},
        }
    }
    assert metadata == {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": "Ohwx dog",
        "modelspec.description": "LoRA of rank 16 for SDXL base 1.0, after 250 steps. "
        "Trigger words: ohwx dog, in ohwx style.",
        "modelspec.license": "CreativeML Open RAIL++-M (base model)",
        "modelspec.tags": "lora,sdxl",
        "modelspec.resolution": "1024x768",
        "modelspec.trigger_phrase": "ohwx dog, in ohwx style",
        "modelspec.usage_hint": "Trigger words: ohwx dog, in ohwx style",
        "modelspec.prediction_type": "epsilon",
        "modelspec.thumbnail": "data:image/jpeg;base64,/9j/",
        "diffsynth_lite.version": "0.1.0",
        "diffsynth_lite.family": "sdxl",
        "diffsynth_lite.base_model": "stabilityai/stable-diffusion-xl-base-1.0",
        "diffsynth_lite.base_model_revision": "0a" * 20,
        "diffsynth_lite.contract": "1b" * 32,
        "diffsynth_lite.step": "250",
        "diffsynth_lite.weights": "trained",
        "ss_base_model_version": "sdxl_base_v1-0",
        "ss_sd_model_name": "stabilityai/stable-diffusion-xl-base-1.0",
        "ss_output_name": "Ohwx dog",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "16",
        "ss_network_alpha": "8",
        "ss_resolution": "(1024, 768)",
        "ss_num_train_images": "8",
        "ss_num_train_items": "8",
        "ss_steps": "250",
        "ss_seed": "7",
        "ss_learning_rate": "0.0001",
        "ss_lr_scheduler": "constant",
    }


def test_a_model_that_is_not_a_release_and_a_run_without_trigger_have_fewer_metadata() -> None:
    facts = replace(
        FACTS,
        name=None,
        base=BaseModel(),
        family="aura_flow",
        trigger_words=(),
        prediction_type=None,
        sources={},
    )
    metadata = lora_metadata(facts, step=1, is_average=True)
    assert metadata["modelspec.architecture"] == "aura_flow/lora"
    assert metadata["modelspec.title"] == "aura_flow LoRA"
    assert replace(FACTS, name=None).title == "ohwx dog, SDXL base 1.0 LoRA"
    assert metadata["modelspec.description"] == "LoRA of rank 16 for aura_flow, after 1 steps."
    assert metadata["diffsynth_lite.weights"] == "average"
    missing = (
        *(
            "modelspec.license",
            "modelspec.trigger_phrase",
            "modelspec.usage_hint",
            "modelspec.prediction_type",
        ),
        *("modelspec.thumbnail", "modelspec.timestep_range", "modelspec.date", "ss_base_model_version"),
        *("ss_sd_model_name", "ss_output_name", "ss_tag_frequency", "diffsynth_lite.base_model"),
    )
    assert metadata.keys().isdisjoint(missing)


def test_a_file_of_an_expert_or_of_a_part_of_the_noise_names_its_timesteps() -> None:
    def timesteps(noise_range: tuple[float, float], sigma_range: tuple[float, float] = (0.0, 1.0)) -> str:
        facts = replace(FACTS, sigma_range=sigma_range)
        return lora_metadata(facts, step=1, noise_range=noise_range)["modelspec.timestep_range"]

    assert timesteps((0.875, 1.0)) == "875,999"
    assert timesteps((0.0, 0.875)) == "0,874"
    assert timesteps((0.0, 0.9), (0.25, 1.0)) == "250,899"


TENSORS = {
    "b.lora_A.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "a.alpha": torch.tensor(4.0),
    "c.lora_B.weight": torch.ones(3, 2, dtype=torch.bfloat16),
}


def test_a_file_with_metadata_has_the_same_tensors_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    own = {f"key{number}": "" for number in range(40)}
    added = {"modelspec.title": 'Žluťoučký 猫 "x"\n', "key7": "mine", "zz": "{}"}
    contents = set()
    for place, order in enumerate((own, dict(reversed(own.items())))):
        file = tmp_path / f"{place}.safetensors"
        save_file(TENSORS, file, metadata=order)
        add_metadata(file, dict(sorted(added.items(), reverse=bool(place))))
        contents.add(file.read_bytes())
    (content,) = contents
    read = load_file(file)
    assert read.keys() == TENSORS.keys()
    assert all(
        torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
        for name, tensor in TENSORS.items()
    )

    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])["__metadata__"]
    digest = hashlib.sha256(content[8 + length :]).hexdigest()
    hashes = {"modelspec.hash_sha256": f"0x{digest}", "sshs_model_hash": digest}
    assert header == {**own, **added, **hashes, "diffsynth_lite.dtype": "bfloat16"}
    assert list(header) == sorted(header)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == header
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["0.safetensors", "1.safetensors"]
