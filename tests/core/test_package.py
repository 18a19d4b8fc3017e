"""The distribution: what a wheel holds, and what importing it does not do."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_wheel_holds_the_four_packages_and_nothing_called_shared(tmp_path) -> None:
    pytest.importorskip("build")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"drsa_core", "drsa_audit", "zennit_drsa", "captum_drsa"}
    for package in top:
        assert f"{package}/py.typed" in names
        sources = ROOT / ("shared" if package in ("drsa_core", "drsa_audit") else "")
        files = {file.relative_to(sources).as_posix() for file in (sources / package).rglob("*.py")}
        assert files <= set(names)  # also those of packages in it, each of which pyproject.toml must name
    templates = ROOT / "shared" / "drsa_audit" / "report" / "templates"
    assert {f"drsa_audit/report/templates/{file.name}" for file in templates.iterdir()} <= set(names)
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert b"drsa = drsa_audit.command:main" in zipfile.ZipFile(wheel).read(entry_points)


def test_the_core_needs_neither_adapter_nor_their_libraries() -> None:
    script = (
        "import sys, drsa_core; "
        "optional = {'captum', 'zennit', 'timm', 'matplotlib', 'cv2'}; "
        "optional |= {'captum_drsa', 'zennit_drsa', 'drsa_audit'}; "
        "bad = optional & set(sys.modules); "
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0
