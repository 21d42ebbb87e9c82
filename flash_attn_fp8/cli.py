"""The command line: demo, env, support, explain, accuracy; `cli_sim` and `cli_compile` have more.

Typer and rich are used in these modules and nowhere else. Everything that computes is imported by
the command that needs it. Bad input ends with exit code 2 and a sentence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flash_attn_fp8 import cli_compile, cli_sim

if TYPE_CHECKING:
    import torch

    from flash_attn_fp8.accuracy.experiments import Experiment
    from flash_attn_fp8.results import Row

app = typer.Typer(
    help="Flash-attention forward in fp8: see it run, ask what runs where, measure its error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# The script's own options follow its name.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    cli_sim.sim
)
app.command()(cli_compile.compile)

_WIDTH_OF_A_PIPE = 160  # columns of tables that go to a file or another program


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH_OF_A_PIPE)


@contextmanager
def _bad_input() -> Iterator[None]:
    """Turn the package's refusals into a message and exit code 2."""
    from flash_attn_fp8.errors import FlashAttnFp8Error
    from flash_attn_fp8.results import ResultsError

    try:
        yield
    except (FlashAttnFp8Error, ResultsError, OSError) as fault:
        typer.echo(f"error: {fault}", err=True)
        raise typer.Exit(2) from None


def _table(title: str, *header: str, lines: Sequence[Sequence[str]]) -> Table:
    """A rich table; columns of numbers are aligned on the right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(header):
        numbers = all(_is_number(line[i]) for line in lines)
        table.add_column(escape(name), justify="right" if numbers else "left")
    for line in lines:
        table.add_row(*(escape(cell) for cell in line))
    return table


def _is_number(cell: str) -> bool:
    try:
        return not cell or math.isfinite(float(cell))
    except ValueError:
        return False


# ------------------------------------------------------------------------------------ demo


@app.command()
def demo(
    seqlen: Annotated[int, typer.Option(min=1, help="Tokens.")] = 512,
    nheads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 4,
    nheads_kv: Annotated[int, typer.Option(min=1, help="KV heads.")] = 2,
    head_dim: Annotated[int, typer.Option(min=8, help="Channels of a head.")] = 64,
) -> None:
    """Quantise random q, k and v, attend, and compare with exact attention on this machine."""
    import torch

    console = _console()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, seqlen, heads, head_dim, generator=generator).to(device)
        for heads in (nheads, nheads_kv, nheads_kv)
    )
    with _bad_input():
        lines, why = _demo_lines(q, k, v)
    console.print(
        f"q [1, {seqlen}, {nheads}, {head_dim}], {nheads_kv} KV heads, on {device}, causal"
    )
    console.print(why, markup=False)
    header = ("how", "scales", "error (rel_l2)", "time (ms)")
    console.print(_table("Against exact attention of the tensors", *header, lines=lines))
    console.print(
        "UNSAFE is the published fault (flash-attention #2716): max_offset + rescale_threshold = 12"
        " passes e4m3's 8.807, and the largest probabilities saturate. Fp8Policy refuses it; here "
        "it was forced.",
        markup=False,
    )


def _demo_lines(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[list[tuple[str, ...]], str]:
    """The lines of the demo's table, and what ran and why."""
    import torch

    import flash_attn_fp8 as fa
    from flash_attn_fp8.accuracy.measure import exact, rel_l2
    from flash_attn_fp8.policy import Fp8Policy

    reference = exact(q, k, v, causal=True)
    broken = Fp8Policy.breaking_the_budget("e4m3", 8, 4, row_sum="exact")
    settings: list[tuple[torch.dtype, Any, Fp8Policy]] = [
        (torch.float8_e4m3fn, "batch_head", fa.policy_for("e4m3")),
        (torch.float8_e4m3fn, "token_head", fa.policy_for("e4m3").replace(row_sum="exact")),
        (torch.float8_e5m2, "batch_head", fa.policy_for("e5m2")),
        (torch.float8_e4m3fn, "batch_head", broken),
    ]
    lines: list[tuple[str, ...]] = []
    for dtype, per, policy in settings:
        codes = {
            n: fa.quantize(x, dtype=dtype, per=per) for n, x in zip("qkv", (q, k, v), strict=True)
        }
        call: dict[str, Any] = {n: c.values for n, c in codes.items()}
        call |= {f"{n}_descale": c.descale for n, c in codes.items()}
        out, ms = _timed(fa.flash_attn_func, fp8_policy=policy, causal=True, **call)
        how = str(policy).partition(" exp2")[0]
        lines.append((how, str(per), f"{rel_l2(out, reference):.4f}", f"{ms:.0f}"))
    call = {n: x.bfloat16() for n, x in zip("qkv", (q, k, v), strict=True)}
    out, ms = _timed(fa.flash_attn_func, causal=True, **call)
    lines.append(("bf16, for comparison", "", f"{rel_l2(out, reference):.4f}", f"{ms:.0f}"))
    plan = fa.explain(fa.flash_attn_func, causal=True, **call).plan
    if plan is None:
        return lines, ""
    passed_over = [f"not {impl}: {'; '.join(reasons)}" for impl, reasons in plan.rejected]
    return lines, "\n".join([f"ran: {plan.impl}", *passed_over])


