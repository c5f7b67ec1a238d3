"""The plan as a command: what a config takes and which settings fit, without weights or a download."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TinyRun

from diffsynth_lite.cli.main import main
from diffsynth_lite.core.gradient import KEEP, RECOMPUTE
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.planning import choices
from diffsynth_lite.training.planning.phases import PhaseCounter

ANY = ("data.path=pictures", "output.dir=runs/one")


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def plan(*arguments: str) -> int:
    return main(["plan", *arguments])


def row(printed: str, name: str) -> list[float]:
    (line,) = [line for line in printed.splitlines() if line.strip().startswith(name)]
    return [float(cell) for cell in line.split(name)[1].split()]


def test_a_release_is_planned_from_its_numbers_alone(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("memory.stream_blocks=all", "train.compile=blocks", "train.ema_decay=0.9")
    assert plan("--config", "sana_lora.yaml", *settings, *ANY) == 0
    printed = capsys.readouterr().out
    needed, next_one, time = printed.splitlines()[:3]
    assert re.fullmatch(r"Needs (\S+) GiB of the GPU and (\S+) GiB of host memory\.", needed)
    assert "--gpu 'RTX 4090'" in next_one
    assert time.startswith("Time: not known without the name of a card")
    assert "Counted and estimated as with train.compile=off." in printed
    assert "sana, 1024x1024, micro-batch of 1" in printed
    names = ("slots of streamed weights", "LoRA", "its optimizer", "activations and gradients, peak")
    device = [row(printed, name)[0] for name in ("frozen weights", *names)]
    assert row(printed, "total")[0] == pytest.approx(sum(device), abs=0.03)
    # The LoRA and its average; two moments.
    lora, optimizer = (row(printed, name)[0] for name in ("LoRA", "its optimizer"))
    assert optimizer == pytest.approx(lora, abs=0.01)
    assert lora > 0.05  # so that one without the other would be seen
    assert row(printed, "training") == row(printed, "total")
    (most,) = re.findall(r"The most: (\S+) GiB on the device, while encoding prompts\.", printed)
    assert float(most) == pytest.approx(row(printed, "encoding prompts")[0], abs=0.06)
    # What the model's settings say that lies on the host, in bfloat16.
    assert row(printed, "frozen weights")[1] > row(printed, "slots of streamed weights")[0] > 0


def test_a_base_that_is_sharded_is_counted_as_each_process_has_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "_STRATEGIES", (KEEP,))  # a second for each
    printed = []
    for settings in (("--processes=1",), ("--processes=4", "memory.shard_base=node")):
        room = ("--device-gib=24", "--gpu=RTX 4090", "train.global_batch_size=4")
        assert plan("--config", "sana_lora.yaml", *room, *settings, "validation.prompts=[]", *ANY) == 0
        printed.append(capsys.readouterr().out)
    whole, sharded = printed
    weights = row(sharded, "frozen weights, 1 of 4 shards")
    assert weights == [pytest.approx(row(whole, "frozen weights")[0] / 4, abs=0.02), 0]
    assert 0 < row(sharded, "gathered of all shards, peak")[0] < row(whole, "frozen weights")[0]
    assert re.search(r"^Time: \S+ s a step of batch 4, ", sharded, re.MULTILINE)
    assert "What the processes exchange takes time on top." in sharded
    assert "stream_blocks" not in sharded


def test_a_sample_that_processes_share_is_counted_as_each_has_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "_STRATEGIES", (KEEP,))  # a second for each
    printed = {}
    for name, settings in (
        ("unsplit", ()),
        ("ulysses", ("train.context_parallel=2",)),
        ("ring", ("train.context_parallel=2", "train.context_parallel_kind=ring")),
    ):
        given = ("--config", "qwen_lora.yaml", "validation.prompts=[]", "model.family=flux", *ANY)
        room = ("model.path=black-forest-labs/FLUX.1-dev", "--gpu=H100", "lora.target_modules=attention")
        assert plan(*given, *room, "train.global_batch_size=2", "--processes=4", *settings) == 0
        printed[name] = capsys.readouterr().out
    activations = {name: row(text, "activations and gradients, peak")[0] for name, text in printed.items()}
    assert activations["ulysses"] == activations["ring"] < 0.6 * activations["unsplit"]
    exchanged = [row(printed[name], "exchanged of split sequences, peak")[0] for name in ("ulysses", "ring")]
    assert 0 < exchanged[0] < exchanged[1]
    assert "exchanged" not in printed["unsplit"]
    assert "one of 2 parts of the tokens. Previews are counted as if each" in printed["ulysses"]
    seconds = {name: float(re.findall(r"Time: (\S+) s", text)[0]) for name, text in printed.items()}
    assert seconds["ring"] < seconds["ulysses"] < seconds["unsplit"]  # Ulysses attends once more in backward
    assert " a step of batch 2, " in printed["unsplit"]
    assert " a step of batch 2, " in printed["ulysses"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert plan(*arguments, "--json") == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_a_verdict_comes_first_and_what_it_proposes_then_fits(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "_STRATEGIES", (KEEP, RECOMPUTE))
    given = ("--config", str(tiny_run.config), "--gpu=4090", "train.use_gradient_checkpointing=false")
    fits = answer(capsys, *given)
    assert fits["fits"] is True
    assert fits["overrides"] == []
    assert fits["summary"][0].startswith("Fits your RTX 4090: 0.0 of 21.6 GiB")
    assert fits["summary"][1] == "Nothing needs to change."
    assert fits["run_s"] == fits["step_s"] * 6
    short = "--device-gib=0.0115"
    refused = answer(capsys, *given, short)
    assert refused["fits"] is False
    assert refused["limit_gib"] <= refused["needed_gib"] == 0.012
    verdict, remedy, time = refused["summary"]
    assert verdict.startswith("Does not fit your RTX 4090: 0.01 of 0.01 GiB")
    assert remedy == f"It fits with these settings: {shlex.join(refused['overrides'])}"
    assert re.match(
        r"Time: with that \S+ s a step of batch 4, .* for 6 steps; estimated from the card's", time
    )
    (own,) = [choice for choice in refused["choices"] if choice["is_configured"]]
    assert not own["fits"]
    for settings in (refused["overrides"], ["memory.auto=true"]):  # as the run then chooses
        assert answer(capsys, *given, short, *settings)["fits"] is True

    def refuse(*_given: object) -> None:
        raise UserError("loads its models in a way of its own")

    assert fits["uncounted"] is None
    monkeypatch.setattr(PhaseCounter, "count", refuse)
    partial = answer(capsys, *given)
    assert partial["uncounted"] == "loads its models in a way of its own"
    assert partial["summary"][0].endswith(" (training only).")


def test_a_recipe_for_the_card_is_proposed_and_a_no_is_an_error_only_where_a_fit_is_required(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choices, "_STRATEGIES", (KEEP,))
    given = ("--config", "z_image_lora.yaml", "--device-gib=11", *ANY)
    assert plan(*given, "--json", "--require-fit") == 2
    refused = json.loads(capsys.readouterr().out)
    assert refused["summary"][1] == "The recipe for this card fits: --config z_image_12gb.yaml"
    assert refused["recipe"] == "z_image_12gb.yaml"
    assert refused["step_s"] is None  # without the name of a card
    assert plan(*given) == 0
    (proposed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Next: ")]
    assert proposed.endswith(f" train --config z_image_12gb.yaml {shlex.join(ANY)}")
    assert "--require-fit: Does not fit: " in caplog.text


def test_settings_of_a_step_are_listed_with_those_of_the_config_or_that_none_fit(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "_STRATEGIES", (KEEP,))

    def lines_of(gib: str, *given: str) -> list[str]:
        room = ("--device-gib", gib, *given)
        assert plan("--config", str(tiny_run.config), *room, "train.micro_batch_size=2") == 0
        lines = capsys.readouterr().out.splitlines()
        printed = [line.strip() for line in lines if "Counts reused from earlier plans" not in line]
        assert "qwen_image, 64x32, micro-batch of 2" in printed
        return printed

    last = lines_of("1")[-6:]
    assert last[:3] == [
        "Settings of a step, the fastest first:",
        "0.0 GiB, 0.0 on the host, 1.00 of the first one's time:",
        "train.use_gradient_checkpointing=false",
    ]
    assert last[4] == "as the config says"
    assert last[5].startswith("Next: ")
    assert last[5].endswith(f" train --config {tiny_run.config} train.micro_batch_size=2")
    without_previews = "validation.prompts=[]"
    preserved = "data.path=null", "data.sources=[{path: a}, {path: a, preserve: true, weight: 0.25}]"
    printed = lines_of("1", "--gpu", "M1", without_previews, *preserved)
    assert printed[2].startswith("Time: not known. Nothing was tried on a Mac")
    assert "20 % of the samples, if all sources hold as many items, are preserved" in " ".join(printed)
    assert lines_of("1e-8", without_previews)[1].startswith("Nothing that is known makes it fit.")


def test_counts_are_kept_for_the_next_plan(
    tiny_run: TinyRun, caches: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "_STRATEGIES", (KEEP,))

    def printed(*settings: str) -> str:
        assert plan("--config", str(tiny_run.config), "--device-gib=1", *settings) == 0
        return capsys.readouterr().out

    first, again = printed(), printed()
    folder = caches / "diffsynth_lite" / "plan"
    *same, reused = again.splitlines()
    assert "\n".join(same) + "\n" == first
    assert re.fullmatch(rf"Counts reused from earlier plans: [4-9]\. They are kept in {folder}; .*", reused)
    # Neither the number of streamed blocks nor what follows the plan is part of a count.
    files = set(folder.iterdir())
    printed("memory.stream_blocks=all", "train.steps=5")
    assert set(folder.iterdir()) == files
    for file in folder.iterdir():
        file.write_bytes(b"damaged")
    assert printed() == first


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "model.path=nobody/nothing",
            "neither a folder nor a known release of qwen_image (Qwen/",
        ),
        ("data.frame_counts=[5]", "data.frame_counts: 5 frames; this family makes images"),
        ("memory.stream_blocks=61", "memory.stream_blocks: 61; the model has 60 blocks"),
        ("lora.target_modules=[nothing]", "lora.target_modules: nothing match no linear layer"),
        ("--require-fit", "--require-fit: needs a card: give --gpu NAME"),
        ("--gpu=RTX 4900", "--gpu RTX 4900: not known; did you mean 'RTX 4090'"),
        ("memory.shard_base=all", "memory.shard_base: all needs several processes: pass --processes 8"),
        (
            "train.context_parallel=2",
            "train.context_parallel: 2 must divide the processes: pass --proc",
        ),
    ],
)
def test_what_no_run_could_do_is_refused(setting: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    assert plan("--config", "qwen_lora.yaml", setting, *ANY) == 2
    assert words in caplog.text
