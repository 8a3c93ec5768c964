"""``paceenv live`` as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import typer
from commands import DEADLINE_S
from live_samples import ATTEMPT, record, run_python, snapshot
from typer.testing import CliRunner

from paceenv.calibration.fits.noise_fit import calibrate_noise
from paceenv.cli.application import SUMMARIES
from paceenv.core.errors import InputError
from paceenv.core.trace import read_trace
from paceenv.live.live_command import application
from paceenv.live.record.run_folder import write_status


def live(*arguments: str) -> int:
    """Run ``paceenv live`` in this process; errors come out as the command line gets them."""
    assert isinstance(application, typer.Typer)
    return int(application(args=list(arguments), prog_name="paceenv live", standalone_mode=False) or 0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of four ranks that has ended, but for rank 3, which nobody has heard of for a while."""
    folder = tmp_path / "run"
    for rank in range(4):
        record(folder, 30, rank=rank, world_size=4, host=f"node{rank // 2}")
        write_status(folder, snapshot(rank, unix_time_s=time.time() - (100.0 if rank == 3 else 0.0), final=rank < 3))
    return folder


def test_the_command_is_found_by_its_entry_point() -> None:
    assert "live" in SUMMARIES
    text = Path(__file__).resolve().parents[1].joinpath("pyproject.toml").read_text()
    assert 'live = "paceenv.live.live_command:application"' in text


def test_status_has_a_line_per_rank(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live("status", str(run))
    out = capsys.readouterr().out
    assert f"job: attempt {ATTEMPT}, 4 ranks" in " ".join(out.split())
    assert out.count("node1") == 2
    assert out.count("ended") == 3
    assert re.search(r"silent 1\d\d s", " ".join(out.split()))
    assert "helps by 8.1 % [7.2, 9.0]" in out


def test_status_names_ranks_that_wrote_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(tmp_path, snapshot(1, state="observe"))
    live("status", str(tmp_path))
    assert "no status of 3 ranks" in " ".join(capsys.readouterr().out.split())


def test_status_for_machines(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live("status", str(run), "--json", "-")
    printed = json.loads(capsys.readouterr().out)
    assert [entry["rank"] for entry in printed["ranks"]] == [0, 1, 2, 3]
    assert (printed["attempt"], printed["attempts"], printed["notes"]) == (ATTEMPT, [ATTEMPT], [])
    live("status", str(run), "--json", str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == printed


def test_watching_ends_with_the_job(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(run, snapshot(3, unix_time_s=time.time()))
    live("status", str(run), "--watch")
    assert "4 ended" in capsys.readouterr().out
    live("status", str(run), "--watch", "--all")
    assert capsys.readouterr().out.count("ended") == 4


def test_summary_prints_the_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live("summary", str(run))
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith(f"paceenv live: job job, attempt {ATTEMPT}, 4 ranks; this page is from 4 of them on 2 hosts")


def test_trace_merges_for_calibration(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live("trace", str(run), "-o", str(tmp_path / "merged.parquet"))
    assert read_trace(tmp_path / "merged.parquet").table.num_rows == 360
    assert calibrate_noise(tmp_path / "merged.parquet")[0].workers == 4
    assert f"360 rows of 4 ranks, attempt {ATTEMPT}; all ranks on one clock" in capsys.readouterr().err


def test_dashboard_is_written(tmp_path: Path) -> None:
    live("dashboard", "-o", str(tmp_path / "new" / "grafana.json"))
    assert json.loads((tmp_path / "new" / "grafana.json").read_text())["title"] == "paceenv live"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("status", "{run}/none"), "no such folder"),
        (("summary", "{run}", "--attempt", "7"), f"attempt = '7': there is none; allowed: one of {ATTEMPT}"),
        (("trace", "{run}", "-o", "{run}/no/such/folder.parquet"), "cannot write here"),
        (("status", "{run}", "--json", "{run}"), "is a folder"),
        (("status", "{run}", "--watch", "--json", "-"), "allowed: without --json"),
    ],
)
def test_bad_input_is_one_clear_line(run: Path, arguments: tuple[str, ...], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        live(*(argument.format(run=run) for argument in arguments))


def test_help_names_what_there_is() -> None:
    assert all(name in CliRunner().invoke(application, ["--help"]).output for name in ("status", "summary", "trace"))


def test_looking_at_a_run_needs_nothing_heavy(run: Path) -> None:
    code = (
        "import sys; from paceenv.live.live_command import application\n"
        "application(args=['summary', sys.argv[1]], standalone_mode=False)\n"
        "print('LOADED', *sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = run_python(code, str(run))
    loaded = done.stdout.rsplit("LOADED", 1)[1].split()
    assert not {"torch", "pyarrow", "pydantic", "numba", "gymnasium", "prometheus_client"} & set(loaded)


def test_watching_goes_on_while_a_rank_has_not_ended(run: Path) -> None:
    code = "import sys; from paceenv.live.live_command import application\n"
    code += "application(args=['status', sys.argv[1], '--watch'])"
    process = subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(DEADLINE_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        tables = 0
        while tables < 2:
            line = process.stdout.readline()
            assert line
            tables += "job: attempt" in line
    finally:
        timer.cancel()
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def test_trace_without_pyarrow_says_what_to_install(run: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from paceenv.cli.application import main\n"
        "sys.argv = ['paceenv', 'live', 'trace', *sys.argv[1:]]; sys.exit(main())"
    )
    done = run_python(code, str(run), "-o", str(tmp_path / "merged.parquet"))
    expected = "paceenv: error: paceenv live trace needs pyarrow; install it: pip install '/path/to/checkout[sim]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_a_rank_of_a_large_job_is_silent_only_after_several_of_its_periods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, age_s in enumerate((100.0, 1000.0)):
        write_status(tmp_path, snapshot(rank, world_size=1000, final=False, unix_time_s=time.time() - age_s))
    live("status", str(tmp_path))
    assert capsys.readouterr().out.count("silent") == 1
