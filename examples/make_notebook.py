"""Makes each notebook from its script, such as `which_setting.ipynb` from `which_setting.py`, and runs it.

    python examples/make_notebook.py [NAME ...]

Needs nbclient and ipykernel. A cell of code begins with `# %%`, and one of text with `# %% [markdown]`.
"""

import sys
from pathlib import Path

import nbclient
import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

FOLDER = Path(__file__).parent
NAMES = ("memory_over_a_step", "which_setting", "misbehaving_norm")


def notebook_of(name):
    """The notebook without outputs. Cells are numbered, so that the same source makes the same file."""
    source, cells = (FOLDER / f"{name}.py").read_text(), []
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
    """Execute every cell in a new kernel, and write the outputs into the notebook."""
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", record_timing=False).execute()
    notebook.metadata.pop("language_info", None)  # has the version of Python
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        nbformat.write(run(notebook_of(name)), FOLDER / f"{name}.ipynb")
        print(f"made {name}.ipynb")
