"""This file holds what every stage of a run needs."""

from dataclasses import dataclass

from accelerate import Accelerator
from rich.console import Console

from diffsynth_lite.config import Config, LoadedConfig
from diffsynth_lite.training.checkpoint.resume import Origin
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.grace import StopGrace
from diffsynth_lite.training.preflight import CheckedRun
from diffsynth_lite.training.run_folder.folder import RunFolder
from diffsynth_lite.training.startup import StartupClock


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """What every stage of a run needs: settings, processes, places.

    Attributes:
        loaded: the config and its texts.
        accelerator: of the run.
        folder: of the run.
        store: its checkpoints.
        checked: the base model and the data, as far as they are known before weights load.
        console: where the progress line goes.
        clock: counts the start-up time.
        grace: that the launcher gives a stopped run; None where it is not known.
    """

    loaded: LoadedConfig
    accelerator: Accelerator
    folder: RunFolder
    store: CheckpointStore
    checked: CheckedRun
    console: Console
    clock: StartupClock
    grace: StopGrace | None

    @property
    def origin(self) -> Origin:
        """Where the run comes from."""
        resume = self.config.resume
        return Origin(source=resume.source, allow=resume.allow, folder=self.folder, store=self.store)

    @property
    def config(self) -> Config:
        """The settings."""
        return self.loaded.config

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes."""
        return bool(self.accelerator.is_main_process)
