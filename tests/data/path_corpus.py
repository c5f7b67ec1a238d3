"""Texts that data may give in the place of a file's name, and a folder with secrets around it."""

from pathlib import Path

OUTSIDE = (
    "../secret.png",
    "../../{name}/secret.png",
    "../data/../secret.png",
    "./../secret.png",
    ".//..//secret.png",
    "../data-2/secret.png",
    "../data/a.png",
    "sub/../../secret.png",
    "sub/../a.png",
    "sub/../../data/a.png",
    "missing/../../secret.png",
    "linked/../secret.png",
    "a.png/../../secret.png",
    "archive.zip/../../secret.png",
    "..",
    "../",
    "../" * 300 + "etc/passwd",
    "{root}/secret.png",
    "{root}/data/../secret.png",
    "{root}/data/a.png",
    "//{root}/secret.png",
    "/etc/passwd",
    "/proc/self/environ",
    "/dev/zero",
    "//host/share/a.png",
    "../" + "a" * 300 + ".png",
    "../\ud800.png",
)
"""Paths with ``..`` and absolute ones, for ``allow_outside`` alone; many reach a file that is there."""

THROUGH_LINKS = (
    "link.png",
    "link to secret.png",
    "linked/secret.png",
    "sub/link.png",
    "chained.png",
    "loop.png",
    "nothing.png",
)
"""Names of links in the folder that leave it, lead to themselves, or to nothing."""

NO_PATHS = (
    "C:/a.png",
    "C:\\a.png",
    "C:a.png",
    "c:secret.png",
    "\\\\host\\share\\a.png",
    "\\\\?\\C:\\a.png",
    "\\\\.\\pipe\\a.png",
    "..\\secret.png",
    "sub\\..\\..\\secret.png",
    "sub\\e.png",
    "\\secret.png",
    "http://127.0.0.1:9/a.png",
    "https://host/a.png",
    "HTTPS://host/a.png",
    "http:/127.0.0.1/a.png",
    "file://{root}/secret.png",
    "file:{root}/secret.png",
    "ftp://host/a.png",
    "s3://bucket/a.png",
    "hf://datasets/owner/name/a.png",
    "data:image/png;base64,AAAA",
    "zip://a.png::{root}/archive.zip",
    "zip://../secret.png::archive.zip",
    "archive.zip/a.png",
    "archive.zip!/../secret.png",
    "simplecache::http://host/a.png",
    "%2e%2e/secret.png",
    "%2e%2e%2fsecret.png",
    "..%2fsecret.png",
    "%252e%252e%252fsecret.png",
    "..%5csecret.png",
    "..%c0%afsecret.png",
    "&#46;&#46;/secret.png",
    "~/secret.png",
    "~root/.bashrc",
    "$HOME/secret.png",
    "${{HOME}}/secret.png",
    "%USERPROFILE%/secret.png",
    "$(cat secret.png)",
    "`cat secret.png`",
    "a.png|cat",
    "-rf.png",
    "*.png",
    "?.png",
    "[ab].png",
    "{{a,b}}.png",
    "a.png\0",
    "a.png\0.txt",
    "\0",
    "../secret.png\0.png",
    "a.png\n",
    "a.png\n../secret.png",
    "\ta.png",
    " a.png",
    "a.png ",
    "a.png.",
    "a.png::$DATA",
    "a.png:stream",
    "CON",
    "nul.png",
    "\u2024\u2024/secret.png",
    "\u2025/secret.png",
    "\uff0e\uff0e/secret.png",
    "..\u2215secret.png",
    "..\u2044secret.png",
    "..\uff0fsecret.png",
    "..\uff3csecret.png",
    "\u0430.png",
    "a.png\u200b",
    "\u202egnp.a",
    "\ufeffa.png",
    "a\u0301.png",
    "\ud800.png",
    "A.PNG",
    "a" * 300 + ".png",
    "a" * 100_000,
    "/".join(["a"] * 5000),
    ".hidden.png",
    ".hidden/a.png",
    "sub",
    "sub/",
    ".",
    "./",
    "...",
    ".../secret.png",
    "",
    "   ",
)
"""What names no file of the folder, and never may, also where ``allow_outside`` is set."""


def plant(root: Path) -> Path:
    """Make the folder ``data`` with ``a.png`` and others below ``root``, and secrets around it."""
    data = root / "data"
    names = ("a.png", "b.png", "c.mp4", "d.mp4", "sub/e.png", "notes.txt", ".hidden.png", ".hidden/a.png")
    for path in (*(data / name for name in names), *secrets(root)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    for name, target in {
        "link.png": "../secret.png",
        "link to secret.png": str(root / "secret.png"),
        "sub/link.png": "../../data-2/secret.png",
        "linked": "../data-2",
        "chained.png": "link.png",
        "loop.png": "loop.png",
        "nothing.png": "../gone.png",
    }.items():
        (data / name).symlink_to(target)
    return data


def secrets(root: Path) -> list[Path]:
    """The files around the folder ``data`` that nothing in it may reach."""
    return [root / name for name in ("secret.png", "data-2/secret.png", "archive.zip")]


def written_out(text: str, root: Path) -> str:
    """A text of this corpus for data below ``root``."""
    return text.format(root=root, name=root.name)
