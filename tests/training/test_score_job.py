"""Features of images and their similarity to prompts, of tiny DINOv2 and SigLIP against their own forward."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import PreviewRequest
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.scores.features import FeatureModels
from diffsynth_lite.scores.record import read_scores
from diffsynth_lite.testing.feature_models import save_tiny_dinov2, save_tiny_siglip
from diffsynth_lite.training.encoding.scored_prompts import ScoredPrompt, ScoredPrompts
from diffsynth_lite.training.previews import Previews
from diffsynth_lite.training.scoring.job import ImageColumn, ScoredImages, ScoreJob, cut_back, scored_images

RED, BLUE, STRIPED = (Image.new("RGB", (64, 32), colour) for colour in ("red", "blue", "white"))
STRIPED.paste("black", (0, 8, 64, 16))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    return [str(save_tiny_dinov2(root / "dinov2")), str(save_tiny_siglip(root / "siglip"))]


@pytest.fixture
def models(folders: list[str]) -> FeatureModels:
    return FeatureModels.find(folders)


def test_features_are_unit_vectors_and_those_of_a_clip_point_where_its_frames_do(
    models: FeatureModels,
) -> None:
    red, blue, both, twice = models.features([[RED], [STRIPED], [RED, STRIPED], [RED, RED]])
    assert np.linalg.norm([red, blue, both], axis=1) == pytest.approx(1, abs=1e-12)
    assert both == pytest.approx((red + blue) / np.linalg.norm(red + blue), abs=1e-6)
    assert twice == pytest.approx(red, abs=1e-6)
    assert red @ blue < 0.999


@torch.no_grad()
def test_similarity_is_the_cosine_that_siglip_s_own_logits_are_made_of(
    models: FeatureModels, folders: list[str]
) -> None:
    images, prompts = [RED, STRIPED], ["a red circle", "a blue square"]
    model = AutoModel.from_pretrained(folders[1]).eval()
    pixels = AutoImageProcessor.from_pretrained(folders[1], backend="pil")(images, return_tensors="pt")
    padded = AutoTokenizer.from_pretrained(folders[1])(
        prompts, padding="max_length", max_length=64, return_tensors="pt"
    )
    logits = model(**pixels, input_ids=padded["input_ids"]).logits_per_image
    cosines = ((logits - model.logit_bias) / model.logit_scale.exp()).diagonal().numpy()
    found = models.similarity([[image] for image in images], [prompts[0].upper(), prompts[1]])
    assert found == pytest.approx(cosines, abs=1e-6)
    mean = models.similarity([images], prompts[:1])
    alone = models.similarity([[image] for image in images], prompts[:1] * 2)
    assert mean == pytest.approx([alone.mean()], abs=1e-6)


def test_models_are_the_same_by_what_is_in_their_files(folders: list[str], tmp_path: Path) -> None:
    moved = [str(shutil.copytree(folder, tmp_path / Path(folder).name)) for folder in folders]
    assert FeatureModels.find(moved).identity == FeatureModels.find(folders).identity
    assert FeatureModels.find(moved).names == ("dinov2", "siglip")
    save_tiny_siglip(Path(moved[1]), seed=1)
    assert FeatureModels.find(moved).identity != FeatureModels.find(folders).identity


def scored(
    folder: Path, models: FeatureModels, measure: str = "one", *, is_average: bool = False
) -> tuple[ScoreJob, list[ImageColumn]]:
    """A job, and the files of the base and of step 5: two images of each kind, of two frames."""
    columns = []
    for step in (0, 5):
        files = [folder / f"step-{step:08d}-prompt-{place:02d}-aa.png" for place in range(6)]
        for place, file in enumerate(files):
            strip = Image.new("RGB", (64, 32), (40 * place, 20 * step, 90))
            strip.paste("white", (8 * place, 0, 40, 20))
            strip.save(file)
        columns.append(ImageColumn(name="base" if step == 0 else "5", step=step, files=files))
    prompts = ScoredPrompts(
        new=[prompt("a red circle", [RED]), prompt("a blue square", [STRIPED], [BLUE])],
        plain=[prompt("a circle"), prompt("a square")],
        taught=[prompt("a red", [RED, RED]), prompt("a blue", [BLUE])],
    )
    previews = SimpleNamespace(
        marks=[measure], requests=[SimpleNamespace(num_frames=2)], generated_by="the base"
    )
    # The base's image of one prompt is the same from other noise, and that of the other is not.
    again = SimpleNamespace(
        marks=[], requests=range(2), file=lambda step, place: columns[0].files[(2, 5)[place]]
    )
    images = ScoredImages(previews=previews, again=again)
    of_run = {"path": folder / "scores.json", "prompts": prompts, "images": images, "models": models}
    job = ScoreJob(**of_run, is_average=is_average)
    return job, columns


def prompt(text: str, *clips: list[Image.Image]) -> ScoredPrompt:
    items = [SimpleNamespace(few_frames=lambda _, clip=clip: clip, identity=lambda: "") for clip in clips]
    return ScoredPrompt(text=text, items=items)


def test_what_is_there_is_not_scored_again_and_a_damaged_record_or_another_measure_starts_over(
    models: FeatureModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job, columns = scored(tmp_path, models)
    assert job.lacks("base")
    first = job.update(columns[:1])
    assert (job.lacks("base"), job.lacks("5")) == (False, True)
    assert scored(tmp_path, models, "another")[0].lacks("base")
    averaged, _ = scored(tmp_path, models, is_average=True)
    assert (averaged.lacks("base"), averaged.measure) == (True, job.measure)  # runs of both compare
    both = scored(tmp_path, models)[0].update(columns)  # after a kill: by a new process
    assert both.base == first.base
    assert both.other_seed[0] == pytest.approx(1, abs=1e-9)
    assert both.other_seed[1] < 1
    assert both.base.kept == pytest.approx((1, 1), abs=1e-9)
    assert max(both.columns[1].kept) < 1
    with monkeypatch.context() as patch:
        patch.setattr(FeatureModels, "features", lambda *_: pytest.fail("scored again"))
        assert scored(tmp_path, models)[0].update(columns) == both
    (tmp_path / "scores.json").write_text("{")
    assert job.update(columns) == both
    assert scored(tmp_path, models, "another")[0].update(columns[:1]).columns == both.columns[:1]
    assert caplog.text.count("scores start over") == 2


def test_images_of_averaged_weights_and_of_another_base_have_files_of_their_own(tmp_path: Path) -> None:
    file, prompts = tmp_path / "a.yaml", ScoredPrompts(new=[prompt("a")], plain=[prompt("b")])
    file.write_text("model: {family: qwen_image, path: a}\ndata: {path: a}\noutput: {dir: b}\n")
    of_one = {"conditioning": {}, "negative": {}, "width": 8, "height": 8, "num_inference_steps": 1}
    request = PreviewRequest(**of_one, guidance_scale=1.0, seed=0)

    def files(*settings: str, weights: str = "a") -> list[Path]:
        family = SimpleNamespace(fingerprint=lambda: weights)
        of_model = {"family": family, "model": "", "sampler": "", "vae_dtype": torch.float32}
        previews = Previews(folder=tmp_path, requests=[request] * 2, **of_model)
        config = load_config(file, settings).config
        images = scored_images(config, RunFolder(tmp_path), previews, prompts)
        return [images.previews.file(0, 0), images.again.file(0, 0)]

    found = [*files(), *files("train.ema_decay=0.5"), *files("model.quantize=int8"), *files(weights="b")]
    assert len(set(found)) == 8
    assert files("train.ema_decay=0.5", "validation.use_ema=false") == files()


def test_new_images_of_a_column_are_scored_again_and_damaged_ones_are_named(
    models: FeatureModels, tmp_path: Path
) -> None:
    job, columns = scored(tmp_path, models)
    before = job.update(columns)
    Image.new("RGB", (64, 32), "green").save(columns[1].files[0])
    assert job.update(columns) == before
    changed = job.update(columns, again=["5"]).columns[1].likeness
    assert changed[0] != before.columns[1].likeness[0]
    assert changed[1] == before.columns[1].likeness[1]
    columns[1].files[3].write_bytes(b"\x89PNG")
    with pytest.raises(
        UserError, match=r"step-00000005-prompt-03-aa.png cannot be read: .*; remove it to have"
    ):
        job.update(columns, again=["5"])


def test_a_run_that_continues_from_an_earlier_step_has_no_scores_of_later_ones(
    models: FeatureModels, tmp_path: Path
) -> None:
    job, columns = scored(tmp_path, models)
    job.update([*columns, ImageColumn(name="of others", step=None, files=columns[1].files)])
    for step, names in ((5, ["base", "5", "of others"]), (4, ["base", "of others"])):
        cut_back(tmp_path / "scores.json", tmp_path, step)
        assert [column.column for column in read_scores(tmp_path / "scores.json").columns] == names
    assert sorted({path.name[:13] for path in tmp_path.glob("*.png")}) == ["step-00000000"]
