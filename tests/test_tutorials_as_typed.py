"""Each tutorial as a reader types it: hidden cells do not run, the practice server is started by
the command on the page, lines with `!` are typed in a terminal, and code is Python.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "nbs" / "tutorials"
TUTORIALS = sorted(page.stem for page in FOLDER.glob("*.ipynb"))
RUN = """
import subprocess
def terminal(command):
    if subprocess.run(["bash", "-c", command]).returncode:
        raise SystemExit(f"a command of the page failed: {command}")
"""


def visible_cells(page: Path) -> list[tuple[str, str]]:
    """(kind, source) of the cells that the site shows."""
    cells = []
    for cell in json.loads(page.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if not re.search(r"^#\| hide", source, re.M):
            cells.append((cell["cell_type"], source))
    return cells


def typed_program(cells: list[tuple[str, str]], url: str) -> str:
    """The cells of a page as one Python program."""
    lines = [RUN, "import os", f"os.environ['URL'] = {url!r}"]
    lines += ["import matplotlib", "matplotlib.use('Agg')"]
    for kind, source in cells:
        if kind != "code":
            continue
        for line in source.splitlines():
            is_typed = line.startswith("!")
            lines.append(f"terminal({line[1:]!r})" if is_typed else line)
    return "\n".join(lines)


def server_command(cells: list[tuple[str, str]]) -> str | None:
    """The command for a second terminal that a page shows."""
    text = "\n".join(source for kind, source in cells if kind == "markdown")
    found = re.search(r"^memcalib practice.*$", text, re.M)
    return None if found is None else found[0]


def test_all_nine_are_there():
    assert len(TUTORIALS) == 9


@pytest.mark.parametrize("name", TUTORIALS)
def test_what_is_used_is_shown(name):
    """No name of a visible cell comes from a hidden one."""
    import ast
    import builtins

    cells = visible_cells(FOLDER / f"{name}.ipynb")
    program = ast.parse(typed_program(cells, ""))
    defined = {*dir(builtins), "__name__"}
    for node in ast.walk(program):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    used = {node.id for node in ast.walk(program) if isinstance(node, ast.Name)}
    assert used <= defined, f"defined in no visible cell: {sorted(used - defined)}"
    text = "\n".join(source for _, source in cells)
    if "$URL" in text or '"URL"' in text:
        assert "export URL=http://localhost:8765/v1" in text and server_command(cells)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs_as_it_is_typed(name, tmp_path):
    cells = visible_cells(FOLDER / f"{name}.ipynb")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(FOLDER.parents[1]),
        "MEMCALIB_CACHE": str(tmp_path / "calls.sqlite"),
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = {"cwd": tmp_path, "env": environment, "text": True}
    command = server_command(cells)
    program = typed_program(cells, "URL")
    if command is None:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, **options)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return
    # what a page does before it names the server may make the file that the server serves
    first, second = split_at_server(cells)
    before = typed_program(first, "")
    done = subprocess.run([sys.executable, "-c", before], capture_output=True, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    server = subprocess.Popen(
        ["bash", "-c", f"exec {command} --port 0"], stdout=subprocess.PIPE, **options
    )
    try:
        url = server.stdout.readline().split(" at ")[1].split()[0]
        program = typed_program([*first_python(first), *second], url)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, **options)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)


def split_at_server(cells):
    """The cells before the one that names the server, and the others."""
    at = next(n for n, (kind, source) in enumerate(cells) if "\nmemcalib practice" in source)
    return cells[:at], cells[at:]


def first_python(cells):
    """The Python of cells that ran already, without what was typed in the terminal: the reader's
    session still has its names.
    """
    without = [(kind, re.sub(r"^!.*$", "", source, flags=re.M)) for kind, source in cells]
    return [(kind, source) for kind, source in without if source.strip()]
