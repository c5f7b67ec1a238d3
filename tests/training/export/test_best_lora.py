"""The best LoRA of a run with scores: it is that of the recommended step, or of none."""

from pathlib import Path

import pytest
from run_folders import write_run_scores

from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.model_card import marked
from diffsynth_lite.training.export.best_lora import follow_scores

FILE = "pytorch_lora_weights.safetensors"
BASE = {0: (0.0, 1.0)}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of which step 20 is recommended, and a LoRA of others is better still."""
    write_run_scores(tmp_path, BASE | {10: (0.3, 0.9), 20: (0.6, 0.9), None: (0.9, 0.95)})
    for step in (10, 20):
        folder = tmp_path / "checkpoints" / f"lora-{step:08d}"
        for file in (FILE, "COMPLETE"):
            (folder / file).write_text(f"step {step}")
        (folder / "README.md").write_text(marked(f"step {step}"))
    return RunFolder(tmp_path)


def best(run: RunFolder) -> str:
    return (run.best_lora_folder / FILE).read_text()


def test_the_best_lora_is_that_of_the_recommended_step_and_moves_with_it(run: RunFolder) -> None:
    assert follow_scores(run, "lora", kept=None) == 20
    assert best(run) == "step 20"
    assert sorted(file.name for file in run.best_lora_folder.iterdir()) == [FILE, "README.md"][::-1]
    card = run.best_lora_folder / "README.md"
    write_run_scores(run.path, BASE | {10: (0.7, 0.9), 20: (0.6, 0.9)})
    assert follow_scores(run, "lora", kept=20) == 10
    assert best(run) == "step 10"
    assert card.read_text() == marked("step 10")
    card.write_text("mine")
    write_run_scores(run.path, BASE | {10: (0.7, 0.9), 20: (0.9, 0.9)})
    assert follow_scores(run, "lora", kept=10) == 20
    assert card.read_text() == "mine"
    (run.best_lora_folder / FILE).write_text("as it was")
    assert follow_scores(run, "lora", kept=20) == 20
    assert best(run) == "as it was"


def test_without_a_recommendation_the_best_lora_of_before_is_set_aside(
    run: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    follow_scores(run, "lora", kept=None)
    assert follow_scores(run, "lora_ema", kept=20, sets_aside=False) == 20  # no such copies
    assert best(run) == "step 20"
    assert follow_scores(run, "lora_ema", kept=20) is None
    assert not run.best_lora_folder.exists()
    assert (run.path / ".left-lora_best-1" / FILE).read_text() == "step 20"
    assert "The scores recommend no step" in caplog.text
    run.scores_file.unlink()
    assert follow_scores(run, "lora", kept=None) is None


def test_damaged_scores_change_nothing(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    follow_scores(run, "lora", kept=None)
    run.scores_file.write_text("{")
    assert follow_scores(run, "lora", kept=20) == 20
    assert best(run) == "step 20"
    assert "lora_best stays as it is" in caplog.text
