"""Run folders for tests of the page: with every file that a run can leave."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.metrics import MeasuredItem, write_items
from diffsynth_lite.scores.record import FILE_NAME, ScoredColumn, ScoreRecord, write_scores

ATTACK = "</script><script>document.title = 'attacked'</script><b> & \" ' {{ 7 * 7 }}"
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def full_folder(path: Path, *, text: str = "a circle", steps: Iterable[int] = (0, 100, 200)) -> Path:
    """A run of 300 steps that failed after step 200, with ``text`` wherever others than us write some.

    Two prompts are drawn at each of the steps, the second one as clips. The losses of three items changed by
    -80, -40 and +20 %; of four layers one has not changed. Two steps have scores, and no LoRA.
    """
    path.mkdir()
    folder = RunFolder(path)
    message = f"no memory for {text}"
    folder.write_status("failed", exit_code=1, step=200, message=message, progress={"time": 400.0})
    settings = {"data": {"path": text}, "train": {"steps": 300}, "validation": {"prompts": [text, "second"]}}
    folder.resolved_file.write_text(json.dumps(settings))
    start = {"step": 0, "at": "2026-01-01T00:00:00+00:00", "device": "cpu", "processes": 1, "versions": {}}
    changed = {"step": 100, "changed": {text: {"from": text, "to": 2}}, "chosen": {"memory.stream_blocks": 3}}
    folder.lineage_file.write_text(json.dumps([start, start | changed]))
    write_rows(folder.quarantine_file, [{"item": text, "reason": f"no image: {text}"}])
    _write_metrics(folder)
    losses = [0.5, 1.0, 2.0]
    items = [
        MeasuredItem(
            name=f"{place} {text}",
            caption=text,
            size="8x8",
            noise_levels=[0.5],
            measured_by="m",
            thumbnail=PIXEL,
        )
        for place in range(3)
    ]
    write_items(folder.items_file, items)
    after = [0.1, 0.6, 2.4]
    write_rows(
        folder.item_losses_file,
        [
            {"step": 0, "losses": losses, "by_level": [[x] for x in losses]},
            {"step": 200, "losses": after, "by_level": [[x] for x in after]},
        ],
    )
    kinds = ("blocks.0.to_q", "blocks.0.to_k", "blocks.1.to_q", f"blocks.1.{text}")
    updates = dict(zip(kinds, (0.01, 0.001, 0.1, 0.0), strict=True))
    samples = [{"step": step, "samples": {text: [[0.5, 2.0]], "b": [[0.5, 1.0]]}} for step in range(40)]
    write_rows(folder.sample_losses_file, samples)
    write_rows(folder.layers_file, [{"step": 200, "updates": updates}])
    write_run_scores(
        path, {0: (0.0, 1.0), 100: (0.6, 0.9), 200: (0.2, 0.5), None: (0.1, 0.9)}, text=text, loras=False
    )
    folder.previews_folder.mkdir()
    for step in steps:
        for place in range(2):
            name = f"step-{step:08d}-prompt-{place:02d}-aa{place}.png"
            Image.new("RGB", (32, 32), (step % 256, 90, 90)).save(folder.previews_folder / name)
        (folder.previews_folder / f"step-{step:08d}-prompt-01-aa1.mp4").write_bytes(b"\0" * 99)
    return path


def alternating(order: int, count: int) -> list[float]:
    """Differences of 0.01 from a mean, in another order of prompts for each second column."""
    return [0.02 * (place % 2 - 0.5) for place in range(count)][:: (-1) ** order]


def score_record(
    scores: Mapping[int | None, tuple[float, float]],
    *,
    text: str = "a circle",
    num_prompts: tuple[int, int, int] = (8, 8, 0),
    noise: Callable[[int, int], Iterable[float]] = alternating,
    **others: object,
) -> ScoreRecord:
    """The scores of a run.

    Args:
        scores: N and K by step, around which the prompts are; None is a LoRA of others.
        text: in each place where somebody else may write one.
        num_prompts: new, plain and taught ones.
        noise: differences of prompts from their mean, of a column by its place.
    """

    def around(value: float, order: int, count: int) -> tuple[float, ...]:
        return tuple(float(value + each) for each in noise(order, count))

    num_new, num_plain, num_taught = num_prompts
    columns = [
        ScoredColumn(
            column=text[:500] if step is None else ScoredColumn.name(step),
            step=step,
            **{name: around(new, order, num_new) for name in ("likeness", "contrast", "prompt")},
            kept=around(kept, 0, num_plain),
            memory=around(new, order, num_taught),
        )
        for order, (step, (new, kept)) in enumerate(scores.items())
    ]
    kinds = ("new_prompts", "plain_prompts", "taught_prompts")
    prompts = {kind: (text,) * count for kind, count in zip(kinds, num_prompts, strict=True)}
    record = {"measure": "m", "models": (text, text), "held_out_contrast": 1.0, "columns": tuple(columns)}
    return ScoreRecord(**{**record, **prompts, **others})


def write_run_scores(
    path: Path, scores: Mapping[int | None, tuple[float, float]], *, loras: bool = True, **others: Any
) -> None:
    """Write a :func:`score_record` into a run folder, and the LoRA of each step where these are kept."""
    write_scores(path / FILE_NAME, score_record(scores, **others))
    for step in filter(None, scores if loras else ()):
        (path / "checkpoints" / f"lora-{step:08d}").mkdir(parents=True, exist_ok=True)


def of_chart(name: str, expression: str) -> str:
    """JavaScript that computes an expression of the ``chart`` which the page has drawn."""
    found = f"uPlot.sync('step').plots.find(each => each.root.parentElement.dataset.chart === '{name}')"
    return f"(chart => {expression})({found})"


def _write_metrics(folder: RunFolder) -> None:
    report = {"blocks_run": 6, "blocks_checkpointed": 6, "blocks_recomputed": 6, "tensors_offloaded": 2}
    rows: list[dict[str, object]] = [
        {"step": 0, "time": 100.0, "train_fixed_noise_loss": 0.9},
        {"step": 1, "time": 101.0, **report, "bytes_offloaded": 2048},
        {"step": 2, "time": 102.0, "device_bytes_predicted": 1000, "device_bytes_measured": 900},
    ]
    for step in range(10, 241, 10):
        low = {"samples_by_noise/0.0-0.1": 2, "loss_by_noise/0.0-0.1": 0.2 if step > 120 else 0.4}
        high = {"samples_by_noise/0.9-1.0": 6, "loss_by_noise/0.9-1.0": 0.5}
        logged = {"loss": 1 / step, "grad_norm": 0.5, "learning_rate": 1e-4, "samples_per_s": 3.0}
        rows.append({"step": step, "time": 100.0 + step, **logged, "peak_memory_gib": 1.5, **low, **high})
        rows[-1] |= {"step_seconds/forward": 1.0, "step_seconds/backward": 2.0, "step_seconds/between": 1.0}
    rows.append({"step": 200, "time": 400.0, "train_fixed_noise_loss": 0.3})
    write_rows(folder.metrics_file, rows)
