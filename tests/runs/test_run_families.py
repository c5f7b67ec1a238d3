"""Every family through the training command: offload, previews, an exact resume, a LoRA that loads.

The layouts of its releases too. The first of each kind of data is also sampled from, with streamed weights:
what a family adds to that, its previews, is tested in tests/pipelines, and a layout adds nothing to a resume.
What is more about a family or a kind of data has a file of its own.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from card_code import LARGEST_DIFFERENCE, code_of, difference, generated
from family_cases import PROMPT, SIZES, STEPS, FamilyCase, cases_of, make_case
from family_sample import families_to_test, pairs_on, small_edit_inputs
from PIL import Image
from tiny_run import TinyRun, checkpoint_tensors, differing

from diffsynth_lite.cli.main import main
from diffsynth_lite.core.gradient import blocks_in
from diffsynth_lite.lora.updates import pairs_of
from diffsynth_lite.media import Generated, frame_strip, frames_of
from diffsynth_lite.pipelines import ModelFamily, PreviewRequest
from diffsynth_lite.pipelines.base.composite import Composite
from diffsynth_lite.training.export.usage import usage_code

STREAMED = ("memory.stream_blocks=all", "memory.stream_slots=1")
NO_PREVIEWS = tuple(
    f"validation.{key}=[]"
    for key in ("prompts", "inputs", "last_frames", "control", "inpaint_masks", "faces")
)
INPUTS = {
    "starts/0.png": "input.png",
    "lasts/0.png": "last.png",
    "holes/0.png": "mask.png",
    "controls/0.mp4": "control.mp4",
    "faces/0.mp4": "face.mp4",
}
"""What the code of a card calls the files that a case has for its preview."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Train each family."""
    cases = cases_of(families_to_test(metafunc.config))
    metafunc.parametrize("case", cases.values(), ids=cases.keys())


@pytest.fixture(autouse=True)
def _small_inputs() -> Iterator[None]:
    with small_edit_inputs():
        yield


@dataclass
class Asked:
    """The previews that a run asks its family for."""

    requests: Sequence[PreviewRequest] = field(default_factory=list)

    @classmethod
    def of(cls, family: ModelFamily, patch: pytest.MonkeyPatch) -> "Asked":
        asked, sample = cls(), type(family).sample

        def note(
            self: ModelFamily, model: Any, dtype: torch.dtype, requests: Sequence[PreviewRequest]
        ) -> Any:
            asked.requests = requests
            return sample(self, model, dtype, requests)

        patch.setattr(type(family), "sample", note)
        return asked


