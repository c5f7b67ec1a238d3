"""Renders which noise levels the steps of the recipes train, as a table of ``docs/models.md``.

Each recipe's family is bound to its model, written out as a folder without weights, and asked as the doctor
asks it, at the recipe's own size: nothing is downloaded.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.data import Bucket
from diffsynth_lite.doctor.findings import NoiseFindings
from diffsynth_lite.doctor.noise import noise_table
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.training.builder import build_noise_levels
from diffsynth_lite.training.data_settings import frame_counts_of

_REPOSITORY = Path(__file__).parents[1]

EXPLANATION = """\
Below the recipes of a family stand the noise levels that their steps train, at the recipe's size. `steps` is
the part of all steps; `<0.5`, and the columns from `0.0` (up to 0.1) on, are parts of those of the row, in %.
`diffsynth-lite doctor` shows the same for your config and data.
"""


def noise_section(family: type[ModelFamily], recipes: Sequence[Path]) -> list[str]:
    """Lines of Markdown.

    Args:
        recipes: files of the family's recipes.
    """
    if not recipes:
        return []
    noise_level, rows = "", []
    for recipe in recipes:
        noise_level, size, findings = _noise_of(family, load_config(recipe).config)
        for row in findings:
            of = f"`{recipe.name}`, {size}" if row is findings[0] else f"its `{row.name}`"
            rows.append(f"| {' | '.join([of, *row.cells])} |")
    headings = [f"noise levels: {noise_level}", *NoiseFindings.COLUMNS]
    return [f"| {' | '.join(headings)} |", f"|---|{'---:|' * len(NoiseFindings.COLUMNS)}", *rows, ""]


def _noise_of(family_class: type[ModelFamily], config: Config) -> tuple[str, str, Sequence[NoiseFindings]]:
    """What a noise level is, the recipe's size in words, and its rows."""
    with TemporaryDirectory() as path:
        folder = PipelineFolder(path=_REPOSITORY / config.model.path)
        if not folder.path.is_dir():
            (release,) = (one for one in family_class.releases if one.hub_id == config.model.path)
            folder = write_release(release, Path(path))
        family = family_class(folder, trained=config.lora.components)
        width, height = config.data.first_size
        size = Bucket(width=width, height=height, num_frames=max(frame_counts_of(config, family)))
        rows = noise_table(build_noise_levels(config, family), family, {size: 1.0})
        return family.noise_path.noise_level, size.name, rows
