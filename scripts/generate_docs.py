"""Writes what is generated from the code: pages in ``docs``, the README's families, the schema of configs.

``--family my_package.my_family`` prints what ``docs/models.md`` would have of a family kept elsewhere.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from models_page import render_family, render_models_page, render_readme

from diffsynth_lite.config.reference import render_reference, render_schema
from diffsynth_lite.pipelines import family_names

REPOSITORY = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write each of them, or print one section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--family", metavar="NAME", help="print the section of this family, and write nothing"
    )
    if family := parser.parse_args(arguments).family:
        print(render_family(family))
        return
    texts = {
        "docs/configuration.md": render_reference(),
        "README.md": render_readme((REPOSITORY / "README.md").read_text(encoding="utf-8")),
        "docs/models.md": render_models_page(REPOSITORY / "configs"),
        "configs/schema.json": render_schema(family_names()),
    }
    for name, text in texts.items():
        (REPOSITORY / name).write_text(text, encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
