"""What the doctor says of the model: which release it is, how large, and what its files say otherwise."""

import json
from pathlib import Path

import pytest
import torch
from messy_data import Workplace, add_images, findings

from diffsynth_lite.doctor.examination import examine
from diffsynth_lite.doctor.model import model_table
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import PipelineFolder, load_family, releases_of
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.pipelines.flux import Flux


def released(name: str, path: Path) -> PipelineFolder:
    return write_release(next(release for release in releases_of("flux") if release.name == name), path)


def table_of(workplace: Workplace, folder: PipelineFolder, *overrides: str) -> dict[str, str]:
    config = workplace.config("data.path=data", f"model.path={folder.path}", *overrides, family="flux")
    return model_table(config, Flux(folder))


def test_a_release_is_known_by_its_files_and_counted_without_weights(workplace: Workplace) -> None:
    settings = ("lora.rank=16", "model.quantize=int8", "model.text_encoder_quantize=int8")
    table = table_of(workplace, released("FLUX.1 schnell", workplace.root / "model"), *settings)
    assert table == {
        "release": "with the settings of FLUX.1 schnell",
        "licence of it": "Apache-2.0",
        "transformer": "11,891,178,560 parameters, 11.1 GiB in int8 and bfloat16, trained",
        "text_encoder": "123,060,480 parameters, 226.8 MiB in int8 and float32",
        "text_encoder_2": "4,762,310,656 parameters, 7.6 GiB in int8 and float32",
        "vae": "83,819,683 parameters, 319.7 MiB in float32",
        "LoRA": "342 layers, 44,826,624 parameters: 171.0 MiB in float32, and 342.0 MiB of AdamW",
    }


def test_settings_that_the_files_have_otherwise_are_named(workplace: Workplace) -> None:
    folder = released("FLUX.1 schnell", workplace.root / "model")
    file = folder.path / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "shift": 2.0}))
    table = table_of(workplace, folder)
    assert table["release"] == "with the settings of FLUX.1 schnell"
    assert table["not as released"] == "scheduler.shift is 2.0, not 1.0"


def test_releases_with_the_same_files_are_known_only_by_the_hub_id(workplace: Workplace) -> None:
    folder = released("FLUX.1 dev", workplace.root / "model")
    assert table_of(workplace, folder)["release"] == "with the settings of FLUX.1 dev or FLUX.1 Krea dev"
    table = table_of(workplace, folder, "model.path=black-forest-labs/FLUX.1-Krea-dev")
    assert table["release"] == "FLUX.1 Krea dev"
    assert table["not confirmed of it"] == ("that its settings are those of FLUX.1 dev; whether it is gated")


def test_a_hub_id_with_other_files_than_the_release_is_reported(workplace: Workplace) -> None:
    folder = released("FLUX.1 schnell", workplace.root / "model")
    table = table_of(workplace, folder, "model.path=black-forest-labs/FLUX.1-dev")
    assert table["release"] == "FLUX.1 dev"
    assert "transformer.guidance_embeds is False, not True" in table["not as released"]


def test_a_model_that_is_no_release_is_counted_too_as_it_is_streamed_on_this_machine(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_images(workplace, "square", 2, (64, 64))
    # Its layers are too small to be moved on an accelerator.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    streamed = ("memory.stream_text_encoder=true", "memory.stream_slots=1")
    found = findings(workplace.config(f"data.path={path}", *streamed), sheet_size=0)
    assert found.model["release"] == "none that is known"
    assert found.model["transformer"].endswith("in bfloat16, trained")
    assert "layers, " in found.model["LoRA"]


def test_a_family_may_have_no_releases(workplace: Workplace) -> None:
    class Other(load_family("qwen_image")):  # type: ignore[misc]  # a class that is found by its name
        """A family made from another, whose releases are not its own."""

    config = workplace.config("data.path=data")
    table = model_table(config, Other(PipelineFolder(path=workplace.models / "qwen_image")))
    assert table["release"] == "none of this family is known"


def test_a_component_that_is_built_only_with_its_weights_is_not_counted(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = load_family("qwen_image")(PipelineFolder(path=workplace.models / "qwen_image"))
    build = family.empty_component
    monkeypatch.setattr(family, "empty_component", lambda name: None if name == "vae" else build(name))
    table = model_table(workplace.config("data.path=data"), family)
    assert table.keys() == {"release", "transformer", "text_encoder", "LoRA"}


def test_layers_that_are_not_there_are_a_problem_among_the_others(workplace: Workplace) -> None:
    path = add_images(workplace, "square", 2, (64, 64))
    config = workplace.config(f"data.path={path}", "lora.target_modules=[to_query]")
    examination = examine(config, sheet_size=0)
    assert examination.findings.model == {}
    with pytest.raises(UserError, match="to_query match no linear layer"):
        examination.require_usable()
