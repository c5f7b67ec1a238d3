"""Time and memory of the screen with many runs and a data set of many images, in a workspace made for it.

The server is a process of its own, and is asked as a browser asks it, over six connections. The first
thumbnails are those of a window: a page is complete once they and the findings are there.
"""

import argparse
import http.client
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

from PIL import Image

from diffsynth_lite.config import load_config

_CONNECTIONS = 6
_IN_A_WINDOW = 24
_POLLS = 20
_SIDE_PX = 1024
_MIB_IN_KIB = 1024


class Visitor:
    """A browser that is signed in.

    Args:
        address: as the server prints it.
    """

    def __init__(self, address: str) -> None:
        self._host = urlsplit(address).netloc
        answer = self._ask(f"/?{urlsplit(address).query}", {})
        self._cookie = str(answer.headers["set-cookie"]).partition(";")[0]

    def read(self, path: str) -> bytes:
        """The content of a page or file."""
        answer = self._ask(path, {"cookie": self._cookie})
        assert answer.status == http.client.OK, f"{path}: {answer.status}"
        return answer.read()

    def read_all(self, paths: Sequence[str]) -> None:
        """Read what a page needs, as a browser does."""
        with ThreadPoolExecutor(_CONNECTIONS) as connections:
            list(connections.map(self.read, paths))

    def _ask(self, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._host)
        connection.request("GET", path, headers=headers)
        return connection.getresponse()


def main() -> None:
    """Print what Home and a data set cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000, metavar="N", help="in the data set")
    parser.add_argument("--runs", type=int, default=500, metavar="N", help="on Home")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_data_set(Path(folder) / "data" / "many", parsed.images)
        make_runs(Path(folder) / "runs", parsed.runs)
        with served(Path(folder)) as (visitor, process):
            print(f"{'server at rest':<44}{memory_mib(process):8.0f} MiB")
            measure_home(visitor, process, parsed.runs)
            measure_data_set(visitor, process)


def measure_home(visitor: Visitor, process: int, count: int) -> None:
    """Print times of Home: the first one, and one of those that an open page asks for."""
    for when, times in (("first", 1), ("each further", _POLLS)):
        started, used = time.monotonic(), cpu_s(process)
        for _ in range(times):
            assert f'aria-label="All {count}"' in visitor.read("/").decode()
        wall, cpu = time.monotonic() - started, cpu_s(process) - used
        print(f"{f'Home with {count} runs, {when} time':<44}{wall / times:8.3f} s, {cpu / times:.3f} CPU s")


def measure_data_set(visitor: Visitor, process: int) -> None:
    """Print times of a data set's page, and the server's memory afterwards."""
    started = time.monotonic()
    page = visitor.read("/data/many/").decode()
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    items = json.loads(data[1])["items"]
    thumbnails = [f"/data/many/thumbnails/{quote(item['file'])}?version={item['version']}" for item in items]
    print(f"{f'page of {len(items):,} images':<44}{time.monotonic() - started:8.2f} s")
    visitor.read_all(thumbnails[:_IN_A_WINDOW])
    print(f"{'with the thumbnails of a window':<44}{time.monotonic() - started:8.2f} s")
    visitor.read("/data/many/findings")
    print(f"{'complete, with the findings':<44}{time.monotonic() - started:8.2f} s")
    started = time.monotonic()
    visitor.read_all(thumbnails)
    print(f"{f'thumbnails of {len(items):,} images':<44}{time.monotonic() - started:8.2f} s")
    print(f"{'server after them':<44}{memory_mib(process):8.0f} MiB")


@contextmanager
def served(workspace: Path) -> Iterator[tuple[Visitor, int]]:
    """A visitor of the screen of a workspace, and the process of the server."""
    command = [sys.executable, "-m", "diffsynth_lite.cli.main", "ui", str(workspace), "--port=0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield Visitor(server.stdout.readline().split()[1]), server.pid
        finally:
            server.terminate()


def make_data_set(folder: Path, count: int) -> None:
    """Write JPEGs of a size that people have, each with a caption; no two have the same bytes."""
    folder.mkdir(parents=True)
    noise = Image.effect_noise((_SIDE_PX, _SIDE_PX), 40)
    file = io.BytesIO()
    Image.merge("RGB", (noise, noise.rotate(90), noise.rotate(180))).save(file, "JPEG", quality=85)
    content = file.getvalue()
    for number in range(count):
        # A comment after the first marker, so that each is another file.
        comment = b"\xff\xfe\x00\x0a%08d" % number
        (folder / f"{number:06}.jpg").write_bytes(content[:2] + comment + content[2:])
        (folder / f"{number:06}.txt").write_text(f"a photo of skz mug number {number} on a wooden table\n")


def make_runs(folder: Path, count: int) -> None:
    """Write folders of finished runs with as many rows and previews as those of 2,000 steps."""
    settings = load_config("qwen_lora.yaml").resolved_yaml
    rows = [{"step": step, "time": step * 3.5, "loss": 0.1 + 1 / step} for step in range(1, 2001)]
    metrics = "".join(json.dumps(row) + "\n" for row in rows)
    status = {"state": "finished", "exit_code": 0, "step": 2000, "message": "", "found_at": {}}
    for number in range(count):
        run = folder / f"run_{number:04}"
        (run / "previews").mkdir(parents=True)
        (run / "resolved.yaml").write_text(settings)
        (run / "metrics.jsonl").write_text(metrics)
        (run / "status.json").write_text(json.dumps(status))
        for step in range(0, 2001, 250):
            (run / "previews" / f"step-{step:08}-prompt-00-000000.png").write_bytes(b"")


def cpu_s(process: int) -> float:
    """CPU time that a process has used, in seconds; Linux only."""
    after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")


def memory_mib(process: int) -> float:
    """Memory that a process holds now, in MiB; Linux only."""
    status = Path(f"/proc/{process}/status").read_text()
    held = re.search(r"VmRSS:\s+(\d+)", status)
    assert held is not None
    return int(held[1]) / _MIB_IN_KIB


if __name__ == "__main__":
    main()
