"""`python -m tokendepth` is the command `tokendepth`, also where nothing was installed."""

from tokendepth.cli.main import main

if __name__ == "__main__":
    main()
