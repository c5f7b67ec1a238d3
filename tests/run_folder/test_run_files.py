"""Files of a run are read as far as possible, with problems listed and secrets masked."""

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
from PIL import Image

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.files import write_json
from diffsynth_lite.lora.updates import pairs_of
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.redaction import Redactor, in_force
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.metrics import start_trackers
from diffsynth_lite.run_folder.reading import TolerantReader
from diffsynth_lite.training.checkpoint.resume import require_same, settings_fingerprint
from diffsynth_lite.training.encoding.dataset import Quarantine
from diffsynth_lite.training.lora_file import export_lora
from diffsynth_lite.training.previews import Previews

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


def test_a_file_that_is_not_there_is_empty_and_no_problem(tmp_path: Path) -> None:
    reader = TolerantReader(tmp_path / "none")
    assert (reader.mapping("a.json"), reader.sequence("b.yaml"), reader.rows("c.jsonl")) == ({}, [], [])
    assert reader.problems == []


def test_rows_around_a_broken_line_are_read_and_a_torn_last_one_is_no_problem(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"step": 1}\nnonsense\n[2]\n{"step": 3}\n{"ste')
    reader = TolerantReader(tmp_path)
    assert reader.rows("a.jsonl") == [{"step": 1}, {"step": 3}]
    assert reader.problems == ["a.jsonl: 2 of 4 lines are not rows and are left out"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", "{"),
        ("a.json", "[1]"),
        ("a.yaml", "a: [1"),
        ("a.yaml", "\0"),
        ("a.yaml", "# nothing\n"),
        ("a.yaml", "a: 2026-13-01\n"),
        ("a.yaml", "a: &b 1\nc: *b\n"),
    ],
)
def test_a_document_that_is_no_mapping_is_left_out_and_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    reader = TolerantReader(tmp_path)
    assert reader.mapping(name) == {}
    assert reader.problems == [f"{name} cannot be read and is left out"]
    (tmp_path / "folder.json").mkdir()
    assert reader.mapping("folder.json") == {}
    assert reader.problems[1:] == ["folder.json is not a regular file, and is left out"]


def test_secrets_in_what_is_read_are_masked(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"a": TOKEN}))
    (tmp_path / "a.jsonl").write_text(json.dumps({"step": 1, "names": [TOKEN]}) + "\n")
    reader = TolerantReader(tmp_path)
    assert reader.mapping("a.json") == {"a": "REDACTED"}
    assert reader.rows("a.jsonl") == [{"step": 1, "names": ["REDACTED"]}]


@pytest.mark.parametrize(
    ("lock", "is_abandoned"),
    [
        ("process 99999999 on {host}", True),
        ("process 99999999 on {host}, started at any time", True),
        ("process 1 on {host}", False),  # of a version that did not write the start
        ("process 1 on {host}, started before the machine was booted again", True),
        ("process 1 on elsewhere, started before the machine was booted again", False),
        ("process 99999999 on elsewhere", False),
        ("process 99999999999999999999 on {host}", False),
        ("what is this", False),
        (None, False),
    ],
)
def test_a_run_is_abandoned_where_the_holder_of_its_lock_is_known_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str | None, is_abandoned: bool
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    if lock is not None:
        (tmp_path / ".lock").write_text(lock.format(host="here"))
    assert RunFolder(tmp_path).is_abandoned() == is_abandoned


def test_rows_take_little_more_than_their_file(tmp_path: Path) -> None:
    rows = [
        {"step": step, **{f"loss_by_noise/{place}": step + place / 7 for place in range(20)}}
        for step in range(500)
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    reader = TolerantReader(tmp_path)
    tracemalloc.start()
    try:
        assert reader.rows(file.name) == rows
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * file.stat().st_size  # 2.3 times here, and 4.7 with a name and a copy for each row


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{family: qwen_image, path: m}}\ndata: {{path: d, trigger: {TOKEN}}}\n"
        f"output: {{dir: {tmp_path}/run}}\n"
    )
    return load_config(path).config


