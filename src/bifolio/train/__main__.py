"""`python -m bifolio.train FILES --output FOLDER ...`: `bifolio train` without the packages of the command line."""

from __future__ import annotations

import sys

from bifolio.errors import BifolioError
from bifolio.train.command_line import describe, parse


def main() -> int:
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        print(f"usage: python -m bifolio.train FILES --output FOLDER [options]\n{describe()}")
        return 0
    try:
        settings = parse(sys.argv[1:])
        from bifolio.train.loop import train

        train(settings)
    except BifolioError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
