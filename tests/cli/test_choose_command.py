"""``diffsynth-lite choose``: what a choice names, who takes it, and what is refused."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diffsynth_lite.cli.main import main
from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import chosen_copy, find_lora_place
from diffsynth_lite.ui.runs.downloads import downloads

LAYER = "transformer.transformer_blocks.0.attn.to_q"
CARD = "---\nbase_model: Qwen/Qwen-Image\n---\n"


def put_lora(folder: Path, step: int, weights: str = "trained") -> None:
    folder.mkdir(parents=True)
    tensors = {f"{LAYER}.lora_A.weight": torch.full((2, 4), step), f"{LAYER}.lora_B.weight": torch.ones(4, 2)}
    own = {"diffsynth_lite.step": str(step), "diffsynth_lite.weights": weights}
    metadata = own | {"diffsynth_lite.family": "qwen_image"}
    save_file(
        {name: tensor.float() for name, tensor in tensors.items()},
        folder / "pytorch_lora_weights.safetensors",
        metadata=metadata,
    )
    (folder / "README.md").write_text(CARD)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with LoRAs of three steps and their averages, of which that of step 40 was best."""
    monkeypatch.chdir(tmp_path)
    run = RunFolder(Path("mine"))
    run.path.mkdir()
    run.write_status("finished", exit_code=0, step=60, message="finished")
    for step in (20, 40, 60):
        put_lora(run.checkpoints_folder / f"lora-{step:08d}", step)
        put_lora(run.checkpoints_folder / f"lora_ema-{step:08d}", step, "average")
    put_lora(run.lora_folder, 60)
    put_lora(run.ema_lora_folder, 60, "average")
    put_lora(run.best_lora_folder, 40, "average")
    return run


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ("mine@20", "lora-00000020"),
        ("mine@last", "lora-00000060"),
        ("mine@ema", "lora_ema-00000060"),
        ("mine@best", "lora_ema-00000040"),
        ("mine/checkpoints/lora_ema-00000020", "lora_ema-00000020"),
    ],
)
def test_each_name_of_a_lora_chooses_its_copy_by_step(run: RunFolder, given: str, chosen: str) -> None:
    assert main(["choose", given]) == 0
    assert find_lora_place("mine@chosen").resolve() == (run.checkpoints_folder / chosen).resolve()


def test_convert_publish_and_downloads_take_the_chosen_lora_unless_another_is_named(
    run: RunFolder, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def converted(source: str) -> bytes:
        Path("out.safetensors").unlink(missing_ok=True)
        assert main(["convert", source, "out.safetensors", "--to", "kohya"]) == 0
        return Path("out.safetensors").read_bytes()

    def sizes(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["publish", *arguments, "--to", "ann/lora", "--dry-run"]) == 0
        return capsys.readouterr().out

    latest, of_20 = converted("mine"), converted("mine@20")
    assert main(["choose", "mine"]) == 0
    assert main(["choose", "mine@20"]) == 0
    assert main(["choose", "mine"]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if "chosen" in line]
    assert printed[0] == "mine: no LoRA was chosen."
    assert printed[1].endswith("mine: step 20 was chosen; lora-00000020 in checkpoints/ stays.")
    assert printed[2] == "mine: step 20 was chosen."
    caplog.clear()
    assert converted("mine") == converted("mine@chosen") == of_20 != latest == converted("mine@last")
    assert caplog.messages == ["mine: step 20 was chosen; mine@last is the latest LoRA."]
    (run.checkpoints_folder / "lora-00000020" / "README.md").write_text(f"{CARD}# Of step 20")
    assert sizes("mine") == sizes("mine@chosen") != sizes("mine", "--lora", "last")
    first = next(iter(downloads(run).values()))
    assert (first.words, first.name) == ("Chosen LoRA, step 20", "lora-00000020.safetensors")
    assert main(["choose", "mine", "--clear"]) == 0
    assert converted("mine") == latest
    assert next(iter(downloads(run).values())).words == "LoRA"


def test_a_choice_that_is_gone_or_cannot_be_is_an_error_that_names_what_is_there(
    run: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["choose", "mine@20"]) == 0
    shutil.rmtree(run.checkpoints_folder / "lora-00000020")
    there = "the run has @last; @best; @ema; @40; @60"
    for command in (
        ["convert", "mine", "a.safetensors", "--to", "kohya"],
        ["publish", "mine", "--to", "a/b"],
    ):
        assert main(command) == 2
        assert caplog.messages[-1] == (
            f"mine@chosen: step 20 was chosen, and its LoRA is gone; choose another; {there}"
        )
    shutil.rmtree(run.checkpoints_folder / "lora-00000060")
    for given, words in (
        ("mine@20", "no LoRA of step 20 was kept (output.keep_adapters)"),
        ("mine@last", "no LoRA by step was kept of it (output.keep_adapters); the run has @last"),
        ("mine@40 --clear", "--clear mine@40: takes the folder of a run"),
        ("nowhere", "nowhere: there is no such file or folder"),
    ):
        assert main(["choose", *given.split()]) == 2
        assert words in caplog.messages[-1]
    put_lora(Path("alone"), 3)
    assert main(["choose", "alone"]) == 2
    assert "alone: is not a LoRA of a run" in caplog.messages[-1]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"lora": 3}', '{"lora": "lora"}', '{"lora": ["a"]}'])
def test_a_damaged_choice_is_an_error_and_leads_nowhere_else(run: RunFolder, content: str) -> None:
    run.chosen_file.write_text(content)
    with pytest.raises(UserError, match=r"chosen\.json: names no LoRA of the run"):
        find_lora_place("mine@chosen")
    assert next(iter(downloads(run).values())).words == "LoRA"
    run.chosen_file.write_text('{"lora": "../../other/checkpoints/lora-00000020"}')
    choice = chosen_copy(run)
    assert choice is not None
    assert choice.path == run.checkpoints_folder / "lora-00000020"
