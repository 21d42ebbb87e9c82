"""The house rules. Each takes one file and yields a sentence for every fault that it finds."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from tests.house.exemptions import (
    FOREIGN_ENVIRONMENT,
    LONG_FILES,
    LONG_FUNCTIONS,
    WIDE_MODULES,
)
from tests.house.sources import Function, Source

# A limit, and the one for what exemptions.py names.
FILE_LINES, LONG_FILE_LINES = 600, 800
FUNCTION_LINES, LONG_FUNCTION_LINES = 120, 250
PARAMETERS = 8

# A module is named for what it knows; these names attract whatever has no place.
NAMES_THAT_SAY_NOTHING = {"utils", "helpers", "common", "misc", "core", "base"}
# The simulator imports nothing of the package, so it reads the cache's place itself.
ENVIRONMENT_READERS = {
    "flash_attn_fp8/target.py",
    "flash_attn_fp8/sim/isa/compiled.py",
}
ENVIRONMENT_PREFIX = "FLASH_ATTN_FP8_"
TOLERANCE_OWNER = "tests/budget.py"


def file_length(source: Source) -> Iterator[str]:
    limit = LONG_FILE_LINES if source.path in LONG_FILES else FILE_LINES
    if source.lines > limit:
        yield f"{source.path}: {source.lines} lines, at most {limit}"


def function_length(source: Source) -> Iterator[str]:
    for name, node in source.functions():
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        where = f"{source.path}::{name}"
        limit = LONG_FUNCTION_LINES if where in LONG_FUNCTIONS else FUNCTION_LINES
        if lines > limit:
            yield f"{where}: {lines} lines, at most {limit}"


def parameters(source: Source) -> Iterator[str]:
    if source.path in WIDE_MODULES:
        return
    for name, node in source.functions():
        taken = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        count = sum(a.arg not in ("self", "cls") for a in taken)
        if count > PARAMETERS:
            yield f"{source.path}::{name}: {count} parameters, at most {PARAMETERS}: bundle them"


def module_name(source: Source) -> Iterator[str]:
    for part in PurePosixPath(source.path).with_suffix("").parts:
        if part in NAMES_THAT_SAY_NOTHING:
            yield f"{source.path}: `{part}` does not say what belongs there"


def no_assert(source: Source) -> Iterator[str]:
    """An assert is mute and vanishes under -O. Device code may: there it runs while tracing."""
    if source.path.startswith("flash_attn_fp8/kernels/"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert):
            yield f"{source.path}:{node.lineno}: assert; raise an error that carries the values"


def environment(source: Source) -> Iterator[str]:
    if source.path in FOREIGN_ENVIRONMENT:
        return
    constants = _string_constants(source.tree)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            imported = {alias.name for alias in node.names} & {"environ", "getenv"}
            for name in sorted(imported):
                yield f"{source.path}:{node.lineno}: from os import {name}; write os.{name}"
        if not _is_environment(node):
            continue
        if source.path not in ENVIRONMENT_READERS:
            yield f"{source.path}:{node.lineno}: the environment is read in target.py only"
    for key in _environment_keys(source.tree):
        name = key.value if isinstance(key, ast.Constant) else None
        if isinstance(key, ast.Name):
            name = constants.get(key.id)
        if not str(name).startswith(ENVIRONMENT_PREFIX):
            found = ast.unparse(key)
            yield f"{source.path}:{key.lineno}: {found} does not start with {ENVIRONMENT_PREFIX}"


def _is_environment(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    )


def _environment_keys(tree: ast.AST) -> Iterator[ast.expr]:
    """The key of every `os.environ[key]`, `os.environ.get(key)` and `os.getenv(key)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _is_environment(node.value):
            yield node.slice
        elif isinstance(node, ast.Call) and node.args:
            called = node.func
            method_of = called.value if isinstance(called, ast.Attribute) else called
            if _is_environment(called) or _is_environment(method_of):
                yield node.args[0]


def _string_constants(tree: ast.Module) -> dict[str, str]:
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def proves_something(source: Source) -> Iterator[str]:
    if not PurePosixPath(source.path).name.startswith("test_"):
        return
    for name, node in source.functions():
        if node.name.startswith("test_") and not any(map(_proves, ast.walk(node))):
            yield f"{source.path}::{name}: asserts nothing"


def _proves(node: ast.AST) -> bool:
    """An assert, a call that fails by itself, or one of something named check_ or assert_."""
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).rpartition(".")[2].lstrip("_")
    return name in ("raises", "warns", "opcheck") or name.startswith(("check_", "assert_"))


def tolerance(source: Source) -> Iterator[str]:
    """No rtol= or atol= with a number, as argument or default; 0 is equality, not a tolerance."""
    if source.path == TOLERANCE_OWNER:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.keyword) and node.arg:
            given = [(node.arg, node.value)]
        elif isinstance(node, Function):
            given = _defaults(node.args)
        else:
            continue
        for name, value in given:
            if name in ("rtol", "atol") and _is_nonzero_number(value):
                where = f"{source.path}:{value.lineno}"
                yield f"{where}: {name}={ast.unparse(value)}; the budget is {TOLERANCE_OWNER}'s"


def _defaults(args: ast.arguments) -> list[tuple[str, ast.expr]]:
    plain = args.posonlyargs + args.args
    last = plain[len(plain) - len(args.defaults) :]
    named = [*last, *args.kwonlyargs]
    values = [*args.defaults, *args.kw_defaults]
    return [(a.arg, v) for a, v in zip(named, values, strict=True) if v is not None]


def _is_nonzero_number(value: ast.expr) -> bool:
    names = any(isinstance(n, ast.Name | ast.Attribute | ast.Call) for n in ast.walk(value))
    return not names and ast.unparse(value) not in ("None", "0", "0.0")


@dataclass(frozen=True)
class Rule:
    """A check, and the folders whose files it judges."""

    check: Callable[[Source], Iterator[str]]
    folders: tuple[str, ...]

    def __str__(self) -> str:
        return self.check.__name__


PACKAGE, TESTS, BENCHMARKS = "flash_attn_fp8", "tests", "benchmarks"
RULES = (
    Rule(file_length, (PACKAGE, TESTS, BENCHMARKS)),
    Rule(function_length, (PACKAGE, TESTS, BENCHMARKS)),
    Rule(parameters, (PACKAGE, TESTS, BENCHMARKS)),
    Rule(module_name, (PACKAGE, TESTS, BENCHMARKS)),
    Rule(no_assert, (PACKAGE,)),
    Rule(environment, (PACKAGE,)),
    Rule(proves_something, (TESTS,)),
    Rule(tolerance, (TESTS,)),
)
