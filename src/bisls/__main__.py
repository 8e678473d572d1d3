"""`python -m bisls` is the command `bisls`."""

from bisls_cli import main

if __name__ == "__main__":
    main()
