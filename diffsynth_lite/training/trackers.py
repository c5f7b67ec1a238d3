"""This file sends metrics to ``metrics.jsonl`` always, and to the trackers that were asked for."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import redacted
from diffsynth_lite.training.metrics import MetricsFile


def require_trackers(names: Sequence[str]) -> None:
    """Check that the packages of the trackers are there.

    Raises:
        UserError: naming the missing package and how to install it.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"logging.trackers: {', '.join(missing)} is not installed: pip install {' '.join(missing)}"
        )


def start_trackers(
    accelerator: Accelerator,
    *,
    names: Sequence[str],
    project: str,
    settings: Mapping[str, Any],
    folder: Path,
    run_name: str | None,
    run_id: str,
    wandb_mode: str,
) -> None:
    """Start the accelerator's trackers; a resumed run continues its wandb run.

    They get numbers, and the settings with secrets masked. wandb would send more on its own: the command
    line, what the terminal shows, the changes in the git repository that it is started in. All that is off.

    Args:
        accelerator: was made with ``log_with=names``.
        names: of the trackers.
        project: groups runs.
        settings: shown beside the run.
        folder: where offline files go.
        run_name: shown for the run; None lets the tracker choose.
        run_id: identifies the run across resumes.
        wandb_mode: online or offline.
    """
    if not names:
        return
    from wandb import Settings as WandbSettings  # wandb takes a second to import
    from wandb.errors import Error as WandbError

    folder.mkdir(parents=True, exist_ok=True)
    wandb = {
        "dir": str(folder),
        "mode": wandb_mode,
        "name": redacted(run_name),
        "id": run_id,
        "resume": "allow",
        # The command line is part of wandb's metadata.
        "settings": WandbSettings(console="off", x_disable_meta=True, disable_git=True, disable_code=True),
    }
    try:
        accelerator.init_trackers(
            redacted(project), config=redacted(_flat(settings)), init_kwargs={"wandb": wandb}
        )
    except WandbError as error:
        raise UserError(
            f"logging.trackers: wandb: {error}; log in with `wandb login`, or set logging.wandb_mode=offline"
        ) from error


class MetricsLog:
    """Where numbers of the run go."""

    def __init__(self, file: MetricsFile, accelerator: Accelerator) -> None:
        self._file = file
        self._accelerator = accelerator

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row; call it on the main process or on all: only the main one writes."""
        if not self._accelerator.is_main_process or not values:
            return
        self._file.append(step, values)
        self._accelerator.log(dict(values), step=step)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Nested settings with dotted keys; what a tracker cannot show (lists, None) as text."""
    flat: dict[str, str | int | float | bool] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return flat
