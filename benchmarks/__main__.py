"""`python -m benchmarks VERB ...`"""

from __future__ import annotations

import sys
from importlib import import_module

from bifolio.cli import commands

VERBS = ("benchmarks.verbs", "benchmarks.fleet.verb", "benchmarks.targets_verb", "benchmarks.formats_verb")


def build_app() -> commands.App:
    import benchmarks

    app = commands.App("python -m benchmarks", benchmarks.__doc__ or "")
    for name in VERBS:
        import_module(name).register(app)
    return app


def main() -> None:
    """Run the command line. Named errors print one line."""
    from benchmarks.columns import ColumnError
    from bifolio.errors import BifolioError

    try:
        build_app()()
    except (BifolioError, ColumnError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
