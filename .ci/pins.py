"""Print constraints.txt for the environment that runs this: `make constraints` calls it."""

import re
import sys
from importlib.metadata import Distribution, distributions

from packaging.specifiers import SpecifierSet

HEADER = """\
# Exact versions of everything that development and CI install. Written by `make constraints`,
# which installs .[dev] into a fresh environment and lists what it finds; not edited by hand.
# A pin that has dropped Python {oldest} holds from {running} up, and pip chooses below that.
# A CUDA build of torch brings NVIDIA's libraries, which torch pins itself.
"""
OLDEST = "3.10"
NOT_PINNED = {"flash-attn-fp8", "pip", "setuptools", "wheel"}


def pin(package: Distribution, running: str) -> str:
    """Name and version, without a local suffix; a marker if the oldest Python is refused."""
    version = package.version.partition("+")[0]
    line = f"{package.metadata['Name']}=={version}"
    needs = package.metadata["Requires-Python"]
    if needs and not SpecifierSet(needs).contains(f"{OLDEST}.99"):
        line += f' ; python_version >= "{running}"'
    return line


def main() -> None:
    running = "{}.{}".format(*sys.version_info)
    names = {package.metadata["Name"]: package for package in distributions()}
    sys.stdout.write(HEADER.format(oldest=OLDEST, running=running))
    for name in sorted(names, key=str.lower):
        if re.sub(r"[-_.]+", "-", name).lower() not in NOT_PINNED:
            sys.stdout.write(pin(names[name], running) + "\n")


if __name__ == "__main__":
    main()
