"""`python -m hipgroupgemm.integrations.jax build`: compiles the native handler ahead of time."""

from __future__ import annotations

import sys

import jaxlib

from hipgroupgemm.integrations.jax.native import NativeDoorError, build


def main(arguments: list[str]) -> int:
    """The command; its exit status."""
    if arguments != ["build"]:
        print("usage: python -m hipgroupgemm.integrations.jax build", file=sys.stderr)
        return 2
    try:
        code = build()
    except NativeDoorError as error:
        print(f"the native handler cannot be built: {error}", file=sys.stderr)
        return 1
    print(f"the native handler for jaxlib {jaxlib.__version__} is built ({len(code)} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
