"""Renders which noise levels the steps of the recipes train, as a table of ``docs/models.md``.

Each recipe's family is bound to its model, written out as a folder without weights, and asked as the doctor
asks it, at the recipe's own size: nothing is downloaded.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.doctor.findings import NoiseFindings
from diffsynth_lite.doctor.tables import noise_table
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.training.builder import build_noise_levels
from diffsynth_lite.training.data_settings import frame_counts_of

_REPOSITORY = Path(__file__).parents[1]

EXPLANATION = """\
Below the recipes of a family are the noise levels that their steps train, at the recipe's size. `steps` is
the part of all steps; `<0.5`, and the columns from `0.0` (up to 0.1) on, are parts of those of the row, in %.
`diffsynth-lite doctor` shows the same for your config and data.
"""


def noise_section(family: type[ModelFamily], recipes: Sequence[Path]) -> list[str]:
    """Lines of Markdown.

    Args:
        recipes: files of the family's recipes.
    """
    noise_level, rows = "", []
    for recipe in recipes:
        config = load_config(recipe).config
        with TemporaryDirectory() as path:
            folder = _folder_of(family, config.model.path, Path(path))
            if folder is None:
                continue
            noise_level, size, findings = _noise_of(family(folder, trained=config.lora.components), config)
        for row in findings:
            of = f"`{recipe.name}`, {size}" if row is findings[0] else f"its `{row.name}`"
            rows.append(f"| {' | '.join([of, *row.cells[1:]])} |")
    if not rows:
        return []
    headings = [f"noise levels: {noise_level}", *NoiseFindings.COLUMNS[1:]]
    return [f"| {' | '.join(headings)} |", f"|---|{'---:|' * (len(headings) - 1)}", *rows, ""]


def _folder_of(family: type[ModelFamily], location: str, path: Path) -> PipelineFolder | None:
    """The model of a recipe: a folder of this repository, or a release that is written out at ``path``."""
    folder = PipelineFolder(path=_REPOSITORY / location)
    if folder.path.is_dir():
        return folder
    found = [release for release in family.releases if release.hub_id == location]
    return write_release(found[0], path) if found else None


def _noise_of(family: ModelFamily, config: Config) -> tuple[str, str, Sequence[NoiseFindings]]:
    """What a noise level is, the recipe's size in words, and its rows."""
    width, height = config.data.first_size
    size = Bucket(width=width, height=height, num_frames=max(frame_counts_of(config, family)))
    rows = noise_table(build_noise_levels(config, family), family, {size: 1.0})
    return family.noise_path.noise_level, size.name, rows
