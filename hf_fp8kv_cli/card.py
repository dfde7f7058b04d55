"""`hf-fp8kv card`, which measures the quality, memory and speed of a model with each cache."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from . import arguments
from .shared import DEMO_NAME, load_model_and_tokenizer, make_console, print_note


def card(
    model: arguments.ModelArgument = None,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            writable=True,
            help="Folder of the card. Default: card-NAME. An interrupted run continues from it.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer and shorter texts: two minutes for a small model."),
    ] = False,
    long: Annotated[bool, typer.Option("--long", help="More and longer texts: hours.")] = False,
    caches: Annotated[
        str,
        typer.Option(
            help="Caches to measure: default, fp8_e3m4, fp8, fp8-1.0, checkpoint, q8_0, "
            "QuantizedCache, bf16, or plans such as 'int8 rotated', separated by commas."
        ),
    ] = "",
    texts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Score the first 10,240 tokens (with --quick 2,560) of these texts instead of "
            "texts that come with Python: a .txt file or JSON lines (.jsonl).",
        ),
    ] = None,
    scales: Annotated[
        str | None, typer.Option(help="Measure these static scales as well: a folder or Hub id.")
    ] = None,
    memory: Annotated[
        Any, typer.Option(help="Memory to fill with tokens: 8GiB, 500MB, ...", **arguments.SIZE)
    ] = "8GiB",
    device: arguments.Device = "auto",
    as_json: arguments.Json = False,
) -> None:
    """Measure a model with each cache: KL, top-1, bytes and speed."""
    from hf_fp8kv.card.measure import SIZES, measure_card
    from hf_fp8kv.card.rendering import format_markdown, format_table
    from hf_fp8kv.utils.files import write_atomically

    if quick and long:
        raise typer.BadParameter("expected --quick or --long, got both")
    name = DEMO_NAME if model is None else Path(os.path.abspath(model)).name
    folder = out or Path(f"card-{name.split()[0]}")
    size = "quick" if quick else "normal"
    if long:
        size = "long"
    # Each size has a separate file, so a quick card does not replace the parts of a long card.
    parts_path = folder / f"{size}.parts.json"
    loaded_texts = None if texts is None else arguments.load_texts(texts)
    loaded_model, tokenizer = load_model_and_tokenizer(model, device, "float32")
    content = measure_card(
        loaded_model,
        tokenizer,
        name=name,
        parts_path=parts_path,
        size=SIZES[size],
        texts=loaded_texts,
        caches=[cache.strip() for cache in caches.split(",") if cache.strip()],
        scales=scales,
        memory_gib=memory / 2**30,
    )
    files = {
        folder / "card.json": (json.dumps(content, indent=2) + "\n").encode(),
        folder / "card.md": format_markdown(content).encode(),
    }
    write_atomically({**files, parts_path: None})
    if as_json:
        print(json.dumps(content))
    else:
        make_console(piped_width=200).print(format_table(content))
    print_note(f"The card is in {folder}.")
