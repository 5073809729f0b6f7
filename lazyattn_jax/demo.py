"""``make demo``: a real model answers questions over documents whose KV is computed once."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lazyattn_jax.cache.pool import bytes_per_token
from lazyattn_jax.engine.params import SamplingParams
from lazyattn_jax.llm import LLM, Usage, keep_compiled
from lazyattn_jax.prompt import Document

SYSTEM = "You answer questions using the documents. Answer with a short phrase."

DOCUMENTS = (
    Document(
        title="Harbour of Velmora",
        text=(
            "Velmora is a fishing port on the northern coast. Its harbour was built in 1874 by "
            "the engineer Ada Lindqvist, who had the breakwater made of red granite from the "
            "quarries of Osk. The lighthouse at its end is 31 metres high and shows a green "
            "light. Every autumn the herring fleet, about sixty boats, winters in the inner "
            "basin, and the town holds a three-day market on the quay where smoked fish and rope "
            "are sold."
        ),
    ),
    Document(
        title="The Tarn Valley railway",
        text=(
            "The Tarn Valley railway runs 48 kilometres from Brunn to the salt mines of Keld. It "
            "was opened in 1902. Because the last stretch is too steep for ordinary trains, the "
            "engines there climb on a toothed rail. Since 1988 the line has been powered by its "
            "own hydroelectric station at the Mirren falls. Today it carries hikers in summer and "
            "timber in winter, and its blue carriages are a popular subject for painters."
        ),
    ),
    Document(
        title="Orsin bread",
        text=(
            "Orsin bread is a dark loaf from the island of Orsin. The dough is made of rye flour, "
            "buttermilk and roasted barley, and is left to rise for two days in wooden troughs. "
            "It is baked in ovens heated with heather, which gives the crust its smoky taste. A "
            "loaf weighs four pounds and keeps for a month. Sailors used to hang the loaves from "
            "the beams of their cabins so that the rats could not reach them."
        ),
    ),
    Document(
        title="The glass frog Lumo",
        text=(
            "The glass frog Lumo lives in the cloud forests of the Sarita mountains. Its belly is "
            "so clear that its heart can be seen beating. The female lays her eggs on the "
            "underside of fern leaves, and the male guards them against wasps. The frog was first "
            "described by the biologist Ines Carvalho, who found it in 1961. It eats small flies "
            "and calls only on nights with fog, with a sound like two pebbles knocked together."
        ),
    ),
    Document(
        title="The comet clock of Hallen",
        text=(
            "The comet clock stands in the town hall of Hallen. The clockmaker Jonas Weir worked "
            "on it for eleven years. Besides the hours it shows the phases of the moon and the "
            "return of a comet every 76 years. It is driven by three lead weights that must be "
            "wound up on Sundays. During the flood of 1923 the lower wheels rusted, and since "
            "then the figure of the astronomer no longer raises its telescope at noon."
        ),
    ),
    Document(
        title="Training at the Ridge School",
        text=(
            "The Ridge School trains rescue dogs for avalanches. A course takes eighteen months. "
            "The dogs, mostly border collies, learn to find a person under two metres of snow "
            "within ten minutes. The head of the school is Petra Novak, a former ski racer. "
            "Lessons begin with a toy hidden in a sandbox and end with a night search on the "
            "Korvin glacier. Retired dogs live with families in the valley."
        ),
    ),
)

QUESTIONS = (
    "How high is the lighthouse?",
    "Where does the comet clock stand?",
    "When was the Tarn Valley railway opened?",
    "Who first described the glass frog Lumo?",
    "Who is the head of the Ridge School?",
)

CACHE = Path(".venv") / "compilation-cache"


@dataclass(frozen=True)
class _Answer:
    question: str
    order: tuple[int, ...]
    usage: Usage
    seconds: float


def main() -> None:
    """Asks all questions, each over the documents in another order, and prints what was reused."""
    console = Console(highlight=False)
    console.print("[bold]lazyattn_jax[/bold]  SmolLM2-135M-Instruct over one shared KV pool\n")
    if CACHE.parent.is_dir():  # makes the second demo start in seconds
        keep_compiled(str(CACHE))
    llm = LLM(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=4096)
    answers = [_ask(console, llm, q, order) for q, order in zip(QUESTIONS, _orders(), strict=True)]
    console.print(_table(answers))
    console.print(_summary(llm, answers))


def _orders() -> list[tuple[int, ...]]:
    orders = list(itertools.permutations(range(len(DOCUMENTS))))
    return random.Random(1).sample(orders, len(QUESTIONS))


def _ask(console: Console, llm: LLM, question: str, order: tuple[int, ...]) -> _Answer:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{question} Answer with a few words from the documents."},
    ]
    documents = [DOCUMENTS[i] for i in order]
    console.print(f"[dim]{' '.join(str(i + 1) for i in order)}[/dim]  {question}")
    console.print("  [green]>[/green] ", end="")
    request = None
    params = SamplingParams(temperature=0, max_tokens=32)
    for output in llm.stream_chat(messages, params, documents=documents):
        console.print(Text(output.text), end="", soft_wrap=True)
        request = output.request
    console.print("\n")
    assert request is not None
    assert request.first_token_at is not None
    return _Answer(question, order, Usage.of(request), request.first_token_at - request.arrived_at)


def _table(answers: list[_Answer]) -> Table:
    table = Table(title="Time to first token and reuse", title_justify="left")
    table.add_column("documents in order")
    table.add_column("pool")
    for name in ("prompt tokens", "reused", "time to first token"):
        table.add_column(name, justify="right")
    for answer in answers:
        usage = answer.usage
        warm = usage.cached_tokens > 0
        table.add_row(
            " ".join(str(i + 1) for i in answer.order),
            "[green]warm[/green]" if warm else "[yellow]cold[/yellow]",
            str(usage.prompt_tokens),
            f"{usage.cached_tokens} ({usage.cached_tokens / usage.prompt_tokens:.0%})",
            f"{answer.seconds * 1000:.0f} ms",
        )
    return table


def _summary(llm: LLM, answers: list[_Answer]) -> str:
    engine = llm.engine
    config = engine.loaded.config
    token_bytes = bytes_per_token(config, engine.loaded.model.embed.embedding.dtype)
    pages = sum(len(s.pages) for s in engine.scheduler.index.segments() if s.is_document)
    copied = sum(d.tokens for a in answers for d in a.usage.documents) * token_bytes
    stored = pages * engine.page_bytes
    cold = answers[0].seconds
    warm = sorted(a.seconds for a in answers[1:])[len(answers[1:]) // 2]
    return (
        f"\nTime to first token: cold {cold * 1000:.0f} ms, warm {warm * 1000:.0f} ms (median), "
        f"[bold]{cold / warm:.1f} x[/bold] sooner.\n"
        f"KV of documents: {stored / 2**20:.1f} MiB stored once and shared; a copy for each of the "
        f"{len(answers)} questions would be {copied / 2**20:.1f} MiB, "
        f"[bold]{copied / stored:.1f} x[/bold] as much."
    )


if __name__ == "__main__":
    main()
