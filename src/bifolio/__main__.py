"""`python -m bifolio` is the `bifolio` command."""

from bifolio.cli.main import main

if __name__ == "__main__":
    main()
