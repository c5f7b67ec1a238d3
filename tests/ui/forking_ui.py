"""The command ``ui``, whose commands are forked from it."""

import subprocess
import sys

from forked_commands import ForkedCommand

from diffsynth_lite.cli.main import main

subprocess.Popen = ForkedCommand
sys.exit(main(["ui", *sys.argv[1:]]))
