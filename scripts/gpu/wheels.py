"""This file fetches what a machine without network lacks, as wheels in the folder ``.wheels``.

The other machine describes itself by ``python -m pip inspect``. Its torch stays; the others have the versions
of constraints.txt.
"""

import json
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LIMIT_BYTES = 64 * 2**20
FOLDER = ".wheels"
_UNUSED = ("torch", "wandb")
"""Of those that the package requires: the machine's own, and what no stage imports."""
_OPTIONAL = ("bitsandbytes",)
"""Cases that need one of them are skipped without it."""
_TESTING = ("pytest", "hypothesis")
_PLATFORMS = (
    *(f"manylinux_2_{minor}" for minor in (35, 34, 31, 28, 27, 24, 17)),
    "manylinux2014",
    "manylinux1",
)


@dataclass(frozen=True)
class Target:
    """The machine that the wheels are for.

    Attributes:
        environment: values of the markers of requirements.
        installed: versions by name.
    """

    environment: Mapping[str, str]
    installed: Mapping[str, str]

    @classmethod
    def described_in(cls, file: Path) -> "Target":
        """By what ``pip inspect`` printed there.

        Raises:
            ValueError: the file cannot be read, or holds something else.
        """
        try:
            document = json.loads(file.read_text())
            found = [package["metadata"] for package in document["installed"]]
            installed = {canonicalize_name(each["name"]): each["version"] for each in found}
            return cls(environment=document["environment"], installed=installed)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"--wheels {file}: is not what `python -m pip inspect` prints on the other machine ({error})"
            ) from error

    def lacks(self, requirement: Requirement) -> bool:
        """Whether it has no version that would do."""
        marker = requirement.marker
        if marker is not None and not marker.evaluate({**self.environment, "extra": ""}):
            return False
        version = self.installed.get(canonicalize_name(requirement.name))
        return version is None or not requirement.specifier.contains(version, prereleases=True)


def fetch_wheels(target: Target, root: Path) -> int:
    """Fetch what a machine lacks, as far as it fits; 1 where something that every stage needs cannot come."""
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    for earlier in folder.glob("*.whl"):
        earlier.unlink()
    pins = dict(_pins(root / "constraints.txt"))
    missing: list[str] = []
    waiting = [*_required(root), *map(Requirement, _TESTING), *map(Requirement, _OPTIONAL)]
    seen: set[str] = set(_UNUSED)
    num_bytes = 0
    for requirement in waiting:  # grows while it is walked through
        name = canonicalize_name(requirement.name)
        if name in seen or not target.lacks(requirement):
            continue
        seen.add(name)
        wheel = _fetch(pins.get(name, str(requirement)), target, folder)
        if wheel is None or num_bytes + wheel.stat().st_size > LIMIT_BYTES:
            missing.append(f"{name} ({'no wheel for it' if wheel is None else 'too large'})")
            if wheel is not None:
                wheel.unlink()
            continue
        num_bytes += wheel.stat().st_size
        waiting += _requirements_of(wheel)
    print(f"{num_bytes / 2**20:.1f} MiB in {folder}")
    print(f"cannot come: {', '.join(missing)}" if missing else "all that it lacks")
    return int(any(name.split()[0] not in _OPTIONAL for name in missing))


def _required(root: Path) -> list[Requirement]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return list(map(Requirement, project["dependencies"]))


def _pins(file: Path) -> Iterator[tuple[str, str]]:
    for line in file.read_text().splitlines():
        pin = line.partition("#")[0].strip()
        if "==" in pin:
            yield canonicalize_name(Requirement(pin).name), pin


def _fetch(pin: str, target: Target, folder: Path) -> Path | None:
    """The wheel of a requirement for the machine; None where there is none."""
    before = set(folder.glob("*.whl"))
    machine, version = target.environment["platform_machine"], target.environment["python_version"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", version, "--implementation", "cp", "--dest", str(folder)]
    command += [word for platform in _PLATFORMS for word in ("--platform", f"{platform}_{machine}")]
    if subprocess.run([*command, pin], stderr=subprocess.DEVNULL).returncode:
        return None
    new = set(folder.glob("*.whl")) - before
    return new.pop() if new else None


def _requirements_of(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(file.read(name).decode())
    return list(map(Requirement, metadata.get_all("Requires-Dist") or []))
