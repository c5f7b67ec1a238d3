"""A run with a family that is kept outside of the package and given by the dotted path of its module."""

import logging
import sys
from pathlib import Path

import pytest
import torch
from diffusers import AuraFlowPipeline
from my_families.aura_flow import tiny
from tiny_run import REPOSITORY, TinyRun, make_run

FAMILY = "my_families.aura_flow"
ELSEWHERE = REPOSITORY / "tests" / "elsewhere"
SETTINGS = (
    *(f"model.family={FAMILY}", "train.steps=3", "validation.prompts=[a red circle]"),
    *("validation.loss_items=0", "train.use_gradient_checkpointing_offload=true"),
)


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    model = tmp_path / "model"
    tiny().save_pretrained(model)
    made = make_run(tmp_path, model)
    return TinyRun(root=made.root, config=made.config, settings=SETTINGS)


def test_a_family_from_a_folder_on_the_path_of_python_is_trained(run: TinyRun) -> None:
    assert (run.train(), run.status()["state"]) == (0, "finished")
    assert [row["step"] for row in run.metrics() if "loss" in row] == [1, 2, 3]
    # Four blocks, and two micro-batches a step.
    assert next(row["blocks_recomputed"] for row in run.metrics() if "blocks_recomputed" in row) == 8
    assert len(list((run.folder / "previews").glob("step-00000003-*.png"))) == 1
    pipeline = AuraFlowPipeline.from_pretrained(run.root / "model")
    pipeline.load_lora_weights(run.folder / "lora")
    names = {name: weight for name, weight in pipeline.transformer.named_parameters() if ".lora_B." in name}
    assert len(names) == 4 * 4
    assert all(torch.count_nonzero(weight) for weight in names.values())


def test_a_family_that_python_does_not_find_is_named_in_one_line(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [place for place in sys.path if Path(place) != ELSEWHERE])
    for name in (FAMILY, "my_families"):
        monkeypatch.delitem(sys.modules, name)
    logging.getLogger().handlers.clear()
    assert run.train() == 2
    printed = capsys.readouterr().err
    assert f"model.family: unknown family '{FAMILY}'" in printed
    assert "PYTHONPATH" in printed
    assert "Traceback" not in printed
