"""The compiled host module's calls into the CUDA runtime, led to Python functions.

The host code that CuTe DSL emits only declares the runtime functions it calls
(`llvm.func @_cudaLaunchKernelEx(!llvm.ptr, ...) -> i32`); the execution engine would find them in
the DSL's runtime library, which wants a driver. Each declaration is replaced, before the module is
turned into machine code, by a private definition that jumps to the address of a ctypes callback. No
library has to be built, found or loaded first, and every architecture LLVM knows is served.

The addresses are of this process: such a module may not be written to disk (`dsl.py` sees to that).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cutlass._mlir import ir

_DECLARATION = re.compile(
    r"llvm\.func\s+(?:\w+\s+)?@(?P<name>[\w$]+)\((?P<args>[^)]*)\)(?P<rest>.*)"
)
_RESULT = re.compile(r"\s*->\s*(?P<type>!?[\w.]+)")

# Runtime functions by their names. The rest of what is declared (printf, TVM FFI, naming an error)
# runs without a driver and stays.
RUNTIME_SYMBOL = re.compile(r"_cu(da)?[A-Z]\w*|cuda_dialect_(un|init_|load_)\w*")


def splice(module: Any, address_of: Callable[[str], int | None]) -> list[str]:
    """Defines the runtime functions that `module` declares; returns their names.

    `address_of(name)` is where to jump to, or None for a function that does nothing and returns 0.
    """
    declared = [op for op in module.body.operations if _is_runtime_declaration(op)]
    names = []
    with module.context, ir.Location.unknown(module.context):
        for op in declared:
            text = definition(str(op.operation), address_of)
            op.operation.erase()
            module.body.append(ir.Operation.parse(text))
            names.append(_match(text)["name"])
        if declared:
            module.operation.verify()
    return names


def _is_runtime_declaration(op: Any) -> bool:
    if op.operation.name != "llvm.func" or len(op.operation.regions[0].blocks):
        return False
    return RUNTIME_SYMBOL.fullmatch(op.operation.attributes["sym_name"].value) is not None


def _match(text: str) -> re.Match[str]:
    found = _DECLARATION.search(text)
    if found is None:
        raise ValueError(f"declaration of a runtime function not understood: {text!r}")
    return found


def definition(declaration: str, address_of: Callable[[str], int | None]) -> str:
    """The MLIR text of a function that passes its arguments on and returns what comes back."""
    found = _match(declaration)
    types = [part.strip() for part in found["args"].split(",") if part.strip()]
    if "..." in types:
        raise ValueError(f"runtime function @{found['name']} is variadic; it cannot be led away")
    result = _RESULT.match(found["rest"])
    returns = result["type"] if result else None
    parameters = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(types))
    arrow = f" -> {returns}" if returns else ""
    body = _body(types, returns, address_of(found["name"]))
    return f"llvm.func internal @{found['name']}({parameters}){arrow} {{\n{body}}}"


def _body(types: list[str], returns: str | None, address: int | None) -> str:
    if address is None:
        if returns is None:
            return "  llvm.return\n"
        return f"  %zero = llvm.mlir.zero : {returns}\n  llvm.return %zero : {returns}\n"
    arguments = ", ".join(f"%a{i}" for i in range(len(types)))
    signature = f"({', '.join(types)}) -> {returns or '()'}"
    target = "%result = " if returns else ""
    back = f"  llvm.return %result : {returns}\n" if returns else "  llvm.return\n"
    return (
        f"  %address = llvm.mlir.constant({address} : i64) : i64\n"
        "  %callee = llvm.inttoptr %address : i64 to !llvm.ptr\n"
        f"  {target}llvm.call %callee({arguments}) : !llvm.ptr, {signature}\n" + back
    )
