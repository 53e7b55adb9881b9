"""`python -m fp8launch`."""

from fp8launch.cli import main

# Processes that Python's multiprocessing starts import this file again.
if __name__ == "__main__":
    main()
