"""Every file keeps every house rule, and no exemption outlives its need."""

import pytest

from tests.house.exemptions import (
    FOREIGN_ENVIRONMENT,
    LONG_FILES,
    LONG_FUNCTIONS,
    WIDE_MODULES,
)
from tests.house.rules import FILE_LINES, FUNCTION_LINES, PARAMETERS, RULES, Rule
from tests.house.sources import sources


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rule_is_kept(rule: Rule) -> None:
    faults = [f for folder in rule.folders for s in sources(folder) for f in rule.check(s)]
    assert not faults, "\n".join(faults)


def test_something_is_judged() -> None:
    for folder in ("flash_attn_fp8", "tests"):
        assert sources(folder), f"no Python file below {folder}/: the rules judged nothing"


def test_no_exemption_outlives_its_need() -> None:
    files = {s.path: s for f in ("flash_attn_fp8", "tests", "benchmarks") for s in sources(f)}
    functions = {f"{p}::{name}": n for p, s in files.items() for name, n in s.functions()}

    def wide(path: str) -> bool:
        arguments = (n.args for name, n in functions.items() if name.startswith(f"{path}::"))
        return any(len(a.posonlyargs + a.args + a.kwonlyargs) > PARAMETERS for a in arguments)

    needed = {path for path, s in files.items() if s.lines > FILE_LINES}
    needed |= {f for f, n in functions.items() if n.end_lineno - n.lineno >= FUNCTION_LINES}
    needed |= {path for path in files if wide(path)}
    needed |= {path for path, s in files.items() if "os.environ" in s.text}
    idle = {*LONG_FILES, *LONG_FUNCTIONS, *WIDE_MODULES, *FOREIGN_ENVIRONMENT} - needed
    assert not idle, f"exemptions without need: {sorted(idle)}"