def _timed(attend: Callable[..., Any], **call: Any) -> tuple[torch.Tensor, float]:
    """A call's output and its time in ms; on a GPU of the second call, when kernels are built."""
    import torch

    def wait() -> None:
        if call["q"].is_cuda:
            torch.cuda.synchronize()

    if call["q"].is_cuda:
        attend(**call)
    wait()
    begun = time.perf_counter()
    out, _ = attend(**call)
    wait()
    return out, (time.perf_counter() - begun) * 1e3


# ------------------------------------------------------------------------------------- env


@app.command()
def env() -> None:
    """What is installed here, and which executors can run and why not the others."""
    import platform
    from importlib import metadata

    import torch

    from flash_attn_fp8.support import EXECUTORS
    from flash_attn_fp8.target import target_of

    console = _console()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    installed = [
        ("flash-attn-fp8", _version("flash-attn-fp8"), ""),
        ("python", platform.python_version(), ""),
        ("torch", torch.__version__, _wanted("torch")),
        ("CUDA of torch", torch.version.cuda or "none", ""),
        ("nvidia-cutlass-dsl", _version("nvidia-cutlass-dsl"), _wanted("nvidia-cutlass-dsl")),
        ("GPU", ", ".join(gpus) or "none that torch sees", ""),
    ]
    console.print(_table("Installed", "what", "found", "wanted", lines=installed))
    target = target_of(torch.device("cuda" if gpus else "cpu"))
    lines = []
    for impl in EXECUTORS:
        reasons = _reasons_here(impl, target.arch)
        lines.append((impl, "no" if reasons else "yes", "; ".join(reasons)))
    title = f"Executors on {target.arch}, best first"
    console.print(_table(title, "executor", "runs", "why not", lines=lines))
    try:
        metadata.distribution("flash-attn-fp8")
    except metadata.PackageNotFoundError:
        console.print("flash-attn-fp8 itself is not installed: this is a source tree.")


def _version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _wanted(name: str) -> str:
    """The version range of a dependency in this package's own metadata; empty if unknown."""
    import re
    from importlib import metadata

    try:
        requirements = metadata.requires("flash-attn-fp8") or []
    except metadata.PackageNotFoundError:
        return ""
    for requirement in requirements:
        match = re.match(rf"{re.escape(name)}(?:\[[\w,]*\])?\s*([^;]*)", requirement)
        if match and match[1]:
            return match[1].strip(" ()")
    return ""


def _reasons_here(impl: str, arch: str) -> tuple[str, ...]:
    """Why an executor cannot take the plainest fp8 call."""
    from flash_attn_fp8.explanation import explain

    plainest = "e4m3[1, 128, 8, 128]"
    call = f"flash_attn_func(q={plainest}, k={plainest}, v={plainest}, impl={impl!r})"
    return tuple(r.partition(": ")[2] for r in explain(call, target=arch).reasons)


# --------------------------------------------------------------------------------- support


