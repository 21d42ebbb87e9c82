"""The version is written once, in pyproject.toml."""

import sys
from importlib.metadata import version

import flash_attn_fp8
from tests.house.sources import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it where the standard library has none

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_package_says_what_pyproject_says() -> None:
    assert flash_attn_fp8.__version__ == PROJECT["version"]
    assert version(PROJECT["name"]) == PROJECT["version"]


def test_the_changelog_knows_the_version() -> None:
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
