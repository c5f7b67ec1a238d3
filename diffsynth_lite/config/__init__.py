"""The yaml of a run as typed, checked settings; imports no torch, so a wrong config is refused at once."""

from diffsynth_lite.config.data import DataSettings, SourceSettings
from diffsynth_lite.config.document import load_yaml
from diffsynth_lite.config.files import find_config_file
from diffsynth_lite.config.loader import LoadedConfig, dump_config, load_config, recipes_for_card
from diffsynth_lite.config.run import AllowedChange
from diffsynth_lite.config.schema import Config, section_types
from diffsynth_lite.config.settings import ConfigError, ConfigProblem

__all__ = [
    "AllowedChange",
    "Config",
    "ConfigError",
    "ConfigProblem",
    "DataSettings",
    "LoadedConfig",
    "SourceSettings",
    "dump_config",
    "find_config_file",
    "load_config",
    "load_yaml",
    "recipes_for_card",
    "section_types",
]