def test_a_family_trains_goes_on_as_if_it_had_not_ended_and_leaves_a_lora_that_diffusers_loads(
    case: FamilyCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, family = make_case(case, tmp_path)
    whole = run.root / "whole"
    asked = Asked.of(family, monkeypatch)
    assert run.train(f"output.dir={whole}", "output.checkpoint_every_steps=1") == 0
    check_conditioning(run, case)
    if case.has_last_frames:
        assert [image.size for image in asked.requests[0].inputs] == [SIZES[0]] * 2

    monkeypatch.undo()
    trained = checkpoint_tensors(whole, STEPS)
    if len(family.noise_ranges) == 1:  # a step trains one of several experts
        check_all_learn(checkpoint_tensors(whole, 1), trained)
    if case.is_plain or case.is_first:
        check_goes_on(run, whole)
    if case.is_first:
        check_samples(whole, run.root / "samples")

    pipeline = case.build()
    # Read from the files as the run did: where a tensor lies in memory shows in the last bit of a sum.
    parts = family.parts_of(family.load_transformer(torch.float32))
    pipeline.register_modules(**parts)
    for file, of_file in family.lora_files.by_name.items():
        load_lora(pipeline, whole / "lora" / file, of_file[-1])
        with safetensors.safe_open(whole / "lora" / file, "pt") as opened:
            assert family.lora_metadata.items() <= opened.metadata().items()
    check_loaded(parts, trained)
    check_blocks(parts[family.trained[0]], family, run.metrics(whole))
    model = Composite(parts) if len(parts) > 1 else parts[family.trained[0]]
    preview = check_previews(family, model, asked.requests, whole / "previews")
    monkeypatch.chdir(run.root)
    pipeline = check_card(run, family, preview)
    if case.is_plain and not asked.requests[0].num_layers:  # layers have the sizes of their pipeline
        check_other_code(family, model, asked.requests[0], pipeline)


def check_goes_on(run: TinyRun, whole: Path) -> None:
    """From the first step on, as if it had not ended; with streamed weights, which change no bit either."""
    assert run.train(*NO_PREVIEWS, *STREAMED, "--resume", str(whole / "checkpoints" / "step-00000001")) == 0
    assert differing(checkpoint_tensors(whole, STEPS), checkpoint_tensors(run.folder, STEPS)) == []


def check_all_learn(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """All of the LoRA changes in the second step."""
    changed = differing(before, after)
    names = {name for name in after if ".lora_B." in name and name.startswith("adapter/")}
    assert names
    assert names - set(changed) == set()


def load_lora(pipeline: Any, file: Path, part: str) -> None:
    """As docs/models.md says, for pipelines of one file, of two, and those that load none."""
    second = {"load_into_transformer_2": True} if part == "transformer_2" else {}
    if not hasattr(pipeline, "load_lora_weights"):
        getattr(pipeline, part).load_lora_adapter(file.parent, weight_name=file.name)
        return
    pipeline.load_lora_weights(file.parent, weight_name=file.name, **second)


def check_blocks(model: torch.nn.Module, family: ModelFamily, rows: list[dict[str, Any]]) -> None:
    """All blocks are recomputed and offloaded from the first one on that a gradient reaches.

    That is the first one with a LoRA, or the first of all where what it is given comes from another LoRA.
    """
    blocks = blocks_in(model, family.block_lists)
    has_lora = [any(".lora_" in name for name, _ in block.named_parameters()) for block in blocks]
    first = has_lora.index(True) if len(family.trained) == 1 else 0
    report = next(row for row in rows if "blocks_recomputed" in row)
    assert report["blocks_recomputed"] == 2 * (len(blocks) - first)
    assert report["bytes_offloaded"] > 0


def check_conditioning(run: TinyRun, case: FamilyCase) -> None:
    """The cache holds what the case names."""
    held = set()
    for path in (run.root / "cache").rglob("*.safetensors"):
        held |= {
            (name, len(value)) for name, value in safetensors.torch.load_file(path).items() if value.ndim
        }
    assert held >= set(case.conditioning)


def check_loaded(parts: dict[str, torch.nn.Module], trained: dict[str, torch.Tensor]) -> None:
    """The LoRA does to the pipeline's models what the checkpoint's adapter does, whose alpha is 8."""
    loaded = {}
    for part, model in parts.items():
        prefix = "" if len(parts) == 1 else f"{part}."
        loaded |= {f"{prefix}{layer}": pair for layer, pair in pairs_on(model).items()}
    adapter = {
        name.removeprefix("adapter/"): value for name, value in trained.items() if name.startswith("adapter/")
    }
    expected = pairs_of(adapter, {"lora_alpha": 8})
    assert loaded.keys() == expected.keys()
    assert all(pair.distance(loaded[layer]) == 0 for layer, pair in expected.items())


def check_previews(
    family: ModelFamily, model: torch.nn.Module, requests: Sequence[PreviewRequest], previews: Path
) -> Generated:
    """Diffusers' pipeline draws with the loaded LoRA what the run drew last, which is not what it drew first.

    The family gives it what the prompt was encoded to.
    """
    with torch.no_grad():
        [preview] = family.sample(model.eval(), torch.float32, requests)
    frames = frames_of(preview)
    [before], [after] = (list(previews.glob(f"step-{step:08d}-*.png")) for step in (0, STEPS))
    drawn = frame_strip(frames).tobytes()
    assert drawn == pixels(after)
    assert drawn != pixels(before)
    for place in range(requests[0].num_layers):
        with Image.open(after.with_suffix("") / f"layer-{place + 1}.png") as layer:
            assert layer.tobytes() == frames[place].tobytes()
    return preview


def check_samples(folder: Path, samples: Path) -> None:
    """The command draws, without the LoRA and with it, what the run drew first and last; streamed, too."""
    assert main(["sample", "--lora", str(folder), "--out", str(samples), *STREAMED]) == 0
    for step, scale in ((0, 0), (STEPS, 1)):
        [preview] = folder.glob(f"previews/step-{step:08d}-*.png")
        [sample] = samples.glob(f"*-scale-{scale}.png")
        assert pixels(sample) == pixels(preview)


def check_card(run: TinyRun, family: ModelFamily, preview: Generated) -> Any:
    """The code in the model card takes the LoRA into all that was trained, and generates the preview."""
    for folder, file in INPUTS.items():
        if (run.root / folder).exists():
            shutil.copyfile(run.root / folder, file)
    lora = run.root / "whole" / "lora"
    folders = {"path/to/the/base/model": run.root / "model", "path/to/this/folder": lora}
    drawn, pipeline = generated(
        code_of(lora / "README.md"), folders, sees_images=family.edits.prompt_sees_images
    )
    assert all(getattr(pipeline, part).peft_config for part in family.trained)
    assert difference(drawn, preview) <= LARGEST_DIFFERENCE
    return pipeline


def check_other_code(
    family: ModelFamily, model: torch.nn.Module, request: PreviewRequest, pipeline: Any
) -> None:
    """The code for a preview of another size and without guidance generates that one."""
    is_sized = not request.control and not request.inpaint_mask
    width = request.width + is_sized * family.size_divisor
    other = replace(request, guidance_scale=1.0, width=width)
    facts = {"base": "", "dtype": "float32", "lora": "", "prompt": PROMPT, "negative_prompt": " "}
    code = usage_code(family, other, **facts, fps=family.default_fps)
    assert code is not None
    with torch.no_grad():
        [preview] = family.sample(model, torch.float32, [other])
    drawn, _ = generated(code, pipeline=pipeline)
    assert difference(drawn, preview) <= LARGEST_DIFFERENCE


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.convert("RGB").tobytes()
