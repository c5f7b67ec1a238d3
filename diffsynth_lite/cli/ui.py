"""Prepare images, start runs and steer them in a browser on this machine."""

import argparse
import logging
import os
import re
import sys
import webbrowser
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from diffsynth_lite.cli.console import print_lines
from diffsynth_lite.cli.continuation import continuation
from diffsynth_lite.errors import UserError

logger = logging.getLogger(__name__)

_PORT = 8713
_PROXY = re.compile(r"https?://[^/?#@\s]+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite ui``."""
    parser.add_argument(
        "workspace",
        nargs="?",
        type=Path,
        default=Path("workspace"),
        metavar="WORKSPACE",
        help="folder with data/, configs/ and runs/, made if need be (default: ./workspace)",
    )
    parser.add_argument(
        "--port", metavar="N", type=int, default=_PORT, help="0 for any (default: %(default)s)"
    )
    parser.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        help="open a browser (default: where there is a display, and no ssh)",
    )
    parser.add_argument(
        "--behind",
        metavar="https://NAME",
        help="address of the HTTP proxy of a rented machine, through which the browser comes; "
        "the server then listens on all addresses of the machine",
    )


def run(parsed: argparse.Namespace) -> None:
    """Answer until Ctrl+C; the runs that were started continue.

    Raises:
        UserError: the port is taken, or the folder is not a workspace.
    """
    behind = parsed.behind.rstrip("/") if parsed.behind is not None else None
    if behind is not None and not _PROXY.fullmatch(behind):
        raise UserError(f"--behind {parsed.behind}: give the address that the browser shows: https://NAME")
    from diffsynth_lite.ui.server import build, listen, serve
    from diffsynth_lite.workspace import open_workspace

    workspace = open_workspace(parsed.workspace)
    os.chdir(workspace.path)  # Paths in its configs are relative to it.
    token = workspace.token()
    with listen(parsed.port, behind=behind) as bound:
        port = bound.getsockname()[1]
        address = f"{behind or f'http://127.0.0.1:{port}'}/?token={token}"
        print_lines(f"Open {address} in a browser; Ctrl+C ends it.")
        if behind is not None:
            print_lines(
                f"It listens on all addresses of this machine, port {port}; who has the address above can "
                "train, read and remove files here."
            )
        if opens_browser(os.environ, sys.platform) if parsed.open is None else parsed.open:
            webbrowser.open(address)
        try:
            by_queue = partial(continuation, within=workspace.path)
            guard = build(workspace, token=token, continuation=by_queue, behind=behind)
            serve(guard, [bound])
        except KeyboardInterrupt:
            logger.info("Ended; runs that it started continue.")


def opens_browser(variables: Mapping[str, str], platform: str) -> bool:
    """Whether a machine has a display that the person looks at.

    Args:
        variables: of the environment.
        platform: as ``sys.platform`` names it.
    """
    if any(name in variables for name in ("SSH_CONNECTION", "SSH_TTY")):
        return False
    has_display = any(variables.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return has_display or platform in ("darwin", "win32")
