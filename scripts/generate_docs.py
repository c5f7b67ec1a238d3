"""Writes the pages that are generated from the code: ``docs/configuration.md`` and ``docs/models.md``."""

from pathlib import Path

from models_page import render_models_page

from diffsynth_lite.config.reference import render_reference

REPOSITORY = Path(__file__).parents[1]


def main() -> None:
    """Write both pages."""
    pages = {
        "configuration.md": render_reference(),
        "models.md": render_models_page(REPOSITORY / "configs"),
    }
    for name, text in pages.items():
        (REPOSITORY / "docs" / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