@app.command()
def support(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/support.md instead.")
    ] = False,
) -> None:
    """Print what runs where, by format, layout, head dim and feature: asked, not remembered."""
    from flash_attn_fp8.support_table import AXES, COLUMNS, as_markdown, support_table

    answers = support_table()
    if markdown:
        typer.echo(as_markdown(answers))
        return
    console = _console()
    heads = [f"{impl} on {on}" for impl, on in COLUMNS]
    for axis, values in AXES.items():
        lines = [
            (v, *(answers.cell(reasons) for reasons in answers.lines[axis, v])) for v in values
        ]
        console.print(_table("", axis, *heads, lines=lines))
    if answers.pairs:
        together = [
            (name, *(answers.cell(reasons) if reasons else "" for reasons in answer))
            for name, answer in answers.combinations()
        ]
        title = "Refused together, though each works alone"
        console.print(_table(title, "combination", *heads, lines=together))
    for reason, number in answers.reasons.items():
        console.print(f"[{number}] {reason}", markup=False)
    console.print(f"{answers.points:,} combinations were asked.")


# --------------------------------------------------------------------------------- explain


@app.command()
def explain(
    call: Annotated[
        list[str],
        typer.Argument(
            help="A call as error messages print it, or a function's name and then name=value "
            "arguments: flash_attn_func 'q=e4m3[1, 128, 8, 64]' 'k=...' 'v=...' causal=True"
        ),
    ],
    target: Annotated[
        str | None, typer.Option(help="Plan for cpu, sm_90a, sm_100a or sm_100a:SMS.")
    ] = None,
) -> None:
    """Say what a call would run, or every reason why it would be refused (exit code 1).

    Nothing is run, and no GPU is needed.
    """
    from flash_attn_fp8.explanation import explain as explained

    name, *arguments = call
    text = name if "(" in name and not arguments else f"{name}({', '.join(arguments)})"
    with _bad_input():
        answer = explained(text, target=target)
    typer.echo(str(answer))
    if not answer.ok:
        raise typer.Exit(1)


# -------------------------------------------------------------------------------- accuracy


class TableBy(str, Enum):
    """Executors of the accuracy table."""

    tiled = "tiled"
    sim = "sim"


@app.command()
def accuracy(
    full: Annotated[
        bool,
        typer.Option(
            "--full/--quick",
            help="All of it, which takes most of an hour on two cores, or a sample in a minute.",
        ),
    ] = False,
    policies: Annotated[
        bool, typer.Option(help="Also compare policies of P, scores by scores.")
    ] = True,
    impl: Annotated[
        TableBy,
        typer.Option(help="Who computes the table: the emulation, or the simulated kernel."),
    ] = TableBy.tiled,
    out: Annotated[Path, typer.Option(help="Folder for the JSON, Markdown and PNG files.")] = Path(
        "accuracy-results"
    ),
) -> None:
    """Reproduce the accuracy table of flash-attention PR #2717, and compare policies."""
    from flash_attn_fp8.accuracy import experiments
    from flash_attn_fp8.results import Results

    console = _console()
    chosen = [experiments.table(quick=not full, impl=impl.value)]
    if policies:
        chosen.append(experiments.policies(quick=not full))
    command = f"flash-attn-fp8 accuracy {'--full' if full else '--quick'}"
    command += "" if policies else " --no-policies"
    command += "" if impl is TableBy.tiled else f" --impl {impl.value}"
    with _bad_input():
        for experiment in chosen:
            rows = _measured(experiment, console)
            _print_results(rows, experiment.shown, console)
            deviation = experiments.published_deviation(rows)
            if deviation is not None:
                console.print(f"Largest deviation from a published figure: {deviation:.2f} %")
            written, why_no_picture = experiment.save(Results.here(rows, command), out)
            console.print(f"wrote {', '.join(map(str, written))}", markup=False)
            if why_no_picture:
                console.print(f"no picture: {why_no_picture}", markup=False)


def _measured(experiment: Experiment, console: Console) -> list[Row]:
    """All rows of an experiment, behind a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    rows: list[Row] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(experiment.name, total=len(experiment))
        for found in experiment.rows():
            rows += found
            progress.advance(task)
    return rows


def _print_results(rows: Sequence[Row], columns: Sequence[str], console: Console) -> None:
    from flash_attn_fp8.results import tables

    for table in tables(rows, columns):
        same = ", ".join(f"{name} {value}" for name, value in table.constant.items())
        title = f"{table.title}   {same}"
        console.print(_table(title, *table.header, lines=table.lines))
