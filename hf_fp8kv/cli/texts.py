"""Text options of `calibrate` and `inspect`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from .arguments import FORMAT

PYDOC = "pydoc"
TEXTS_HELP = "A .txt file, or JSON lines (.jsonl). pydoc stands for Python's own documentation."

Dtype = Annotated[
    str | None,
    typer.Option(
        help="The format to choose scales for, or to measure them in. Default: fp8_e4m3.", **FORMAT
    ),
]
MaxTokens = Annotated[int | None, typer.Option(min=2, help="Number of tokens to read.")]
MaxLength = Annotated[int | None, typer.Option(min=2, help="Tokens in one sequence.")]
MaxPosition = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Also try the scales at other positions, up to this one; centers of K must help "
        "there, too. Default: eight times --max-length, or as many as the model has.",
    ),
]
TextColumn = Annotated[
    str | None, typer.Option(help="JSON lines: the key of the text. Default: text.")
]
ChatTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Use the model's chat template for every text / refuse conversations. "
        "Default: use it for conversations, not for plain texts.",
    ),
]


def load_texts(name: str) -> Path | list[str]:
    """Return the file, or pydoc's text on each of Python's topics."""
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


def drop_unset(**options: object) -> dict[str, Any]:
    """Return the options that are not None; the library has the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}
