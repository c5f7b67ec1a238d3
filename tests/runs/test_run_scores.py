"""A run whose steps are scored with tiny DINOv2 and SigLIP: what is generated and kept, what is refused."""

import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from accelerate.state import AcceleratorState
from tiny_run import TinyRun, checkpoint_tensors, copy_run, differing, make_run, tiny_image

from diffsynth_lite.cli.main import main
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.sampling.session import SampleSession
from diffsynth_lite.scores.recommendation import Recommendation, recommend
from diffsynth_lite.scores.record import ScoredColumn, ScoreRecord, read_scores, write_scores
from diffsynth_lite.testing.feature_models import save_tiny_dinov2, save_tiny_siglip
from diffsynth_lite.training.previews import Previews

LORA = "pytorch_lora_weights.safetensors"
NEW = ["ohwx, a red square", "ohwx, a blue square"]


def recommend_first(record: ScoreRecord, saved: Collection[int]) -> Recommendation:
    """The first step, in place of none, as there are too few prompts."""
    found = recommend(record, saved)
    return replace(found, best=found.columns[0])


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> TinyRun:
    """A finished run with two scored steps, 2 and 4."""
    root = tmp_path_factory.mktemp("scored")
    run = make_run(root, tiny_model)
    (root / "kept").mkdir()
    for place, caption in enumerate(NEW):
        tiny_image(64, 32, 30 + place).save(root / "kept" / f"{place}.png")
        (root / "kept" / f"{place}.txt").write_text(caption)
    save_tiny_dinov2(root / "dinov2")
    save_tiny_siglip(root / "siglip")
    settings = (
        *("validation.loss_items=0", "validation.item_losses=0", "validation.prompts=[a red circle]"),
        *("validation.num_inference_steps=2", "validation.guidance_scale=1", "data.trigger=ohwx"),
        *("train.steps=4", "validation.every_steps=2", f"validation.data={root}/kept"),
        f"validation.score_models=[{root}/dinov2, {root}/siglip]",
    )
    run = replace(run, settings=(*settings, "validation.scores=true"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffsynth_lite.training.export.best_lora.recommend", recommend_first)
        assert run.train() == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    return run


@pytest.fixture
def scored_run(scored: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_run(scored, tmp_path)


def columns(run: TinyRun) -> dict[str, ScoredColumn]:
    return {column.column: column for column in read_scores(run.folder / "scores.json").columns}


def test_the_base_and_each_saved_step_are_scored_and_the_training_is_the_same_as_without(
    scored_run: TinyRun,
) -> None:
    record = read_scores(scored_run.folder / "scores.json")
    assert [column.column for column in record.columns] == ["base", "2", "4"]
    assert record.new_prompts == tuple(NEW)
    assert record.plain_prompts == ("a red circle", "a red circle on a white background")
    assert record.taught_prompts == tuple(f"ohwx, {text}" for text in record.plain_prompts)
    assert record.models == ("dinov2", "siglip")
    base, _, last = record.columns
    assert base.kept == pytest.approx((1.0, 1.0))
    assert max(last.kept) < 0.999999
    images = sorted((scored_run.folder / "previews" / "scores").glob("*.png"))
    assert len(images) == 3 * 6
    assert len(list(images[0].parent.glob("other-seed/step-00000000-*.png"))) == len(record.other_seed) == 2
    assert len({path.read_bytes() for path in images[:6]}) == 6
    assert not list((scored_run.folder / "previews").glob("step-00000002-prompt-01*"))
    best, copy = scored_run.folder / "lora_best", scored_run.folder / "checkpoints" / "lora-00000002"
    assert (best / LORA).read_bytes() == (copy / LORA).read_bytes()
    assert "after 2 optimizer steps, where the score was highest." in (best / "README.md").read_text()

    plain = replace(scored_run, settings=scored_run.settings[:-1])
    folder = scored_run.root / "plain"
    assert plain.train(f"output.dir={folder}") == 0
    assert not (folder / "scores.json").exists()
    assert plain.metrics(folder) == scored_run.metrics()
    assert differing(checkpoint_tensors(folder, 4), checkpoint_tensors(scored_run.folder, 4)) == []
    weights = "lora/pytorch_lora_weights.safetensors"
    assert (folder / weights).stat().st_size == (scored_run.folder / weights).stat().st_size


def test_a_run_that_was_killed_before_the_scores_makes_them_and_those_of_later_steps_are_made_again(
    scored_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, before = scored_run.folder / "scores.json", columns(scored_run)
    record = read_scores(file)
    write_scores(file, record.model_copy(update={"columns": (record.base, record.columns[2])}))
    shutil.rmtree(scored_run.folder / "checkpoints" / "step-00000004")
    (scored_run.folder / "status.json").unlink()
    of_base = sorted((scored_run.folder / "previews" / "scores").glob("step-00000000-*.png"))
    contents = [image.read_bytes() for image in of_base]
    of_base[0].unlink()
    generated, generate = [], Previews.generate

    def note(self: Previews, transformer: object, step: int) -> Path | None:
        generated.extend([step] * (self.folder.name == "scores"))
        return generate(self, transformer, step)

    monkeypatch.setattr(Previews, "generate", note)
    assert scored_run.train("train.stop_after=9") == 0
    assert generated == [0, 4]
    assert [image.read_bytes() for image in of_base] == contents  # without the LoRA
    assert columns(scored_run) == before
    assert not (scored_run.folder / "lora_best").exists()  # There are too few prompts.

    state = scored_run.folder / "checkpoints" / "step-00000004" / "state.json"
    waited = json.loads(state.read_text())["stop_after"]
    assert (waited["step"], waited["num_since"]) == (2, 1)  # Step 2 is the first with scores.
    total = recommend(record).columns[0].total
    assert sum(map(mean, waited["samples"])) == pytest.approx(-total.value)
    assert waited["measured_by"] == {"scores": record.measure}


def test_the_command_scores_what_a_run_lacks_and_loras_of_others(
    scored_run: TinyRun,
    foreign_lora: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = columns(scored_run)
    generate, loras = SampleSession.generate_requests, []

    def note(self, requests, given):
        loras.append([lora.name for lora in given])
        return generate(self, requests, given)

    monkeypatch.setattr(SampleSession, "generate_requests", note)
    (scored_run.folder / "scores.json").unlink()
    for image in (scored_run.folder / "previews" / "scores").glob("step-0000000[04]*"):
        image.unlink()
    other = ("--lora", f"{foreign_lora}:0.5", "--lora", str(foreign_lora), "--json")
    assert main(["score", str(scored_run.folder), *other]) == 0
    assert loras == [["step-00000004"], ["foreign"], ["foreign"], []]
    found = columns(scored_run)
    assert [(name, column.step) for name, column in found.items()] == [
        *(("base", 0), ("2", 2), ("4", 4), ("foreign:0.5", None), ("foreign", None)),
    ]
    assert found["foreign"].kept != found["foreign:0.5"].kept
    assert {name: found[name] for name in before} == before
    printed = json.loads(capsys.readouterr().out)
    assert printed["reason"] == "too few prompts"
    assert [column["column"] for column in printed["columns"]] == ["2", "4", "foreign:0.5", "foreign"]
    file, of_another = scored_run.folder / "scores.json", found["foreign:0.5"]
    write_scores(file, read_scores(file).with_column(of_another.model_copy(update={"column": "foreign"})))
    assert main(["score", str(scored_run.folder), *other[2:4]]) == 0
    assert columns(scored_run) == found
    assert len(loras) == 4  # nothing was generated again
    assert "The scores recommend no step: it takes 8 captions" in capsys.readouterr().out
    assert "foreign:0.5" in (scored_run.folder / "report.html").read_text()


def test_the_command_compares_runs_and_refuses_those_that_differ_in_base_or_prompts(
    scored_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("diffsynth_lite.training.export.best_lora.recommend", recommend_first)
    monkeypatch.setattr(SampleSession, "generate_requests", lambda *_: pytest.fail("generated again"))
    first, other = scored_run.folder, scored_run.root / "other"
    shutil.copytree(first, other)
    shutil.rmtree(other / "lora_best")
    setting = f"logging.project={'a' * 300}"  # more than a file name may have
    assert main(["score", str(first), str(other), setting, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [column["column"] for column in printed["columns"]] == [
        f"{run}@{step}" for run in (first, other) for step in (2, 4)
    ]
    assert printed["lora_best"] == {str(first): 2, str(other): 2}
    assert (other / "lora_best" / LORA).read_bytes() == (first / "lora_best" / LORA).read_bytes()
    assert "after 2 optimizer steps." in (other / "lora_best" / "README.md").read_text()
    settings = (other / "resolved.yaml").read_text()
    for before, after, name in (
        ("vae_tiling: false", "vae_tiling: true", "model.vae_tiling"),
        ("plain_prompts: []", "plain_prompts: [a, b]", "the prompts"),
    ):
        (other / "resolved.yaml").write_text(settings.replace(before, after))
        assert main(["score", str(first), str(other)]) == 2
        assert f"{other} differ in {name}, so their scores do not compare" in caplog.text


def test_a_run_that_trains_is_not_scored_by_the_command(
    scored_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RunFolder, "trains", lambda _: True)
    assert main(["score", str(scored_run.folder)]) == 2
    assert "trains, and both would write scores.json; score it when it has ended" in caplog.text


MODELS = "validation.score_models=[{root}/%s, {root}/%s]"
REFUSED = {
    "validation.data=null": "compares with items that are not trained on, and none are held out; set",
    "validation.every_steps=null": "evaluated and saved are scored: here only the last is; set it to 2",
    "validation.every_steps=3": "that are both evaluated and saved are scored: here only the last is",
    "validation.score_models=[no/dinov2, no/siglip]": "validation.score_models: no/dinov2 is not in the hub",
    MODELS % ("siglip", "dinov2"): "siglip is a siglip; give one for images (DINOv2)",
    MODELS % ("data", "siglip"): "data has no config.json; preprocessor_config.json",
    "data.trigger=null": "validation.plain_prompts: 0 can be written from the captions",
    "validation.data={root}/one": "validation.scores: the held-out items have 1 different captions",
}


@pytest.mark.parametrize(("setting", "message"), REFUSED.items())
def test_what_cannot_be_scored_is_refused_before_weights_load(
    scored_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    setting: str,
    message: str,
) -> None:
    monkeypatch.setattr(QwenImage, "load_prompt_encoder", lambda *_: pytest.fail("weights were loaded"))
    root = scored_run.root
    (root / "one").mkdir()
    for name in ("0.png", "0.txt"):
        shutil.copy(root / "kept" / name, root / "one" / name)
    other = f"output.dir={root}/other"
    assert scored_run.train(setting.format(root=root), other) == 2
    assert message in caplog.text
