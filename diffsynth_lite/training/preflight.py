"""This file checks a whole run before any weights are loaded, and reports all that is wrong at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.core.gradient import BlockPolicy, Treatment, blocks_of
from diffsynth_lite.data import BatchLayout, Record, check_image, read_records, without_bad_items
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.pipelines import ModelFamily, load_family, resolve_folder
from diffsynth_lite.training.learning_rate import learning_rate_schedule
from diffsynth_lite.training.trackers import require_trackers

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """What the checks found, for the builder.

    Attributes:
        family: bound to its folder.
        records: training images and captions.
        validation_records: held-out ones; empty when the training items are measured instead.
        target_layers: full names of the layers that get a LoRA.
        num_blocks: transformer blocks that checkpointing covers.
        num_selected_blocks: those of them that the policy checkpoints.
    """

    family: ModelFamily
    records: Sequence[Record]
    validation_records: Sequence[Record]
    target_layers: Sequence[str]
    num_blocks: int
    num_selected_blocks: int


class _Checks:
    """Runs checks one after the other and keeps what they complain of."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def attempt(self, check: Callable[[], _Result]) -> _Result | None:
        """The check's result, or None when it complained."""
        try:
            return check()
        except UserError as error:
            self.problems.append(str(error))
            return None


def check_run(config: Config, *, num_processes: int) -> CheckedRun:
    """Check paths, data, sizes, targets and blocks; no weights are loaded.

    Args:
        config: of the run.
        num_processes: devices of the run.

    Raises:
        UserError: one line for each problem found.
    """
    checks = _Checks()
    validation = config.validation
    checks.attempt(lambda: _check_batch_size(config, num_processes))
    checks.attempt(lambda: build_learning_rate(config))
    checks.attempt(lambda: _check_output_is_apart(config))
    checks.attempt(lambda: require_trackers(config.logging.trackers))
    records = checks.attempt(
        lambda: _read_images(config, "data.path", config.data.path, config.data.metadata)
    )
    held_out = checks.attempt(
        lambda: _read_images(config, "validation.data", validation.data, None) if validation.data else []
    )
    if checks.problems and not Path(config.model.path).expanduser().is_dir():
        raise UserError("\n".join(checks.problems))  # Before a model is downloaded.
    family = checks.attempt(lambda: _bind_family(config))
    if family is not None:
        model = _check_model(checks, family, config)
    if checks.problems:
        raise UserError("\n".join(checks.problems))
    assert family is not None
    assert records is not None
    assert held_out is not None
    return CheckedRun(
        family=family,
        records=records,
        validation_records=held_out,
        target_layers=model.target_layers,
        num_blocks=model.num_blocks,
        num_selected_blocks=model.num_selected_blocks,
    )


def _check_batch_size(config: Config, num_processes: int) -> None:
    try:
        BatchLayout(
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            num_processes=num_processes,
            process_index=0,
        )
    except UserError as error:
        raise UserError(f"train.{error}") from None


def _read_images(config: Config, key: str, path: str, metadata: str | None) -> list[Record]:
    folder = Path(path).expanduser()
    try:
        records = read_records(
            folder,
            metadata=_metadata_file(folder, metadata) if metadata else None,
            image_column=config.data.image_column,
            caption_column=config.data.caption_column,
        )
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    if config.data.on_bad_item == "skip":
        return records  # The caching pass finds the bad ones and keeps the list of them.
    bad = {}
    for record in records:
        try:
            check_image(record.image)
        except UserError as error:
            bad[record.name] = str(error)
    return without_bad_items(records, bad, on_bad_item="error", quarantine=lambda *_: None)


def _check_output_is_apart(config: Config) -> None:
    output, data = (Path(path).expanduser().resolve() for path in (config.output.dir, config.data.path))
    if output.is_relative_to(data):
        raise UserError(
            f"output.dir: {config.output.dir} is inside data.path {config.data.path}, where its previews "
            "would be taken for data; name a folder outside"
        )


def _metadata_file(folder: Path, name: str) -> Path:
    """A file in the data folder, or else a path of its own."""
    inside = folder / name
    return inside if inside.is_file() else Path(name).expanduser()


def _bind_family(config: Config) -> ModelFamily:
    family_class = load_family(config.model.family)
    folder = resolve_folder(config.model.path, revision=config.model.revision, variant=config.model.variant)
    family = family_class(folder)
    family.check_folder()
    return family


@dataclass(frozen=True, kw_only=True)
class _CheckedModel:
    target_layers: Sequence[str]
    num_blocks: int
    num_selected_blocks: int


def _check_model(checks: _Checks, family: ModelFamily, config: Config) -> _CheckedModel:
    checks.attempt(
        lambda: family.check_size(config.data.width, config.data.height, keys="data.width, data.height")
    )
    if preview_size(config) != (config.data.width, config.data.height):
        keys = "validation.width, validation.height"
        checks.attempt(lambda: family.check_size(*preview_size(config), keys=keys))
    transformer = family.empty_transformer()
    blocks = checks.attempt(lambda: _find_blocks(family, transformer))
    layers = checks.attempt(lambda: _find_targets(family, transformer, config)) if blocks else []
    selected = checks.attempt(lambda: _select_blocks(config, len(blocks))) if blocks else []
    return _CheckedModel(
        target_layers=layers or [],
        num_blocks=len(blocks or []),
        num_selected_blocks=len(selected or []),
    )


def _find_targets(family: ModelFamily, transformer: torch.nn.Module, config: Config) -> list[str]:
    return find_target_layers(
        transformer,
        config.lora.target_modules or family.default_target_modules,
        block_lists=family.block_lists,
        dead_in_last_block=family.dead_in_last_block,
    )


def _find_blocks(family: ModelFamily, transformer: torch.nn.Module) -> list[torch.nn.Module]:
    try:
        return blocks_of(transformer, family.block_lists)
    except ValueError as error:
        raise UserError(f"train.use_gradient_checkpointing: {error}") from None


def build_learning_rate(config: Config) -> Callable[[int], float]:
    """The learning rate of each 0-based optimizer step.

    Raises:
        UserError: the settings of the schedule do not fit together.
    """
    return learning_rate_schedule(
        config.train.lr_scheduler,
        base=config.train.learning_rate,
        warmup_steps=config.train.warmup_steps,
        total_steps=config.train.steps,
    )


def block_policy(config: Config) -> BlockPolicy:
    """What happens to the single blocks, as far as the two gradient switches permit it."""
    memory = config.memory
    return BlockPolicy(
        select=memory.policy,
        n=memory.policy_n,
        blocks=tuple(memory.policy_blocks),
        selected=Treatment(park=True, save_attention=memory.save_attention),
    )


def _select_blocks(config: Config, num_blocks: int) -> list[int]:
    key = "policy_n" if config.memory.policy_n else "policy_blocks"
    try:
        return block_policy(config).selection(num_blocks)
    except ValueError as error:
        raise UserError(f"memory.{key}: {error}") from None


def preview_size(config: Config) -> tuple[int, int]:
    """Width and height of the previews in pixels: the data's unless given."""
    return config.validation.width or config.data.width, config.validation.height or config.data.height
