"""The command of docs/add-a-model.md runs the tests of all families on one family, wherever it is kept."""

import re
import shlex
from pathlib import Path

import pytest
from processes import Program

REPOSITORY = Path(__file__).parents[1]
COMMAND = re.compile(r"```bash\nPYTHONPATH=my_project python -m (pytest .*?)\n```", re.S)
PYTEST = Path(pytest.__file__).parent / "__main__.py"


def test_the_command_for_a_family_elsewhere_reaches_every_file_of_tests_of_families(tmp_path: Path) -> None:
    (command,) = COMMAND.findall((REPOSITORY / "docs" / "add-a-model.md").read_text())
    _, option, family, *patterns = shlex.split(command)
    assert (option, family) == ("--family", "my_package.my_family")
    files = {path for pattern in patterns for path in REPOSITORY.glob(pattern)}
    assert {"test_family_interface.py", "test_run_families.py"} < {path.name for path in files}

    run = Program(
        PYTEST,
        # Plain assertions: what the process has imported before pytest cannot be rewritten.
        [
            *("--collect-only", "-q", "--assert=plain", option, "my_families.stable_diffusion"),
            *map(str, files),
        ],
        tmp_path / "printed",
    )
    assert run.wait() == 0, run.printed()
    collected = re.findall(r"^(\S+\.py)::\w+\[(.*)\]$", run.printed(), re.M)
    named = {
        REPOSITORY / file for file, parameters in collected if "my_families.stable_diffusion" in parameters
    }
    assert named == files
    assert not [parameters for _, parameters in collected if "qwen_image" in parameters]
