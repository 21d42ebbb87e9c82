"""Bundles of a benchmark's kernels, for a machine without the compiler."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from flash_attn_fp8.specs import Spec

# Options of a benchmark's command line.
Folder = Annotated[Path | None, typer.Option(help="make a bundle here, measure nothing")]
Arch = Annotated[str, typer.Option(help="of the bundle, with its SMs")]
H200 = "sm_90a:132"


def make(folder: Path, arch: str, specs: Iterable[Spec]) -> str:
    """Compile kernels for an architecture (`sm_90a:132` or `sm_90a`); what there is then."""
    from flash_attn_fp8.compiler import bundle, cache
    from flash_attn_fp8.compiler.key import key_of

    name = arch.partition(":")[0]
    entries = {key_of(spec, name): cache.keep(spec, name) for spec in specs}
    bundle.write(folder, name, entries)
    return f"{len(entries)} kernels in {folder}"
