"""`flash-attn-fp8 compile`: kernels ahead of time, into the cache or into a bundle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from flash_attn_fp8.compiler.key import Key

T = TypeVar("T")


def compile(
    preset: Annotated[str, typer.Option(help="Kernels of a kind of model; see --list.")] = "",
    arch: Annotated[str, typer.Option(help="Architecture of the GPU.")] = "sm_100a",
    out: Annotated[
        Path | None, typer.Option(help="Make a bundle here, for machines without the compiler.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the presets, and do nothing.")] = False,
) -> None:
    """Compile kernels ahead of time: no GPU is needed.

    They go into the cache, so that no call waits for them; with --out also into a folder that
    FLASH_ATTN_FP8_BUNDLE names on the machine with the GPU.
    """
    from flash_attn_fp8.errors import FlashAttnFp8Error

    if show:
        _list_presets(arch)
        return
    try:
        _compile(preset, arch, out)
    except (FlashAttnFp8Error, OSError) as fault:
        what = "a folder cannot be written: " if isinstance(fault, OSError) else ""
        typer.echo(f"error: {what}{fault}", err=True)
        raise typer.Exit(2) from None


def _list_presets(arch: str) -> None:
    from flash_attn_fp8.compiler.presets import PRESETS, specs_of

    for name, preset in PRESETS.items():
        typer.echo(f"{name:10} {len(specs_of(preset, arch)):3} kernels: {preset.about}")


def _compile(preset: str, arch: str, out: Path | None) -> None:
    from flash_attn_fp8.compiler import bundle, cache, link, store
    from flash_attn_fp8.compiler.key import key_of
    from flash_attn_fp8.compiler.presets import preset_named, specs_of

    specs = specs_of(preset_named(preset), arch)
    link.require_c_compiler()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made, before the work
    entries: dict[Key, Path] = {}
    compiled = 0
    for spec in _with_progress(specs, f"{preset} for {arch}"):
        key = key_of(spec, arch)
        compiled += store.find(cache.folder(), key) is None
        entries[key] = cache.keep(spec, arch)
    typer.echo(f"{len(specs)} kernels, {compiled} of them compiled now, in {cache.folder()}")
    if out is not None:
        typer.echo(f"wrote {bundle.write(out, arch, entries)}")


def _with_progress(items: Iterable[T], what: str) -> Iterator[T]:
    """The items, behind a progress bar."""
    items = list(items)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield from progress.track(items, description=what)
