"""The flags: which there are, what wins, and what is refused."""

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from diffsynth_lite.cli.main import main
from diffsynth_lite.cli.train import build_parser
from diffsynth_lite.cli.train import main as train
from diffsynth_lite.errors import RunInterrupted, RunStoppedError, UserError, exit_code


def test_the_flags_are_these_and_no_others() -> None:
    flags = {option for action in build_parser()._actions for option in action.option_strings}
    assert flags == {
        *("-h", "--help", "--config", "--preset", "--resume"),
        *("--use_gradient_checkpointing", "--no-use_gradient_checkpointing"),
        *("--use_gradient_checkpointing_offload", "--no-use_gradient_checkpointing_offload"),
    }


def test_overrides_and_flags_come_in_any_order() -> None:
    parsed = build_parser().parse_intermixed_args(
        ["train.steps=5", "--config", "a.yaml", "--use_gradient_checkpointing_offload", "lora.rank=4"]
    )
    assert parsed.overrides == ["train.steps=5", "lora.rank=4"]
    assert parsed.use_gradient_checkpointing_offload is True
    assert parsed.use_gradient_checkpointing is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["sample", "--lora", "one", "--preset", "style"], "--preset style: lies on top of a --config; "),
        (["plan", "--config", "sdxl_lora.yaml", "--preset", "motion"], "--preset motion: is for cogvideox, "),
        (["doctor", "--preset", "x", "--config", "sdxl_lora.yaml"], "--preset x: There are few_pictures, "),
        (
            ["cache", "fill", "--config", "sdxl_lora.yaml", "--preset", "x"],
            "--preset x: There are few_pictures, ",
        ),
    ],
)
def test_commands_refuse_presets_that_do_not_fit(
    arguments: list[str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(arguments) == 2
    assert caplog.messages[-1].startswith(reason)


def test_each_way_to_end_has_its_exit_code() -> None:
    assert exit_code(UserError("")) == 2
    assert exit_code(RunStoppedError("")) == 3
    assert exit_code(RunInterrupted("")) == 75
    assert exit_code(ValueError("")) == 1


def test_torchs_agent_gets_the_reason_for_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert train(["--config", "nowhere.yaml"]) == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert "nowhere.yaml" in str(ChildFailedError("train.py", {0: failure}))
