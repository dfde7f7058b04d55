"""The options that say what text is read, for `calibrate` and for `inspect`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from .values import completing, dtypes

__all__ = ["ChatTemplate", "Dtype", "MaxLength", "MaxTokens", "TextColumn", "given", "texts_of"]

PYDOC = "pydoc"
TEXTS_HELP = "Text, or JSON lines (.jsonl); pydoc stands for Python's own documentation."

Dtype = Annotated[
    str | None,
    typer.Option(
        help="The format that scales are chosen for, or measured in. Default: fp8_e4m3.",
        autocompletion=completing(dtypes),
    ),
]
MaxTokens = Annotated[int | None, typer.Option(min=2, help="How many to read of the text.")]
MaxLength = Annotated[int | None, typer.Option(min=2, help="Tokens that are read in one piece.")]
TextColumn = Annotated[
    str | None, typer.Option(help="JSON lines: the entry with the text. Default: text.")
]
ChatTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Each text is a user's turn / conversations are an error. "
        "Default: conversations go through the model's template, texts do not.",
    ),
]


def texts_of(name: str) -> Path | list[str]:
    """Returns the file, or what pydoc says on each of Python's topics."""
    if name == PYDOC:
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"--texts: expected a file, or {PYDOC} for Python's own documentation, got {name!r}; "
            "check the path"
        )
    return path


def given(**options: object) -> dict[str, Any]:
    """Returns the options that were given; for others, the library has the default."""
    return {name: value for name, value in options.items() if value is not None}