def test_the_contract_is_masked_and_still_agrees_with_itself(config: Config) -> None:
    fingerprint = settings_fingerprint(config, model_fingerprint="f")
    assert fingerprint["data.trigger"] == ["REDACTED"]
    saved = json.loads(json.dumps(fingerprint))
    assert require_same(settings_fingerprint(config, model_fingerprint="f"), saved, where="here") == []


def test_a_json_file_is_masked(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"message": [f"with {TOKEN}"], "step": 12})
    assert json.loads((tmp_path / "a.json").read_text()) == {"message": ["with REDACTED"], "step": 12}


def test_the_list_of_bad_items_is_masked(config: Config, tmp_path: Path) -> None:
    quarantine = Quarantine(config)
    quarantine.add_rows([("0.png", f"https://ann:{TOKEN}@example.org/ is not an image")])
    quarantine.write()
    row = json.loads((tmp_path / "run" / "quarantine.jsonl").read_text())
    assert row == {"item": "0.png", "reason": "https://REDACTED@example.org/ is not an image"}


def test_the_metadata_of_a_lora_are_masked_but_never_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    family = QwenImage(PipelineFolder(path=tmp_path))
    layer = "transformer_blocks.0.attn.to_q"
    tensors = {f"{layer}.lora_A.weight": torch.ones(2, 4), f"{layer}.lora_B.weight": torch.ones(3, 2)}
    settings = {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": [layer],
        "base_model_name_or_path": f"https://{TOKEN}@example.org/model",
    }
    monkeypatch.setattr(family.lora_files, "loaded", lambda _: pairs_of(tensors, settings))
    # The value of a secret variable, and the name of a layer.
    with in_force(Redactor({"KEY": "transformer_blocks"})):
        (file,), _ = export_lora(family, tmp_path / "lora", tensors, settings, lambda _: {})
    with safetensors.safe_open(file, "pt") as opened:
        metadata = str(opened.metadata())
    assert "https://REDACTED@example.org/model" in metadata
    assert layer in metadata
    assert TOKEN.encode() not in file.read_bytes()


def test_the_labels_of_the_preview_grid_and_the_metadata_of_previews_are_masked(tmp_path: Path) -> None:
    def grid_of(prompt: str, folder: Path) -> bytes:
        family = SimpleNamespace(
            sample=lambda *_args: [[Image.new("RGB", (64, 32), "red")]],
            shards=None,
            context=None,
            parts_of=lambda _model: {},
        )
        request = PreviewRequest(
            prompt=prompt,
            conditioning={},
            negative={},
            width=64,
            height=32,
            num_inference_steps=1,
            guidance_scale=1.0,
            seed=0,
        )
        previews = Previews(
            family=family,
            folder=folder,
            requests=[request],
            model="tiny",
            sampler="Euler",
            vae_dtype=torch.float32,
        )
        grid = previews.generate(torch.nn.Linear(1, 1), 0)
        assert grid is not None
        (preview,) = folder.glob("step-*.png")
        return grid.read_bytes() + preview.read_bytes()

    assert (
        grid_of(TOKEN, tmp_path / "a")
        == grid_of("REDACTED", tmp_path / "b")
        != grid_of("else", tmp_path / "c")
    )


def test_what_the_trackers_get_is_masked_and_wandb_takes_no_more(tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    accelerator = SimpleNamespace(
        init_trackers=lambda project, config, init_kwargs: given.update(
            project=project, config=config, **init_kwargs["wandb"]
        )
    )
    start_trackers(
        accelerator,
        names=["wandb"],
        project=f"p {TOKEN}",
        settings={"validation": {"prompts": [TOKEN]}, "train": {"steps": 3}},
        folder=tmp_path,
        run_name=f"r {TOKEN}",
        run_id="id",
        wandb_mode="offline",
    )
    assert (given["project"], given["name"]) == ("p REDACTED", "r REDACTED")
    assert given["config"] == {"validation.prompts": "['REDACTED']", "train.steps": 3}
    settings = given["settings"]
    assert (settings.console, settings.x_disable_meta) == ("off", True)
    assert (settings.disable_git, settings.disable_code) == (True, True)
