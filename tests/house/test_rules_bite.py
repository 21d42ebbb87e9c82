"""Each rule finds a planted fault and leaves its lawful neighbour alone."""

import pytest

from tests.house import rules
from tests.house.sources import Source


def lines(count: int) -> str:
    return "x = 1\n" * count


def function(count: int) -> str:
    return "def f():\n" + "    x = 1\n" * (count - 1)


PACKAGE, TEST = "flash_attn_fp8/run.py", "tests/api/test_run.py"
ENVIRONMENT = "flash_attn_fp8/target.py"

# rule, file, faulty text, lawful text
PLANTED = [
    (rules.file_length, PACKAGE, lines(601), lines(600)),
    (rules.function_length, PACKAGE, function(121), function(120)),
    (
        rules.parameters,
        PACKAGE,
        "def f(a, b, c, d, e, *, f, g, h, i): ...",
        "class C:\n    def f(self, a, b, c, d, e, *, f, g, h): ...",
    ),
    (rules.no_assert, PACKAGE, "def f(x):\n    assert x, 'mute under -O'", "if x: raise E(x)"),
    (rules.environment, PACKAGE, "import os\na = os.environ.get('FLASH_ATTN_FP8_A')", "import os"),
    (rules.environment, PACKAGE, "import os\na = os.getenv('FLASH_ATTN_FP8_A')", "os.getpid()"),
    (rules.environment, PACKAGE, "from os import environ", "from os import getpid"),
    (rules.environment, ENVIRONMENT, "os.getenv('HOME')", "os.getenv('FLASH_ATTN_FP8_A', '')"),
    (rules.environment, ENVIRONMENT, "os.environ['A']", "os.environ['FLASH_ATTN_FP8_A']"),
    (rules.environment, ENVIRONMENT, "os.environ.get(f(x))", "os.environ.get('FLASH_ATTN_FP8_A')"),
    (
        rules.environment,
        ENVIRONMENT,
        "NAME = 'HOME'\nos.environ.get(NAME)",
        "NAME = 'FLASH_ATTN_FP8_A'\nos.environ.get(NAME)",
    ),
    (rules.proves_something, TEST, "def test_a():\n    f()", "def test_a():\n    assert f()"),
    (
        rules.proves_something,
        TEST,
        "class TestA:\n    def test_a(self):\n        out.shape",
        "class TestA:\n    def test_a(self):\n        with pytest.raises(E): f()",
    ),
    (
        rules.proves_something,
        TEST,
        "def test_a():\n    recheck(out)",
        "def test_a():\n    budget.check_close(out)",
    ),
    (rules.tolerance, TEST, "close(a, b, rtol=1e-3)", "close(a, b, rtol=budget)"),
    (rules.tolerance, TEST, "close(a, b, atol=2 ** -8)", "close(a, b, rtol=0, atol=0.0)"),
    (rules.tolerance, TEST, "def close(a, *, atol=1e-3): ...", "def close(a, *, atol=None): ..."),
]


@pytest.mark.parametrize(("rule", "path", "faulty", "lawful"), PLANTED)
def test_rule_bites(rule, path, faulty, lawful) -> None:
    faults = list(rule(Source(path, faulty)))
    assert faults
    assert all(fault.startswith(path) for fault in faults)
    assert not list(rule(Source(path, lawful)))


@pytest.mark.parametrize("name", sorted(rules.NAMES_THAT_SAY_NOTHING))
def test_a_name_that_says_nothing_is_refused(name: str) -> None:
    assert list(rules.module_name(Source(f"flash_attn_fp8/{name}.py", "")))
    assert list(rules.module_name(Source(f"flash_attn_fp8/{name}/mask.py", "")))
    assert not list(rules.module_name(Source(f"flash_attn_fp8/{name}_of_rows.py", "")))


def test_device_code_may_assert() -> None:
    assert not list(rules.no_assert(Source("flash_attn_fp8/kernels/mask.py", "assert x")))


def test_every_rule_is_planted() -> None:
    planted = {rule for rule, *_ in PLANTED} | {rules.module_name}
    assert planted == {rule.check for rule in rules.RULES}
