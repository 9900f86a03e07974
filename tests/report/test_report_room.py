"""The room as a whole: it reads timelines of runs that it needs no torch to look at."""

import subprocess
import sys


def test_the_reports_import_no_torch() -> None:
    code = (
        "import sys, pipeloom.report.console, pipeloom.report.timeline, pipeloom.report.trace;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
