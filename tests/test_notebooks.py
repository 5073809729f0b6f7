"""The notebooks, run from top to bottom as a person would, with the embedded model."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from lazyattn_jax.bench.kernels import NO_GPU

FOLDER = Path(__file__).parents[1] / "notebooks"
SECONDS = 600  # a cell may take
PNG = b"\x89PNG\r\n"


class Run:
    """A notebook that has been run.

    Args:
      name: of the file.
      probe: an expression that is computed after the last cell.
      parameters: other values for the parameters.
    """

    def __init__(self, name: str, probe: str, **parameters: Any) -> None:
        notebook = nbformat.read(FOLDER / name, as_version=4)
        [cell] = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
        names = [line.split(" = ")[0] for line in cell.source.splitlines()]
        assert set(parameters) <= set(names)
        cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
        source = f"import json\nprint(json.dumps({probe}))"
        notebook.cells.append(nbformat.v4.new_code_cell(source, id="probe"))
        NotebookClient(
            notebook, timeout=SECONDS, resources={"metadata": {"path": str(FOLDER)}}
        ).execute()
        self._outputs = {c.id: c.outputs for c in notebook.cells if c.cell_type == "code"}
        self.values = json.loads(self.text("probe"))

    def text(self, cell: str) -> str:
        """What a cell has printed."""
        return "".join(o.text for o in self._outputs[cell] if o.output_type == "stream")

    def picture(self, cell: str) -> bytes:
        """The one picture that a cell shows, as PNG."""
        [data] = [o.data["image/png"] for o in self._outputs[cell] if "data" in o]
        return base64.b64decode(data)


def test_quickstart() -> None:
    run = Run(
        "quickstart.ipynb",
        """{
            "texts": [a.text for a in (cold, warm, other)],
            "cached": [a.usage.cached_tokens for a in (cold, warm, other)],
            "prompts": [a.usage.prompt_tokens for a in (cold, warm, other)],
            "seconds": [a.time_to_first_token for a in (cold, warm, other)],
            "documents": [[d.tokens, d.cached_tokens] for d in other.usage.documents],
            "labels": [bar.get_width() for bar in bars],
            "pieces": pieces,
            "ahead": [first.cached_tokens, again.cached_tokens, again.prompt_tokens],
        }""",
    )
    values = run.values
    cold, warm, other = values["texts"]
    assert "1874" in cold
    assert warm == cold
    assert "red granite" in other
    assert values["cached"][0] == 0
    assert values["prompts"][1] - 16 <= values["cached"][1] < values["prompts"][1]  # a page of 16
    assert len(values["documents"]) == 3
    assert all(tokens == cached > 0 for tokens, cached in values["documents"])
    assert all(seconds > 0 for seconds in values["seconds"])
    assert values["labels"] == [1000 * seconds for seconds in values["seconds"]]
    assert run.picture("plot").startswith(PNG)
    assert "".join(values["pieces"]) == run.text("stream")
    assert len(values["pieces"]) > 1
    assert "Sarita" in run.text("stream")
    nothing, everything, prompt = values["ahead"]
    assert nothing == 0
    assert everything == prompt
    assert run.text("warm").endswith("the same answer: True\n")


def test_colab() -> None:
    counts = [1, 2]
    run = Run(
        "colab_tpu.ipynb",
        """{
            "texts": [a.text for a in answers],
            "cached": [a.usage.cached_tokens for a in answers],
            "documents": [sum(d.tokens for d in a.usage.documents) for a in answers],
            "same": again.text,
            "cold": list(cold.items()),
            "warm": list(warm.items()),
            "reused": list(reused.items()),
            "lines": [line.get_xydata().tolist() for line in ax.lines],
            "served": served["choices"][0]["message"]["content"],
            "usage": served["usage"],
            "alive": thread.is_alive(),
        }""",
        PLATFORM="cpu",
        DOCUMENT_COUNTS=counts,
        TRIALS=1,
    )
    values = run.values
    assert NO_GPU in run.text("kernels")
    expected = ("31 met", "town hall", "1902", "Ines Carvalho", "Petra Novak")
    for text, answer in zip(values["texts"], expected, strict=True):
        assert answer in text
    assert values["same"] == values["texts"][0]
    assert values["cached"][0] == 0
    reused = zip(values["cached"], values["documents"], strict=True)
    assert all(cached >= tokens > 0 for cached, tokens in list(reused)[1:])
    for name, line in zip(("cold", "warm"), values["lines"], strict=True):
        assert [count for count, _ in values[name]] == counts
        assert all(seconds > 0 for _, seconds in values[name])
        assert line == [[count, 1000 * seconds] for count, seconds in values[name]]
    assert all(tokens > 50 * count for count, tokens in values["reused"])
    assert run.picture("plot").startswith(PNG)
    assert values["served"] == values["texts"][2]
    details = values["usage"]["prompt_tokens_details"]
    assert [d["cached_tokens"] for d in details["documents"]] == [
        d["tokens"] for d in details["documents"]
    ]
    assert values["alive"] is False


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.name)
def test_no_outputs_are_kept(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    for cell in code:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
