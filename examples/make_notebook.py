"""Makes `memory_over_a_step.ipynb` from `memory_over_a_step.py`, and runs it.

    python examples/make_notebook.py

Needs nbclient and ipykernel. Cells begin with `# %%`; those with `[markdown]` after it are text.
"""

from pathlib import Path

import nbclient
import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

SOURCE = Path(__file__).with_name("memory_over_a_step.py")
NOTEBOOK = SOURCE.with_suffix(".ipynb")


def notebook_of(source):
    """The notebook, with no outputs. Cells are numbered, so that the same source makes the same file."""
    cells = []
    for number, part in enumerate(source.split("# %%")[1:]):
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines())
            cells.append(new_markdown_cell(text, id=f"cell-{number}"))
        else:
            cells.append(new_code_cell(body.strip(), id=f"cell-{number}"))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def run(notebook):
    """Execute every cell in a new kernel; the outputs are written into the notebook."""
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", record_timing=False).execute()
    notebook.metadata.pop("language_info", None)  # names the version of Python
    return notebook


if __name__ == "__main__":
    nbformat.write(run(notebook_of(SOURCE.read_text())), NOTEBOOK)
    print(f"made {NOTEBOOK.name}")
