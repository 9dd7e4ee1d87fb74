"""`python -m hipgroupgemm`: the command line, where the script `hipgroupgemm` is not on the path."""

from hipgroupgemm.cli import main

if __name__ == "__main__":
    main()
