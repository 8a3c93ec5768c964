"""``python -m benchmarks.jobs SHAPE --told DIR`` trains one job."""

import typer

from benchmarks.jobs._shape_job import main

if __name__ == "__main__":
    typer.run(main)
