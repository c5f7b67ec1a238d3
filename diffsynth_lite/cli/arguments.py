"""This file has the arguments that commands share: which config, what lies on top of it, single settings."""

import argparse


def add_config_arguments(
    parser: argparse.ArgumentParser,
    *,
    config_help: str = "yaml; a bare name is also looked for in configs/",
    required: bool = True,
) -> None:
    """``--config``, ``--preset`` and ``key=value``."""
    parser.add_argument("--config", metavar="FILE", required=required, help=config_help)
    add_preset_argument(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.steps=500")


def add_preset_argument(parser: argparse.ArgumentParser) -> None:
    """``--preset``, which may be given several times."""
    parser.add_argument(
        "--preset",
        action="append",
        default=[],
        dest="presets",
        metavar="NAME",
        help="settings for a goal, on top of the file: likeness, style, motion, few_pictures; repeatable",
    )
