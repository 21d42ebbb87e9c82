"""What the package imports is required by it: pip install gives a package that works."""

import ast
import re
import sys

import pytest

from tests.house.sources import sources
from tests.house.test_version import PROJECT

# Names of modules that are not those of their distributions.
DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
# What belongs to the interface of a requirement: torch's and numba's own.
THEIRS = {"typing_extensions": "torch", "llvmlite": "numba"}


def imported() -> set[str]:
    """Modules of others that any part of the package imports."""
    names: set[str] = set()
    for source in sources("flash_attn_fp8"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    tops = {name.partition(".")[0] for name in names}
    return tops - {"flash_attn_fp8", *sys.stdlib_module_names}


def required(*extras: str) -> dict[str, str]:
    """Distributions that pyproject.toml lists, with what it says of them."""
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][e] for e in extras)]
    return {re.match(r"[\w-]+", text)[0]: text for some in lists for text in some}


@pytest.mark.parametrize("module", sorted(imported()))
def test_what_is_imported_is_required(module: str) -> None:
    module = THEIRS.get(module, module)
    assert DISTRIBUTIONS.get(module, module) in required("sim", "bench")


def test_what_kernels_need_comes_together() -> None:
    """Compiled with one, loaded by the other: the same systems have both."""
    dsl, ffi = (required()[name] for name in DISTRIBUTIONS.values())
    assert dsl.partition(";")[2] == ffi.partition(";")[2] != ""
