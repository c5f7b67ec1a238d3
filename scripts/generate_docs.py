"""Writes what is generated from the code: pages in ``docs``, the README's families, the schema of configs."""

from pathlib import Path

from models_page import render_models_page, render_readme

from diffsynth_lite.config.reference import render_reference, render_schema

REPOSITORY = Path(__file__).parents[1]


def main() -> None:
    """Write each of them."""
    texts = {
        "docs/configuration.md": render_reference(),
        "README.md": render_readme((REPOSITORY / "README.md").read_text(encoding="utf-8")),
        "docs/models.md": render_models_page(REPOSITORY / "configs"),
        "configs/schema.json": render_schema(),
    }
    for name, text in texts.items():
        (REPOSITORY / name).write_text(text, encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
