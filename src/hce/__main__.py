"""`python -m hce` is `hce`."""

from hce.cli import main

if __name__ == "__main__":
    main()
