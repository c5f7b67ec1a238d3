"""Secrets in the environment, the yaml, the command line and in errors reach neither disk nor screen."""

from collections.abc import Iterator

import pytest
from leaking_train import make_leaky
from tiny_run import TinyRun, forked

from diffsynth_lite.redaction import Redactor

CANARY = "canary"
TOKEN = "hf_canaryAbcdefghijklmnopqrstuvwxyz"
SETTINGS = f"""
# my token is {TOKEN}
  project: of-Bearer canary0123456789abcdef
  run_name: run-of-${{oc.env:LEAK_PASSWORD}}
"""
PROMPT = "https://ann:canary-in-url@example.org/picture"


@pytest.fixture
def leaky_run(watched_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> TinyRun:
    """A run with secrets in its environment, its yaml and its command."""
    monkeypatch.setenv("LEAK_PASSWORD", 'the canary\'s "pass\\word" é')
    monkeypatch.setenv("LEAK_TOKEN", TOKEN)
    text = watched_run.config.read_text()
    assert "logging:\n" in text
    text = text.replace("logging:\n", f"logging:{SETTINGS}").replace("a red circle,", f"'{PROMPT}',")
    watched_run.config.write_text(text)
    settings = (f"validation.negative_prompt=not {TOKEN}", "train.steps=2", "output.checkpoint_every_steps=1")
    return TinyRun(root=watched_run.root, config=watched_run.config, settings=settings)


def leaks(run: TinyRun) -> Iterator[str]:
    """Names of the files in run folder and cache that hold a canary."""
    for folder in (run.folder, run.root / "cache"):
        for path in folder.rglob("*"):
            if path.is_file() and CANARY.encode() in path.read_bytes().lower():
                yield path.relative_to(run.root).as_posix()


def test_no_secret_reaches_the_disk_the_trackers_or_the_screen(leaky_run: TinyRun) -> None:
    program = forked(
        leaky_run,
        *("logging.trackers=[wandb, tensorboard]", "logging.wandb_mode=offline"),
        script=("tests/runs/leaking_train.py",),
    )
    assert program.wait() == 1, program.printed()
    printed = program.printed()
    assert CANARY not in printed.lower()
    assert list(leaks(leaky_run)) == []
    for place in ("logging.project", "validation.prompts", "negative_prompt=not REDACTED (command line)"):
        assert f"{place}: holds a secret" in printed
    assert "RuntimeError: GET https://REDACTED@example.org/?token=REDACTED as 'REDACTED' failed" in printed
    assert "REDACTED" in leaky_run.status()["message"]
    (record,) = leaky_run.folder.rglob("*.wandb")
    assert b"REDACTED" in record.read_bytes()
    assert b"holds a secret" not in record.read_bytes()  # it does not get what the terminal shows


def test_without_the_redactor_the_same_run_leaks(
    leaky_run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Redactor, "text", lambda _self, text: text)
    make_leaky(monkeypatch.setattr)
    with pytest.raises(SystemExit, match="1"):
        leaky_run.train("logging.trackers=[tensorboard]")
    assert CANARY in capsys.readouterr().err
    found = set(leaks(leaky_run))
    config = "run/checkpoints/step-00000001/config.json"
    assert {"run/config.yaml", "run/resolved.yaml", "run/status.json", config} <= found
    assert any("tfevents" in name for name in found)
